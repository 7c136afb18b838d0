"""The face towards transformers: loading, generating, training."""

import copy
import math
import warnings

import pytest
import torch
from torch.nn import functional as F

from innerloop import nn
from innerloop.lm import Config, LanguageModel
from innerloop.lm.kinds import KINDS
from innerloop.testing import error

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
face = pytest.importorskip("innerloop.integrations.huggingface")

pytestmark = pytest.mark.filterwarnings("ignore")  # of another library's own making

Model, Configuration = face.InnerloopForCausalLM, face.InnerloopConfig


@pytest.fixture
def model(kit):
    return Model.of(kit.build("hybrid"))


def brute_force_beams(model, tokens, beams, count):
    """Return the best of ``beams`` candidates a step, from whole forwards without a state."""
    kept = [(0.0, tokens)]
    for _ in range(count):
        candidates = []
        for score, row in kept:
            chances = model(row[None])[0][0, -1].log_softmax(-1)
            candidates += [(score + chance.item(), row, word) for word, chance in enumerate(chances)]
        best = sorted(candidates, key=lambda x: -x[0])[:beams]
        kept = [(score, torch.cat((row, torch.tensor([word])))) for score, row, word in best]
    return kept[0][1]


def padded(kit, lengths, width):
    tokens, mask = kit.words(len(lengths), width), torch.zeros(len(lengths), width, dtype=torch.int64)
    for n, length in enumerate(lengths):
        mask[n, width - length :] = 1
    return tokens, mask


@torch.no_grad()
def test_generate_writes_what_the_model_writes(kit, model):
    tokens = kit.words(2, 5)
    want = torch.stack(list(model.model.generate(tokens, max_new_tokens=7, temperature=0)), 1)
    for options in ({}, {"use_cache": False}, {"num_beams": 1, "use_cache": True}):
        got = model.generate(tokens, max_new_tokens=7, do_sample=False, **options)
        assert torch.equal(got, torch.cat((tokens, want), 1))
    one = model.generate(tokens[:, :1], max_new_tokens=7, do_sample=False)
    assert torch.equal(one, model.generate(tokens[:, :1], max_new_tokens=7, do_sample=False, use_cache=False))


@torch.no_grad()
def test_beams_are_those_of_a_search_without_a_cache(kit, model):
    tokens = kit.words(2, 4)
    want = torch.stack([brute_force_beams(model.model, row, 3, 6) for row in tokens])
    got = model.generate(tokens, max_new_tokens=6, do_sample=False, num_beams=3)
    assert torch.equal(got, want)
    assert not torch.equal(got, model.generate(tokens, max_new_tokens=6, do_sample=False))  # beams found better


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 3])
def test_prompts_of_different_length_go_on_as_if_alone(kit, model, beams):
    lengths = [3, 9, 6]
    tokens, mask = padded(kit, lengths, 9)
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    together = model.generate(tokens, attention_mask=mask, **options)
    for n, length in enumerate(lengths):
        # With a mask: transformers takes a token like the pad's for a pad.
        prompt = tokens[n : n + 1, 9 - length :]
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        assert torch.equal(together[n, 9:], alone[0, length:])
    single = model.generate(tokens[:1], attention_mask=mask[:1], **options)
    assert torch.equal(single, together[:1])


@torch.no_grad()
def test_sampling_draws_the_same_with_and_without_a_cache(kit, model):
    tokens, runs = kit.words(2, 5), []
    for cached in (True, False, True):
        torch.manual_seed(3 + (len(runs) == 2))
        runs.append(model.generate(tokens, max_new_tokens=12, do_sample=True, top_k=9, top_p=0.9, use_cache=cached))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    many = model.generate(tokens, max_new_tokens=3, do_sample=True, num_return_sequences=4)
    assert many.shape == (8, 8)


@torch.no_grad()
def test_generation_goes_on_from_a_cache(kit, model):
    tokens = kit.words(2, 6)
    want = model.generate(tokens, max_new_tokens=6, do_sample=False)
    prompt = model(tokens[:, :4])
    kept = copy.deepcopy(prompt.cache)
    assert prompt.cache.get_seq_length() == 4
    got = model.generate(tokens, max_new_tokens=6, do_sample=False, **{face._CACHE: prompt.cache})
    assert torch.equal(got, want)
    assert prompt.cache.get_seq_length() == 11
    assert torch.equal(model.generate(tokens, max_new_tokens=6, do_sample=False, **{face._CACHE: kept}), want)
    first = model(tokens[:, :3])
    second = model(tokens[:, 3:], cache=first.cache)
    assert error(second.logits, model(tokens).logits[:, 3:]) <= 1e-10
    with pytest.raises(ValueError, match="must go beyond the 6 tokens"):
        model.generate(tokens, max_new_tokens=2, **{face._CACHE: model(tokens).cache})
    with pytest.raises(TypeError, match="cache must be a StateCache"):
        model(tokens, cache=transformers.DynamicCache())
    with pytest.raises(ValueError, match="cannot be cropped"):
        kept.crop(3)


def test_a_cache_moves_every_tensor_of_every_layer(kit, model):
    cache = model(kit.words(3, 5)).cache
    before = torch.utils._pytree.tree_leaves(cache.state)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    for x, y in zip(torch.utils._pytree.tree_leaves(cache.state), before, strict=True):
        assert torch.equal(x, y[[2, 0, 0]])
    cache.batch_repeat_interleave(2)
    assert cache.state.position.shape == (6,)
    cache.batch_select_indices(torch.tensor([5]))
    assert cache.state.position.shape == (1,)
    cache.reset()
    assert (cache.state, cache.get_seq_length()) == (None, 0)


def test_the_loss_moves_the_labels_by_one(kit, model):
    tokens = kit.words(2, 7)
    labels = tokens.clone()
    labels[0, :3] = -100
    logits = model(tokens).logits
    want = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    out = model(tokens, labels=labels)
    assert error(out.loss, want) <= 1e-10
    assert error(out.logits, logits) <= 1e-10
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    assert error(model(tokens, labels=labels, num_items_in_batch=torch.tensor(5)).loss, total / 5) <= 1e-10
    assert error(model(tokens, labels=labels, return_dict=False)[0], want) <= 1e-10
    model.train()
    out = model(tokens, labels=labels)
    assert error(out.loss, want) <= 1e-10
    assert out.logits is None
    assert out.cache is None
    assert model(tokens, logits_to_keep=2).logits.shape == (2, 2, kit.vocabulary)
    assert model(tokens, logits_to_keep=torch.tensor([1, 3])).logits.shape == (2, 2, kit.vocabulary)


def test_packed_sequences_are_told_by_positions_or_bounds(kit, model):
    tokens = kit.words(1, 9)
    parts = tokens.split([4, 2, 3], 1)
    want = torch.cat([model(part).logits for part in parts], 1)
    losses = sum(model(part, labels=part).loss * (part.shape[1] - 1) for part in parts) / 6
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    bounds = torch.tensor([0, 4, 6, 9], dtype=torch.int32)
    for how in ({"position_ids": positions}, {"cu_seqlens": bounds}, {"cu_seq_lens_q": bounds}):
        out = model(tokens, labels=tokens, **how)
        assert error(out.logits, want) <= 1e-10
        assert error(out.loss, losses) <= 1e-10
    assert error(model(tokens, position_ids=torch.arange(9)[None]).logits, model(tokens).logits) <= 1e-10
    with pytest.raises(ValueError, match="must lie in one row; got 2 rows"):
        model(tokens.repeat(2, 1), position_ids=positions.repeat(2, 1))
    with pytest.raises(ValueError, match="inputs_embeds are not taken"):
        model(tokens, inputs_embeds=torch.zeros(1))


# Files


@pytest.mark.parametrize("tied", [True, False])
def test_both_ways_of_saving_are_read_both_ways(kit, tmp_path, tied):
    model, tokens = kit.build("+".join(KINDS), torch.float32, tied=tied), kit.words(2, 5)
    want = model(tokens)[0]
    model.save(tmp_path / "ours")
    Model.of(model).save_pretrained(tmp_path / "theirs")
    Model.of(model).save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    for folder in ("ours", "theirs", "shards"):
        assert torch.equal(LanguageModel.load(tmp_path / folder).eval()(tokens)[0], want)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert isinstance(again, Model)
        assert again.config.innerloop == model.config.to_dict()
        assert torch.equal(again(tokens).logits, want)
        assert not [file for file in (tmp_path / folder).iterdir() if file.suffix in (".bin", ".pt", ".pkl")]
    assert transformers.AutoConfig.from_pretrained(tmp_path / "theirs").num_hidden_layers == len(KINDS)


def test_half_precision_leaves_decays_wide_by_every_route(kit, tmp_path):
    model = kit.build("+".join(KINDS), torch.float32)
    model.save(tmp_path)
    truth = {name: p.dtype for name, p in Model.of(copy.deepcopy(model).bfloat16()).named_parameters()}
    assert {torch.float32, torch.bfloat16} == set(truth.values())
    auto = transformers.AutoModelForCausalLM
    for half in (
        auto.from_pretrained(tmp_path, dtype=torch.bfloat16),
        auto.from_config(Configuration(model.config.to_dict()), dtype=torch.bfloat16),
        Model(Configuration(model.config.to_dict())).bfloat16(),
    ):
        assert {name: p.dtype for name, p in half.named_parameters()} == truth
    loaded = dict(auto.from_pretrained(tmp_path, dtype=torch.bfloat16).named_parameters())
    for name, p in model.named_parameters():
        assert torch.equal(loaded[f"model.{name}"], p.to(truth[f"model.{name}"])), name


def test_initial_values_are_the_models_own():
    config = Config(vocab_size=300, width=64, heads=16, tied=False, pattern="+".join(KINDS))
    torch.manual_seed(4)
    want = LanguageModel(config)
    for make in (Model, transformers.AutoModelForCausalLM.from_config):
        torch.manual_seed(4)
        found = make(Configuration(config.to_dict())).named_parameters()
        for (name, p), truth in zip(found, want.parameters(), strict=True):
            assert torch.equal(p, truth), name


@pytest.mark.parametrize("every_other", [0, 1])
def test_what_a_file_lacks_is_drawn_as_at_the_start(tmp_path, every_other):
    config = Config(vocab_size=300, width=64, heads=16, pattern="+".join(KINDS))
    want = Model(Configuration(config.to_dict()))
    lacking = {name for i, (name, _) in enumerate(want.named_parameters()) if i % 2 == every_other}
    want.save_pretrained(tmp_path, state_dict={n: p for n, p in want.state_dict().items() if n not in lacking})
    got = dict(Model.from_pretrained(tmp_path).named_parameters())
    for name, truth in want.named_parameters():
        p = got[name]
        if name not in lacking:
            assert torch.equal(p, truth), name
            continue
        spread = truth.std(correction=0).item()
        assert abs(p.mean() - truth.mean()) <= 6 * spread * math.sqrt(2 / p.numel()) + 1e-6, name
        assert abs(p.std(correction=0) - spread) <= 6 * spread * math.sqrt(2 / p.numel()) + 1e-6, name


def test_the_vocabulary_grows_with_its_configuration(kit, tmp_path):
    for tied in (True, False):
        model = Model.of(kit.build("kda", torch.float32, tied=tied))
        want = model(kit.words(1, 4)).logits
        model.resize_token_embeddings(kit.vocabulary + 3)
        assert error(model(kit.words(1, 4)).logits[..., : kit.vocabulary], want) <= 1e-6
        model.save_pretrained(tmp_path)
        again = Model.from_pretrained(tmp_path)
        assert again.config.vocab_size == again.model.config.vocab_size == kit.vocabulary + 3
        assert again(torch.tensor([[kit.vocabulary + 2]])).logits.shape[-1] == kit.vocabulary + 3
    with pytest.raises(ValueError, match="a gated_delta_rule layer"):
        Configuration(Config(vocab_size=5, width=8).to_dict() | {"heads": 3})


def test_what_the_configuration_says_is_what_is_built(kit, tmp_path):
    model = kit.build("1*kda", torch.float32)
    model.save(tmp_path)
    auto = transformers.AutoConfig
    for config in (
        auto.from_pretrained(tmp_path, width=12, heads=3, num_hidden_layers=2),
        auto.from_pretrained(tmp_path, hidden_size=12, num_attention_heads=3, depth=2),
        Configuration(model.config.to_dict(), width=12, num_attention_heads=3, depth=2),
    ):
        built = Model(config).model
        assert (built.config.width, built.config.heads, len(built.blocks)) == (12, 3, 2)
        assert (config.hidden_size, config.width, config.num_attention_heads, config.heads) == (12, 12, 3, 3)
        assert (config.num_hidden_layers, config.depth) == (2, 2)
        config.dropout, config.hidden_size, config.pattern = 0.25, 24, "mamba2"
        built = Model(copy.deepcopy(config)).model
        assert (built.config.dropout, built.embedding.weight.shape[1]) == (0.25, 24)
        assert [entry.rule for entry in built.config.layers] == ["mamba2"] * 2
    with pytest.raises(ValueError, match="depth must be a multiple"):
        auto.from_pretrained(tmp_path, pattern="kda+mamba2", num_hidden_layers=3)


@torch.no_grad()
def test_hidden_states_are_what_each_block_and_the_head_read(kit, model):
    tokens = kit.words(2, 5)
    assert model(tokens).hidden_states is None
    out = model(tokens, output_hidden_states=True)
    blocks = model.model.blocks
    assert len(out.hidden_states) == len(blocks) + 1 == model.config.num_hidden_layers + 1
    x, value = model.model.embedding(tokens), None
    for block, seen in zip(blocks, out.hidden_states, strict=False):
        assert error(seen, x) <= 1e-10
        x, _, value = block(x, None, None, None, value)
    assert error(out.hidden_states[-1], model.model.norm(x)) <= 1e-10
    assert error(model.model.logits(out.hidden_states[-1]), out.logits) <= 1e-10
    written = model.generate(
        tokens, max_new_tokens=2, do_sample=False, output_hidden_states=True, return_dict_in_generate=True
    )
    assert [[x.shape[1] for x in step] for step in written.hidden_states] == [[n] * (len(blocks) + 1) for n in (5, 1)]
    model.config.output_hidden_states = True
    assert len(model(tokens, return_dict=False)[-1]) == len(blocks) + 1
    with pytest.raises(ValueError, match="output_attentions must be False"):
        model(tokens, output_attentions=True)


# Training


def examples(count, seed=0):
    tokens = torch.randint(4, (count, 8), generator=torch.Generator().manual_seed(seed)).repeat(1, 2)
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(folder, model, **options):
    options = {"max_steps": 12, "save_steps": 6, "logging_steps": 1} | options
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True,
        seed=1, **options,
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=examples(48), eval_dataset=examples(8, 1))


def small(**options):
    torch.manual_seed(0)
    config = Config(vocab_size=11, width=16, heads=2, pattern="gated_delta_rule+attention", **options)
    return Model(Configuration(config.to_dict()))


def test_a_trainer_trains_evaluates_saves_and_resumes(tmp_path):
    whole = trainer(tmp_path / "whole", small())
    whole.train()
    losses = [row["loss"] for row in whole.state.log_history if "loss" in row]
    assert losses[-1] < losses[0] - 0.5
    evaluated = whole.evaluate()["eval_loss"]
    assert math.isfinite(evaluated)
    assert whole.predict(examples(3)).predictions.shape == (3, 16, 11)
    resumed = trainer(tmp_path / "whole", small())
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    for (name, p), q in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(p, q), name
    again = LanguageModel.load(tmp_path / "whole" / "checkpoint-12")
    assert torch.equal(again.embedding.weight, whole.model.model.embedding.weight)


def test_accumulated_steps_and_checkpointing_change_no_loss(tmp_path):
    runs = {}
    for name, options in (
        ("plain", {}),
        ("checkpointing", {"gradient_checkpointing": True}),
        ("accumulating", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
    ):
        options = {"per_device_train_batch_size": 4, "max_steps": 3} | options
        arguments = transformers.TrainingArguments(
            tmp_path / name, learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1,
            save_strategy="no", seed=1, **options,
        )  # fmt: skip
        run = transformers.Trainer(small(), arguments, train_dataset=examples(48))
        run.train()
        runs[name] = [row["loss"] for row in run.state.log_history if "loss" in row]
        assert run.model.model.checkpointing == (name == "checkpointing")
    assert runs["checkpointing"] == runs["plain"]
    assert max(abs(a - b) for a, b in zip(runs["accumulating"], runs["plain"], strict=True)) < 1e-3


def test_weight_decay_can_go_by_our_groups():
    model = small()
    groups = nn.parameter_groups(model, 0.1)
    assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in model.parameters()}


def test_a_face_shares_the_parameters_of_its_model(kit):
    model = kit.build("kda").train()
    wrapped = Model.of(model)
    assert wrapped.model is model
    assert wrapped.training
    assert {id(p) for p in wrapped.parameters()} == {id(p) for p in model.parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped.gradient_checkpointing_enable()
        assert model.checkpointing
        wrapped.gradient_checkpointing_disable()
    assert not model.checkpointing
