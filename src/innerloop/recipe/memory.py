r"""What can be expressed: the class of functions from which the memory :math:`m` is taken.

A memory here has no weights of its own. It is called with parameters ``[B, G, ...]``, one set for each batch row and
head, and with N inputs at once, ``[B, G, N, K]``. Axes may stand before B: copies of the parameters that share inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from torch import Tensor
from torch.nn import functional

from innerloop.recipe.choice import Choice
from innerloop.recipe.weights import Parameters

Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "relu": functional.relu,
}


class Memory(Choice):
    """What can be expressed."""

    linear: ClassVar[bool]
    """Whether the memory is linear in its parameters, so that a squared loss has one optimum."""

    def __call__(self, parameters: Parameters, x: Tensor) -> Tensor:
        """Evaluate the memory at inputs ``[B, G, N, K]``: ``[B, G, N, V]``."""
        raise NotImplementedError

    def zeros(self, k: Tensor, v: Tensor) -> Parameters:
        """Return an empty memory for keys ``[B, G, N, K]`` and values ``[B, G, N, V]``."""
        raise NotImplementedError


class LinearMemory(Memory):
    """A memory that is linear in its one parameter, ``[B, G, F, V]``."""

    linear = True

    def features(self, x: Tensor) -> Tensor:
        """Return what the map acts on, ``[B, G, N, F]``."""
        raise NotImplementedError

    def __call__(self, parameters: Parameters, x: Tensor) -> Tensor:
        """Return the map applied to the features of the inputs."""
        return self.features(x) @ parameters[0]

    def zeros(self, k: Tensor, v: Tensor) -> Parameters:
        """Return a map that answers 0 everywhere."""
        return (k.new_zeros(*k.shape[:2], self.features(k).shape[-1], v.shape[-1]),)


@dataclass(frozen=True, repr=False)
class LinearMap(LinearMemory):
    r"""A matrix: :math:`m(k) = S^\top k` with S of ``[K, V]``.

    Example:
        >>> import torch
        >>> LinearMap()((torch.eye(2).reshape(1, 1, 2, 2),), torch.ones(1, 1, 3, 2)).shape
        torch.Size([1, 1, 3, 2])
    """

    @property
    def words(self) -> str:
        """The choice in a few words."""
        return "linear"

    def features(self, x: Tensor) -> Tensor:
        """Return the input itself."""
        return x


@dataclass(frozen=True, repr=False)
class FeatureMap(LinearMemory):
    r"""A matrix on features of the key: :math:`m(k) = W^\top \phi(k)`.

    Args:
        phi: Function from ``[B, G, N, K]`` to ``[B, G, N, F]``.

    Raises:
        ValueError: If ``phi`` cannot be called.

    Example:
        >>> import torch
        >>> from innerloop.recipe import Exact, Recipe, Uniform
        >>> parabola = FeatureMap(lambda x: torch.cat([x**0, x, x**2], dim=-1))
        >>> x = torch.tensor([-1.0, 0.0, 1.0, 3.0], dtype=torch.float64).reshape(1, 4, 1, 1)
        >>> o, _ = Recipe(Uniform(), parabola, Exact()).run(x, x, x**2)
        >>> torch.allclose(o, x**2)
        True
    """

    phi: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        """Check the feature map.

        Raises:
            ValueError: If it cannot be called.
        """
        if not callable(self.phi):
            raise ValueError(
                f"FeatureMap.phi must be a function from [B, G, N, K] to [B, G, N, F]; got {self.phi!r}. "
                "Use LinearMap() if the keys are to be used as given."
            )

    @property
    def words(self) -> str:
        """The choice in a few words."""
        return "linear in features"

    def features(self, x: Tensor) -> Tensor:
        """Return phi of the input.

        Raises:
            ValueError: If phi changes more than the last axis.
        """
        features = self.phi(x)
        if features.ndim != x.ndim or features.shape[:-1] != x.shape[:-1]:
            raise ValueError(
                f"FeatureMap.phi must keep all axes but the last of {list(x.shape)}; got {list(features.shape)}. "
                "Map the last axis alone."
            )
        return features


@dataclass(frozen=True, repr=False)
class KernelSmoother(LinearMemory):
    """A constant, fitted afresh at every query: the class of the Nadaraya-Watson estimator, and so of attention.

    Nothing is left over between queries but the past. Goes with ``QueryKernel`` weights and the ``Exact`` solver.

    Example:
        >>> from innerloop.recipe import Exact, QueryKernel, Recipe
        >>> Recipe(QueryKernel(), KernelSmoother(), Exact()).describe()
        ('query kernel', 'local constant', 'exact')
    """

    @property
    def words(self) -> str:
        """The choice in a few words."""
        return "local constant"

    def features(self, x: Tensor) -> Tensor:
        """Return 1 for every input."""
        return x.new_ones(*x.shape[:-1], 1)


@dataclass(frozen=True, repr=False)
class MLP(Memory):
    r"""A multi-layer perceptron: :math:`m(k) = W_L^\top a(\dots a(W_1^\top k + b_1) \dots) + b_L`.

    Its parameters are ``(W1, b1, ..., WL, bL)``, or ``(W1, ..., WL)`` without bias, each ``[B, G, in, out]`` or
    ``[B, G, out]``. They start where the caller says (``Recipe.start``): from zeros no gradient reaches them.

    Args:
        widths: Sizes of the layers, the key's first, the value's last.
        activation: ``"gelu"``, ``"gelu_tanh"``, ``"silu"`` or ``"relu"``, between layers.
        bias: Whether layers have one.

    Raises:
        ValueError: If there are fewer than two widths, one is not positive, or the activation is unknown.

    Example:
        >>> MLP((32, 128, 32)).shapes
        ((32, 128), (128,), (128, 32), (32,))
    """

    widths: tuple[int, ...]
    activation: Activation = "gelu"
    bias: bool = True
    linear: ClassVar = False

    def __post_init__(self) -> None:
        """Check the sizes and the activation.

        Raises:
            ValueError: If one is not to be used.
        """
        if len(self.widths) < 2 or any(not isinstance(width, int) or width < 1 for width in self.widths):
            raise ValueError(
                f"MLP.widths must be at least two positive sizes, the key's first and the value's last; "
                f"got {self.widths!r}. Write (32, 128, 32) for one hidden layer of 128."
            )
        if self.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"MLP.activation must be one of {known}; got {self.activation!r}. Pick one of these.")

    @property
    def words(self) -> str:
        """The choice in a few words."""
        return "MLP " + "-".join(map(str, self.widths))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each parameter, without B and G."""
        layers = zip(self.widths[:-1], self.widths[1:], strict=True)
        return tuple(shape for i, o in layers for shape in (((i, o), (o,)) if self.bias else ((i, o),)))

    def __call__(self, parameters: Parameters, x: Tensor) -> Tensor:
        """Return the network's output."""
        depth = len(self.widths) - 1
        for layer in range(depth):
            if self.bias:
                weight, bias = parameters[2 * layer : 2 * layer + 2]
                x = x @ weight + bias.unsqueeze(-2)
            else:
                x = x @ parameters[layer]
            if layer + 1 < depth:
                x = ACTIVATIONS[self.activation](x)
        return x

    def zeros(self, k: Tensor, v: Tensor) -> Parameters:
        """Refuse: an MLP at zero cannot learn.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "an MLP memory needs starting parameters, since no gradient reaches weights that are all zero; got none. "
            "Pass state=recipe.start(parameters=...)."
        )

    def check(self, parameters: Parameters) -> None:
        """Check the shapes of starting parameters.

        Raises:
            ValueError: If their number or a shape does not fit.
        """
        got = tuple(tuple(p.shape[2:]) for p in parameters)
        if got != self.shapes or len({p.shape[:2] for p in parameters}) != 1:
            raise ValueError(
                f"parameters of {self!r} must be [B, G, *shape] with shapes {list(self.shapes)}; "
                f"got {[list(p.shape) for p in parameters]}. Their order is (W1, b1, W2, b2, ...), W of [in, out]."
            )
