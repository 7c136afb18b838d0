"""The parts that layers share, each against the plainest way to write it."""

import pytest
import torch
from torch.nn import functional as F

from innerloop import ops
from innerloop.nn.convolution import ShortConvolution
from innerloop.nn.gates import Decay, GateProjection, inverse_softplus
from innerloop.nn.linear_attention import features
from innerloop.nn.norms import HeadNorm, RMSNorm
from innerloop.nn.sequences import Sequences
from innerloop.testing import error


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_the_convolution_is_torchs_depthwise_one(taps, bias):
    convolution = ShortConvolution(5, taps, bias=bias).double()
    x = torch.randn(2, 9, 5, dtype=torch.float64)
    plain = F.conv1d(F.pad(x.mT, (taps - 1, 0)), convolution.weight[:, None], convolution.bias, groups=5)
    assert error(convolution(x, x.new_zeros(2, taps - 1, 5))[0], F.silu(plain.mT)) <= 1e-12


def test_a_window_joins_what_it_held_and_what_is_new():
    window = torch.tensor([[[1.0], [2.0], [3.0]]])
    for pieces in ([4.0], [5.0, 6.0]):
        x = torch.tensor(pieces)[None, :, None]
        _, _, window = Sequences(None).behind(window, x)
    assert window.flatten().tolist() == [4.0, 5.0, 6.0]


def test_packed_windows_join_what_each_sequence_held():
    window = torch.arange(9.0).view(3, 3, 1)
    x = torch.tensor([-1.0, 10, 20, 21, 22, 23, -1])[None, :, None]
    row, place, after = Sequences(torch.tensor([1, 2, 2, 6])).behind(window, x)
    assert after[..., 0].tolist() == [[1, 2, 10], [3, 4, 5], [21, 22, 23]]
    before = [row[0, p - 3 : p + 1, 0].tolist() for p in place[1:6]]
    assert before == [[0, 1, 2, 10], [6, 7, 8, 20], [7, 8, 20, 21], [8, 20, 21, 22], [20, 21, 22, 23]]


def test_positions_go_on_in_every_sequence():
    start, x = torch.tensor([5, 0, 7]), torch.zeros(1, 6, 1)
    packed = Sequences(torch.tensor([0, 2, 2, 6])).positions(x, start)
    assert packed.tolist() == [[5, 6, 7, 8, 9, 10]]
    assert Sequences(None).positions(torch.zeros(3, 2, 1), start).tolist() == [[5, 6], [0, 1], [7, 8]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decay_is_finite_far_out(dtype):
    decay = Decay(1)
    with torch.no_grad():
        decay.A_log.zero_()
        decay.dt_bias.zero_()
    a = torch.tensor([[100.0], [-100.0], [-50.0]], dtype=dtype, requires_grad=True)
    g = decay(a)
    assert g.dtype == torch.float32
    assert g[0].item() == -100
    assert -1e-43 <= g[1].item() <= 0
    assert abs(g[2].item() / -1.9287e-22 - 1) < 1e-3
    g.sum().backward()
    assert a.grad.isfinite().all()
    assert a.grad[0].item() == -1


def test_a_bounded_decay_is_bounded():
    decay = Decay(2, 3, lower_bound=-5.0).double()
    a = torch.linspace(-1e3, 1e3, 60, dtype=torch.float64).view(10, 2, 3)
    g = decay(a)
    assert g.min() >= -5
    assert g.max() <= 0
    want = -5 / (1 + torch.exp(-decay.A_log.exp()[:, None] * (a + decay.dt_bias)))
    assert error(g, want) <= 1e-12


def test_softplus_is_undone():
    x = torch.tensor([1e-3, 0.1, 1.0, 40.0], dtype=torch.float64)
    assert error(F.softplus(inverse_softplus(x)), x) <= 1e-12


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_norms_are_taken_wide(scale):
    x = (scale * torch.randn(4, 128, generator=torch.Generator().manual_seed(0))).bfloat16()
    wide = x.double()
    y = RMSNorm(128, eps=1e-12)(x)
    assert y.dtype == torch.bfloat16
    assert error(y, wide * torch.rsqrt(wide.square().mean(-1, keepdim=True))) <= 2**-8
    z = HeadNorm(1, 128, eps=1e-12)(x[:, None])
    assert error(z[:, 0], F.layer_norm(wide, (128,), eps=1e-12)) <= 2**-8


def test_features_far_below_zero_do_not_round_to_zero():
    x = torch.tensor([-8.0, -6.0, 0.0, 2.0, 60.0], dtype=torch.bfloat16, requires_grad=True)
    y = features(x)
    want = F.elu(x.double()) + 1
    assert ((y.double() - want).abs() <= 2**-8 * want).all()
    (slope,) = torch.autograd.grad(y[0], x)
    assert abs(slope[0].item() / 3.3546e-4 - 1) < 1e-2
    q = features(torch.full((1, 1, 1, 4), -8.0, dtype=torch.bfloat16))
    v = torch.tensor([3.0, -1.0], dtype=torch.bfloat16)
    assert torch.equal(ops.normalized_linear_attention(q, q, v[None, None, None])[0][0, 0, 0], v)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("gate_first", [False, True])
def test_the_gate_comes_after_the_norm_or_before_it(activation, gate_first):
    norm = RMSNorm(6, activation=activation, gate_first=gate_first).double()
    with torch.no_grad():
        norm.weight.uniform_(-1, 1)
    x, z = torch.randn(2, 3, 6, dtype=torch.float64).unbind(0)
    gate = getattr(F, activation)(z)
    before, after = (gate, 1) if gate_first else (1, gate)
    want = F.rms_norm(x * before, (6,), norm.weight, 1e-5) * after
    assert error(norm(x, z), want) <= 1e-12


def test_a_gates_projection_is_wide_whatever_is_around_it():
    projection = GateProjection(64, 3, start=0.5)
    x = torch.randn(5, 64)
    want = x.double() @ projection.weight.double().T + 0.5
    with torch.autocast("cpu", torch.bfloat16):
        assert error(projection(x), want) <= 1e-6
    assert projection.double()(x.double()).dtype == torch.float64
