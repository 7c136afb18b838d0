"""Patterns and configurations: what they mean, and what is said of wrong ones."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from innerloop import nn
from innerloop.lm import Config, Entry, LanguageModel, parse
from innerloop.lm.kinds import KINDS, SHORT

NAMES = [*KINDS, *SHORT]


def written(tree):
    """Return a random tree as a pattern, and the layers it stands for."""
    if isinstance(tree, str):
        return tree, [SHORT.get(tree, tree)]
    count, parts = tree
    texts, layers = zip(*map(written, parts), strict=True)
    text = " + ".join(texts)
    flat = [layer for part in layers for layer in part]
    return f"{count} * ({text})" if count else f"({text})", flat * (count or 1)


trees = st.recursive(
    st.sampled_from(NAMES),
    lambda inner: st.tuples(st.integers(0, 3), st.lists(inner, min_size=1, max_size=3)),
    max_leaves=6,
)


@given(trees)
def test_a_pattern_stands_for_the_layers_that_it_writes_out(tree):
    text, layers = written(tree)
    assert [entry.rule for entry in parse(text)] == layers
    assert parse(text.replace(" ", "")) == parse(text)


def test_options_are_read_as_what_they_are():
    (entry,) = parse("attention( window = 64, rotary_base=-1.5e3,key_norm=True, key_width=none, x=word )")
    assert entry == Entry(
        "softmax_attention",
        (("window", 64), ("rotary_base", -1500.0), ("key_norm", True), ("key_width", None), ("x", "word")),
    )
    assert [type(value) for _, value in entry.options[:3]] == [int, float, bool]
    assert parse("2*kda()") == (Entry("kda"), Entry("kda"))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "character 1: wanted a layer, a number or '\\('; got the end"),
        ("3*", "character 3: wanted a layer, a number or '\\('; got the end"),
        ("kda+", "character 5: wanted a layer"),
        ("kda+3", r"character 6: wanted '\*' behind 3; got the end"),
        ("3kda", r"character 2: wanted '\*' behind 3; got 'kda'"),
        ("0*kda", "character 1: wanted a whole number from 1 to 100,000 before"),
        ("2.5*kda", "character 1: wanted a whole number"),
        ("-2*kda", "character 1: wanted a whole number"),
        ("9" * 5000 + "*kda", "character 1: wanted a whole number"),
        ("\u0663*kda", "character 1: wanted a whole number"),
        ("(" * 5000 + "kda" + ")" * 5000, "character 52: wanted at most 50 brackets inside each other; got '\\('"),
        ("99999*99999*kda", "at most 100,000 layers; got 9,999,800,001"),
        ("kda kda", "character 5: wanted '\\+' or the end; got 'kda'"),
        ("(kda", "character 5: wanted '\\+' or '\\)'; got the end"),
        ("kda)", "character 4: wanted '\\+' or the end; got '\\)'"),
        ("kda+atention", "character 5: wanted the name of a layer; got 'atention'. Did you mean 'attention'?"),
        ("zzz", "Layers are attention, softmax_attention"),
        ("kda(taps)", "character 9: wanted '=' behind taps; got '\\)'. Options are written name=value"),
        ("kda(taps=)", "character 10: wanted a number, a word, true, false or none; got '\\)'"),
        ("kda(taps=2", "character 11: wanted ',' or '\\)'; got the end"),
        ("kda(taps=2 heads=1)", "character 12: wanted ',' or '\\)'; got 'heads'"),
        ("kda(taps=2,taps=3)", "character 12: wanted every option once"),
        ("kda(3)", "character 5: wanted the name of an option; got '3'"),
        ("kda(taps=1.2.3)", "character 10: wanted a number"),
        ("kda\n+\n?", "character 7: wanted a layer"),
        ("ünï", "character 1: wanted"),
    ],
)
def test_a_pattern_that_does_not_parse_says_where_in_one_line(pattern, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse(pattern)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("pattern ")


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"vocab_size": 0}, ValueError, "vocab_size must be at least 1; got 0"),
        ({"vocab_size": True}, TypeError, "vocab_size must be a whole number; got True"),
        ({"width": 2.5}, TypeError, "width must be a whole number"),
        ({"depth": 0}, ValueError, "depth must be at least 1"),
        ({"pattern": "2*kda+mamba2", "depth": 4}, ValueError, "depth must be a multiple of the 3 layers"),
        ({"heads": 5}, ValueError, "a gated_delta_rule layer cannot be made of this configuration: heads must divide"),
        ({"pattern": 3}, TypeError, "pattern must be a string"),
        ({"pattern": "kda(tap=3)"}, ValueError, "a kda layer takes the options heads, .* taps, .*; got 'tap'"),
        ({"pattern": "kda(taps=-1)"}, ValueError, "a kda layer cannot .* taps must be a whole number .* got -1"),
        ({"pattern": "kda(taps=word)"}, ValueError, "a kda layer cannot be made of this configuration"),
        ({"pattern": "attention(window=-1)"}, ValueError, "window must be a whole number of at least 0; got -1"),
        ({"pattern": "longhorn_diagonal(heads=2)"}, ValueError, "key_width, expand, taps; got 'heads'"),
        ({"pattern": "rwkv7(index=1)"}, ValueError, "takes the options .*; got 'index'"),
        ({"pattern": "rwkv7+rwkv7(value_width=3)"}, ValueError, "all rwkv7 layers must have values of one width"),
        ({"layer_options": []}, TypeError, "layer_options must be a dict"),
        ({"layer_options": {"kd": {}}}, ValueError, "layer_options must be by rule, one of .*; got 'kd'"),
        ({"layer_options": {"kda": {"a": 1}}}, ValueError, "a kda layer takes the options"),
        ({"layer_options": {"kda": 3}}, TypeError, "layer_options must hold a dict of options"),
        ({"feed_forward_width": -1}, ValueError, "feed_forward_width must be at least 0"),
        ({"dropout": 1.0}, ValueError, r"dropout must lie in \[0, 1\); got 1.0"),
        ({"dropout": float("nan")}, ValueError, "dropout must lie"),
        ({"dropout": "a"}, TypeError, "dropout must be a number"),
        ({"tied": 1}, TypeError, "tied must be True or False"),
        ({"norm_eps": 0}, ValueError, "norm_eps must be finite and above 0"),
        ({"initial_std": float("inf")}, ValueError, "initial_std must be finite"),
    ],
)
def test_a_wrong_field_is_said_in_one_line(fields, kind, message):
    with pytest.raises(kind, match=message) as caught:
        Config(**{"vocab_size": 5, "width": 8, "heads": 2} | fields)
    assert "\n" not in str(caught.value)


def test_a_configuration_goes_through_json():
    options = {"attention": {"window": 5}, "gated_delta_rule": {"variant": "qwen", "value_heads": 4}}
    config = Config(
        vocab_size=9, width=8, heads=2, pattern="2*gated_delta_rule+attention(window=3)+attention", depth=8,
        feed_forward_width=0, tied=False, dropout=0.5, layer_options=options, checkpointing=True,
    )  # fmt: skip
    again = Config.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert [layer.window for layer in layers(again, nn.SoftmaxAttention)] == [3, 5, 3, 5]
    assert all(layer.value_heads == 4 for layer in layers(again, nn.GatedDeltaNet))
    options["attention"]["window"] = 7
    config.to_dict()["layer_options"]["softmax_attention"]["window"] = 7
    assert config == again
    with pytest.raises(AttributeError):
        config.width = 3


def layers(config, kind):
    return [block.layer for block in LanguageModel(config).blocks if isinstance(block.layer, kind)]


def test_a_configuration_of_another_version_or_with_other_fields_is_refused():
    fields = Config(vocab_size=5, width=8).to_dict()
    for wrong, message in (
        (fields | {"version": 7}, "must have version 1; got 7. Load it with the release"),
        ({"vocab_size": 5}, "must have version 1; got None"),
        (fields | {"hidden": 3}, "got an unknown 'hidden'"),
        ({"version": 1}, "must have a vocab_size"),
    ):
        with pytest.raises(ValueError, match=message):
            Config.from_dict(wrong)
    with pytest.raises(TypeError, match="must be a mapping"):
        Config.from_dict([])
    with pytest.raises(TypeError, match=r"config must be an innerloop\.lm\.Config"):
        LanguageModel(fields)


def test_every_kind_makes_the_layer_of_its_rule():
    for rule in KINDS:
        (block,) = LanguageModel(Config(vocab_size=5, width=8, heads=2, pattern=rule)).blocks
        assert block.layer.rule == rule
    # A recipe is no text, and its state has no file.
    public = {name for name in nn.__all__ if name[0].isupper()} - {"Layer", "LayerState", "RecipeLayer"}
    assert {kind.make.__name__ for kind in KINDS.values()} == public


def test_layers_that_learn_in_mini_batches_take_their_sizes_from_a_pattern():
    pattern = "titans(variant=mac,mini_batch=8)+hope(mini_batch=4,periods=8)+hope(periods=none)+cms(periods=3)"
    pattern += "+ttt(mini_batch=5)"
    blocks = LanguageModel(Config(vocab_size=5, width=8, heads=2, pattern=pattern)).blocks
    mac, hope, bare, cms, ttt = (block.layer for block in blocks)
    assert (mac.variant, mac.mini_batch, ttt.mini_batch) == ("mac", 8, 5)
    assert (hope.mini_batch, hope.levels.periods, bare.levels, cms.levels.periods) == ((4, 4), (8,), None, (3,))
    options = {"hope": {"mini_batch": [4, 2]}, "cms": {"periods": [1, 2]}}
    config = Config(vocab_size=5, width=8, pattern="hope+cms", layer_options=options)
    again = Config.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert LanguageModel(again).blocks[1].layer.levels.periods == (1, 2)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("hope(mini_batch=0)", "mini_batch must be a whole number above 0"),
        ("hope(periods=0)", "periods must be whole numbers above 0"),
        ("cms(periods=none)", "periods must be whole numbers above 0"),
        ("titans(variant=map)", "variant must be one of"),
        ("ttt(mini_batch=1.5)", "mini_batch must be a whole number"),
        ("cms(heads=2)", "a cms layer takes the options"),
    ],
)
def test_an_option_that_a_network_cannot_have_is_one_line(pattern, message):
    with pytest.raises(ValueError, match=message) as caught:
        Config(vocab_size=5, width=8, heads=2, pattern=pattern)
    assert "\n" not in str(caught.value)


def test_making_a_configuration_draws_no_numbers():
    torch.manual_seed(3)
    want = torch.rand(3)
    torch.manual_seed(3)
    Config(vocab_size=5, width=8, heads=2, pattern="+".join(KINDS))
    assert torch.equal(torch.rand(3), want)
