"""Memory of trails: kept for the next call and never given to two at once; and trails that keep one memory of four."""

import threading

import pytest
import torch
import torch.nn.functional as F

from innerloop import ops
from innerloop.kernels.native import missing
from innerloop.kernels.native.library import LARGE
from innerloop.kernels.native.spare import Spare

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "present")


def outline(size):
    return torch.empty(1, dtype=torch.uint8).expand(size)


def test_memory_comes_back_once_nobody_holds_it():
    spare = Spare()
    first = spare.take(outline(LARGE))
    part = first[10:20]
    place = first.data_ptr()
    del first
    other = spare.take(outline(LARGE))
    assert other.data_ptr() != place  # a part of the first is still in use
    del part
    assert spare.take(outline(LARGE)).data_ptr() == place
    assert spare.nbytes == 2 * LARGE


def test_what_a_graph_holds_is_in_use():
    class Holding(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, held):
            ctx.save_for_backward(held)
            return x + 0

        @staticmethod
        def backward(ctx, slope):
            return slope * ctx.saved_tensors[0][0], None

    spare = Spare()
    held = spare.take(outline(LARGE)).fill_(7)
    place = held.data_ptr()
    x = torch.ones(1, requires_grad=True)
    y = Holding.apply(x, held)
    del held
    other = spare.take(outline(LARGE)).fill_(1)
    assert other.data_ptr() != place
    y.backward()
    assert x.grad.item() == 7
    del y
    assert spare.take(outline(LARGE)).data_ptr() == place


def test_no_more_than_the_limit_is_kept():
    spare = Spare(limit=2 * LARGE + 100)
    for size in (LARGE, LARGE + 1, LARGE, LARGE + 2, LARGE - 1, 3 * LARGE):
        assert spare.take(outline(size)).nbytes == size
        assert spare.nbytes <= 2 * LARGE + 100
    assert spare.nbytes == 2 * LARGE + 2  # the newest two that are large and fit


def test_threads_are_never_given_the_same_memory():
    spare, wrong = Spare(), []

    def work(mark):
        for _ in range(50):
            mine = spare.take(outline(LARGE))
            mine[:1000] = mark
            if not bool((mine[:1000] == mark).all()):
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def slopes(tokens, state, slope, last, **options):
    """Gradients through one call for all tokens."""
    leaves = [x.detach().requires_grad_() for x in (*tokens, state)]
    q, k, v, g, beta, start = leaves
    o, end = ops.gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=start, output_final_state=True, backend="cpu", **options
    )
    return torch.autograd.grad((o, end), leaves, (slope, last))


@pytest.mark.parametrize("lengths", [(4000,), (700, 1300, 2000)])
def test_a_trail_that_keeps_one_memory_of_four_changes_no_bit(lengths):
    """4,000 tokens of this size leave more than 64 MiB; as pieces of half the length they keep every memory."""
    torch.manual_seed(0)
    T, H, K = sum(lengths), 16, 128
    q, k, v, slope = (torch.randn(1, T, H, K) for _ in range(4))
    # Mild decays: what the first memory says must reach the chunks behind it.
    tokens = (q, F.normalize(k, dim=-1), v, -0.01 * torch.rand(1, T, H), 0.1 * torch.rand(1, T, H))
    state, last = torch.randn(len(lengths), H, K, K), torch.randn(len(lengths), H, K, K)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    found = slopes(tokens, state, slope, last, cu_seqlens=bounds if len(lengths) > 1 else None)
    for n, (begin, end) in enumerate(zip(bounds.tolist(), bounds.tolist()[1:], strict=False)):
        own = [x[:, begin:end] for x in tokens]
        wanted = in_halves(own, state[n : n + 1], slope[:, begin:end], last[n : n + 1])
        for x, y in zip(found[:-1], wanted[:-1], strict=True):
            assert torch.equal(x[:, begin:end], y)
        assert torch.equal(found[-1][n : n + 1], wanted[-1])


def in_halves(tokens, state, slope, last):
    """The same of a sequence in pieces of at most 2,048 tokens, whole chunks, each of which leaves a small trail."""
    leaves = [x.detach().requires_grad_() for x in (*tokens, state)]
    q, k, v, g, beta, now = leaves
    outs = []
    for t in range(0, q.shape[1], 2048):
        piece = slice(t, t + 2048)
        o, now = ops.gated_delta_rule(
            q[:, piece], k[:, piece], v[:, piece], g=g[:, piece], beta=beta[:, piece], initial_state=now,
            output_final_state=True, backend="cpu",
        )  # fmt: skip
        outs.append(o)
    return torch.autograd.grad((torch.cat(outs, 1), now), leaves, (slope, last))
