"""The parts of a layer beside its memory, through kernels and in plain torch, against their definitions in float64."""

import pytest
import torch
from torch.nn import functional as F

from innerloop.algebra.convolution import short_convolution
from innerloop.algebra.norm import gated_norm
from innerloop.kernels import parts
from innerloop.kernels.native import missing
from innerloop.testing import assert_close

WAYS = ("torch",) if missing() else ("torch", "cpu")
DOUBLE, HALF = torch.float64, torch.bfloat16


def drawn(*shape, seed=0, dtype=DOUBLE, scale=1.0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
    return (scale * x).to(dtype)


def spread_out(x):
    """Return the same numbers at strides that no other tensor has, with NaN between them."""
    wide = torch.full((*(2 * n for n in x.shape[:-1]), 3 * x.shape[-1]), torch.nan, dtype=x.dtype)
    view = wide[*(slice(n) for n in x.shape[:-1]), 1::3]
    return view.copy_(x)


def slopes(outputs, inputs):
    """Return the gradients of a fixed random functional of the outputs, for the inputs that there are."""
    total = sum((y.double() * drawn(*y.shape, seed=7 + i)).sum() for i, y in enumerate(outputs))
    wanted = [x for x in inputs if x is not None]
    return torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)


def compare(run, definition, inputs, dtype, *, strided=False):
    """Hold values and gradients of a part to those of its definition on the same numbers."""
    given = [None if x is None else x.detach().to(dtype) for x in inputs]
    given = [None if x is None else (spread_out(x) if strided else x).requires_grad_() for x in given]
    exact = [None if x is None else x.detach().double().requires_grad_() for x in given]
    got, want = run(*given), definition(*exact)
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert_close(x, y, dtype, "values", f"output {i}")
    assert got[0].dtype == dtype
    for i, (x, y) in enumerate(zip(slopes(got, given), slopes(want, exact), strict=True)):
        assert_close(x, y, dtype, "gradients", f"gradient {i}")


# The convolution


def convolved(x, window, weight, bias, bounds, silu):
    """Every sequence on its own through torch's depthwise convolution."""
    taps, y, after = weight.shape[1], torch.zeros_like(x), []
    count = x.shape[0] if bounds is None else len(bounds) - 1
    for n in range(count):
        row, begin, end = (n, 0, x.shape[1]) if bounds is None else (0, int(bounds[n]), int(bounds[n + 1]))
        whole = torch.cat((window[n], x[row, begin:end]))
        if end > begin:
            found = F.conv1d(whole.T[None], weight[:, None], bias, groups=x.shape[2])[0].T
            inside = torch.zeros_like(x).index_put((torch.tensor(row), torch.arange(begin, end)), found)
            y = y + (F.silu(inside) if silu else inside)
        after.append(whole[len(whole) - taps + 1 :])
    return y, torch.stack(after)


def convolution(way, bounds=None, silu=True):
    if way == "torch":
        return lambda *x: short_convolution(*x, bounds, silu)
    return lambda *x: parts.convolve(*x, bounds, silu=silu)


def given(B=2, T=9, C=5, W=4, N=None, *, bias=True):
    N = B if N is None else N
    return [drawn(B, T, C), drawn(N, W - 1, C, seed=1), drawn(C, W, seed=2), drawn(C, seed=3) if bias else None]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, HALF, torch.float16])
def test_a_convolution_is_its_definition(way, dtype):
    for T, C, W in ((9, 5, 4), (1, 17, 4), (2, 8, 4), (150, 33, 4), (7, 3, 1), (3, 70, 2), (5, 1, 7)):
        for silu in (True, False):
            inputs = given(3, T, C, W, bias=silu)
            compare(convolution(way, silu=silu), lambda *x, s=silu: convolved(*x, None, s), inputs, dtype)


@pytest.mark.parametrize("way", WAYS)
def test_packed_sequences_are_convolved_apart(way):
    for bounds in ([0, 9], [1, 3, 3, 4, 8], [0, 0, 1, 9, 9], [0, 100, 101, 170]):
        bounds = torch.tensor(bounds, dtype=torch.int32)
        inputs = given(1, max(9, int(bounds[-1]) + 2), 6, N=len(bounds) - 1)
        compare(convolution(way, bounds), lambda *x, b=bounds: convolved(*x, b, True), inputs, torch.float32)


@pytest.mark.parametrize("way", WAYS)
def test_a_convolution_takes_any_strides(way):
    for dtype in (torch.float32, HALF):
        compare(convolution(way), lambda *x: convolved(*x, None, True), given(2, 6, 9), dtype, strided=True)


@pytest.mark.parametrize("way", WAYS)
def test_pieces_of_a_sequence_are_convolved_as_the_whole(way):
    run, (x, window, weight, bias) = convolution(way), given(T=12)
    whole, last = run(x, window, weight, bias)
    for cuts in ((1, 2, 3), (2, 9), (5, 6), range(1, 12)):
        pieces, past = [], window
        for piece in x.tensor_split(tuple(cuts), 1):
            y, past = run(piece, past, weight, bias)
            pieces.append(y)
        assert_close(torch.cat(pieces, 1), whole, DOUBLE)
        assert torch.equal(past, last)


@pytest.mark.parametrize("way", WAYS)
def test_what_lies_outside_of_packed_sequences_reaches_nothing(way):
    inputs, bounds = given(1, 9), torch.tensor([2, 7])
    found = []
    for outside in (0.0, 5.0, torch.nan):
        x = inputs[0].clone()
        x[:, :2] = x[:, 7:] = outside
        tracked = [x.requires_grad_(), *(y.detach().requires_grad_() for y in inputs[1:])]
        outputs = convolution(way, bounds)(*tracked)
        found.append((*outputs, *slopes(outputs, tracked)))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    y, _, slope, *_ = found[0]
    assert not y[:, [0, 1, 7, 8]].any()
    assert not slope[:, [0, 1, 7, 8]].any()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [1, 200])
def test_a_window_does_not_keep_the_inputs_alive(way, length):
    for bounds in (None, torch.tensor([0, length])):
        _, window = convolution(way, bounds)(*given(1, length))
        assert window.untyped_storage().nbytes() == window.nbytes


# The norms


def normed(x, gate, weight, measure, eps, activation, gate_first):
    """The definitions, written out."""
    factor = 1.0 if gate is None else torch.sigmoid(gate) * (gate if activation == "silu" else 1)
    before, after = (factor, 1.0) if gate_first else (1.0, factor)
    h = x * before
    total = (h**2).sum(-1, keepdim=True)
    count = x.shape[-1] if measure == "mean" else 1
    length = total.sqrt().clamp(min=eps) if measure == "floor" else (total / count + eps) ** 0.5
    return (h / length * (1 if weight is None else weight) * after,)


def norm(way, *options):
    if way == "torch":
        return lambda *x: (gated_norm(*x, *options),)
    names = ("measure", "eps", "activation", "gate_first")
    return lambda *x: (parts.norm(*x, **dict(zip(names, options, strict=True))),)


OPTIONS = [
    (measure, activation, first, has_gate, has_weight)
    for measure, activation, first, has_gate, has_weight in (
        ("mean", "silu", False, True, True),
        ("mean", "sigmoid", False, True, True),
        ("mean", "silu", True, True, True),
        ("mean", "sigmoid", True, True, False),
        ("mean", "silu", False, False, True),
        ("sum", "silu", False, False, False),
        ("floor", "silu", False, False, False),
        ("floor", "silu", True, True, True),
    )
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o)))
def test_a_norm_is_its_definition(way, options):
    measure, activation, first, has_gate, has_weight = options
    named = (measure, 1e-3, activation, first)
    for shape in ((7,), (3, 2), (2, 3, 40), (2, 5, 3, 17), (2, 2, 2, 2, 8), (700, 33)):
        inputs = [
            drawn(*shape),
            drawn(*shape, seed=1, scale=3.0) if has_gate else None,
            drawn(shape[-1], seed=2) if has_weight else None,
        ]
        for dtype in (DOUBLE, torch.float32, HALF, torch.float16):
            compare(norm(way, *named), lambda *x: normed(*x, *named), inputs, dtype)
        compare(norm(way, *named), lambda *x: normed(*x, *named), inputs, torch.float32, strided=True)


@pytest.mark.parametrize("way", WAYS)
def test_a_row_of_zeros_has_a_finite_norm_and_gradient(way):
    for measure in ("mean", "sum", "floor"):
        x = torch.zeros(2, 5, requires_grad=True)
        (y,) = norm(way, measure, 1e-6, "silu", False)(x, None, None)
        (slope,) = torch.autograd.grad(y.sum(), x)
        assert not y.any()
        assert slope.isfinite().all()
        assert (slope > 0).all()


@pytest.mark.skipif(bool(missing()), reason=missing() or "present")
def test_gates_far_out_are_what_they_tend_to():
    gate = torch.tensor([200.0, -200.0, 88.5, -88.5, float("inf")], requires_grad=True)
    x = torch.full((5,), 2.0)
    for activation, want in (("sigmoid", [1.0, 0, 1, 0, 1]), ("silu", [200.0, 0, 88.5, 0, float("inf")])):
        y = parts.norm(x, gate, measure="mean", eps=0.0, activation=activation)
        assert y.tolist() == want
        (slope,) = torch.autograd.grad(y[:4].sum(), gate)
        assert slope[:4].tolist() == ([0.0, 0, 0, 0] if activation == "sigmoid" else [1.0, 0, 1, 0])


# What frameworks ask of both


def samples():
    x, window, weight, bias = (t.requires_grad_() for t in given(2, 5, 3, 3))
    yield torch.ops.innerloop.short_convolution.default, (x, window, weight, bias), (None, True, True)
    packed = (x[:1].detach().requires_grad_(), window, weight, None)
    yield torch.ops.innerloop.short_convolution.default, packed, (torch.tensor([0, 1, 4]), False, True)
    rows = (drawn(2, 5, 3, seed=5).requires_grad_(), drawn(2, 5, 3, seed=6).requires_grad_(), drawn(3).requires_grad_())
    yield torch.ops.innerloop.gated_norm.default, rows, ("mean", 1e-5, "silu", False, True)
    yield torch.ops.innerloop.gated_norm.default, (rows[0], None, None), ("floor", 1e-12, "silu", False, True)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("sample", range(4))
def test_a_part_is_an_operator_like_any_other(sample):
    op, tensors, options = list(samples())[sample]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, (*tensors, *options), test_utils=checks)
    wanted = [x for x in tensors if x is not None]

    def run(*given):
        rest = iter(given)
        return tuple(op(*(None if x is None else next(rest) for x in tensors), *options))

    assert torch.autograd.gradcheck(run, wanted, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, wanted, fast_mode=True)


@pytest.mark.parametrize("sample", range(4))
def test_a_part_has_gradients_for_each_of_a_batch(sample):
    op, tensors, options = list(samples())[sample]
    several = [None if x is None else torch.stack((x, 2 * x, -x)).detach() for x in tensors]

    def total(*given):
        return sum(y.sin().sum() for y in op(*given, *options))

    places = tuple(i for i, x in enumerate(tensors) if x is not None)
    dims = tuple(None if x is None else 0 for x in several)
    got = torch.func.vmap(torch.func.grad(total, places), in_dims=dims)(*several)
    for i in range(3):
        want = torch.func.grad(total, places)(*(None if x is None else x[i] for x in several))
        for x, y in zip(got, want, strict=True):
            assert_close(x[i], y, DOUBLE)


@pytest.mark.skipif(bool(missing()), reason=missing() or "present")
def test_more_threads_change_no_bit_of_a_part():
    inputs = [x.float().requires_grad_() for x in given(4, 300, 64)]
    rows = [drawn(4, 300, 2, 64, seed=i).float().requires_grad_() for i in (0, 1)]
    weight, threads, found = drawn(64).float().requires_grad_(), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            both = parts.convolve(*inputs)
            y = (parts.norm(*rows, weight, eps=1e-5),)
            found.append((*both, *slopes(both, inputs), *y, *slopes(y, (*rows, weight))))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
