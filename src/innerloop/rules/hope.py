"""HOPE: memories that make their own keys, values, rates and keeps, and so modify themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from innerloop.algebra.mlp import activate
from innerloop.algebra.self_modifying import (
    Memory,
    Style,
    Write,
    answer,
    answers,
    damping,
    read_block,
    unit,
    write_block,
)
from innerloop.arguments import check_choice, check_count, check_flags, check_positive
from innerloop.checks import Backend, Form
from innerloop.network import NetworkRule
from innerloop.network_call import call, check_parameter, check_tokens, check_weights, per_row, widened
from innerloop.shapes import compute_dtype

Read = Literal["after", "before"]
DGD = Literal["input", "all"]


class HopeWeights(NamedTuple):
    """The first weights of five memories, each (W,) for a linear one or (W_in, W_out), and two biases."""

    key: Memory
    """``[H, K, K]``, or ``[H, K, h]`` and ``[H, h, K]``."""
    value: Memory
    """Alike."""
    rate: Memory
    """``[H, K, 1]``, or ``[H, K, h]`` and ``[H, h, 1]``."""
    keep: Memory
    """Alike."""
    memory: Memory
    """As ``key``: the one that is read."""
    rate_bias: Tensor
    """``[H]``: the rate before the memory speaks is ``rate_max`` times its sigmoid."""
    keep_bias: Tensor
    """``[H]``: what is kept before the memory speaks is its sigmoid."""


class HopeState(NamedTuple):
    """Five memories in the order of ``HopeWeights``, as they are and as they were when their mini-batches began."""

    weights: tuple[Memory, ...]
    """Each ``[N, H, in, out]``."""
    snapshots: tuple[Memory, ...]
    """Alike: what keys, values, gates, targets and gradients are taken at."""
    position: Tensor
    """Tokens that each row has seen, int64 ``[N]``."""


class Hope(NetworkRule):
    r"""Five memories, written at keys, to values, at rates and with keeps that four of them answer.

    .. math::
        k = u(M_k x), \quad v = u(M_v x), \quad \eta = \eta_{\max} \sigma(M_\eta x + b_\eta), \quad
        \alpha = \sigma(M_\alpha x + b_\alpha)

        M \leftarrow M (\alpha I - \eta k k^\top) - \eta \nabla \tfrac12 |M(k) - M(v)|^2

    for each, all taken at the snapshots. Behrouz et al. (2025), arXiv:2512.24695, section 8, transposed.
    """

    name = "hope"
    paper = "Behrouz et al. (2025), arXiv:2512.24695"
    departs = "the memories write their own targets: no loss is given from outside, and each step's depends on the last"
    axes: ClassVar = {"x": ("B", "T", "H", "K"), "q": ("B", "T", "H", "K")}
    state_type = HopeState


RULE = Hope()


class _Learner:
    """The inner loop of a call."""

    shaped = 0

    def __init__(
        self, weights: HopeWeights, rate_max: float, read: Read, style: Style, normalize_v: bool, sizes: tuple[int, int]
    ) -> None:
        """Take the first weights and the variant."""
        self.weights, self.rate_max, self.read, self.style = weights, rate_max, read, style
        self.normalize_v, self.mini_batches = normalize_v, sizes
        self.residuals = [style.residual, style.residual, False, False, style.residual]
        self._begun = self._first = per_row(tuple(weights[:5]), 1)

    def begin(self, rows: int) -> tuple[tuple[Memory, ...], tuple[Memory, ...]]:
        """Return the first weights, twice."""
        self._begun = per_row(tuple(self.weights[:5]), rows)
        self._first = per_row(tuple(self.weights[:5]), 1)
        return self._begun, self._begun

    def _shared(self, memories: tuple[Memory, ...]) -> tuple[Memory, ...]:
        """Return memories that are still the first weights as the one matrix that they are for all rows."""
        begun = zip(memories, self._begun, self._first, strict=True)
        return tuple(first if memory is expanded else memory for memory, expanded, first in begun)

    def _asked(self, said: Sequence[Tensor]) -> Write:
        """Return what tokens write, from what four memories of the mini-batch's start say, ``[B, H, C, .]``."""
        key, value, rate, keep = said
        value = unit(value) if self.normalize_v else value
        rate = self.rate_max * torch.sigmoid(rate[..., 0] + self.weights.rate_bias[:, None])
        return Write(unit(key), value, rate, torch.sigmoid(keep[..., 0] + self.weights.keep_bias[:, None]))

    def step(
        self, token: Sequence[Tensor], parts: tuple[tuple[Memory, ...], tuple[Memory, ...]], position: Tensor
    ) -> tuple[Tensor, tuple[tuple[Memory, ...], tuple[Memory, ...]]]:
        """Ask the snapshots, take each memory's gradient by autograd, write all, read."""
        x, q = (tensor[..., None, :] for tensor in token)
        memories, snapshots = parts
        write = self._asked([
            answer(memory, x, residual)
            for memory, residual in zip(snapshots[:4], self.residuals[:4], strict=True)
        ])  # fmt: skip
        after = tuple(
            self._moved(memory, snapshot, residual, write)
            for memory, snapshot, residual in zip(memories, snapshots, self.residuals, strict=True)
        )
        read = after[-1] if self.read == "after" else snapshots[-1]
        return answer(read, q, self.style.residual)[..., 0, :], (after, snapshots)

    def _moved(self, memory: Memory, snapshot: Memory, residual: bool, write: Write) -> Memory:
        k, v, rate, keep = write
        target = answer(snapshot, v, residual)

        def loss(snapshot: Memory) -> Tensor:
            return 0.5 * (answer(snapshot, k, residual) - target).square().sum()

        slopes = torch.func.grad(loss)(snapshot)
        directions, damp = [k], [torch.ones_like(rate)]
        if len(snapshot) == 2:
            h = activate(k @ snapshot[0], "gelu_tanh")
            directions.append(unit(h) if self.style.everywhere else torch.zeros_like(h))
            damp = damping(rate, snapshot, h) if self.style.normalized else [*damp, *damp]
        return tuple(
            keep[..., None] * w - rate[..., None] * (along.mT @ (along @ w) + factor[..., None] * slope)
            for w, slope, along, factor in zip(memory, slopes, directions, damp, strict=True)
        )

    def block(
        self,
        tokens: Sequence[Tensor],
        parts: tuple[tuple[Memory, ...], tuple[Memory, ...]],
        real: Tensor | None,
        place: int,
    ) -> tuple[Tensor, tuple[tuple[Memory, ...], tuple[Memory, ...]]]:
        """Do the same for many tokens at once."""
        del place
        x, q = tokens
        memories, snapshots = map(self._shared, parts)
        write = self._asked(answers(snapshots[:4], x, self.residuals[:4]))
        if real is not None:
            write = write._replace(rate=write.rate * real, keep=torch.where(real > 0, write.keep, 1.0))
        after, written, product = write_block(memories, snapshots, self.residuals, write, self.style)
        if self.read == "after":
            o = read_block(memories[-1], q, write.k, written[-1], product, write.keep, self.style.residual)
        else:
            o = answer(snapshots[-1], q, self.style.residual)
        return o, (tuple(after), parts[1])

    def turn(
        self, parts: tuple[tuple[Memory, ...], tuple[Memory, ...]], index: int
    ) -> tuple[tuple[Memory, ...], tuple[Memory, ...]]:
        """Take new snapshots: of the four that speak, or of the one that is read."""
        memories, snapshots = parts
        return memories, (*memories[:4], snapshots[4]) if index == 0 else (*snapshots[:4], memories[4])


def hope(
    x: Tensor,
    q: Tensor,
    *,
    weights: HopeWeights,
    rate_max: float = 1.0,
    read: Read = "after",
    normalize_step: bool = True,
    normalize_v: bool = True,
    residual: bool = True,
    dgd: DGD = "input",
    mini_batch: tuple[int, int] = (16, 16),
    scale: float | None = None,
    initial_state: HopeState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    form: Form = "auto",
    chunk_size: int | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, HopeState | None]:
    r"""Let five memories write themselves at keys, values and gates of their own making, and read one of them.

    .. math::
        k = u(M_k x), \quad v = u(M_v x), \quad \eta = \eta_{\max} \sigma(M_\eta x + b_\eta), \quad
        \alpha = \sigma(M_\alpha x + b_\alpha)

        W_{in} \leftarrow (\alpha I - \eta k k^\top) W_{in} - \eta_1 k \delta_{in}^\top, \qquad
        W_{out} \leftarrow \alpha W_{out} - \eta_2 h \delta_{out}^\top, \qquad
        o = \mathrm{scale} \cdot M_{mem}(q)

    with :math:`M(x) = x + a(x W_{in}) W_{out}` or, linear, :math:`x + x W`, and delta the gradient of
    :math:`\tfrac12 |M(k) - \hat v|^2`, where the target :math:`\hat v = M(v)` is data. All but the delta term and the
    read is taken at the weights where the mini-batch began. Behrouz et al. (2025), arXiv:2512.24695, section 8,
    transposed, known here through secondary sources. From the paper: who makes what, the targets, the rate on both
    terms, the snapshots, the read before the write. Ours: sigmoids on the gates, unit values, one rate and one keep a
    head, the proximal damping, the read after the write. Nothing is detached: the outer gradient goes through every
    write.

    Args:
        x: What the memories are asked about, ``[B, T, H, K]``.
        q: Queries, ``[B, T, H, K]``, used as given.
        weights: ``HopeWeights``; used where no state is given, but for the biases.
        rate_max: The largest rate.
        read: ``"after"`` the token's own write, or ``"before"``: at the snapshot, as published.
        normalize_step: Take the proximal step layer by layer: rates ``eta / (1 + eta |W_out|^2)`` and
            ``eta / (1 + eta |h|^2)``. False is the literal rule.
        normalize_v: Make v unit length. Longer values amplify themselves.
        residual: Whether key, value and read memories add their input.
        dgd: The delta term acts on the ``"input"`` weights, or on ``"all"``, there along the hidden layer's direction.
        mini_batch: Tokens between snapshots of the four memories that speak, and of the one that is read.
        scale: Finite number that multiplies the read; 1 if None.
        initial_state: ``HopeState(weights, snapshots, position)`` before the first token.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of N packed sequences in one row (B=1), ``[N+1]``, int32 or int64.
        form: ``"recurrent"`` (the definition, a token loop), ``"chunk"`` (parallel in time) or ``"auto"``.
        chunk_size: The most tokens of a mini-batch that are taken at once; changes nothing beyond rounding. 128 if
            None.
        backend: ``None`` for the best present, or ``"torch"``.

    Returns:
        ``o`` of ``[B, T, H, K]`` in x's dtype, and the state after the last token (float32, or float64 for float64) or
        None.

    Raises:
        TypeError: If an input is no float tensor, or dtypes differ.
        ValueError: If a shape disagrees with x's, or an option is unknown.
        RuntimeError: If a named backend cannot serve.

    Example:
        >>> import torch
        >>> from innerloop import ops
        >>> x, q = torch.randn(2, 1, 40, 2, 8).unbind(0)
        >>> maps = [(torch.randn(2, 8, width) / 8,) for width in (8, 8, 1, 1, 8)]
        >>> weights = ops.HopeWeights(*maps, rate_bias=torch.zeros(2), keep_bias=torch.full((2,), 9.0))
        >>> o, state = ops.hope(x, q, weights=weights, output_final_state=True)
        >>> o.shape, state.weights[4][0].shape
        (torch.Size([1, 40, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    tokens = {"x": x, "q": q}
    sizes = check_tokens(RULE, tokens, cu_seqlens)
    check_positive("rate_max", rate_max)
    check_choice("read", read, get_args(Read))
    check_choice("dgd", dgd, get_args(DGD))
    check_flags(normalize_step=normalize_step, normalize_v=normalize_v, residual=residual)
    if not isinstance(mini_batch, tuple | list) or len(mini_batch) != 2:
        raise ValueError(f"mini_batch must be two sizes, of the memories that speak and of the one read; "
                         f"got {mini_batch!r:.40}")  # fmt: skip
    for place, size in enumerate(mini_batch):
        check_count(f"mini_batch[{place}]", size)
    _check_weights(weights, sizes, x)
    style = Style(residual, normalize_step, dgd == "all")
    wide = HopeWeights(*widened(tuple(weights), compute_dtype(x.dtype)))
    learner = _Learner(wide, float(rate_max), read, style, normalize_v, (int(mini_batch[0]), int(mini_batch[1])))
    return call(
        RULE,
        tokens,
        learner,
        sizes,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        form=form,
        chunk_size=chunk_size,
        backend=backend,
    )


def _check_weights(weights: HopeWeights, sizes: dict[str, int], like: Tensor) -> None:
    if not isinstance(weights, HopeWeights):
        raise TypeError(f"weights must be HopeWeights({', '.join(HopeWeights._fields)}); got {type(weights).__name__}")
    for name in HopeWeights._fields[:5]:
        memory = getattr(weights, name)
        if not isinstance(memory, tuple | list) or len(memory) not in (1, 2):
            raise ValueError(f"weights.{name} must be (W,) or (W_in, W_out); got {type(memory).__name__}")
        sizes["1"] = 1
        width, hidden = "1" if name in ("rate", "keep") else "K", f"h of {name}"
        axes = [("H", "K", width)] if len(memory) == 1 else [("H", "K", hidden), ("H", hidden, width)]
        check_weights(f"weights.{name}", memory, axes, sizes, like)
    for name in HopeWeights._fields[5:]:
        check_parameter(f"weights.{name}", getattr(weights, name), ("H",), sizes, like)
