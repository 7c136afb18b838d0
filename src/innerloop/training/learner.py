"""One update after another of a language model's weights."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor, nn

from innerloop.lm import LanguageModel
from innerloop.nn import parameter_groups
from innerloop.training.options import TrainingOptions


class Update(NamedTuple):
    """What one update has shown."""

    loss: float
    """Nats a token over the batch, before the update."""
    norm: float
    """The gradient's, before it was clipped."""
    rate: float


class Learner:
    """A model and the optimizer that trains it."""

    def __init__(self, model: LanguageModel, options: TrainingOptions) -> None:
        """Start with fresh moments."""
        self.model, self.options = model, options
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.optimizer = torch.optim.AdamW(
            decayed_groups(model, options.weight_decay),
            lr=options.rate,
            betas=(options.beta1, options.beta2),
            fused=True,
        )

    def update(self, batch: Tensor, step: int) -> Update:
        """Take the update that follows ``step`` others.

        Args:
            batch: Windows, ``[B, length + 1]``.
            step: By which the rate goes.

        Returns:
            Loss, gradient and rate.

        Raises:
            FloatingPointError: If the loss or the gradient is not finite; the weights are as they were.
        """
        self.model.train()
        rate = self.options.rate_at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        total, tokens = 0.0, batch[:, 1:].numel()
        for part in batch.split(self.options.part or len(batch)):
            with precision(self.options):
                loss, _ = self.model.loss(part[:, :-1], part[:, 1:], reduction="sum")
            (loss / tokens).backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip or torch.inf).item()
        if not (abs(total) < torch.inf and norm < torch.inf):
            raise FloatingPointError(f"the loss is {total / tokens} and its gradient has norm {norm}")
        self.optimizer.step()
        return Update(total / tokens, norm, rate)

    def moments(self) -> dict[str, Tensor]:
        """Return the optimizer's numbers by names that tell which parameter's they are."""
        return {
            f"{key}.{self.names[id(p)]}": value
            for p, numbers in self.optimizer.state.items()
            for key, value in numbers.items()
        }

    def set_moments(self, moments: dict[str, Tensor]) -> None:
        """Take up the moments of another learner of such a model; ValueError if they are not."""
        by_name = {name: p for p in self.model.parameters() if (name := self.names[id(p)])}
        found: dict[str, dict[str, Tensor]] = {}
        for key, value in moments.items():
            kind, _, name = key.partition(".")
            found.setdefault(name, {})[kind] = value
        # Before the first update there are none.
        if found and found.keys() != by_name.keys():
            odd = sorted(found.keys() ^ by_name.keys())[0]
            raise ValueError(f"the optimizer's moments must be those of the model's parameters; {odd} differs")
        for name, numbers in found.items():
            p = by_name[name]
            shapes = {kind: tuple(x.shape) for kind, x in numbers.items()}
            if shapes != {"step": (), "exp_avg": tuple(p.shape), "exp_avg_sq": tuple(p.shape)}:
                raise ValueError(f"the optimizer's moments of {name} must fit the model; got {shapes}")
            self.optimizer.state[p] = dict(numbers)


def decayed_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return a model's parameters in two groups: matrices with weight decay; and norms, biases, gates, embeddings.

    Args:
        model: A language model.
        weight_decay: Of the first group.

    Returns:
        Two groups as ``torch.optim.AdamW`` takes them; every parameter is in one, once.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    groups = parameter_groups(model, weight_decay)
    decayed, others = (list(group["params"]) for group in groups)  # pyright: ignore[reportArgumentType]
    others += [p for p in decayed if id(p) in embeddings]
    decayed = [p for p in decayed if id(p) not in embeddings]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def precision(options: TrainingOptions) -> contextlib.AbstractContextManager[object]:
    """Return the context in which the model runs forwards."""
    if options.precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast("cpu", torch.bfloat16)
