"""The continuum memory: a chain of networks, each of which moves once in a window of its own length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from innerloop.algebra.mlp import ACTIVATIONS, Activation, Weights, activate, apply_mlp, layers_of, through_activation
from innerloop.algebra.windows import add_gradients, damped, window_block
from innerloop.arguments import check_choice, check_count, check_flags
from innerloop.checks import Backend, Form
from innerloop.network import NetworkRule
from innerloop.network_call import apart, begin_call, check_tokens, check_weights, per_row, run_sequence, widened
from innerloop.rule import Gate
from innerloop.shapes import check_shape, check_tensor, compute_dtype


class CMSState(NamedTuple):
    """Every level's network, what its window has found so far, and what a gradient from outside would need."""

    weights: tuple[Weights, ...]
    """A pair (W1, W2) a level, each ``[N, H, in, out]``."""
    accumulated: tuple[Weights, ...]
    """The sum of the open window's gradients, each times its rate, alike."""
    pending: tuple[tuple[Tensor, ...], ...]
    """After a call without targets, a level: inputs, hidden layer, its slope, rate, and the period; else nothing."""
    position: Tensor
    """Tokens that each row has seen, int64 ``[N]``."""


class CMS(NetworkRule):
    r"""A chain of networks; level l sums its gradients over windows of C_l tokens and moves at their ends.

    .. math::
        y = f_n(\dots f_1(x)), \qquad f_l(h) = h + a(h W_1) W_2, \qquad
        \theta_l \leftarrow \theta_l - \sum_{window} \eta_t \nabla \tfrac12 |f_l(h_t) - target_{l,t}|^2

    Behrouz et al. (2025), Nested Learning, equations 30 and 31, arXiv:2512.24695.
    """

    name = "cms"
    paper = "Behrouz et al. (2025), arXiv:2512.24695"
    departs = "a level moves once a window, by the sum of gradients taken where the window began"
    axes: ClassVar = {"x": ("B", "T", "H", "D"), "target": ("B", "T", "n", "H", "D")}
    gates = (Gate("rate", low=0.0, high=1.0, axes=("B", "T", "n", "H")),)
    state_type = CMSState


RULE = CMS()


class _Level:
    """The inner loop of one level, whose tokens are its inputs, targets and rates."""

    shaped = 0

    def __init__(self, weights: Weights, period: int, activation: Activation, normalized: bool) -> None:
        """Take the first weights and the window."""
        self.weights, self.mini_batches, self.activation = weights, (period,), activation
        self.damped_by = period if normalized else 0

    def begin(self, rows: int) -> tuple[Weights, Weights]:
        """Return the first weights, and nothing found."""
        first = per_row(self.weights, rows)
        return first, tuple(torch.zeros_like(w) for w in first)

    def step(
        self, token: Sequence[Tensor], parts: tuple[Weights, Weights], position: Tensor
    ) -> tuple[Tensor, tuple[Weights, Weights]]:
        """Read at the window's weights, take the loss's gradient there by autograd, add it to the others."""
        del position
        x, target, rate = token
        weights, total = parts

        def answer(weights: Weights) -> Tensor:
            return apply_mlp(weights, x[..., None, :], self.activation, True)[..., 0, :]

        slopes = torch.func.grad(lambda weights: 0.5 * (answer(weights) - target).square().sum())(weights)
        inputs, _ = layers_of(weights, x[..., None, :], self.activation)
        rates = damped(rate[..., None], weights, inputs, self.damped_by)
        total = tuple(s + r[..., None] * slope for s, slope, r in zip(total, slopes, rates, strict=True))
        return answer(weights), (weights, total)

    def block(
        self, tokens: Sequence[Tensor], parts: tuple[Weights, Weights], real: Tensor | None, place: int
    ) -> tuple[Tensor, tuple[Weights, Weights]]:
        """Do the same for many tokens at once."""
        del real, place
        x, target, rate = tokens
        weights, total = parts
        y, total = window_block(x, target, rate, weights, total, self.activation, self.damped_by)
        return y, (weights, total)

    def turn(self, parts: tuple[Weights, Weights], index: int) -> tuple[Weights, Weights]:
        """Move by what the window has found."""
        del index
        weights, total = parts
        return tuple(w - s for w, s in zip(weights, total, strict=True)), tuple(torch.zeros_like(s) for s in total)


def cms(
    x: Tensor,
    *,
    weights: tuple[Weights, ...],
    target: Tensor | None,
    rate: Tensor,
    periods: tuple[int, ...],
    activation: Activation = "gelu_tanh",
    normalize_step: bool = False,
    initial_state: CMSState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    form: Form = "auto",
    chunk_size: int | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, CMSState | None]:
    r"""Run tokens through a chain of networks that learn at different frequencies.

    .. math::
        y = f_n(\dots f_1(x)), \qquad f_l(h) = h + a(h W_1) W_2, \qquad
        \theta_l \leftarrow \theta_l - \sum_{window} \eta_t \nabla \tfrac12 |f_l(h_t) - target_{l,t}|^2

    Level l reads and takes its gradients at the weights of its window's start, and moves after every ``periods[l]``
    tokens by their sum. A window that is not full is carried, never flushed. Behrouz et al. (2025), arXiv:2512.24695:
    the chain, the periods, sums. Ours: the residual, the target (there the loss is the outer one, which a forward pass
    does not have), and windows of C tokens where the paper's sum counts C + 1.

    Args:
        x: Tokens, ``[B, T, H, D]``.
        weights: A pair (W1, W2) a level, ``[H, D, h]`` and ``[H, h, D]``; used where no state is given.
        target: What each level learns to answer, ``[B, T, n, H, D]``, data to the inner loss. None only reads; the
            state then keeps what ``cms_update`` needs to learn from a gradient that comes later.
        rate: Of each level, ``[B, T, n, H]``, at least 0. Sums grow with the period: rates should fall with it.
        periods: Tokens of each level's window.
        activation: ``"gelu"``, ``"gelu_tanh"``, ``"silu"`` or ``"relu"``.
        normalize_step: Divide each layer's rate by ``1 + C rate c``, C the period and c a bound on the loss's curvature
            in that layer; ``cms_update`` takes rates as given.
        initial_state: ``CMSState(weights, accumulated, pending, position)`` before the first token.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of N packed sequences in one row (B=1), ``[N+1]``, int32 or int64.
        form: ``"recurrent"`` (the definition, a token loop), ``"chunk"`` (parallel in time) or ``"auto"``.
        chunk_size: The most tokens of a window that are taken at once; changes nothing beyond rounding. 128 if None.
        backend: ``None`` for the best present, or ``"torch"``.

    Returns:
        ``y`` of ``[B, T, H, D]`` in x's dtype, and the state after the last token (float32, or float64 for float64) or
        None.

    Raises:
        TypeError: If an input is no float tensor, or dtypes differ.
        ValueError: If a shape disagrees with x's, a rate holds NaN, or an option is unknown.
        RuntimeError: If a named backend cannot serve.

    Example:
        >>> import torch
        >>> from innerloop import ops
        >>> x, target = torch.randn(1, 21, 1, 8), torch.randn(1, 21, 3, 1, 8)
        >>> weights = tuple((torch.randn(1, 8, 16) / 8, torch.randn(1, 16, 8) / 16) for _ in range(3))
        >>> rate = torch.full((1, 21, 3, 1), 0.01)
        >>> y, state = ops.cms(
        ...     x, weights=weights, target=target, rate=rate, periods=(1, 4, 16), output_final_state=True
        ... )
        >>> y.shape, [int(state.position) // period for period in (1, 4, 16)]
        (torch.Size([1, 21, 1, 8]), [21, 5, 1])
    """
    tokens = {"x": x, "target": target, "rate": rate} if target is not None else {"x": x, "rate": rate}
    sizes = check_tokens(RULE, tokens, cu_seqlens)
    check_choice("activation", activation, ACTIVATIONS)
    check_flags(normalize_step=normalize_step)
    levels = _levels(weights, periods, activation, normalize_step, sizes, x)
    if target is None and cu_seqlens is not None:
        raise ValueError("cu_seqlens goes with targets: a gradient from outside comes for rows; got target=None")
    begun = (*zip(*(level.begin(sizes["N"]) for level in levels), strict=True), ())
    started = begin_call(
        RULE, sizes, begun, initial_state, compute_dtype(x.dtype), output_final_state, form, chunk_size, backend,
        ignored="pending", mini_batches=periods,
    )  # fmt: skip
    h, pairs, pending = x.to(started.dtype), zip(*started.parts[:2], strict=True), []
    after = []
    for number, (level, parts) in enumerate(zip(levels, pairs, strict=True)):
        if target is None:
            pending.append(_pend(h, parts[0], rate[:, :, number], level))
            h = apply_mlp(parts[0], h.transpose(1, 2), activation, True).transpose(1, 2)
            after.append(parts)
            continue
        wide = [h, target[:, :, number].to(started.dtype), rate[:, :, number].to(started.dtype)]
        h, parts = run_sequence(level, wide, [0.0] * 3, parts, started, cu_seqlens)
        after.append(parts)
    state = started.finish((*zip(*after, strict=True), tuple(pending)), sizes, x, cu_seqlens)
    return h.to(x.dtype), state


def _levels(
    weights: tuple[Weights, ...],
    periods: tuple[int, ...],
    activation: Activation,
    normalized: bool,
    sizes: dict[str, int],
    x: Tensor,
) -> list[_Level]:
    for name, given in (("weights", weights), ("periods", periods)):
        if not isinstance(given, tuple | list) or len(given) != sizes["n"]:
            got = f"{len(given)}" if isinstance(given, tuple | list) else type(given).__name__
            raise ValueError(f"{name} must be a tuple with one for each of n={sizes['n']} levels; got {got}")
    for number, (pair, period) in enumerate(zip(weights, periods, strict=True)):
        check_count(f"periods[{number}]", period)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"weights[{number}] must be (W1, W2); got {type(pair).__name__}")
        hidden = f"h{number}"
        check_weights(f"weights[{number}]", pair, [("H", "D", hidden), ("H", hidden, "D")], sizes, x)
    dtype = compute_dtype(x.dtype)
    return [
        _Level(widened(pair, dtype), int(c), activation, normalized) for pair, c in zip(weights, periods, strict=True)
    ]


def _pend(h: Tensor, weights: Weights, rate: Tensor, level: _Level) -> tuple[Tensor, ...]:
    """Return what a gradient of the level's output turns into gradients of its weights, ``[N, H, T, .]`` each."""
    inputs = h.transpose(1, 2)
    z = inputs @ weights[0]
    slope = through_activation(torch.ones_like(z), z, level.activation)
    period = torch.full((h.shape[0],), level.mini_batches[0], device=h.device)
    return inputs, activate(z, level.activation), slope, rate.transpose(1, 2).to(h.dtype), period


def cms_update(state: CMSState, delta: Tensor) -> CMSState:
    r"""Learn from the true gradient of the tokens that the last call without targets has read.

    Every level's gradient is the chain rule's through the levels above it, at the weights of that call; sums, rates and
    windows are those of ``cms``. For training in two passes, and for learning once the label is known.

    Args:
        state: What ``cms(..., target=None)`` returned.
        delta: Gradient of the loss at that call's ``y``, ``[B, T, H, D]``.

    Returns:
        The state after the tokens have been learned from.

    Raises:
        TypeError: If an input has another type.
        ValueError: If no tokens are pending, or the shape is not theirs.

    Example:
        >>> import torch
        >>> from innerloop import ops
        >>> x, weights = torch.randn(1, 6, 1, 8), ((torch.randn(1, 8, 8) / 8, torch.randn(1, 8, 8) / 8),)
        >>> options = {"rate": torch.ones(1, 6, 1, 1), "periods": (4,), "output_final_state": True}
        >>> y, state = ops.cms(x, weights=weights, target=None, **options)
        >>> state = ops.cms_update(state, y - torch.ones_like(y))
        >>> torch.equal(state.weights[0][0][0], weights[0][0])
        False
    """
    if not isinstance(state, CMSState):
        raise TypeError(f"state must be a CMSState; got {type(state).__name__}")
    if not state.pending:
        raise ValueError("state must have tokens that wait for their gradient; got none. Call cms with target=None.")
    check_tensor("delta", delta)
    N, H, T, D = state.pending[0][0].shape
    check_shape("delta", delta, ("B", "T", "H", "D"), {"B": N, "T": T, "H": H, "D": D})
    signal, levels = delta.to(state.weights[0][0].dtype).transpose(1, 2), []
    for weights, total, pending in zip(
        reversed(state.weights), reversed(state.accumulated), reversed(state.pending), strict=True
    ):
        inputs, hidden, slope, rate, period = pending
        below = (signal @ weights[1].mT) * slope
        levels.append(_moved(weights, total, [inputs, hidden], [below, signal], rate, state.position, period))
        signal = signal + below @ weights[0].mT
    found, sums = zip(*reversed(levels), strict=True)
    moved, kept = apart((found, sums), set())
    return CMSState(moved, kept, (), state.position.clone())


def _moved(
    weights: Weights,
    total: Weights,
    inputs: list[Tensor],
    signals: list[Tensor],
    rate: Tensor,
    position: Tensor,
    period: Tensor,
) -> tuple[Weights, Weights]:
    """Return weights and sums after T tokens whose gradients are known, by the windows that have ended."""
    length = rate.shape[-1]
    ended = position // period * period - (position - length)  # tokens of this piece in windows that are closed
    closed = (torch.arange(length, device=rate.device) < ended[:, None])[:, None]  # [N, 1, T]
    any_closed = (ended > 0).view(-1, 1, 1, 1)
    done = add_gradients(total, inputs, signals, [rate * closed] * 2)
    rest = add_gradients(tuple(torch.zeros_like(x) for x in total), inputs, signals, [rate * ~closed] * 2)
    moved = tuple(torch.where(any_closed, w - x, w) for w, x in zip(weights, done, strict=True))
    kept = tuple(torch.where(any_closed, x, y + x) for x, y in zip(rest, total, strict=True))
    return moved, kept
