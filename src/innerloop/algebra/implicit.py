"""Solutions of linear systems with the gradient of the implicit function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

Params = tuple[Tensor | None, ...]
Solve = Callable[..., Tensor]


def implicit_solution(solve: Solve, exact: Solve, product: Solve, right: Tensor, *params: Tensor | None) -> Tensor:
    """Return ``x = solve(right, *params)`` of ``product(x, *params) = right`` with the derivatives of the solution.

    With ``w = solve(dx, *params)`` the gradient of ``right`` is w, and that of the parameters is that of
    ``-<w, product(x, *params)>`` with x and w held fast: what ``solve`` does on its way is neither kept nor
    differentiated. Terms of the product without parameters may be left out. Under ``torch.func``, in forward mode and
    while compiling no custom Function may run: there ``exact``, which is plain torch, lends its derivatives.

    Args:
        solve: Solves for all right-hand sides, in a stated number of steps or to the end.
        exact: Solves to the end, differentiable.
        product: Multiplies by the matrices, which are symmetric; differentiable.
        right: Right-hand sides, ``[..., K]``.
        *params: What the matrices are made of; each may be None.

    Returns:
        The solutions, ``[..., K]``.
    """
    compiling = torch.compiler.is_compiling()
    if not (compiling or must_stay_open()):
        return _Implicit.apply(solve, product, right, *params)
    if solve is exact:
        return exact(right, *params)
    if compiling and not any(x is not None and x.requires_grad for x in (right, *params)):
        return solve(right, *params)
    slopes = exact(right, *params)
    return solve(*(None if x is None else x.detach() for x in (right, *params))) + (slopes - slopes.detach())


def must_stay_open() -> bool:
    """Whether ``torch.func`` or forward mode watches: no custom Function may run there."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def can_branch() -> bool:
    """Whether values may decide what is computed: outside of traces and transforms."""
    return not (torch.compiler.is_compiling() or must_stay_open() or torch._C._len_torch_dispatch_stack())


class _Implicit(torch.autograd.Function):
    """The solution, whose backward is a solution again: any order of derivatives is right."""

    @staticmethod
    def forward(solve: Solve, product: Solve, right: Tensor, *params: Tensor | None) -> Tensor:
        return solve(right, *params)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # ruff: ignore[any-type] - the framework's own
        ctx.solve, ctx.product, _, *params = inputs
        ctx.save_for_backward(*params, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # ruff: ignore[any-type] - the framework's own
        *params, x = ctx.saved_tensors
        w = _Implicit.apply(ctx.solve, ctx.product, grad, *params)

        def through_matrix(*given: Tensor) -> Tensor:
            left = iter(given)
            return -(w * ctx.product(x, *(None if p is None else next(left) for p in params))).sum()

        value, pull = torch.func.vjp(through_matrix, *(p for p in params if p is not None))[:2]
        found = iter(pull(torch.ones_like(value)))
        return None, None, w, *(None if p is None else next(found) for p in params)
