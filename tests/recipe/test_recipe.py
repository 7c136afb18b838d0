"""What holds for every recipe: the optimum, splits, derivatives, independence of rows, state."""

import itertools
import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close as torch_assert_close

from innerloop.recipe import (
    MLP,
    ChannelDecay,
    ConjugateGradients,
    CrossMoment,
    Exact,
    FeatureMap,
    GradientStep,
    ImplicitStep,
    KernelSmoother,
    LinearMap,
    QueryKernel,
    Recipe,
    ScalarDecay,
    Uniform,
    WeightedDecay,
    Window,
    dot,
)

B, T, G, K, V = 2, 8, 2, 3, 2


def assert_close(got, want, bar=1e-12):
    torch_assert_close(got, want, rtol=bar, atol=bar * max(1.0, want.abs().max().item() if want.numel() else 1.0))


def huber(prediction, target):
    return torch.nn.functional.huber_loss(prediction, target, reduction="none").sum(-1)


def phi(x):
    return torch.cat([x, x.square(), torch.ones_like(x[..., :1])], dim=-1)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(batch=B, tokens=T, heads=G):
    return tuple(normal(batch, tokens, heads, n, seed=seed) for seed, n in enumerate((K, K, V)))


def gates_of(recipe, batch=B, tokens=T, heads=G):
    """Draw a value for every gate of the recipe; decays at most 0, the rest in (0, 1)."""
    drawn = {}
    for seed, path in enumerate(recipe.gates):
        extra = (K,) if isinstance(recipe.weights, ChannelDecay) and path == "weights.g" else ()
        value = normal(batch, tokens, heads, *extra, seed=10 + seed)
        drawn[path] = -value.abs() if path == "weights.g" else value.sigmoid()
    return drawn


def start_of(recipe, batch=B, heads=G):
    if not isinstance(recipe.memory, MLP):
        return None
    shapes = enumerate(recipe.memory.shapes)
    return recipe.start(parameters=tuple(normal(batch, heads, *shape, seed=20 + i) for i, shape in shapes))


EXACT = [
    Recipe(Uniform(), LinearMap(), Exact()),
    Recipe(ScalarDecay(), LinearMap(), Exact(ridge=0.1)),
    Recipe(ScalarDecay(), FeatureMap(phi), Exact(ridge=0.1)),
    Recipe(ScalarDecay(), LinearMap(), ConjugateGradients(6, ridge=0.5)),
    Recipe(Window(3), LinearMap(), Exact()),
    Recipe(Window(4), FeatureMap(phi), Exact()),
    Recipe(QueryKernel(), KernelSmoother(), Exact()),
    Recipe(QueryKernel(dot), KernelSmoother(), Exact()),
    Recipe(QueryKernel(), LinearMap(), Exact(ridge=0.1)),
    Recipe(WeightedDecay(), LinearMap(), Exact(ridge=0.1)),
    Recipe(WeightedDecay(g=-0.1, weight=0.7), FeatureMap(phi), Exact(ridge=0.1)),
]
STEPS = [
    Recipe(Uniform(), LinearMap(), CrossMoment()),
    Recipe(Window(2), LinearMap(), CrossMoment()),
    Recipe(QueryKernel(dot), LinearMap(), CrossMoment()),
    Recipe(ScalarDecay(), LinearMap(), GradientStep()),
    Recipe(ChannelDecay(), LinearMap(), GradientStep(momentum=0.5)),
    Recipe(ScalarDecay(), LinearMap(), ImplicitStep()),
    Recipe(Window(2), FeatureMap(phi), GradientStep(rate=0.05)),
]
UNUSUAL = [
    Recipe(Uniform(), MLP((K, 4, V)), GradientStep(rate=0.1, momentum=0.5, loss=huber)),
    Recipe(ScalarDecay(), MLP((K, 3, V), activation="silu", bias=False), ImplicitStep(steps=2)),
    Recipe(Window(2), FeatureMap(phi), ImplicitStep(math.inf)),
    Recipe(WeightedDecay(), LinearMap(), CrossMoment()),
]
EVERY = EXACT + STEPS + UNUSUAL


@pytest.mark.parametrize("recipe", EXACT, ids=str)
def test_the_loop_reaches_the_optimum_that_brute_force_finds(recipe):
    q, k, v = inputs()
    gates = gates_of(recipe)
    if "weights.g" in gates:
        gates["weights.g"][:, 3] = -math.inf
        gates["weights.g"][:, 5] = -80.0
        if "solver.ridge" not in gates:
            raise AssertionError("a reset without a ridge has many optima")
    got, _ = recipe.run(q, k, v, gates=gates)
    # The loop squares the condition number of the design, which brute force does not.
    assert_close(got, recipe.fit_all(q, k, v, gates=gates), bar=1e-10)


def test_a_pair_that_enters_with_weight_zero_leaves_no_trace_and_a_finite_gradient():
    q, k, v = inputs()
    weight = torch.ones(B, T, G, dtype=torch.float64)
    weight[:, 2] = 0
    weight.requires_grad_()
    recipe = Recipe(WeightedDecay(g=-0.1), LinearMap(), Exact(ridge=0.1))
    got, _ = recipe.run(q, k, v, gates={"weights.weight": weight})
    v[:, 2] = 100.0
    assert_close(recipe.run(q, k, v, gates={"weights.weight": weight})[0], got)
    (slope,) = torch.autograd.grad(got.sum(), weight)
    assert slope.isfinite().all()
    assert slope[:, 2].any()


def test_a_ridge_that_is_a_number_is_that_of_brute_force():
    q, k, v = inputs()
    for ridge in (0.1, torch.tensor([0.3, 2.0], dtype=torch.float64)):
        recipe = Recipe(Uniform(), LinearMap(), Exact(ridge=ridge))
        assert_close(recipe.run(q, k, v)[0], recipe.fit_all(q, k, v), bar=1e-10)


def test_brute_force_can_be_differentiated():
    recipe = Recipe(ScalarDecay(), LinearMap(), Exact(ridge=0.2))
    q, k, v = (x.requires_grad_() for x in inputs())
    gates = {"weights.g": gates_of(recipe)["weights.g"].requires_grad_()}
    leaves = (q, k, v, gates["weights.g"])
    cotangent = normal(B, T, G, V, seed=5)
    got = torch.autograd.grad(recipe.run(q, k, v, gates=gates)[0], leaves, cotangent)
    want = torch.autograd.grad(recipe.fit_all(q, k, v, gates=gates), leaves, cotangent)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, bar=1e-10)


@pytest.mark.parametrize("recipe", EVERY, ids=str)
def test_a_stream_may_be_split_anywhere(recipe):
    q, k, v = inputs()
    gates = gates_of(recipe)
    whole, end = recipe.run(q, k, v, gates=gates, state=start_of(recipe))
    for cuts in ((0, 3, T), (0, 0, 1, T), tuple(range(T + 1))):
        state, parts = start_of(recipe), []
        for a, b in itertools.pairwise(cuts):
            part = {path: gate[:, a:b] for path, gate in gates.items()}
            o, state = recipe.run(q[:, a:b], k[:, a:b], v[:, a:b], gates=part, state=state)
            parts.append(o)
        assert torch.equal(torch.cat(parts, dim=1), whole)
        for got, want in zip(state.parameters + state.velocity, end.parameters + end.velocity, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("recipe", EVERY, ids=str)
def test_a_step_is_a_run_of_one_token(recipe):
    q, k, v = inputs()
    gates = gates_of(recipe)
    whole, _ = recipe.run(q, k, v, gates=gates, state=start_of(recipe))
    state = start_of(recipe)
    for t in range(T):
        now = {path: gate[:, t] for path, gate in gates.items()}
        o, state = recipe.step(q[:, t], k[:, t], v[:, t], gates=now, state=state)
        assert torch.equal(o, whole[:, t])


@pytest.mark.parametrize("recipe", EVERY, ids=str)
def test_rows_and_heads_do_not_see_each_other(recipe):
    q, k, v = inputs()
    gates = gates_of(recipe)
    before, _ = recipe.run(q, k, v, gates=gates, state=start_of(recipe))
    k, v = k.clone(), v.clone()
    k[1, :, 0] += 1
    v[1, :, 0] -= 1
    after, _ = recipe.run(q, k, v, gates=gates, state=start_of(recipe))
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1, :, 1], before[1, :, 1])
    assert not torch.equal(after[1, :, 0], before[1, :, 0])


def reader(recipe):
    """Return the loop as a function of everything that it can be differentiated by, and such arguments."""
    sizes = {"batch": 1, "tokens": 3, "heads": 1}
    gates = gates_of(recipe, **sizes)
    start = start_of(recipe, batch=1, heads=1)
    weights = start.parameters if start else ()
    paths = list(gates)

    def read(q, k, v, *rest):
        given = dict(zip(paths, rest, strict=False))
        state = recipe.start(parameters=rest[len(paths) :]) if weights else None
        return recipe.run(q, k, v, gates=given, state=state)[0]

    return read, [x.requires_grad_() for x in (*inputs(**sizes), *gates.values(), *weights)]


@pytest.mark.parametrize("recipe", EVERY, ids=str)
def test_the_loop_can_be_differentiated_twice(recipe):
    read, leaves = reader(recipe)
    assert gradcheck(read, leaves, fast_mode=True)
    assert gradgradcheck(read, leaves, fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", EVERY, ids=str)
def test_every_entry_of_both_derivatives_is_right(recipe):
    assert gradcheck(*reader(recipe))
    assert gradgradcheck(*reader(recipe))


@pytest.mark.parametrize("beta", [0.0, 1.0, math.inf])
def test_an_implicit_step_has_finite_gradients_at_its_ends(beta):
    k, v = normal(1, 3, 1, K), normal(1, 3, 1, V, seed=1)
    k[:, 1] = 0
    strength = torch.full((1, 3, 1), beta, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (k, v, strength)]
    o, state = Recipe(Uniform(), LinearMap(), ImplicitStep(None)).run(k + 1, k, v, gates={"solver.strength": strength})
    slopes = torch.autograd.grad((o + o.square()).sum(), leaves)
    assert all(slope.isfinite().all() for slope in (o, *slopes))
    if beta == 0:
        assert (state.parameters[0] == 0).all()
        assert slopes[2].abs().sum() > 0


def test_a_zero_key_writes_nothing_by_an_implicit_step():
    k, v = torch.zeros(1, 1, K, dtype=torch.float64), normal(1, 1, V)
    for beta in (1.0, 1e300, math.inf):
        _, state = Recipe(Uniform(), LinearMap(), ImplicitStep(beta)).step(k, k, v)
        assert (state.parameters[0] == 0).all()


def test_the_rate_of_an_implicit_step_is_differentiated_once_at_one():
    # At beta = 1 two branches meet: d/dbeta of beta / (1 + beta) is 1/4 on either side.
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    beta = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    o, _ = Recipe(Uniform(), LinearMap(), ImplicitStep()).step(one, one, one, gates={"solver.strength": beta})
    assert torch.autograd.grad(o.sum(), beta)[0].item() == pytest.approx(0.25, abs=1e-15)


def test_a_total_weight_of_zero_reads_zero_with_a_finite_gradient():
    q, k, v = (x.abs() for x in inputs())
    k[:, :2] = 0
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, _ = Recipe(QueryKernel(dot), KernelSmoother(), Exact()).run(*leaves)
    assert (o[:, :2] == 0).all()
    assert all(slope.isfinite().all() for slope in torch.autograd.grad(o.square().sum(), leaves))


@pytest.mark.parametrize("recipe", [EXACT[1], STEPS[3], STEPS[4], STEPS[5]], ids=str)
def test_a_decay_of_minus_infinity_clears_the_memory_with_a_finite_gradient(recipe):
    q, k, v = inputs()
    gates = gates_of(recipe)
    gates.pop("solver.momentum", None)  # a velocity would outlive the memory
    gates["weights.g"][:, 4] = -math.inf
    leaves = [x.requires_grad_() for x in (q, k, v, gates["weights.g"])]
    o, _ = recipe.run(q, k, v, gates=gates)
    assert all(slope.isfinite().all() for slope in (o, *torch.autograd.grad(o.square().sum(), leaves)))
    if not recipe.describe()[2].endswith("momentum"):
        tail, _ = recipe.run(q[:, 4:], k[:, 4:], v[:, 4:], gates={p: gate[:, 4:] for p, gate in gates.items()})
        assert_close(o[:, 4:], tail)


@pytest.mark.parametrize("recipe", EVERY, ids=str)
def test_float32_agrees_with_float64(recipe):
    q, k, v = inputs()
    gates = gates_of(recipe)
    start = start_of(recipe)
    want, _ = recipe.run(q, k, v, gates=gates, state=start)
    small = {path: gate.float() for path, gate in gates.items()}
    state = recipe.start(parameters=tuple(p.float() for p in start.parameters)) if start else None
    got, _ = recipe.run(q.float(), k.float(), v.float(), gates=small, state=state)
    assert got.dtype == torch.float32
    assert_close(got.double(), want, bar=1e-5)


@pytest.mark.parametrize("recipe", EVERY, ids=str)
def test_no_tokens_read_nothing(recipe):
    q, k, v = inputs(tokens=0)
    o, state = recipe.run(q, k, v, gates=gates_of(recipe, tokens=0), state=start_of(recipe))
    assert o.shape == (B, 0, G, V)
    again, _ = recipe.run(*inputs(), gates=gates_of(recipe), state=state)
    assert torch.equal(again, recipe.run(*inputs(), gates=gates_of(recipe), state=start_of(recipe))[0])


@pytest.mark.parametrize("recipe", EVERY, ids=str)
def test_nothing_is_tracked_that_was_not_tracked_outside(recipe):
    q, k, v = inputs()
    gates = gates_of(recipe)
    o, state = recipe.run(q, k, v, gates=gates, state=start_of(recipe))
    assert not any(x.requires_grad for x in (o, *state.parameters, *state.velocity))
    with torch.no_grad():
        same, _ = recipe.run(q.requires_grad_(), k, v, gates=gates, state=start_of(recipe))
    assert not same.requires_grad
    assert torch.equal(same, o)


def test_a_key_made_from_the_memory_itself_adds_no_gradient_of_its_own():
    S = normal(1, 1, K, K).requires_grad_()
    recipe = Recipe(Uniform(), LinearMap(), GradientStep(rate=0.1))
    k = S[:, :, 0]  # a key that depends on the very parameters it writes to
    v = normal(1, 1, K, seed=3)
    _, state = recipe.step(k, k, v, state=recipe.start(parameters=(S,)))
    x, W = k[0, 0].detach(), S[0, 0].detach()
    assert_close(state.parameters[0][0, 0], W - 0.1 * torch.outer(x, W.T @ x - v[0, 0]))


def test_a_fit_for_one_query_leaves_only_the_past_behind():
    _, state = Recipe(QueryKernel(), LinearMap(), Exact(ridge=0.1)).run(*inputs())
    assert state.parameters == ()
    assert state.past.k.shape == (B, G, T, K)


def test_a_window_keeps_no_more_than_it_needs():
    for solver in (Exact(), GradientStep(0.1)):
        _, state = Recipe(Window(3), LinearMap(), solver).run(*inputs())
        assert state.past.k.shape == (B, G, 3, K)
        assert torch.equal(state.past.v, inputs()[2][:, -3:].transpose(1, 2))


def test_inputs_are_not_changed():
    for recipe in EVERY:
        q, k, v = inputs()
        recipe.run(q, k, v, gates=gates_of(recipe), state=start_of(recipe))
        assert all(torch.equal(x, y) for x, y in zip((q, k, v), inputs(), strict=True))


def test_a_recipe_prints_as_one_line():
    recipe = Recipe(ScalarDecay(), MLP((4, 8, 4)), GradientStep(rate=None, momentum=0.5, loss=huber))
    want = "Recipe(ScalarDecay(), MLP(widths=(4, 8, 4)), GradientStep(rate=None, momentum=0.5, loss=huber))"
    assert repr(recipe) == want
    assert "\n" not in repr(Recipe(ScalarDecay(torch.zeros(50)), LinearMap(), CrossMoment()))


def test_a_recipe_describes_its_three_choices():
    recipe = Recipe(Window(5), MLP((4, 8, 4)), GradientStep(momentum=None, decay=0.1, steps=3))
    assert recipe.describe() == ("last 5", "MLP 4-8-4", "3 gradient steps with momentum and decay")


def test_a_deep_memory_stores_pairs_online():
    # The setting of experiment A11 with a seed of its own: 16 pairs, four passes in random order.
    memory = MLP((32, 128, 32))
    solver = GradientStep(rate=0.005, momentum=0.5, loss=lambda p, v: (p - v).square().sum(-1))
    recipe = Recipe(Uniform(), memory, solver)
    k, v = (torch.nn.functional.normalize(normal(16, 32, seed=seed), dim=-1) for seed in (1, 2))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3)) % 16
    first = (normal(1, 1, 32, 128, seed=4), *(torch.zeros(1, 1, *shape).double() for shape in memory.shapes[1:]))
    stream = [x[order][None, :, None] for x in (k, k, v)]
    _, state = recipe.run(*stream, state=recipe.start(parameters=first))
    before, after = ((memory(p, k[None, None]) - v).square().mean().item() for p in (first, state.parameters))
    assert after < before / 5
