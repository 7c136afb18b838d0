"""How a model is trained: one frozen record that cannot be half wrong."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from innerloop.checks import check_field, check_least

Precision = Literal["float32", "bfloat16"]
"""Of the arithmetic; weights, moments and states are float32 in both."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How many updates on what windows, and how each is taken.

    Raises:
        TypeError: If a field has another type.
        ValueError: If a field is out of range.

    Example:
        >>> from innerloop.training import TrainingOptions
        >>> options = TrainingOptions(steps=100, warmup=10, rate=1e-3)
        >>> [round(options.rate_at(step), 6) for step in (0, 9, 10, 99)]
        [0.0001, 0.001, 0.001, 0.0001]
    """

    steps: int
    """Updates, the warm-up's included."""
    batch: int = 32
    """Windows an update."""
    part: int | None = None
    """Windows at once, whose gradients are summed; the whole batch if None."""
    length: int = 256
    """Tokens that are predicted in a window."""
    stride: int | None = None
    """From one window's start to the next one's; ``length`` if None, so that each token is predicted once a round."""
    rate: float = 1e-3
    """Of AdamW, at its highest."""
    final_rate: float = 0.1
    """What is left of it at the end, in [0, 1]: a cosine leads there."""
    warmup: int = 0
    """Updates over which the rate rises from zero; at most ``steps``."""
    weight_decay: float = 0.1
    """Of matrices; norms, biases, gates and embeddings have none."""
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    """The longest gradient an update takes, by its 2-norm over all parameters; 0 takes any."""
    precision: Precision = "float32"
    seed: int = 0
    """Of the first weights, the order of the windows, and dropout."""
    log_every: int = 10
    """Updates a line of the log."""
    evaluate_every: int = 100
    """Updates between two looks at the text to validate on."""
    evaluate_windows: int = 64
    """How many windows of it are looked at."""
    save_every: int = 100
    """Updates between two checkpoints."""

    def __post_init__(self) -> None:
        """Check every field."""
        for field in fields(self):
            check_field(field.name, field.type, getattr(self, field.name))
        for name in ("steps", "batch", "length", "log_every", "evaluate_every", "evaluate_windows", "save_every"):
            check_least(name, getattr(self, name), 1)
        for name in ("part", "stride"):
            if getattr(self, name) is not None:
                check_least(name, getattr(self, name), 1)
        for name in ("weight_decay", "clip", "seed"):
            check_least(name, getattr(self, name), 0)
        if self.seed >= 1 << 64:
            raise ValueError(f"seed must be below 2^64, what torch's generator takes; got {self.seed}")
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate must be finite and above 0; got {self.rate}")
        if not 0 <= self.final_rate <= 1:
            raise ValueError(f"final_rate must lie in [0, 1], a part of the rate; got {self.final_rate}")
        if not 0 <= self.warmup <= self.steps:
            raise ValueError(f"warmup must lie in [0, steps={self.steps}]; got {self.warmup}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1); got {getattr(self, name)}")
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision must be one of {', '.join(get_args(Precision))}; got {self.precision!r}")

    @property
    def window_stride(self) -> int:
        """From one window's start to the next one's."""
        return self.length if self.stride is None else self.stride

    def rate_at(self, step: int) -> float:
        """Return the rate of the update that follows ``step`` others."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        way = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * (self.final_rate + (1 - self.final_rate) * (1 + math.cos(math.pi * way)) / 2)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, as JSON can hold them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainingOptions:
        """Return the options of which ``to_dict`` returned this; ValueError or TypeError if it did not."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"training has the options {', '.join(sorted(known))}; got an unknown {unknown[0]!r}")
        if "steps" not in values:
            raise ValueError("training must say how many steps; got none")
        return cls(**values)
