"""What a training run's outcome depends on, in one record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from innerloop.lm import Config
from innerloop.threads import MOST
from innerloop.training.options import TrainingOptions

TokenizerKind = Literal["bytes", "pairs"]
Purpose = Literal["training", "comparison"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that a run's outcome depends on."""

    place: str
    """The text; see :func:`innerloop.data.documents`."""
    config: Config
    """Of the model; as many tokens as its ``vocab_size`` are learned where ``tokenizer`` is ``pairs``."""
    options: TrainingOptions
    column: str = "text"
    validation: str | None = None
    """The text to validate on; the end of ``place`` if None."""
    hold_out: float = 0.1
    """How much of ``place`` that end is."""
    tokenizer: TokenizerKind = "bytes"
    threads: int | None = None
    """Of torch; as many as it has now if None. Sums are the same to the bit for the same number alone."""
    board: bool = False
    """Whether to log for TensorBoard too."""
    purpose: Purpose = "training"
    """One model, or several whose patterns and seeds take the place of this one's."""

    def __post_init__(self) -> None:
        """Check what no part checks itself, and settle on a number of threads."""
        if not 0 <= self.hold_out < 1:
            raise ValueError(f"hold_out must lie in [0, 1), a part of the text; got {self.hold_out}")
        if self.tokenizer not in get_args(TokenizerKind):
            raise ValueError(f"tokenizer must be one of {', '.join(get_args(TokenizerKind))}; got {self.tokenizer!r}")
        if self.purpose not in get_args(Purpose):
            raise ValueError(f"purpose must be one of {', '.join(get_args(Purpose))}; got {self.purpose!r}")
        if self.threads is None:
            object.__setattr__(self, "threads", torch.get_num_threads())
        if not isinstance(self.threads, int) or not 1 <= self.threads <= MOST:
            raise ValueError(f"threads must be a whole number of at least 1 and at most {MOST}; got {self.threads!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, as JSON can hold them."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**fields, "config": self.config.to_dict(), "options": self.options.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """Return the plan of which ``to_dict`` returned this; ValueError or TypeError if it did not."""
        parts = {"config": Config.from_dict(values["config"]), "options": TrainingOptions.from_dict(values["options"])}
        return cls(**{**values, **parts})
