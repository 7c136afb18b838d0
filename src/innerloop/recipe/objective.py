"""What a solver makes small, and its gradient: by autograd, for each row and head alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from innerloop.recipe.weights import Parameters

Loss = Callable[[Tensor, Tensor], Tensor]


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    r"""The loss of the framework, :math:`\tfrac12 |m(k) - v|^2`.

    Args:
        prediction: ``[..., V]``.
        target: ``[..., V]``.

    Returns:
        One number a row, ``[...]``.

    Example:
        >>> squared_error(torch.tensor([3.0, 4.0]), torch.zeros(2))
        tensor(12.5000)
    """
    return 0.5 * (prediction - target).square().sum(-1)


def alignment(prediction: Tensor, target: Tensor) -> Tensor:
    r"""The loss behind additive memories, :math:`-\langle m(k), v \rangle`: how little the answer points to the value.

    Args:
        prediction: ``[..., V]``.
        target: ``[..., V]``.

    Returns:
        One number a row, ``[...]``.

    Example:
        >>> alignment(torch.tensor([3.0, 4.0]), torch.ones(2))
        tensor(-7.)
    """
    return -(prediction * target).sum(-1)


def by_row(loss: Loss, prediction: Tensor, target: Tensor) -> Tensor:
    """Return the loss, one number a row.

    Raises:
        ValueError: If it is something else: a mean over rows would let rows of a batch change each other's rate.
    """
    value = loss(prediction, target)
    if value.shape != target.shape[:-1]:
        raise ValueError(
            f"loss must return one number a row, {list(target.shape[:-1])} for predictions of {list(target.shape)}; "
            f"got {list(value.shape)}. Sum over the last axis alone; torch's losses take reduction='none'."
        )
    return value


def gradient(objective: Callable[[Parameters], Tensor], parameters: Parameters) -> Parameters:
    """Return the gradient of a sum of independent rows: each row of the result is that row's own.

    The result can be differentiated again, any number of times, if anything that the objective sees is tracked outside.
    """
    # Asked of the objective itself, for a feature map, kernel or loss of the user's may close over tracked tensors.
    tracked = torch.is_grad_enabled() and objective(parameters).requires_grad
    with torch.enable_grad():
        # Aliases, so that only the way through the memory counts, should k or v depend on the same parameters.
        inner = tuple(p.view_as(p) if tracked and p.requires_grad else p.detach().requires_grad_() for p in parameters)
        return torch.autograd.grad(objective(inner), inner, create_graph=tracked, materialize_grads=True)
