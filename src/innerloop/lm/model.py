"""A causal language model in plain PyTorch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from innerloop.lm.block import Block
from innerloop.lm.config import Config
from innerloop.lm.decoder import Decoder, decoder
from innerloop.lm.files import read_model, write_model
from innerloop.lm.loss import IGNORED, Reduction, head_loss
from innerloop.lm.sampling import Sampling, last_tokens
from innerloop.lm.state import State
from innerloop.nn.dropout import Dropout
from innerloop.nn.gates import Wide
from innerloop.nn.layer import check_mask, reset_children
from innerloop.nn.norms import RMSNorm
from innerloop.nn.projections import Projection
from innerloop.shapes import readable


class LanguageModel(nn.Module):
    """An embedding, blocks of layers as the configuration names them, a norm and a head.

    Args:
        config: What it is made of.

    Example:
        >>> import torch
        >>> from innerloop.lm import Config, LanguageModel
        >>> model = LanguageModel(Config(vocab_size=50, width=32, heads=2, pattern="2*gated_delta_rule+attention"))
        >>> tokens = torch.randint(50, (2, 12))
        >>> logits, _ = model(tokens)
        >>> first, state = model(tokens[:, :7])
        >>> second, state = model(tokens[:, 7:], state)
        >>> torch.allclose(torch.cat((first, second), 1), logits, atol=1e-5)
        True
        >>> loss, _ = model.loss(tokens[:, :-1], tokens[:, 1:])
        >>> len(list(model.generate(tokens, max_new_tokens=5)))
        5
    """

    def __init__(self, config: Config) -> None:
        """Draw the weights from torch's generator."""
        super().__init__()
        if not isinstance(config, Config):
            raise TypeError(f"config must be an innerloop.lm.Config; got {type(config).__name__}")
        self.config = config
        self.checkpointing = config.checkpointing
        self.embedding = Embedding(config.vocab_size, config.width, config.initial_std)
        entries, seen = config.layers, Counter[str]()
        total = Counter(entry.rule for entry in entries)
        self.blocks = nn.ModuleList()
        for entry in entries:
            self.blocks.append(Block(config, entry, seen[entry.rule], total[entry.rule]))
            seen[entry.rule] += 1
        self.norm = RMSNorm(config.width, eps=config.norm_eps)
        self.head = None if config.tied else Projection(config.width, config.vocab_size)
        self.dropout = Dropout(config.dropout)

    @property
    def head_weight(self) -> Tensor:
        """The head's weight, ``[vocab_size, D]``."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(
        self,
        tokens: Tensor,
        state: State | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Return the logits of the token after each, behind those that ``state`` has seen.

        Args:
            tokens: Numbers below ``vocab_size``, ``[B, T]``, int64; whatever pads hold reaches nothing.
            state: What the last call returned; None before the first token.
            attention_mask: Truths or 0 and 1, ``[B, T]``: which tokens of this call are real; pads on either side.
            cu_seqlens: Bounds of N packed sequences in one row (B=1), ``[N+1]``; the state then has N rows.

        Returns:
            Logits, ``[B, T, vocab_size]``, and the state after each row's last real token.

        Raises:
            TypeError: If an input has another type.
            ValueError: If a shape disagrees, a token is out of range, or the state is another model's.
        """
        x, state = self.hidden(tokens, state, attention_mask=attention_mask, cu_seqlens=cu_seqlens)
        return self.logits(x), state

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        state: State | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        reduction: Reduction = "mean",
    ) -> tuple[Tensor, State]:
        """Return the cross entropy of the logits after each token against its label, in nats.

        The logits are made and used up a piece at a time, in the backward pass as well.

        Args:
            tokens: As in ``forward``.
            labels: What comes after each token, ``[B, T]``, int64: usually the tokens, moved by one. -100 does not
                count, and neither does a label at a pad or outside of all packed sequences.
            state: As in ``forward``.
            attention_mask: As in ``forward``.
            cu_seqlens: As in ``forward``.
            reduction: ``"mean"`` over the labels that count, 0 if there are none; ``"sum"``; or ``"none"``.

        Returns:
            The loss in float32 or wider, a scalar or ``[B, T]`` with 0 where no label counts; and the state.

        Raises:
            TypeError: If an input has another type.
            ValueError: If a shape disagrees, a token or label is out of range, or the reduction is unknown.
        """
        _check_integers("labels", labels)
        if isinstance(tokens, Tensor) and labels.shape != tokens.shape:
            raise ValueError(f"labels must have the tokens' shape {list(tokens.shape)}; got {list(labels.shape)}")
        x, state = self.hidden(tokens, state, attention_mask=attention_mask, cu_seqlens=cu_seqlens)
        loss = self.loss_of(x, labels, attention_mask=attention_mask, cu_seqlens=cu_seqlens, reduction=reduction)
        return loss, state

    def loss_of(
        self,
        x: Tensor,
        labels: Tensor,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Return the loss of what the head reads, ``[B, T, D]``; the rest as in ``loss``."""
        if reduction not in get_args(Reduction):
            raise ValueError(f"reduction must be one of {', '.join(map(repr, get_args(Reduction)))}; got {reduction!r}")
        if attention_mask is not None:
            labels = labels.masked_fill(attention_mask == 0, IGNORED)
        if cu_seqlens is not None:
            place = torch.arange(labels.shape[1], device=labels.device)
            labels = labels.masked_fill((place < cu_seqlens[0]) | (place >= cu_seqlens[-1]), IGNORED)
        self._check_range("labels", labels.masked_fill(labels == IGNORED, 0), 0)
        loss = head_loss(x.flatten(0, 1), self.head_weight, labels.flatten(), reduction)
        return loss.view(labels.shape) if reduction == "none" else loss

    def hidden(
        self,
        tokens: Tensor,
        state: State | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        streams: list[Tensor] | None = None,
    ) -> tuple[Tensor, State]:
        """Return what the head reads, ``[B, T, D]``, and the state; arguments and errors as in ``forward``.

        To ``streams`` is added what each block reads, and last what the head reads.
        """
        tokens = self._checked(tokens, attention_mask)
        self._check_state(state)
        if attention_mask is not None and readable(attention_mask) and bool(attention_mask.all()):
            attention_mask = None  # seen once, instead of by every layer
        x = self.dropout(self.embedding(tokens))
        value, after = None, []
        saves = self.checkpointing and self.training and torch.is_grad_enabled()
        for i, block in enumerate(self.blocks):
            if streams is not None:
                streams.append(x)
            args = (x, None if state is None else state.layers[i], attention_mask, cu_seqlens, value)
            x, layer, value = checkpoint(block, *args, use_reentrant=False) if saves else block(*args)
            after.append(layer)
        x = self.norm(x)
        if streams is not None:
            streams.append(x)
        return x, State(tuple(after))

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits, ``[..., vocab_size]``, of what the head reads, ``[..., D]``."""
        return F.linear(x, self.head_weight)

    def generate(
        self,
        tokens: Tensor,
        state: State | None = None,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Collection[int] = (),
        attention_mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Write on, a token of every row at a time, as they come.

        A model of recurrent layers takes the same time and memory for each token, however many came before. The model
        writes as in evaluation, whatever its mode.

        Args:
            tokens: What to go on from, ``[B, T]`` with T at least 1.
            state: What came before ``tokens``, as ``forward`` returns it.
            max_new_tokens: How many to write; without end if None.
            temperature: By which logits are divided, at least 0; 0 takes the likeliest token.
            top_k: Draw from so many of the likeliest tokens alone.
            top_p: Draw from the likeliest tokens alone that together have at least this chance, in (0, 1].
            stop: Tokens that end a row. It repeats its own from there on, until all rows have ended.
            attention_mask: Which of ``tokens`` are real, ``[B, T]``, at least one a row; pads on either side.
            generator: What to draw from; torch's own if None.

        Returns:
            An iterator over the next token of every row, int64 ``[B]``.

        Raises:
            TypeError: If an input has another type.
            ValueError: If one is out of range, or a row has no token.
        """
        sampling = Sampling(temperature, top_k, top_p, generator)
        if max_new_tokens is not None and (not isinstance(max_new_tokens, int) or max_new_tokens < 0):
            raise ValueError(f"max_new_tokens must be a whole number of at least 0, or None; got {max_new_tokens!r}")
        tokens = self._checked(tokens, attention_mask)
        for end in stop:
            if not isinstance(end, int) or not 0 <= end < self.config.vocab_size:
                raise ValueError(f"stop must hold tokens in [0, vocab_size={self.config.vocab_size}); got {end!r}")
        last = last_tokens(tokens, attention_mask)
        return self._generate(tokens, state, attention_mask, last, max_new_tokens, sampling, frozenset(stop))

    def _generate(
        self,
        tokens: Tensor,
        state: State | None,
        attention_mask: Tensor | None,
        last: Tensor,
        count: int | None,
        sampling: Sampling,
        stop: frozenset[int],
    ) -> Iterator[Tensor]:
        ends = torch.tensor(sorted(stop), dtype=torch.int64, device=tokens.device)
        ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        rows, token = torch.arange(len(tokens), device=tokens.device), tokens[:, 0]
        written: Decoder | None = None
        first = True
        while count is None or count > 0:
            # Inference mode saves an eighth of what is no arithmetic; no state leaves it, and of a token a copy.
            with torch.inference_mode():
                if state is not None and not first and (written is None or not written.fits()):
                    state = state if written is None else written.state
                    written = decoder(self, state)
                if first or written is None:
                    x, state = self._evaluated(tokens, state, attention_mask)
                    logits = self.logits(x[rows, last])
                else:
                    logits = written(token)
                first = False
                drawn = torch.where(ended, token, sampling(logits))
            token = drawn.clone()
            yield token
            if stop:
                ended = ended | torch.isin(token, ends)
                if bool(ended.all()):
                    return
            count = None if count is None else count - 1
            tokens, attention_mask, last = token[:, None], None, torch.zeros_like(last)

    def _evaluated(self, tokens: Tensor, state: State | None, attention_mask: Tensor | None) -> tuple[Tensor, State]:
        training = self.training
        if not training:
            return self.hidden(tokens, state, attention_mask=attention_mask)
        self.eval()
        try:
            return self.hidden(tokens, state, attention_mask=attention_mask)
        finally:
            self.train()

    def reset_parameters(self) -> None:
        """Draw all initial values anew, as the constructor did: also what ``to_empty`` left without any."""
        reset_children(self)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``config.json`` and ``model.safetensors``; whatever interrupts it, each is the old one or the new.

        Args:
            folder: Made if there is none; what else it holds is left alone.

        Raises:
            OSError: If a file cannot be written.
        """
        write_model(folder, self.config, self.state_dict())

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> LanguageModel:
        """Read what ``save`` wrote, to the bit, on the CPU; it draws no numbers.

        Args:
            folder: The folder.

        Returns:
            The model, in training mode like any new one.

        Raises:
            ValueError: If the folder holds something else, a file is damaged or of another version.
            OSError: If a file is missing.
        """
        config, weights = read_model(folder)
        with torch.device("meta"):
            model = cls(config)
        _check_weights(folder, dict(model.state_dict()), weights)
        model.load_state_dict(weights, assign=True)
        for module in model.modules():
            if isinstance(module, Wide):
                module._mark()  # the parameters are new ones
        return model

    def _checked(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the tokens with pads emptied, once they are seen to be some."""
        _check_integers("tokens", tokens)
        if attention_mask is not None:
            check_mask(attention_mask, tokens)
            tokens = tokens.masked_fill(attention_mask == 0, 0)
        self._check_range("tokens", tokens, 0)
        return tokens

    def _check_range(self, name: str, tokens: Tensor, least: int) -> None:
        if readable(tokens) and tokens.numel():
            low, high = (int(x) for x in tokens.aminmax())
            if low < least or high >= self.config.vocab_size:
                raise ValueError(
                    f"{name} must lie in [{least}, vocab_size={self.config.vocab_size}); got {low} to {high}"
                )

    def _check_state(self, state: State | None) -> None:
        if state is None:
            return
        if not isinstance(state, State):
            raise TypeError(f"state must be a State that a model has returned; got {type(state).__name__}")
        if len(state.layers) != len(self.blocks):
            raise ValueError(f"state must have {len(self.blocks)} layers; got {len(state.layers)}")


class Embedding(nn.Embedding):
    """An embedding whose start is normal with a deviation of its own."""

    def __init__(self, count: int, width: int, std: float) -> None:
        """Draw the weights."""
        self.std = std
        super().__init__(count, width)

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        if not self.weight.is_meta:  # torch would load its compiler to draw none
            nn.init.normal_(self.weight, std=self.std)


def _check_integers(name: str, tokens: Tensor) -> None:
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64:
        got = str(tokens.dtype) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"{name} must be an int64 tensor; got {got}")
    if tokens.ndim != 2:
        raise ValueError(f"{name} must have shape [B, T]; got {list(tokens.shape)}")


def _check_weights(folder: str | os.PathLike[str], wanted: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    if wanted.keys() != found.keys():
        odd = sorted(wanted.keys() ^ found.keys())[0]
        what = "is missing" if odd in wanted else "is one too many"
        raise ValueError(f"the weights in {folder} must be those of its configuration; {odd} {what}")
    for name, x in wanted.items():
        if x.shape != found[name].shape:
            raise ValueError(f"the weights in {folder} must be those of its configuration: {name} must have shape "
                             f"{list(x.shape)}; got {list(found[name].shape)}")  # fmt: skip
