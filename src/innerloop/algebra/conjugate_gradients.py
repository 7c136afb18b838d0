"""Conjugate gradients for many small positive definite systems at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def conjugate_gradients(
    matvec: Callable[[Tensor], Tensor],
    rhs: Tensor,
    *,
    iterations: int,
    diagonal: Tensor | None = None,
    start: Tensor | None = None,
) -> Tensor:
    r"""Solve :math:`A x = b` for every row b by a stated number of steps.

    A diagonal near A, where given, is preconditioner and, with no other start, start (:math:`x_0 = b / d`); without
    either the start is zero. A row that is solved to rounding, or whose right-hand side is 0, stays where it is: there
    is no exit that depends on the data, so the cost is the same for all inputs and the steps can be differentiated.
    Hestenes and Stiefel (1952), Methods of conjugate gradients for solving linear systems.

    Args:
        matvec: Multiplies every row of ``[..., K]`` by its matrix, symmetric and positive definite.
        rhs: Right-hand sides, ``[..., K]``.
        iterations: Number of steps, at least 0. In exact arithmetic K of them solve the system.
        diagonal: Diagonals near the matrices, such as their own, positive, broadcastable to ``rhs``.
        start: Where to start, ``[..., K]``.

    Returns:
        The solutions, ``[..., K]``.

    Example:
        >>> import torch
        >>> matrix = torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
        >>> rhs = torch.tensor([1.0, 2.0], dtype=torch.float64)
        >>> x = conjugate_gradients(lambda x: x @ matrix, rhs, iterations=2, diagonal=matrix.diagonal())
        >>> torch.allclose(x, torch.linalg.solve(matrix, rhs))
        True
    """
    scaled = rhs if diagonal is None else rhs / diagonal
    if start is None and diagonal is not None:
        start = scaled
    x = torch.zeros_like(rhs) if start is None else start
    residual = rhs if start is None else rhs - matvec(start)
    # Below this a row is solved to rounding; going on would divide noise by noise until both underflow.
    floor = torch.finfo(rhs.dtype).eps ** 2 * (rhs * scaled).sum(-1, keepdim=True).detach()
    direction, before = torch.zeros_like(rhs), torch.ones_like(floor)
    for _ in range(iterations):
        step = residual if diagonal is None else residual / diagonal
        size = (residual * step).sum(-1, keepdim=True)
        # The direction of a solved row is of no account, if it is finite: its steps have no length.
        direction = torch.addcmul(step, size / before, direction)
        solved = size <= floor
        before = size.masked_fill(solved, 1.0)
        product = matvec(direction)
        resistance = (direction * product).sum(-1, keepdim=True)
        length = (size / resistance.masked_fill(solved, 1.0)).masked_fill(solved, 0.0)
        x = torch.addcmul(x, length, direction)
        residual = torch.addcmul(residual, length, product, value=-1)
    return x
