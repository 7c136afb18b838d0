"""Every layer against its paper, written out: matrices that carry the memory from token to token, nothing shared."""

import math

import pytest
import torch
from torch.nn import functional as F

from innerloop import nn
from innerloop.testing import error


def split(x, count):
    return x.reshape(*x.shape[:-1], count, x.shape[-1] // count)


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def convolved(x, convolution):
    taps = convolution.weight.shape[1]
    y = F.conv1d(F.pad(x.mT, (taps - 1, 0)), convolution.weight[:, None], convolution.bias, groups=x.shape[-1])
    return F.silu(y.mT)


def streams(layer, x):
    """Return q, k, v of a layer with a map and a convolution for each."""
    return [convolved(m(x), layer.streams.convolutions[name]) for name, m in layer.streams.maps.items()]


def straight(layer, x):
    return [m(x) for m in layer.streams.maps.values()]


def grouped(layer, *tensors):
    """Give every value head its own copy of its key head's tensor."""
    times = layer.value_heads // layer.heads
    return [split(x, layer.heads).repeat_interleave(times, -2) for x in tensors]


def carried(q, turn, write, scale):
    """Run ``S <- turn S + write`` over ``[B, T, G, K, .]``, and read at q."""
    memory, read = torch.zeros_like(write[:, 0]), []
    for t in range(q.shape[1]):
        memory = turn[:, t] @ memory + write[:, t]
        read.append(scale * (memory.mT @ q[:, t, ..., None])[..., 0])
    return torch.stack(read, 1)


def outer(a, b):
    return a[..., :, None] * b[..., None, :]


def finish(layer, o, z=None, activation=F.silu, eps=1e-5):
    o = o / (o.square().mean(-1, keepdim=True) + eps).sqrt() * layer.norm.weight
    if z is not None:
        o = o * activation(split(z, o.shape[-2]))
    return layer.output(o.flatten(-2))


def falloff(layer, a):
    return -layer.decay.A_log.exp().view(-1, *(1,) * (layer.decay.dt_bias.ndim - 1)) * torch.log1p(
        (a + layer.decay.dt_bias).exp()
    )


def through(sequential, x):
    for linear in sequential:
        x = x @ linear.weight.T + (linear.offset if getattr(linear, "offset", None) is not None else 0)
    return x


def gated_delta_net(layer, x, *, doubled=1, eps=1e-5):
    q, k, v = streams(layer, x)
    (q, k), v = grouped(layer, q, k), split(v, layer.value_heads)
    q, k = unit(q), unit(k)
    g, beta = falloff(layer, x @ layer.a.weight.T), doubled * (x @ layer.b.weight.T).sigmoid()
    turn = g.exp()[..., None, None] * (torch.eye(k.shape[-1]).double() - beta[..., None, None] * outer(k, k))
    o = carried(q, turn, outer(beta[..., None] * k, v), k.shape[-1] ** -0.5)
    return finish(layer, o, layer.gate(x), eps=eps)


def qwen(layer, x):
    mixed = convolved(layer.streams.maps["joined"](x), layer.streams.convolutions["joined"])
    K, V = 2 * 5, 4 * 3
    q, k, v = mixed[..., :K], mixed[..., K : 2 * K], mixed[..., 2 * K : 2 * K + V]
    (q, k), v = grouped(layer, q, k), split(v, 4)
    q, k = unit(q), unit(k)
    g, beta = falloff(layer, x @ layer.a.weight.T), (x @ layer.b.weight.T).sigmoid()
    turn = g.exp()[..., None, None] * (torch.eye(5).double() - beta[..., None, None] * outer(k, k))
    o = carried(q, turn, outer(beta[..., None] * k, v), 5**-0.5)
    return finish(layer, o, layer.gate(x), eps=1e-6)


def delta_net(layer, x):
    q, k, v = streams(layer, x)
    (q, k), v = grouped(layer, q, k), split(v, layer.value_heads)
    q, k, beta = unit(q), unit(k), (x @ layer.b.weight.T).sigmoid()
    turn = torch.eye(k.shape[-1]).double() - beta[..., None, None] * outer(k, k)
    return finish(layer, carried(q, turn, outer(beta[..., None] * k, v), k.shape[-1] ** -0.5))


def kimi(layer, x):
    q, k, v = streams(layer, x)
    (q, k), v = grouped(layer, q, k), split(v, layer.value_heads)
    q, k, beta = unit(q), unit(k), (x @ layer.b.weight.T).sigmoid()
    g = falloff(layer, split(through(layer.a, x), layer.value_heads))
    turn = (torch.eye(k.shape[-1]).double() - beta[..., None, None] * outer(k, k)) @ torch.diag_embed(g.exp())
    o = carried(q, turn, outer(beta[..., None] * k, v), k.shape[-1] ** -0.5)
    return finish(layer, o, layer.gate(x), torch.sigmoid)


def gated_delta_net2(layer, x, activation=torch.sigmoid, doubled=1):
    q, k, v = streams(layer, x)
    G = layer.value_heads
    (q, k), v = grouped(layer, q, k), split(v, G)
    q, k = unit(q), unit(k)
    b, w = doubled * split(x @ layer.b.weight.T, G).sigmoid(), split(x @ layer.w.weight.T, G).sigmoid()
    g = falloff(layer, split(through(layer.a, x), G))
    turn = (torch.eye(k.shape[-1]).double() - outer(k, b * k)) @ torch.diag_embed(g.exp())
    o = carried(q, turn, outer(k, w * v), k.shape[-1] ** -0.5)
    return finish(layer, o, layer.gate(x), activation)


def gated_delta_product(layer, x, doubled=2):
    q, k, v = streams(layer, x)
    n, H, G = layer.steps, layer.heads, layer.value_heads
    q = unit(split(q, H).repeat_interleave(G // H, -2))
    k = unit(split(split(k, n), H).repeat_interleave(G // H, -2))
    v, beta = split(split(v, n), G), doubled * split(x @ layer.b.weight.T, n).sigmoid()
    turn = falloff(layer, x @ layer.a.weight.T).exp()[..., None, None] * torch.eye(q.shape[-1]).double()
    write = torch.zeros(*turn.shape[:-1], v.shape[-1], dtype=torch.float64)
    for i in range(n):
        step = torch.eye(q.shape[-1]).double() - beta[:, :, i, :, None, None] * outer(k[:, :, i], k[:, :, i])
        turn, write = step @ turn, step @ write + outer(beta[:, :, i, :, None] * k[:, :, i], v[:, :, i])
    return finish(layer, carried(q, turn, write, q.shape[-1] ** -0.5), layer.gate(x))


def gated_linear_attention(layer, x, temperature=16):
    q, k, v = straight(layer, x)
    (q, k), v = grouped(layer, q, k), split(v, layer.value_heads)
    g = split(through(layer.a, x), layer.value_heads).sigmoid().log() / temperature
    o = carried(q, torch.diag_embed(g.exp()), outer(k, v), k.shape[-1] ** -0.5)
    return finish(layer, o, layer.gate(x))


def linear_attention(layer, x):
    q, k, v = straight(layer, x)
    (q, k), v = grouped(layer, F.elu(q) + 1, F.elu(k) + 1), split(v, layer.value_heads)
    weights = torch.einsum("btgk,bsgk->bgts", q, k).tril()
    o = torch.einsum("bgts,bsgv->btgv", weights / weights.sum(-1, keepdim=True), v)
    return layer.output(o.flatten(-2))


def turned(x, base, last):
    """Rotate pairs of channels as complex numbers."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None] * base ** -(torch.arange(half).double() / (half - 1 if last else half))
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((z.real, z.imag), -1)


def softmax_attention(layer, x):
    q, k, v = straight(layer, x)
    q, (k, v) = split(q, layer.heads), (split(y, layer.key_heads) for y in (k, v))
    if layer.key_norm is not None:
        q = F.rms_norm(q, q.shape[-1:], layer.query_norm.weight, 1e-6)
        k = F.rms_norm(k, k.shape[-1:], layer.key_norm.weight, 1e-6)
    q, k = turned(q, 10_000.0, False), turned(k, 10_000.0, False)
    k, v = (y.repeat_interleave(layer.heads // layer.key_heads, -2) for y in (k, v))
    scores = torch.einsum("btgk,bsgk->bgts", q, k) / math.sqrt(q.shape[-1])
    later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    if layer.window:
        later |= torch.ones_like(later).tril(-layer.window)
    o = torch.einsum("bgts,bsgv->btgv", scores.masked_fill(later, -torch.inf).softmax(-1), v)
    return layer.output(o.flatten(-2))


def ret_net(layer, x):
    q, k, v = straight(layer, x)
    q, k = (turned(split(y, layer.heads), 10_000.0, True) for y in (q, k))
    q, k = (y.repeat_interleave(layer.value_heads // layer.heads, -2) for y in (q, k))
    v, G = split(v, layer.value_heads), layer.value_heads
    keep = 1 - 2.0 ** (-5 - torch.arange(G).double())
    turn = (keep[:, None, None] * torch.eye(q.shape[-1]).double()).expand(*q.shape, q.shape[-1])
    o = carried(q, turn, outer(k, v), q.shape[-1] ** -0.5)
    o = F.rms_norm(o, o.shape[-1:], eps=1e-5) * F.silu(split(layer.gate(x), G))
    return layer.output(o.flatten(-2))


def mamba2(layer, x):
    mixed = convolved(layer.streams.maps["joined"](x), layer.streams.convolutions["joined"])
    u, b, c = mixed.split(layer.streams.sizes, -1)
    u, (b, c) = split(u, layer.heads), (split(y, layer.groups) for y in (b, c))
    b, c = (y.repeat_interleave(layer.heads // layer.groups, -2) for y in (b, c))
    step = torch.log1p((x @ layer.a.weight.T + layer.decay.dt_bias).exp())
    keep = (-layer.decay.A_log.exp() * step).exp()
    turn = keep[..., None, None] * torch.eye(b.shape[-1]).double()
    o = carried(c, turn, outer(b, step[..., None] * u), 1) + layer.skip.value[:, None] * u
    y = split(o.flatten(-2) * F.silu(layer.gate(x)), layer.groups)
    y = F.rms_norm(y, y.shape[-1:], layer.norm.weight, 1e-5)
    return layer.output(y.flatten(-2))


def mesa_net(layer, x):
    q, k = (convolved(layer.streams.maps[name](x), layer.streams.convolutions[name]) for name in ("query", "key"))
    (q, k), v = grouped(layer, q, k), split(layer.streams.maps["value"](x), layer.value_heads)
    q, k = unit(q), unit(k)
    keep, beta = (x @ layer.a.weight.T + layer.a.offset).sigmoid(), (x @ layer.b.weight.T + layer.b.offset).sigmoid()
    turn = keep[..., None, None] * torch.eye(k.shape[-1]).double()
    H_kk, H_kv, read = 0, 0, []
    ridge = torch.diag_embed(torch.log1p(layer.ridge.value.exp()) + 0.25)
    for t in range(x.shape[1]):
        H_kk = turn[:, t] @ H_kk if t else 0
        H_kv = turn[:, t] @ H_kv if t else 0
        H_kk = H_kk + outer(beta[:, t, :, None] * k[:, t], k[:, t])
        H_kv = H_kv + outer(beta[:, t, :, None] * k[:, t], v[:, t])
        read.append((H_kv.mT @ torch.linalg.solve(H_kk + ridge, q[:, t, ..., None]))[..., 0])
    return finish(layer, torch.stack(read, 1))


def titans_linear(layer, x):
    q, k, v = streams(layer, x)
    (q, k), v = grouped(layer, q, k), split(v, layer.value_heads)
    q, k = unit(q), unit(k)
    theta, eta, alpha = ((x @ m.weight.T + m.offset).sigmoid() for m in (layer.theta, layer.eta, layer.alpha))
    theta = theta * layer.rate_max * (1 - eta if layer.bounded else 1)
    memory, speed, read = 0, 0, []
    for t in range(x.shape[1]):
        slope = -outer(k[:, t], v[:, t]) + (outer(k[:, t], k[:, t]) @ memory if t else 0)
        speed = eta[:, t, :, None, None] * speed - theta[:, t, :, None, None] * slope
        memory = (1 - alpha[:, t, :, None, None]) * memory + speed
        read.append((memory.mT @ q[:, t, ..., None])[..., 0])
    return finish(layer, torch.stack(read, 1), None if layer.gate is None else layer.gate(x))


def longhorn(layer, x):
    u = convolved(layer.streams.maps["value"](x), layer.streams.convolutions["value"])
    k, q, v = (split(y, layer.heads) for y in (layer.key(u), layer.query(u), u))
    if layer.diagonal:
        beta = through(layer.b, u).sigmoid()[..., None, :]
        share = beta / (1 + beta * k.square().sum(-1, keepdim=True))
        memory, read = 0, []
        for t in range(x.shape[1]):
            memory = memory * (1 - outer(k[:, t].square(), share[:, t])) + outer(k[:, t], share[:, t] * v[:, t])
            read.append((memory.mT @ q[:, t, ..., None])[..., 0])
        o = torch.stack(read, 1)
    else:
        beta = (u @ layer.b.weight.T + layer.b.offset).sigmoid()[..., None]
        share = beta / (1 + beta * k.square().sum(-1, keepdim=True))
        turn = torch.eye(k.shape[-1]).double() - outer(share * k, k)
        o = carried(q, turn, outer(share * k, v), 1)
    return layer.output((o.flatten(-2) + layer.skip.value * u) * F.silu(layer.gate(x)))


def small(network, x, activation=lambda h: h):
    y = activation(x @ network.down.T) @ network.up.T
    return y if network.offset is None else y + network.offset


def rwkv7(layer, x, first=None):
    before, H = F.pad(x, (0, 0, 1, -1)), layer.heads
    r, w, k, v, a, g = (x + (before - x) * layer.mixture.weights[name] for name in "rwkvag")
    r, k, a = layer.receptance(r), layer.key(k), small(layer.rate, a).sigmoid()
    decay = torch.exp(-math.exp(-0.5) * small(layer.decay, w, torch.tanh).sigmoid())
    z, value = small(layer.gate, g, torch.sigmoid), layer.value(v)
    if first is not None:
        value = value + (first - value) * small(layer.first, v).sigmoid()
    kappa = F.normalize(split(k * layer.channels.removal, H), dim=-1)
    k = k * (1 + (a - 1) * layer.channels.replacement)
    r, k, a, decay, value = (split(y, H) for y in (r, k, a, decay, value))
    o = carried(r, torch.diag_embed(decay) - outer(a * kappa, kappa), outer(k, value), 1)
    o = F.group_norm(o.flatten(-2).flatten(0, 1), H, layer.norm.weight, layer.norm.bias, eps=64e-5).view(*z.shape)
    bonus = (r * k * split(layer.channels.bonus, H)).sum(-1, keepdim=True) * value
    return layer.output((o + bonus.flatten(-2)) * z)


TRUTHS = {
    "GatedDeltaNet": gated_delta_net,
    "GatedDeltaNet-olmo": lambda layer, x: gated_delta_net(layer, x, doubled=2),
    "GatedDeltaNet-qwen": qwen,
    "DeltaNet": delta_net,
    "KimiDeltaAttention": kimi,
    "GatedDeltaNet2": gated_delta_net2,
    "GatedDeltaNet2-silu": lambda layer, x: gated_delta_net2(layer, x, F.silu, 2),
    "GatedDeltaProduct": gated_delta_product,
    "GatedDeltaProduct-three": lambda layer, x: gated_delta_product(layer, x, 1),
    "GatedLinearAttention": gated_linear_attention,
    "GatedLinearAttention-groups": lambda layer, x: gated_linear_attention(layer, x, 2),
    "LinearAttention": linear_attention,
    "LinearAttention-groups": linear_attention,
    "SoftmaxAttention": softmax_attention,
    "SoftmaxAttention-shared": softmax_attention,
    "SoftmaxAttention-window": softmax_attention,
    "RetNet": ret_net,
    "RetNet-groups": ret_net,
    "Mamba2": mamba2,
    "Mamba2-groups": mamba2,
    "MesaNet": mesa_net,
    "TitansLinear": titans_linear,
    "TitansLinear-slow": titans_linear,
    "Longhorn": longhorn,
    "Longhorn-diagonal": longhorn,
    "RWKV7": rwkv7,
    "RWKV7-last": rwkv7,
}


@pytest.mark.parametrize("kind", TRUTHS)
def test_a_layer_is_its_paper(kit, kind):
    layer, x = kit.build(kind), kit.tokens(2, 9)
    assert error(layer(x)[0], TRUTHS[kind](layer, x)) <= 1e-10


def test_every_layer_has_a_truth(kit):
    # Those whose memory is a network are made of ops that have a truth, tests/rules/test_networks.py.
    networks = {"TTT", "Titans", "Hope", "CMS", "RecipeLayer"}
    assert set(kit.defaults) <= set(TRUTHS)
    public = {name for name in nn.__all__ if name[0].isupper()} - {"Layer", "LayerState"}
    assert public == {*kit.defaults, *networks}


def later_layer(kit):
    layer = nn.RWKV7(kit.width, 2, key_width=5, value_width=3, index=1, layers=3).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.4)
    return layer


def test_a_later_layer_of_rwkv7_mixes_the_first_ones_values_in(kit):
    first, layer, x = kit.build("RWKV7-last"), later_layer(kit), kit.tokens(2, 9)
    _, _, value = first(x, output_first_value=True)
    y, _, same = layer(x, first_value=value, output_first_value=True)
    assert torch.equal(same, value)
    assert error(y, rwkv7(layer, x, value)) <= 1e-10
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :4] = False
    junk = value.masked_fill(~mask[..., None], torch.nan)
    z, state = layer(x, attention_mask=mask, first_value=junk)
    want, _ = layer(x[:1, 4:], first_value=value[:1, 4:])
    assert error(z[:1, 4:], want) <= 1e-10
    again, _ = layer(x[:, :2], state, first_value=value[:, :2])
    whole, _ = layer(torch.cat((x, x[:, :2]), 1)[1:], first_value=torch.cat((value, value[:, :2]), 1)[1:])
    assert error(again[1:], whole[:, 9:]) <= 1e-10


def test_rwkv7_says_who_needs_the_first_values(kit):
    x = kit.tokens(1, 3)
    with pytest.raises(ValueError, match="first_value must be given"):
        later_layer(kit)(x)
    with pytest.raises(ValueError, match="this is layer 0"):
        kit.build("RWKV7")(x, first_value=x)
    with pytest.raises(ValueError, match="first_value must have shape"):
        later_layer(kit)(x, first_value=x)
    with pytest.raises(ValueError, match="index must lie"):
        nn.RWKV7(8, 2, index=1)


@pytest.mark.parametrize("count", [2, 6])
def test_value_heads_read_the_key_heads_of_their_group(kit, count):
    shared = nn.GatedDeltaNet(kit.width, 2, key_width=5, value_width=3, value_heads=count).double()
    apart = nn.GatedDeltaNet(kit.width, count, key_width=5, value_width=3).double()
    weights = shared.state_dict()
    for part in ("query", "key"):
        for key in (f"streams.maps.{part}.weight", f"streams.convolutions.{part}.weight"):
            weights[key] = split(weights[key].T, 2).repeat_interleave(count // 2, -2).flatten(-2).T
    apart.load_state_dict(weights)
    x = kit.tokens(2, 9)
    assert error(shared(x)[0], apart(x)[0]) <= 1e-10


def test_one_step_of_delta_product_is_gated_delta_net_doubled(kit):
    product = nn.GatedDeltaProduct(kit.width, 2, steps=1).double()
    net = nn.GatedDeltaNet(kit.width, 2, variant="olmo").double()
    net.load_state_dict(product.state_dict())
    x = kit.tokens(2, 9)
    assert error(product(x)[0], net(x)[0]) <= 1e-10


def test_options_that_cannot_be_say_so(kit):
    D = kit.width
    for make, message in (
        (lambda: nn.GatedDeltaNet(D, 5), "heads must divide width=12"),
        (lambda: nn.GatedDeltaNet(D, 2, value_heads=3), "multiple of heads=2"),
        (lambda: nn.GatedDeltaNet(D, 2, variant="quen"), "variant must be"),
        (lambda: nn.GatedDeltaNet(D, 2, taps=-1), "taps"),
        (lambda: nn.GatedDeltaNet(0), "width must be"),
        (lambda: nn.KimiDeltaAttention(D, 2, lower_bound=1.0), "below 0"),
        (lambda: nn.GatedDeltaNet2(D, 2, activation="tanh"), "activation must be"),
        (lambda: nn.GatedDeltaProduct(D, 2, steps=0), "steps must be"),
        (lambda: nn.GatedLinearAttention(D, 2, temperature=0), "temperature"),
        (lambda: nn.SoftmaxAttention(D, 4, key_heads=3), "key_heads must divide"),
        (lambda: nn.SoftmaxAttention(D, 4), "key_width must be even"),
        (lambda: nn.RetNet(D, 4), "key_width must be even"),
        (lambda: nn.Mamba2(D, 4, groups=3), "groups must divide"),
        (lambda: nn.MesaNet(D, 2, floor=1.0), "floor must lie"),
        (lambda: nn.TitansLinear(D, 2, rate_max=2.0), "rate_max must lie"),
        (lambda: nn.Longhorn(D, 2, diagonal=True), "heads=1"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
