"""A model written down as one native call decodes as the model itself does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from innerloop.kernels.native.series import MOST, present
from innerloop.lm import Config, LanguageModel
from innerloop.lm.block import FeedForward
from innerloop.lm.decoder import decoder
from innerloop.nn import GatedDeltaNet

pytestmark = pytest.mark.skipif(not present(), reason="there are no native kernels here")

MODELS: dict[str, dict[str, Any]] = {
    "published": {},
    "qwen": {"layer_options": {"gated_delta_rule": {"variant": "qwen", "value_heads": 4}}},
    "olmo, no gate": {"layer_options": {"gated_delta_rule": {"variant": "olmo", "output_gate": False}}},
    "no taps": {"layer_options": {"gated_delta_rule": {"taps": 0}}},
    "odd widths": {"width": 21, "layer_options": {"gated_delta_rule": {"key_width": 5, "value_width": 7, "taps": 3}}},
    "no feed-forward": {"feed_forward_width": 0},
    "untied": {"tied": False, "feed_forward_width": 17},
    "delta": {"pattern": "delta_rule+delta_rule(output_gate=true,allow_neg_eigval=true)"},
    "among others": {"pattern": "mamba2+gated_delta_rule+attention(window=4)+attention"},
    "others alone": {"pattern": "kda+mesa"},
}


def make(seed: int = 0, **options: Any) -> LanguageModel:
    torch.manual_seed(seed)
    config = Config(**{"vocab_size": 31, "width": 24, "heads": 2, "pattern": "2*gated_delta_rule", **options})
    model = LanguageModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():  # norms and gates away from their first values
            p += 0.1 * torch.randn_like(p)
    return model


@pytest.mark.parametrize("rows", [1, 3, MOST])
@pytest.mark.parametrize("name", MODELS)
def test_a_decoder_gives_the_logits_of_the_model_in_float64(name: str, rows: int) -> None:
    model = make(**MODELS[name])
    tokens = torch.randint(31, (rows, 12))
    with torch.no_grad():
        wanted, after = copy.deepcopy(model).double()(tokens)
        _, state = model(tokens[:, :5])
        made = decoder(model, state)
        assert made is not None
        before = state.clone()
        got = torch.stack([made(tokens[:, t]).clone() for t in range(5, 12)], 1)
        assert made.state.position.tolist() == made.state.position.tolist() == [12] * rows
    torch.testing.assert_close(got.double(), wanted[:, 5:], rtol=0, atol=1e-5 * wanted.abs().max().item())
    for mine, theirs in zip(made.state.layers, after.layers, strict=True):
        for (name, x), y in zip(mine.named().items(), theirs.named().values(), strict=True):
            if mine.rule == "softmax_attention" and name in ("memory.k", "memory.v"):
                continue  # room beyond a row's length is anything
            torch.testing.assert_close(x.double(), y.double(), rtol=0, atol=1e-5 * max(1.0, y.abs().max().item()))
    for old, kept in zip(state.layers, before.layers, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(old.named().values(), kept.named().values(), strict=True))


def greedy(model: LanguageModel, tokens: torch.Tensor, count: int) -> list[list[int]]:
    found, state = [], None
    with torch.no_grad():
        for _ in range(count):
            logits, state = model(tokens, state)
            tokens = logits[:, -1:].argmax(-1)
            found.append(tokens[:, 0].tolist())
    return found


def test_generation_writes_what_the_model_says() -> None:
    model = make()
    tokens = torch.randint(31, (2, 6))
    wanted = greedy(model, tokens, 20)
    assert [x.tolist() for x in model.generate(tokens, max_new_tokens=20, temperature=0)] == wanted
    _, state = model(tokens[:, :4])
    again = model.generate(tokens[:, 4:], state, max_new_tokens=20, temperature=0)
    assert [x.tolist() for x in again] == wanted


def change_weights(model: LanguageModel) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.neg_()


def load_others(model: LanguageModel) -> None:
    model.load_state_dict(make(1, pattern=model.config.pattern).state_dict())


def replace_weights(model: LanguageModel) -> None:
    model.embedding.weight = torch.nn.Parameter(make(1).embedding.weight.detach())


def replace_a_layer(model: LanguageModel) -> None:
    model.blocks[1].layer = make(1).blocks[1].layer  # pyright: ignore[reportArgumentType]


def widen(model: LanguageModel) -> None:
    model.double()


def watch(model: LanguageModel) -> None:
    model.blocks[0].register_forward_hook(lambda module, given, found: (-found[0], *found[1:]))


@pytest.mark.parametrize("pattern", ["2*gated_delta_rule", "attention+gated_delta_rule"])
@pytest.mark.parametrize("change", [change_weights, load_others, replace_weights, replace_a_layer, watch])
def test_what_happens_to_a_model_meanwhile_counts(change: Any, pattern: str) -> None:
    model = make(pattern=pattern)
    tokens = torch.randint(31, (1, 6))
    stream = model.generate(tokens, max_new_tokens=12, temperature=0)
    found = [next(stream) for _ in range(4)]
    twin = make(pattern=pattern)
    with torch.no_grad():
        _, state = twin(torch.cat((tokens, torch.stack(found[:-1], 1)), 1))
        change(twin)
        change(model)
        token = found[-1][:, None]
        for got in stream:
            logits, state = twin(token, state)
            token = logits[:, -1:].argmax(-1)
            assert got.tolist() == token[:, 0].tolist()


def test_a_model_may_be_widened_between_two_generations() -> None:
    model = make()
    tokens = torch.randint(31, (1, 6))
    wanted = greedy(copy.deepcopy(model).double(), tokens, 8)
    list(model.generate(tokens, max_new_tokens=4))
    widen(model)
    assert [x.tolist() for x in model.generate(tokens, max_new_tokens=8, temperature=0)] == wanted


class Other(GatedDeltaNet):
    """Somebody's own."""


class Forward(FeedForward):
    """Somebody's own."""


def served(model: LanguageModel, rows: int = 1) -> bool:
    with torch.inference_mode():
        _, state = model(torch.ones(rows, 3, dtype=torch.int64))
        return decoder(model, state) is not None


def test_only_what_is_known_is_written_down() -> None:
    assert served(make())
    assert not served(make(), MOST + 1)
    assert not served(make().double()) and not served(make().bfloat16())
    assert served(make(pattern="gated_delta_rule+attention")) and not served(make(pattern="2*rwkv7"))
    assert served(make().train()) and not served(make(pattern="gated_delta_rule+attention").train())
    model = make()
    model.blocks[0].layer.__class__ = Other  # which is called
    model.blocks[0].layer.register_forward_hook(lambda module, given, found: (-found[0], found[1]))  # pyright: ignore
    assert served(model)
    wanted = greedy(model, torch.ones(1, 3, dtype=torch.int64), 6)
    got = model.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=6, temperature=0)
    assert [x.tolist() for x in got] == wanted
    model = make()
    model.blocks[0].feed_forward.__class__ = Forward
    assert not served(model)
    model = make()
    model.blocks[0].feed_forward.down.register_forward_pre_hook(lambda module, given: None)  # pyright: ignore
    assert not served(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert not served(make())
    with torch.inference_mode():
        assert not served(make())  # its weights do not tell when they change
