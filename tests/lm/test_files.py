"""A model's folder, whatever happens to it, and initial values by every way a model comes to be."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from innerloop.lm import Config, LanguageModel
from innerloop.lm.kinds import KINDS


def assert_same_weights(got, want):
    for (name, x), (other, y) in zip(got.named_parameters(), want.named_parameters(), strict=True):
        assert name == other
        assert x.dtype == y.dtype
        assert torch.equal(x, y), name


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_goes_through_its_folder_to_the_bit(kit, tmp_path, tied):
    model = kit.build("+".join(KINDS), torch.bfloat16, tied=tied, dropout=0.1)
    model.save(tmp_path / "a" / "model")
    state = torch.get_rng_state()
    again = LanguageModel.load(tmp_path / "a" / "model")
    assert torch.equal(torch.get_rng_state(), state)
    assert again.config == model.config
    assert again.training
    assert_same_weights(again, model)
    assert ("head.weight" in dict(again.named_parameters())) != tied
    marks = [[getattr(p, "_no_weight_decay", False) for p in m.parameters()] for m in (model, again)]
    assert marks[0] == marks[1]
    assert any(marks[0])
    tokens = kit.words(2, 5)
    assert torch.equal(again.eval()(tokens)[0], model(tokens)[0])
    assert sorted(os.listdir(tmp_path / "a" / "model")) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("moment", ["write", "rename"])
def test_an_interrupted_save_leaves_the_old_model_or_the_new(kit, tmp_path, monkeypatch, moment, file):
    old, new = kit.build("kda"), kit.build("mamba2", seed=1)
    old.save(tmp_path)

    def failing(name, real):
        def call(which, *args):
            path = os.readlink(f"/proc/self/fd/{which}") if name == "write" else which
            if moment == name and file in str(path):
                raise OSError(28, "No space left on device")
            return real(which, *args)

        return call

    monkeypatch.setattr(os, "fsync", failing("write", os.fsync))
    monkeypatch.setattr(os, "replace", failing("rename", os.replace))
    with pytest.raises(OSError, match="No space left"):
        new.save(tmp_path)
    monkeypatch.undo()
    found = LanguageModel.load(tmp_path)
    assert found.config == old.config
    assert_same_weights(found, old)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    new.save(tmp_path)
    assert_same_weights(LanguageModel.load(tmp_path), new)


def test_a_folder_that_holds_no_model_says_so(kit, tmp_path):
    with pytest.raises(FileNotFoundError, match="must be a folder that LanguageModel"):
        LanguageModel.load(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        LanguageModel.load(tmp_path)
    kit.build("kda").save(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    fields, tensors = json.loads(config.read_text())["innerloop"], load_file(weights)

    def refused(message, metadata, tensors=tensors):
        save_file(tensors, weights, metadata)
        with pytest.raises(ValueError, match=message) as caught:
            LanguageModel.load(tmp_path)
        assert "\n" not in str(caught.value)

    refused("version 1; got 9", {"innerloop": json.dumps(fields | {"version": 9})})
    refused("has the fields", {"innerloop": json.dumps(fields | {"more": 9})})
    refused("embedding.weight must have shape", {"innerloop": json.dumps(fields | {"vocab_size": 9})})
    refused("norm.weight is missing", {}, {k: x for k, x in tensors.items() if k != "norm.weight"})
    refused("more is one too many", {}, tensors | {"more": torch.zeros(1)})
    save_file(tensors, weights, {"format": "pt"})  # as another library writes it: config.json says what it is
    assert LanguageModel.load(tmp_path).config.vocab_size == kit.vocabulary
    for text in ("{", "[]", "{}", '{"innerloop": 3}', "\0"):
        config.write_text(text)
        with pytest.raises(ValueError, match=r"config\.json must"):
            LanguageModel.load(tmp_path)
    config.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"config\.json must hold JSON"):
        LanguageModel.load(tmp_path)
    weights.write_bytes(b"no weights")
    with pytest.raises(ValueError, match=r"JSON|whole safetensors"):
        LanguageModel.load(tmp_path)


class Foreign(torch.nn.Module):
    """A model around ours whose initialisation knows of Linear and Embedding."""

    def __init__(self, model):
        super().__init__()
        self.part = torch.nn.ModuleList([torch.nn.Linear(3, 3), model])
        self.apply(self.draw)

    @staticmethod
    def draw(module):
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            torch.nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                torch.nn.init.zeros_(module.bias)


def made(route, config):
    torch.manual_seed(11)
    if route == "meta":
        with torch.device("meta"):
            model = LanguageModel(config)
        model.to_empty(device="cpu")
    elif route == "nested":
        return Foreign(LanguageModel(config)).part[1]
    elif route == "bfloat16":
        torch.set_default_dtype(torch.bfloat16)
        try:
            return LanguageModel(config)
        finally:
            torch.set_default_dtype(torch.float32)
    else:
        model = LanguageModel(Config.from_dict(json.loads(json.dumps(config.to_dict()))))
        if route == "configuration":
            return model
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(torch.nan)
    model.reset_parameters()
    return model


@pytest.mark.parametrize("route", ["configuration", "reset", "meta", "nested", "bfloat16"])
def test_initial_values_are_alike_by_every_route(route):
    config = Config(vocab_size=300, width=64, heads=16, tied=False, pattern="+".join(KINDS))
    torch.manual_seed(11)  # few numbers a parameter, some of heavy tails: always the same ones
    want, got = LanguageModel(config), made(route, config)
    foreign = {f"{n}.weight" for n, m in want.named_modules() if isinstance(m, torch.nn.Linear)}
    for (name, truth), (_, p) in zip(want.named_parameters(), got.named_parameters(), strict=True):
        assert p.isfinite().all(), name
        if route == "nested" and name in foreign:
            continue
        truth, wide = truth.detach().float(), p.detach().float()
        spread = truth.std(correction=0).item()
        bar = 6 * spread * math.sqrt(2 / p.numel()) + (5e-3 if route == "bfloat16" else 1e-6)
        assert abs(wide.mean() - truth.mean()) <= bar, name
        assert abs(wide.std(correction=0) - spread) <= bar, name
        assert p.dtype == (torch.bfloat16 if route == "bfloat16" and not marked(p) else torch.float32), name
        assert marked(p) == marked(dict(want.named_parameters())[name]), name


def marked(p):
    return getattr(p, "_no_weight_decay", False)


def test_layers_in_a_model_begin_as_layers_alone():
    config = Config(vocab_size=9, width=64, heads=16, pattern="gated_delta_rule+kda+mamba2+rwkv7+rwkv7")
    model = LanguageModel(config)
    for block in list(model.blocks)[:3]:
        rate = block.layer.decay.A_log.exp()
        assert 0 < rate.min() < rate.max() <= 16
        step = torch.nn.functional.softplus(block.layer.decay.dt_bias)
        assert 0.99e-3 < step.min() < step.max() < 0.1001
    assert [block.layer.index for block in list(model.blocks)[3:]] == [0, 1]
    assert model.blocks[4].layer.norm.weight[0] == 1  # ((index + 1) / layers) ** 0.7 of the last
    assert abs(LanguageModel(Config(vocab_size=4000, width=64, initial_std=0.1)).embedding.weight.std() - 0.1) < 1e-3


def test_the_language_model_needs_no_transformers():
    code = "import sys, innerloop.lm; assert 'transformers' not in sys.modules, 'transformers was loaded'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
