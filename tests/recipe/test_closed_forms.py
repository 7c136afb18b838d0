"""Each recipe against the closed form that its paper gives, written out by hand in float64."""

import math

import pytest
import torch
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
    Window,
    dot,
)

B, T, G, K, V = 2, 9, 2, 3, 4
EYE = torch.eye(K, dtype=torch.float64)


def assert_close(got, want, bar=1e-12):
    torch_assert_close(got, want, rtol=bar, atol=bar * max(1.0, want.abs().max().item()))


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return normal


@pytest.fixture
def pairs(draw):
    return draw(B, T, G, K), draw(B, T, G, K), draw(B, T, G, V)


@pytest.fixture
def log_decay(draw):
    g = -draw(B, T, G).abs()
    g[:, 2], g[0, 5, 0], g[1, 6, 1] = -80.0, -math.inf, 0.0
    return g


def loop(update, q, k, v, *gates, state=None):
    """Run ``update(S, k, v, *gates) -> S`` over one head at a time, reading after the write."""
    o = torch.empty_like(v)
    for b in range(q.shape[0]):
        for head in range(q.shape[2]):
            S = q.new_zeros(q.shape[-1], v.shape[-1])
            for t in range(q.shape[1]):
                S = update(S, k[b, t, head], v[b, t, head], *(gate[b, t, head] for gate in gates))
                o[b, t, head] = S.T @ q[b, t, head]
    return o


def test_linear_attention_sums_outer_products(pairs):
    q, k, v = pairs
    got, _ = Recipe(Uniform(), LinearMap(), CrossMoment()).run(q, k, v)
    assert_close(got, loop(lambda S, k, v: S + torch.outer(k, v), q, k, v))


def test_mamba2_fades_what_it_sums(pairs, log_decay):
    q, k, v = pairs
    got, _ = Recipe(ScalarDecay(), LinearMap(), CrossMoment()).run(q, k, v, gates={"weights.g": log_decay})
    assert_close(got, loop(lambda S, k, v, g: g.exp() * S + torch.outer(k, v), q, k, v, log_decay))


def test_a_decay_of_each_head_is_a_field(pairs):
    q, k, v = pairs
    g = torch.tensor([-0.5, -2.0], dtype=torch.float64)
    got, _ = Recipe(ScalarDecay(g), LinearMap(), CrossMoment()).run(q, k, v)
    gates = g.expand(B, T, G)
    assert_close(got, loop(lambda S, k, v, g: g.exp() * S + torch.outer(k, v), q, k, v, gates))


def test_gated_linear_attention_fades_each_key_channel(pairs, draw):
    q, k, v = pairs
    g = -draw(B, T, G, K).abs()
    g[:, 4, :, 1] = -math.inf
    got, _ = Recipe(ChannelDecay(), LinearMap(), CrossMoment()).run(q, k, v, gates={"weights.g": g})
    assert_close(got, loop(lambda S, k, v, g: g.exp()[:, None] * S + torch.outer(k, v), q, k, v, g))


def test_gated_delta_rule_steps_on_the_error_of_the_faded_memory(pairs, log_decay, draw):
    q, k, v = pairs
    beta = draw(B, T, G).sigmoid() * 2
    recipe = Recipe(ScalarDecay(), LinearMap(), GradientStep())
    got, _ = recipe.run(q, k, v, gates={"weights.g": log_decay, "solver.rate": beta})

    def update(S, k, v, g, beta):
        S = g.exp() * S
        return S + beta * torch.outer(k, v - S.T @ k)

    assert_close(got, loop(update, q, k, v, log_decay, beta))


def test_two_steps_on_a_pair_are_the_delta_rule_twice(pairs):
    q, k, v = pairs
    got, _ = Recipe(Uniform(), LinearMap(), GradientStep(rate=0.3, steps=2)).run(q, k, v)

    def update(S, k, v):
        for _ in range(2):
            S = S + 0.3 * torch.outer(k, v - S.T @ k)
        return S

    assert_close(got, loop(update, q, k, v))


def test_momentum_takes_its_gradient_before_the_decay():
    # k = v = 1, eta = .5, theta = .1, alpha = .2, worked out by hand: U = .1 .14 .148, W = .1 .22 .324.
    one = torch.ones(1, 3, 1, 1, dtype=torch.float64)
    solver = GradientStep(rate=0.1, momentum=0.5, decay=0.2)
    got, state = Recipe(Uniform(), LinearMap(), solver).run(one, one, one)
    assert_close(got.flatten(), torch.tensor([0.1, 0.22, 0.324], dtype=torch.float64))
    assert_close(state.velocity[0].flatten(), torch.tensor([0.148], dtype=torch.float64))


def test_momentum_gates_change_with_every_token(pairs, draw):
    q, k, v = pairs
    theta, eta, alpha = draw(3, B, T, G).sigmoid().unbind(0)
    gates = {"solver.rate": theta, "solver.momentum": eta, "solver.decay": alpha}
    got, _ = Recipe(Uniform(), LinearMap(), GradientStep(None, None, None)).run(q, k, v, gates=gates)

    velocity = {}

    def update(S, k, v, theta, eta, alpha):
        U = velocity.pop("U", torch.zeros_like(S)) if S.any() else torch.zeros_like(S)
        velocity["U"] = eta * U - theta * torch.outer(k, S.T @ k - v)
        return (1 - alpha) * S + velocity["U"]

    assert_close(got, loop(update, q, k, v, theta, eta, alpha))


@pytest.mark.parametrize("beta", [0.0, 1e-3, 1.0, 7.0, 1e12, math.inf])
def test_longhorn_is_the_exact_minimum_of_its_objective(pairs, beta):
    q, k, v = pairs
    got, _ = Recipe(Uniform(), LinearMap(), ImplicitStep(beta)).run(q, k, v)

    def update(S, k, v):
        # |s - s'|^2 + beta |s^T k - v|^2 as one least-squares problem; a hard constraint at infinity.
        if math.isinf(beta):
            return S + torch.linalg.pinv(k[None]) @ (v - k @ S)[None]
        design = torch.cat([EYE, math.sqrt(beta) * k[None]])
        return torch.linalg.lstsq(design, torch.cat([S, math.sqrt(beta) * v[None]]), driver="gelsd").solution

    # The truth's design has a condition number of sqrt(beta) |k|, and at 1e12 loses those six digits.
    assert_close(got, loop(update, q, k, v), bar=1e-9 if 1e6 < beta < math.inf else 1e-12)


def test_longhorn_keeps_its_digits_at_a_huge_strength(pairs):
    q, k, v = pairs
    strong, _ = Recipe(Uniform(), LinearMap(), ImplicitStep(1e300)).run(q, k, v)
    endless, _ = Recipe(Uniform(), LinearMap(), ImplicitStep(math.inf)).run(q, k, v)
    assert_close(strong, endless)


def test_an_infinite_strength_stores_the_pair_exactly(pairs):
    _, k, v = pairs
    got, _ = Recipe(Uniform(), LinearMap(), ImplicitStep(math.inf)).run(k, k, v)
    assert_close(got, v)


@pytest.mark.parametrize("beta", [0.5, math.inf])
def test_an_implicit_step_on_a_window_is_the_proximal_step_on_all_its_pairs(pairs, beta):
    q, k, v = pairs
    k[:, 3] = k[:, 2]  # the same key twice: a singular system at infinity
    recipe = Recipe(Window(2), LinearMap(), ImplicitStep(beta))
    got, _ = recipe.run(q, k, v)
    S = torch.zeros(K, V, dtype=torch.float64)
    for t in range(T):
        keys, values = k[0, max(t - 1, 0) : t + 1, 0], v[0, max(t - 1, 0) : t + 1, 0]
        if math.isinf(beta):
            S = S + torch.linalg.pinv(keys) @ (values - keys @ S)
        else:
            S = torch.linalg.solve(EYE + beta * keys.T @ keys, S + beta * keys.T @ values)
        assert_close(got[0, t, 0], S.T @ q[0, t, 0], bar=1e-11)


def test_two_implicit_steps_are_one_after_the_other(pairs):
    q, k, v = pairs
    got, _ = Recipe(Uniform(), LinearMap(), ImplicitStep(0.7, steps=2)).run(q, k, v)

    def update(S, k, v):
        for _ in range(2):
            S = S + 0.7 / (1 + 0.7 * k @ k) * torch.outer(k, v - S.T @ k)
        return S

    assert_close(got, loop(update, q, k, v))


def test_decayed_ridge_solves_the_normal_equations(pairs, log_decay):
    q, k, v = pairs
    got, _ = Recipe(ScalarDecay(), LinearMap(), Exact(ridge=0.3)).run(q, k, v, gates={"weights.g": log_decay})
    H = torch.zeros(B, G, K, K, dtype=torch.float64)
    Z = torch.zeros(B, G, K, V, dtype=torch.float64)
    for t in range(T):
        keep = log_decay[:, t].exp()[..., None, None]
        H = keep * H + k[:, t].unsqueeze(-1) * k[:, t].unsqueeze(-2)
        Z = keep * Z + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        S = torch.linalg.solve(H + 0.3 * EYE, Z)
        assert_close(got[:, t], torch.einsum("bgkv,bgk->bgv", S, q[:, t]))


def test_a_ridge_of_each_channel_is_a_gate(pairs, draw):
    q, k, v = pairs
    ridge = draw(B, T, G, K).abs() + 0.1
    recipe = Recipe(Uniform(), LinearMap(), Exact(ridge=None))
    got, _ = recipe.run(q, k, v, gates={"solver.ridge": ridge})
    for t in range(T):
        keys, values = k[0, : t + 1, 0], v[0, : t + 1, 0]
        S = torch.linalg.solve(keys.T @ keys + torch.diag(ridge[0, t, 0]), keys.T @ values)
        assert_close(got[0, t, 0], S.T @ q[0, t, 0])


def test_softmax_attention_is_the_kernel_smoother(pairs):
    q, k, v = pairs
    got, _ = Recipe(QueryKernel(), KernelSmoother(), Exact()).run(q, k, v)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in pairs), is_causal=True, scale=1.0
    )
    assert_close(got, want.transpose(1, 2))


def test_softmax_attention_survives_scores_that_overflow(pairs):
    q, k, v = pairs
    got, _ = Recipe(QueryKernel(), KernelSmoother(), Exact()).run(1e4 * q, k, v)
    score = torch.einsum("btgk,bsgk->bgts", 1e4 * q, k) + torch.full((T, T), -math.inf).triu(1)
    assert_close(got, torch.einsum("bgts,bsgv->btgv", score.softmax(-1), v))


def test_normalized_linear_attention_is_the_smoother_of_the_dot_kernel(pairs):
    q, k, v = pairs
    q, k = q.abs(), k.abs()
    k[:, 0] = 0  # the total weight of the first token is 0, and reads 0
    got, _ = Recipe(QueryKernel(dot), KernelSmoother(), Exact()).run(q, k, v)
    score = torch.einsum("btgk,bsgk->bgts", q, k).tril()
    want = torch.einsum("bgts,bsgv->btgv", score / score.sum(-1, keepdim=True).clamp(min=1e-300), v)
    assert_close(got, want)
    assert (got[:, 0] == 0).all()


def test_local_linear_regression_falls_out(pairs):
    q, k, v = pairs

    def kernel(q, k):
        return (-0.5 * (q - k).square().sum(-1)).exp()

    got, _ = Recipe(QueryKernel(kernel), LinearMap(), Exact(ridge=0.2)).run(q, k, v)
    for t in range(T):
        keys, values, query = k[1, : t + 1, 1], v[1, : t + 1, 1], q[1, t, 1]
        gamma = torch.diag(torch.stack([torch.exp(-0.5 * (query - key) @ (query - key)) for key in keys]))
        S = torch.linalg.solve(keys.T @ gamma @ keys + 0.2 * EYE, keys.T @ gamma @ values)
        assert_close(got[1, t, 1], S.T @ query)


def test_a_window_of_sums_forgets_the_oldest_pair(pairs):
    q, k, v = pairs
    got, _ = Recipe(Window(3), LinearMap(), CrossMoment()).run(q, k, v)
    for t in range(T):
        last = slice(max(t - 2, 0), t + 1)
        S = torch.einsum("bngk,bngv->bgkv", k[:, last], v[:, last])
        assert_close(got[:, t], torch.einsum("bgkv,bgk->bgv", S, q[:, t]))


def test_a_gradient_step_on_a_window_sums_its_losses(pairs):
    q, k, v = pairs
    got, _ = Recipe(Window(2), LinearMap(), GradientStep(rate=0.1)).run(q, k, v)
    S = torch.zeros(K, V, dtype=torch.float64)
    for t in range(T):
        keys, values = k[0, max(t - 1, 0) : t + 1, 1], v[0, max(t - 1, 0) : t + 1, 1]
        S = S - 0.1 * keys.T @ (keys @ S - values)
        assert_close(got[0, t, 1], S.T @ q[0, t, 1])


def test_a_cross_moment_weighs_pairs_by_a_kernel(pairs):
    q, k, v = pairs
    got, _ = Recipe(QueryKernel(dot), LinearMap(), CrossMoment()).run(q, k, v)
    score = torch.einsum("btgk,bsgk->bgts", q, k).tril()
    assert_close(got, torch.einsum("bgts,bgts,bsgv->btgv", score, score, v))


def test_features_of_the_key_take_the_place_of_the_key(pairs):
    q, k, v = pairs

    def phi(x):
        return torch.cat([x, x.square()], dim=-1)

    for solver in (CrossMoment(), GradientStep(0.1), ImplicitStep(2.0), Exact(0.1)):
        got, _ = Recipe(Uniform(), FeatureMap(phi), solver).run(q, k, v)
        want, _ = Recipe(Uniform(), LinearMap(), solver).run(phi(q), phi(k), v)
        assert_close(got, want)


def test_enough_conjugate_gradients_reach_the_exact_solution(pairs, log_decay):
    q, k, v = pairs
    gates = {"weights.g": log_decay}
    got, _ = Recipe(ScalarDecay(), LinearMap(), ConjugateGradients(2 * K, ridge=0.3)).run(q, k, v, gates=gates)
    want, _ = Recipe(ScalarDecay(), LinearMap(), Exact(ridge=0.3)).run(q, k, v, gates=gates)
    assert_close(got, want)


def test_an_mlp_learns_by_the_gradient_of_its_weights_and_biases(draw):
    widths = (3, 5, 4)
    memory = MLP(widths, activation="silu")
    start = tuple(draw(1, 1, *shape) for shape in memory.shapes)
    q, k, v = draw(1, 6, 1, 3), draw(1, 6, 1, 3), draw(1, 6, 1, 4)
    recipe = Recipe(ScalarDecay(-0.1), memory, GradientStep(rate=0.05, momentum=0.5, decay=0.01))
    got, _ = recipe.run(q, k, v, state=recipe.start(parameters=start))

    W1, b1, W2, b2 = (p[0, 0] for p in start)
    U = [torch.zeros_like(p) for p in (W1, b1, W2, b2)]
    for t in range(6):
        W1, b1, W2, b2 = (math.exp(-0.1) * p for p in (W1, b1, W2, b2))
        z = k[0, t, 0] @ W1 + b1
        h, slope = z * z.sigmoid(), z.sigmoid() * (1 + z * (1 - z.sigmoid()))
        error = h @ W2 + b2 - v[0, t, 0]
        back = slope * (W2 @ error)
        slopes = (torch.outer(k[0, t, 0], back), back, torch.outer(h, error), error)
        U = [0.5 * u - 0.05 * g for u, g in zip(U, slopes, strict=True)]
        W1, b1, W2, b2 = (0.99 * p + u for p, u in zip((W1, b1, W2, b2), U, strict=True))
        z = q[0, t, 0] @ W1 + b1
        assert_close(got[0, t, 0], (z * z.sigmoid()) @ W2 + b2)


def test_an_implicit_step_on_an_mlp_is_a_damped_gauss_newton_step(draw):
    memory = MLP((3, 4, 2), activation="gelu", bias=False)
    start = tuple(draw(1, 1, *shape) for shape in memory.shapes)
    q, k, v = draw(1, 1, 1, 3), draw(1, 1, 1, 3), draw(1, 1, 1, 2)
    recipe = Recipe(Uniform(), memory, ImplicitStep(3.0))
    _, state = recipe.run(q, k, v, state=recipe.start(parameters=start))

    flat = torch.cat([p.flatten() for p in start])

    def answer(flat):
        return torch.nn.functional.gelu(k.flatten() @ flat[:12].view(3, 4)) @ flat[12:].view(4, 2)

    J = torch.autograd.functional.jacobian(answer, flat)
    system = torch.eye(20, dtype=torch.float64) + 3.0 * J.T @ J
    want = flat - torch.linalg.solve(system, 3.0 * J.T @ (answer(flat) - v.flatten()))
    assert_close(torch.cat([p.flatten() for p in state.parameters]), want)
