"""What the model holds to: splits, steps, pads, packing, rows, its loss and its gradients."""

import math
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from innerloop.lm import Config, LanguageModel
from innerloop.lm import loss as loss_module
from innerloop.testing import error


def assert_close(got, want, bar=1e-10):
    assert error(got, want) <= bar


@torch.no_grad()
def test_any_split_equals_the_whole(kit, pattern):
    model, tokens = kit.build(pattern), kit.words(2, 11)
    want, final = model(tokens)
    for cuts in ((0, 4), (1, 2, 9), (10,)):
        parts, state = [], None
        for piece in tokens.tensor_split(cuts, dim=1):
            y, state = model(piece, state)
            parts.append(y)
        assert_close(torch.cat(parts, 1), want)
        for x, y in zip(pytree.tree_leaves(state), pytree.tree_leaves(final), strict=True):
            assert_close(x, y)


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_the_last_token_is_the_same_after_a_prompt_and_in_one_piece(kit, dtype, bar):
    model, tokens = kit.build("3*gated_delta_rule+attention", dtype), kit.words(1, 5)
    want, _ = model(tokens)
    last, _ = model(tokens[:, 4:], model(tokens[:, :4])[1])
    assert_close(last, want[:, 4:], bar)


def padded(kit, sides):
    tokens, mask = kit.words(len(sides), 9), torch.zeros(len(sides), 9, dtype=torch.int64)
    for n, (first, last) in enumerate(sides):
        mask[n, first:last] = 1
    return tokens, mask, [tokens[n : n + 1, first:last] for n, (first, last) in enumerate(sides)]


@pytest.mark.parametrize("sides", [[(0, 9), (6, 9), (0, 3), (2, 7)], [(4, 9)], [(0, 5)]])
def test_pads_on_either_side_change_nothing(kit, pattern, sides):
    model = kit.build(pattern)
    tokens, mask, real = padded(kit, sides)
    junk = tokens.masked_fill(mask == 0, -7)
    logits, state = model(junk, attention_mask=mask)
    loss, _ = model.loss(junk, tokens.roll(-1, 1), attention_mask=mask, reduction="none")
    for n, piece in enumerate(real):
        want, final = model(piece)
        assert_close(logits[n][mask[n] == 1], want[0])
        labels = tokens.roll(-1, 1)[n][mask[n] == 1]
        assert_close(loss[n][mask[n] == 1], F.cross_entropy(want[0], labels, reduction="none"))
        more = kit.words(1, 2, seed=5)
        assert_close(model(more, state.select([n]))[0], model(more, final)[0])
    assert not loss[mask == 0].any()


def test_packed_sequences_equal_separate_ones(kit, pattern):
    model, tokens = kit.build(pattern), kit.words(1, 12)
    bounds = [1, 6, 7, 11]
    packing = torch.tensor(bounds)
    logits, state = model(tokens, cu_seqlens=packing)
    loss, _ = model.loss(tokens, tokens.roll(-1, 1), cu_seqlens=packing, reduction="sum")
    total = 0
    for n, (first, last) in enumerate(pairwise(bounds)):
        want, _ = model(tokens[:, first:last])
        assert_close(logits[:, first:last], want)
        total = total + F.cross_entropy(want[0], tokens.roll(-1, 1)[0, first:last], reduction="sum")
        again, _ = model(tokens, state, cu_seqlens=packing)
        assert_close(again[:, first:last], model(tokens[:, first:last], state.select([n]))[0])
    assert_close(loss, total)


def test_a_row_does_not_see_its_neighbours(kit):
    model, tokens = kit.build("hybrid"), kit.words(3, 7)
    other = tokens.clone()
    other[1] = (other[1] + 1) % kit.vocabulary
    want, got = model(tokens)[0], model(other)[0]
    assert torch.equal(got[::2], want[::2])
    assert_close(model(tokens[:1])[0], want[:1])


def test_a_model_keeps_nothing_between_calls(kit):
    model, tokens = kit.build("hybrid"), kit.words(2, 5)
    want = model(tokens)[0]
    list(model.generate(tokens, max_new_tokens=3))
    assert torch.equal(model(tokens)[0], want)
    assert list(model.buffers()) == []


# The loss


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_is_the_cross_entropy_of_the_logits(kit, monkeypatch, tied, reduction):
    monkeypatch.setattr(loss_module, "_LOGITS", 1)
    monkeypatch.setattr(loss_module, "_FEWEST", 4)  # pieces of 4 tokens
    model, tokens = kit.build("kda", tied=tied, feed_forward_width=0), kit.words(3, 7)
    labels = kit.words(3, 7, seed=2)
    labels[0, 2:5], labels[2, 6] = -100, -100
    loss, state = model.loss(tokens, labels, reduction=reduction)
    logits, final = model(tokens)
    want = F.cross_entropy(logits.mT, labels, reduction=reduction)
    assert_close(loss, want)
    assert loss.shape == want.shape
    assert_close(state.layers[0].memory, final.layers[0].memory)
    weights = torch.rand(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    slopes = [torch.autograd.grad((x * weights).sum(), list(model.parameters())) for x in (loss, want)]
    for got, truth in zip(*slopes, strict=True):
        assert_close(got, truth, 1e-9)


def test_no_label_at_all_is_no_loss(kit):
    model, tokens = kit.build("kda"), kit.words(2, 5)
    loss, _ = model.loss(tokens, torch.full_like(tokens, -100))
    assert loss.item() == 0
    loss.backward()
    assert not model.embedding.weight.grad.any()
    loss, state = model.loss(tokens[:, :0], tokens[:, :0])
    assert loss.item() == 0
    assert state.position.tolist() == [0, 0]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_differentiates_twice(kit, reduction):
    labels, tokens = kit.words(5), kit.words(5, seed=2)
    labels[2] = -100

    def loss(weight):  # tied: what the head reads comes from its own weight
        return loss_module.head_loss(torch.tanh(weight[tokens]), weight, labels, reduction)

    weight = torch.randn(kit.vocabulary, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradgradcheck(loss, (weight.requires_grad_(),), fast_mode=True)
    slopes = [torch.autograd.grad(loss(weight).sum(), weight, create_graph=again)[0] for again in (False, True)]
    assert_close(*slopes)


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor held that anybody made."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.seen = max(self.seen, x.numel())
        return out


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_logits_of_a_long_batch_never_exist_at_once(reduction):
    model = LanguageModel(Config(vocab_size=5000, width=8, heads=2, feed_forward_width=0))
    tokens = torch.randint(5000, (2, 600))
    with Largest() as largest:
        loss, _ = model.loss(tokens, tokens, reduction=reduction)
        loss.sum().backward()
    pieces = loss_module.rows_at_once(5000) * 5000
    assert largest.seen == pieces < 0.25 * tokens.numel() * 5000


def test_a_loss_in_half_precision_is_computed_wide(kit):
    model, tokens = kit.build("kda", torch.float32), kit.words(2, 9)
    want, _ = model.loss(tokens, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = model.loss(tokens, tokens)
        got.backward()
        singles, _ = model.loss(tokens, tokens, reduction="none")
    assert got.dtype == singles.dtype == torch.float32
    assert_close(got, want, 2e-2)
    assert_close(singles.mean(), want, 2e-2)
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())
    half = kit.build("kda", torch.bfloat16)
    loss, _ = half.loss(tokens, tokens)
    loss.backward()
    assert loss.dtype == torch.float32
    assert_close(loss, want, 2e-2)
    assert all(p.grad.dtype == p.dtype for p in half.parameters())


# Gradients


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_checkpointing_gives_equal_gradients_and_keeps_less(kit, dropout):
    tokens, found = kit.words(2, 40), {}
    for checkpointing in (False, True):
        model = kit.build("hybrid", dropout=dropout, checkpointing=checkpointing).train()
        torch.manual_seed(5)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x.numel()) or x, lambda x: x):
            loss, _ = model.loss(tokens, tokens.roll(-1, 1))
        loss.backward()
        found[checkpointing] = sum(kept), [loss.detach(), *(p.grad for p in model.parameters())]
    (much, want), (little, got) = found[False], found[True]
    assert little < 0.35 * much
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


def test_the_gradient_of_pieces_is_that_of_the_whole_and_can_be_cut(kit):
    model, tokens = kit.build("hybrid"), kit.words(2, 8)
    labels = tokens.roll(-1, 1)
    parameters = list(model.parameters())
    want = torch.autograd.grad(model.loss(tokens, labels, reduction="sum")[0], parameters)

    def pieces(cut):
        total, state = 0, None
        for piece, label in zip(tokens.split(3, 1), labels.split(3, 1), strict=True):
            state = state.detach() if cut and state is not None else state
            loss, state = model.loss(piece, label, state, reduction="sum")
            total = total + loss
        return torch.autograd.grad(total, parameters)

    for got, cut, truth in zip(pieces(False), pieces(True), want, strict=True):
        assert_close(got, truth, 1e-9)
        assert cut.isfinite().all()
    assert any(error(cut, truth) > 1e-3 for cut, truth in zip(pieces(True), want, strict=True))


def test_dropout_is_of_training_alone(kit):
    model, tokens = kit.build("kda", dropout=0.5), kit.words(2, 6)
    plain = kit.build("kda")
    assert torch.equal(model(tokens)[0], plain(tokens)[0])
    model.train()
    assert not torch.equal(model(tokens)[0], model(tokens)[0])


def test_a_small_model_learns_to_repeat():
    torch.manual_seed(0)
    model = LanguageModel(Config(vocab_size=12, width=32, heads=2, pattern="gated_delta_rule+attention(window=4)"))
    tokens = torch.randint(12, (16, 12), generator=torch.Generator().manual_seed(1)).repeat(1, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        loss, _ = model.loss(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    single, _ = model.loss(tokens[:, :-1], tokens[:, 1:], reduction="none")
    assert single[:, 14:].mean() < 0.5 * math.log(12)


# What is refused


def test_inputs_that_do_not_fit_say_what_was_wanted(kit):
    model, tokens = kit.build("hybrid"), kit.words(2, 4)
    _, state = model(tokens)
    for wrong, kind, message in (
        (lambda: model(tokens.float()), TypeError, "tokens must be an int64 tensor"),
        (lambda: model([1, 2]), TypeError, "tokens must be an int64 tensor; got list"),
        (lambda: model(tokens[0]), ValueError, r"tokens must have shape \[B, T\]; got \[4\]"),
        (lambda: model(tokens + 20), ValueError, r"tokens must lie in \[0, vocab_size=23\); got"),
        (lambda: model(-1 - tokens), ValueError, "tokens must lie"),
        (lambda: model(tokens, state.layers), TypeError, "state must be a State"),
        (lambda: model(tokens, kit.build("kda")(tokens)[1]), ValueError, "state must have 4 layers; got 2"),
        (lambda: model(kit.words(3, 2), state), ValueError, "N=3 rows"),
        (lambda: model(tokens, attention_mask=torch.ones(2, 4)), TypeError, "attention_mask"),
        (lambda: model(tokens, attention_mask=torch.ones(2, 3).bool()), ValueError, "attention_mask must have shape"),
        (lambda: model(tokens, cu_seqlens=torch.tensor([0, 4])), ValueError, "B must be 1"),
        (lambda: model.loss(tokens, tokens[:, :3]), ValueError, "labels must have the tokens' shape"),
        (lambda: model.loss(tokens, tokens.int()), TypeError, "labels must be an int64 tensor"),
        (lambda: model.loss(tokens, tokens + 20), ValueError, "labels must lie"),
        (lambda: model.loss(tokens, torch.full_like(tokens, -1)), ValueError, "labels must"),
        (lambda: model.loss(tokens, tokens, reduction="all"), ValueError, "reduction must be one of"),
    ):
        with pytest.raises(kind, match=message):
            wrong()


@pytest.mark.slow
@torch.no_grad()
def test_compiled_equals_eager(kit):
    torch._dynamo.reset()
    model = kit.build("hybrid")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    tokens = kit.words(2, 9)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :3] = False
    want, state = model(tokens, attention_mask=mask)
    got, after = compiled(tokens, attention_mask=mask)
    assert_close(got, want)
    assert_close(compiled(tokens[:, :1], after)[0], model(tokens[:, :1], state)[0])
