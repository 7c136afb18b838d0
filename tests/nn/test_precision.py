"""Layers under autocast, in half precision, and compiled."""

import pytest
import torch
import torch._dynamo.testing

from innerloop import nn, ops
from innerloop.nn.layer import Turn
from innerloop.testing import error


@pytest.fixture
def read(monkeypatch):
    """Record what the ops are given."""
    seen = []
    real = Turn.read

    def spy(self, function, q, k, v, **options):
        seen.append({"v": v} | {name: x for name, x in options.items() if isinstance(x, torch.Tensor)})
        return real(self, function, q, k, v, **options)

    monkeypatch.setattr(Turn, "read", spy)
    return seen


def test_autocast_leaves_gates_and_state_wide(kit, name, read):
    layer = kit.build(name, torch.float32)
    x = kit.tokens(2, 9, dtype=torch.float32).requires_grad_()
    want, _ = layer(x)
    wide = read.pop()
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x)
        again, _ = layer(x[:, :2], state)
    narrow = read[0]
    assert y.dtype == again.dtype == torch.bfloat16
    # In the mean, not at the worst place: a norm divides by what a head reads, and at some tokens that is next to 0.
    assert (y - want).square().mean() <= 5e-2**2 * want.square().mean()
    for gate, value in narrow.items():
        if gate != "v":
            assert value.dtype == torch.float32, gate
            # These two are made of a key, and of a convolved value, which autocast has narrowed.
            derived = gate == "kappa" or (gate == "beta" and layer.rule.startswith("longhorn"))
            if value.shape[:2] == x.shape[:2] and not derived:
                assert error(value, wide[gate]) <= 1e-6, f"{gate} has gone through half precision"
    assert all(z.dtype != torch.bfloat16 for z in torch.utils._pytree.tree_leaves(state))
    (y.float().sum() + again.float().sum()).backward()
    assert x.grad.dtype == torch.float32
    for key, p in layer.named_parameters():
        assert p.grad is not None, key
        assert p.grad.dtype == torch.float32
        assert p.grad.isfinite().all()


def test_a_model_in_half_precision_keeps_its_decays_wide(kit, name, read):
    layer = kit.build(name, torch.float32)
    x = kit.tokens(2, 9, dtype=torch.float32)
    want, _ = layer(x)
    marked = [key for key, p in layer.named_parameters() if getattr(p, "_no_weight_decay", False)]
    layer.sum_of = sum(p.detach().double().sum() for key, p in layer.named_parameters() if key in marked)
    half = layer.to(torch.bfloat16)
    y, state = half(x.bfloat16())
    again, _ = half(x[:, :1].bfloat16(), state)
    assert y.dtype == again.dtype == torch.bfloat16
    assert error(y, want) <= 1e-1
    parameters = dict(half.named_parameters())
    assert all((p.dtype == torch.float32) == (key in marked) for key, p in parameters.items())
    assert layer.sum_of == sum(parameters[key].detach().double().sum() for key in marked)
    assert all(value.dtype == torch.float32 for gate, value in read[-1].items() if gate != "v")
    y.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in half.parameters())
    half.to(torch.float16)
    assert all(p.grad.dtype == p.dtype for p in half.parameters())


@pytest.mark.slow
@torch.no_grad()
def test_compiled_equals_eager_at_any_length_and_mask_without_recompiling(kit, plain):
    torch._dynamo.reset()
    layer = kit.build(plain)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    frames = []
    for length in (7, 64, 100):
        x = kit.tokens(3, length)
        mask = torch.ones(3, length, dtype=torch.bool)
        mask[0, :3], mask[1, 4:] = False, False
        (y, state), (want, final) = compiled(x, attention_mask=mask), layer(x, attention_mask=mask)
        assert error(y, want) <= 1e-10
        assert torch.equal(state.position, final.position)
        frames.append(counter.frame_count)
    assert frames == [1, 2, 2]  # the second length tells that lengths differ
    packing = torch.tensor([0, 3, 9, 15])
    x = kit.tokens(1, 15)
    assert error(compiled(x, cu_seqlens=packing)[0], layer(x, cu_seqlens=packing)[0]) <= 1e-10


PIECEWISE = ("CMS", "Hope", "RecipeLayer", "TTT", "Titans")


# One with convolutions, one with positions, one that shifts; all the others take seconds each.
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in ("GatedDeltaNet", "SoftmaxAttention", "RWKV7") else pytest.mark.slow)
        for kind in sorted(nn.__all__)
        # Those that are networks or recipes run token loops and pieces in plain torch, whose number is the length's.
        if kind[0].isupper() and not kind.startswith("Layer") and kind not in PIECEWISE
    ],
)
def test_a_compiled_layer_goes_on_from_a_state_and_has_gradients(kit, kind):
    torch._dynamo.reset()
    layer = kit.build(kind)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = kit.tokens(2, 4)
    state = layer(kit.tokens(2, 5, seed=3))[1].detach()
    results = []
    for run in (layer, compiled):
        y, after = run(x, state)
        slopes = torch.autograd.grad(y.square().sum(), list(layer.parameters()), allow_unused=True)
        results.append((y, *torch.utils._pytree.tree_leaves(after), *slopes))
    for want, got in zip(*results, strict=True):
        assert (want is None) == (got is None)
        assert want is None or error(got, want) <= 1e-9


def test_an_exported_layer_goes_on_at_another_length(kit):
    layer = kit.build("GatedDeltaNet")
    state = layer(kit.tokens(2, 3))[1].detach()
    length = torch.export.Dim("T", min=2, max=4096)
    shapes = {"x": {1: length}, "state": [{}, {key: {} for key in state.windows}, {}]}
    program = torch.export.export(layer, (kit.tokens(2, 5), state), dynamic_shapes=shapes).module()
    x = kit.tokens(2, 9, seed=3)
    (got, after), (want, final) = program(x, state), layer(x, state)
    assert error(got, want) <= 1e-10
    assert error(after.memory, final.memory) <= 1e-10


def test_a_decay_near_one_survives_half_precision(kit):
    layer = kit.build("GatedDeltaNet", torch.float32)
    with torch.no_grad():
        layer.a.weight.zero_()
        layer.decay.A_log.fill_(0)
        layer.decay.dt_bias.fill_(torch.tensor(1e-3).expm1().log())  # softplus of it is 1e-3
    x = torch.randn(1, 4096, kit.width, generator=torch.Generator().manual_seed(0))
    for run in (lambda: layer.a(x), lambda: layer.to(torch.bfloat16).a(x.bfloat16())):
        with torch.autocast("cpu", torch.bfloat16):
            g = layer.decay(run())
        assert g.dtype == torch.float32
        kept = g.double().sum(1).exp()
        assert error(kept, torch.full_like(kept, -4.096).exp()) <= 1e-2


def test_gates_alone_make_no_op_differ(kit):
    """Half inputs with wide gates is what layers give an op; it must take them."""
    q = torch.randn(1, 3, 2, 4, dtype=torch.bfloat16)
    g = -torch.rand(1, 3, 2)
    o, state = ops.gated_delta_rule(q, q, q, g=g, beta=g.exp(), output_final_state=True)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
