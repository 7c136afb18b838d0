"""Layers whose memories are networks: trained through their writes, never moved by a forward pass, and bounded."""

import dataclasses

import pytest
import torch
from torch.utils import _pytree as pytree

from innerloop import nn, ops
from innerloop.nn import LayerState
from innerloop.recipe import MLP, ChannelDecay, Exact, GradientStep, ImplicitStep, LinearMap, Recipe, Uniform, Window
from innerloop.testing import error


def test_every_parameter_has_a_gradient_and_a_forward_pass_moves_none(kit, name):
    layer = kit.build(name)
    before = {key: p.detach().clone() for key, p in layer.named_parameters()}
    y, _ = layer(kit.tokens(2, 13))
    y.square().sum().backward()
    for key, p in layer.named_parameters():
        assert torch.equal(p, before[key]), f"{key} was moved"
        assert p.grad is not None, f"{key} has no gradient"
        # The query of nothing: there are no persistent tokens to learn.
        assert p.grad.any() or not p.numel(), f"{key} has no gradient"


def test_as_drawn_only_the_gates_of_hope_that_have_said_nothing_yet_have_none(kit):
    layer = kit.make("Hope-mlp")
    layer(kit.tokens(2, 13).float())[0].square().sum().backward()
    without = {key for key, p in layer.named_parameters() if not p.grad.any()}
    # Output weights of 0 are a fixed point of the memory's own learning, and hide its input weights.
    assert without == {"rate.matrices.0", "keep.matrices.0"}


WRITERS = {
    "Titans": (
        "gates.", "streams.maps.key", "streams.maps.value", "streams.convolutions.key", "streams.convolutions.value"
    ),
    "Hope": ("key.", "value.", "rate", "keep", "token_convolution"),
}


SMALL = {
    "TTT": {"heads": 1, "mini_batch": 2},
    "Titans": {"heads": 1, "expansion": 1, "mini_batch": 2},
    "Titans-mac": {"heads": 1, "expansion": 1, "mini_batch": 2, "variant": "mac", "persistent": 1},
    "Hope": {"heads": 1, "mini_batch": 2, "periods": (2,)},
    "Hope-mlp": {"heads": 1, "memory": "mlp", "mini_batch": 2, "periods": None},
    "CMS": {"periods": (1, 2), "expansion": 1},
}


@pytest.mark.parametrize("name", SMALL)
def test_gradients_are_those_of_finite_differences_through_every_write(name):
    torch.manual_seed(0)
    layer = getattr(nn, name.partition("-")[0])(4, **SMALL[name]).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(0.7 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    names, values = zip(*layer.named_parameters(), strict=True)
    x = torch.randn(1, 5, 4, generator=generator, dtype=torch.float64, requires_grad=True)

    def outputs(x, *values):
        y, state = torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))
        # A sum that a window's end has emptied is 0 whatever went in.
        kept = [leaf for leaf in pytree.tree_leaves(state.memory) if leaf.is_floating_point() and leaf.any()]
        return (y, *kept)

    assert torch.autograd.gradcheck(outputs, (x, *values), fast_mode=True, atol=1e-6)


def test_memory_as_context_recalls_what_earlier_segments_wrote(kit):
    torch.manual_seed(0)
    layer = nn.Titans(kit.width, 2, variant="mac", mini_batch=4, persistent=1, rate=4.0).double()
    x = kit.tokens(1, 12)
    other = x.clone()
    other[:, :4] += 1
    y, z = layer(x)[0], layer(other)[0]
    # The last segment attends to nothing of the first: what is left of it has gone through the memory.
    assert error(y[:, 8:], z[:, 8:]) > 1e-4
    _, state = layer(x[:, :4])
    assert torch.equal(state.memory.start[0], state.memory.weights[0])
    assert not torch.equal(state.memory.start[0][0], layer.first()[0])


def test_ttt_rotates_anew_in_every_mini_batch(kit):
    torch.manual_seed(0)
    layer, x = nn.TTT(kit.width, 2, mini_batch=4).double(), kit.tokens(1, 4)
    want, state = layer(x)
    # As if the memory had come from elsewhere: a mini-batch of the same tokens behind it is read the same way.
    begun = state.memory._replace(start=tuple(w[None] for w in layer.first()))
    later, _ = layer(x, dataclasses.replace(state, memory=begun))
    assert error(later, want) <= 1e-10


@pytest.mark.parametrize("convolution", ["added", "silu"])
def test_hope_begins_by_reading_the_queries_of_its_convolved_tokens(kit, convolution):
    torch.manual_seed(0)
    layer = nn.Hope(kit.width, 2, read="before", periods=None, convolution=convolution).double()
    x = kit.tokens(2, 5)
    taps = layer.query_convolution.weight  # [D, W]
    seen = torch.nn.functional.pad(x, (0, 0, taps.shape[1] - 1, 0)).unfold(1, taps.shape[1], 1)  # [B, T, D, W]
    seen = (seen * taps).sum(-1)
    seen = x + seen if convolution == "added" else torch.nn.functional.silu(seen)
    q = torch.nn.functional.normalize(layer.query(seen).unflatten(-1, (2, -1)), dim=-1)
    q = torch.nn.functional.rms_norm(q, q.shape[-1:], eps=layer.norm.eps)
    # The first mini-batch is read at the weights as drawn.
    assert error(layer(x)[0], q.flatten(-2) @ layer.output.weight.mT) <= 1e-5
    with pytest.raises(ValueError, match="convolution must be one of 'added', 'silu'; got 'none'"):
        nn.Hope(kit.width, 2, convolution="none")


@pytest.mark.parametrize("kind", WRITERS)
def test_gradients_stop_at_writes_if_asked(kit, kind):
    layer = getattr(nn, kind)(kit.width, 2, stop_gradient_writes=True, **({"periods": ()} if kind == "Hope" else {}))
    y, _ = layer(kit.tokens(2, 13).float())
    y.square().sum().backward()
    for key, p in layer.named_parameters():
        assert (p.grad is None) == key.startswith(WRITERS[kind]), key


def test_a_state_is_saved_selected_and_goes_on(kit, name, tmp_path):
    layer = kit.build(name)
    _, state = layer(kit.tokens(2, 6))
    state.detach().save(tmp_path / "memory.safetensors")
    again = LayerState.load(tmp_path / "memory.safetensors")
    x = kit.tokens(2, 5, seed=3)
    want, _ = layer(x, state)
    assert torch.equal(layer(x, again)[0], want)
    assert error(layer(x[1:], again.reorder([1, 0]).select([0]))[0], want[1:]) <= 1e-12
    with pytest.raises(ValueError, match="cannot forget single tokens"):
        state.crop(3)


def test_half_precision_and_autocast_keep_the_memory_wide(kit, name):
    layer, x = kit.build(name, torch.float32), kit.tokens(2, 7, dtype=torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x)
    assert y.dtype == (x.dtype if layer.rule == "cms" else torch.bfloat16)  # a chain of residuals alone narrows nothing
    z, after = layer.to(torch.bfloat16)(x.bfloat16())
    assert z.dtype == torch.bfloat16
    for leaf in (*pytree.tree_leaves(state), *pytree.tree_leaves(after)):
        assert leaf.dtype in (torch.float32, torch.int64)
        assert leaf.isfinite().all()
    z.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)


def test_values_by_the_meta_device_are_those_of_the_constructor(kit, name):
    with torch.device("meta"):
        layer = kit.make(name)
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(torch.nan)
    torch.manual_seed(3)
    layer.reset_parameters()
    want = kit.make(name)
    torch.manual_seed(3)
    want.reset_parameters()
    for (key, p), q in zip(layer.named_parameters(), want.parameters(), strict=True):
        assert torch.equal(p, q), key


def test_half_of_what_was_written_is_left_after_a_thousand_tokens(kit):
    x = torch.randn(1, 1000, 64, generator=torch.Generator().manual_seed(0))
    kept = {
        "Titans": (1 - nn.Titans(64).gates(x)["alpha"]).prod(1),
        "TitansLinear": (1 - nn.TitansLinear(64).alpha(x).sigmoid()).prod(1),
        "Hope": nn.Hope(64, 4).keep_bias().sigmoid() ** 1000,
    }
    for layer, left in kept.items():
        assert left.min() >= 0.5, f"{layer} has kept {left.min():.3f}"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_pair_is_still_read_after_a_thousand_tokens_of_noise(depth):
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.nn.functional.normalize(torch.randn(1, 1001, 1, 64, generator=generator), dim=-1) for _ in range(2))
    rate = torch.full((1, 1001, 1), 0.01)
    rate[:, 0] = 1
    zeros = torch.zeros_like(rate)
    widths = [(64, 64)] if depth == 1 else [(64, 256), (256, 64)]
    weights = [torch.randn(1, *pair, generator=generator) / pair[0] ** 0.5 for pair in widths]
    weights[-1] *= 0
    q = k[:, :1].expand(-1, 1001, -1, -1)
    o, _ = ops.titans(
        q, k, v, theta=rate, eta=zeros, alpha=zeros, weights=tuple(weights), mini_batch=16, normalize_step=depth > 1
    )
    assert torch.cosine_similarity(o[0, -1, 0], v[0, 0, 0], dim=0) > 0.9


def test_hope_still_reads_a_pair_after_a_thousand_tokens_of_noise():
    """Its gates are its own: a key of a direction of its own is written at rate 1, all else at .01."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1001, 1, 64, generator=generator)
    first, v = (torch.nn.functional.normalize(z, dim=-1) for z in (x[0, 0, 0], x[0, 1, 0]))
    x = x - (x @ first)[..., None] * first
    x[0, 0, 0] = first
    nothing = torch.zeros(1, 64, 64)
    rate_bias = torch.full((1,), 0.01).logit()
    weights = ops.HopeWeights(
        (nothing,), ((first[:, None] * (v - first))[None],), (20 * first[None, :, None],), (torch.zeros(1, 64, 1),),
        (nothing,), rate_bias, torch.full((1,), 40.0),
    )  # fmt: skip
    q = first.expand(1, 1001, 1, 64)
    o, _ = ops.hope(x, q, weights=weights)
    assert torch.cosine_similarity(o[0, 0, 0], v, dim=0) > 0.99
    assert torch.cosine_similarity(o[0, -1, 0], v, dim=0) > 0.9


def test_a_level_still_answers_a_pair_after_a_thousand_tokens_of_noise():
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.nn.functional.normalize(torch.randn(1, 1002, 1, 64, generator=generator), dim=-1)
                 for _ in range(2))  # fmt: skip
    x[:, -1] = x[:, 0]
    rate = torch.full((1, 1002, 1, 1), 0.01)
    rate[:, 0] = 8.0
    weights = ((torch.randn(1, 64, 256, generator=generator) / 8, torch.zeros(1, 256, 64)),)
    y, _ = ops.cms(x, weights=weights, target=target[:, :, None], rate=rate, periods=(1,), normalize_step=True)
    assert torch.cosine_similarity(y[0, -1, 0], target[0, 0, 0], dim=0) > 0.9


def streams(length, width):
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(1, length, width, generator=generator)
    drift = [noise[:, 0]]
    for t in range(1, length):
        drift.append(0.999 * drift[-1] + (1 - 0.999**2) ** 0.5 * noise[:, t])
    return {
        "noise": noise,
        "one token": noise[:, :1].expand_as(noise),
        "eight tokens": noise[:, :8].repeat(1, length // 8, 1),
        "slow drift": torch.stack(drift, 1),
    }


def at_largest(layer):
    """Push every rate and momentum to its end, and forget nothing."""
    with torch.no_grad():
        for key, p in layer.named_parameters():
            if key in ("gates.theta.offset", "gates.eta.offset", "levels.rate.offset", "rate_bias.value",
                       "keep_bias.value", "lr.offset", "theta.offset", "eta.offset"):  # fmt: skip
                p.fill_(40.0)
            elif key in ("gates.alpha.offset", "alpha.offset"):
                p.fill_(-40.0)
    return layer


BOUNDED = {
    "titans-1": lambda: nn.Titans(16, 2, depth=1),
    "titans-2": lambda: nn.Titans(16, 2),
    "titans-4": lambda: nn.Titans(16, 2, depth=4, mini_batch=16),
    "titans-mac": lambda: nn.Titans(16, 2, variant="mac", mini_batch=16),
    "titans-mag": lambda: nn.Titans(16, 2, variant="mag", mini_batch=16, window=16),
    "titans-mal": lambda: nn.Titans(16, 2, variant="mal", mini_batch=16, window=16),
    "titans-linear": lambda: nn.TitansLinear(16, 2),
    "ttt-linear": lambda: nn.TTT(16, 2),
    "ttt-mlp": lambda: nn.TTT(16, 2, memory="mlp"),
    "hope-linear": lambda: nn.Hope(16, 2, periods=()),
    "hope-mlp": lambda: nn.Hope(16, 2, memory="mlp", periods=()),
    "cms": lambda: nn.CMS(16, (16, 64, 256)),
}


def stays_bounded(layer, length):
    for kind, x in streams(length, layer.width).items():
        with torch.no_grad():
            y, state = layer(x)
            _, first = layer(x[:, :1])
        assert y.isfinite().all(), kind
        for now, before in zip(pytree.tree_leaves(state.memory), pytree.tree_leaves(first.memory), strict=True):
            if now.is_floating_point():
                limit = 10 * (before.norm() + 1)
                # The norm in its loss makes it blind to its size: gradients are orthogonal to the weights, whose norm
                # grows as the root of what was written and divides the next step.
                limit = limit * max(1.0, length / 64) ** 0.5 if layer.rule == "ttt" else limit
                assert now.norm() <= limit, f"{kind}: {before.norm():.2g} became {now.norm():.2g}"


@pytest.mark.parametrize("name", BOUNDED)
def test_no_memory_grows_on_a_repetitive_stream_at_the_largest_gates(name):
    torch.manual_seed(0)
    stays_bounded(at_largest(BOUNDED[name]()), 256)


@pytest.mark.slow
@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("name", BOUNDED)
def test_no_memory_grows_on_long_streams(name, largest):
    torch.manual_seed(0)
    stays_bounded(at_largest(BOUNDED[name]()) if largest else BOUNDED[name](), 4096)


NEW = {
    "momentum on a network": Recipe(Uniform(), MLP((6, 8, 6)), GradientStep(rate=0.1, momentum=0.5)),
    "two implicit steps": Recipe(Window(2), LinearMap(), ImplicitStep(strength=None)),
    "a window solved": Recipe(Window(4), LinearMap(), Exact(ridge=0.1)),
}


@pytest.mark.parametrize("name", NEW)
def test_a_recipe_is_a_layer(kit, name):
    torch.manual_seed(0)
    layer, x = nn.RecipeLayer(kit.width, NEW[name], 2, key_width=6).double(), kit.tokens(2, 7)
    want, _ = layer(x)
    state, parts = None, []
    for piece in x.tensor_split((1, 5), 1):
        y, state = layer(piece, state)
        parts.append(y)
    assert error(torch.cat(parts, 1), want) <= 1e-10
    want.square().sum().backward()
    for key, p in layer.named_parameters():
        assert p.grad is not None and p.grad.any(), key
    y, _ = layer(torch.cat((x[:1], x[1:]), 1), cu_seqlens=torch.tensor([0, 7, 14]))
    assert error(y.view_as(want), want) <= 1e-10


LONG = {
    "Titans": lambda: nn.Titans(16, 2, mini_batch=16),
    "Titans-mac": lambda: nn.Titans(16, 2, variant="mac", mini_batch=16),
    "TTT": lambda: nn.TTT(16, 2),
    "Hope": lambda: nn.Hope(16, 2, periods=()),
    "CMS": lambda: nn.CMS(16, (16, 64, 256)),
}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("kind", LONG)
def test_a_stream_of_a_hundred_thousand_tokens_stays_exact_in_constant_memory(kind, capsys):
    torch.manual_seed(0)
    layer = LONG[kind]()
    wide = LONG[kind]().double()
    wide.load_state_dict(layer.state_dict())
    generator, state, truth, sizes, errors = torch.Generator().manual_seed(1), None, None, set(), []
    for _ in range(100):
        x = torch.randn(1, 1000, 16, generator=generator)
        y, state = layer(x, state)
        z, truth = wide(x.double(), truth)
        sizes.add(state.nbytes)
        assert y.isfinite().all()
        errors.append(error(y, z))
    with capsys.disabled():
        print(f"\n{kind}: error against float64 {errors[0]:.1e} in the first 1,000 tokens, {max(errors):.1e} at most")
    assert state.position.tolist() == [100_000]
    assert len(sizes) == 1
    assert max(errors) <= 1e-3


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nn.TTT(16, 2, rate=-1.0), "rate must be a finite number above 0; got -1.0"),
        (lambda: nn.TTT(16, 2, rate=float("nan")), "rate must be a finite number above 0"),
        (lambda: nn.TTT(16, 2, memory="mlp", expansion=0), "expansion must be a whole number"),
        (lambda: nn.Titans(16, 2, rate=float("inf")), "rate must be a finite number above 0"),
        (lambda: nn.Titans(16, 2, normalize_step="no"), "normalize_step must be True or False; got 'no'"),
        (lambda: nn.Hope(16, 2, rate_max=-1.0), "rate_max must be a finite number above 0"),
        (lambda: nn.Hope(16, 2, rate_max=float("nan")), "rate_max must be a finite number above 0"),
        (lambda: nn.Hope(16, 2, read="x"), "read must be one of 'after', 'before'; got 'x'"),
        (lambda: nn.Hope(16, 2, mini_batch=1.5), "mini_batch must be a whole number"),
        (lambda: nn.Hope(16, 2, taps=1.5), "taps must be a whole number"),
        (lambda: nn.Hope(16, 2, taps=-1), "taps must be a whole number"),
        (lambda: nn.TTT(16, 2, output_gate="no"), "output_gate must be True or False"),
        (lambda: nn.Titans(16, 2, window=-1), "window must be a whole number above 0"),
        (lambda: nn.Titans(16, 2, persistent=-1), "persistent must be a whole number of at least 0"),
        (lambda: nn.Titans(16, 2, variant="mac", taps=-1), "taps must be a whole number of at least 0"),
        (lambda: nn.Titans(16, 2, momentum_max=None), r"momentum_max must lie in \[0, 1\); got None"),
        (lambda: nn.DeltaNet(16, 2, taps="a"), "taps must be a whole number of at least 0; got 'a'"),
        (lambda: nn.CMS(16, 1.5), "periods must be whole numbers"),
        (lambda: nn.CMS(16, normalize_step=1), "normalize_step must be True or False"),
    ],
)
def test_options_that_mean_nothing_are_refused_where_they_are_given(make, why):
    with pytest.raises(ValueError, match=why):
        make()


def test_a_recipe_with_a_decay_by_channel_has_its_channel_where_there_is_one():
    layer = nn.RecipeLayer(4, Recipe(ChannelDecay(), LinearMap(), ImplicitStep(strength=1.0)), heads=4)
    y, _ = layer(torch.randn(1, 3, 4))
    assert y.shape == (1, 3, 4)
