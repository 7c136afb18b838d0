"""What all layers share: the call, padding and packing, the state, and initial values."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from innerloop.algebra.convolution import own
from innerloop.arguments import check_count
from innerloop.checks import check_bounds, check_packing
from innerloop.network import find
from innerloop.nn.convolution import ShortConvolution
from innerloop.nn.sequences import Packed, Sequences, arrange
from innerloop.nn.state import LayerState
from innerloop.rule import State
from innerloop.shapes import check_tensor, compute_dtype, readable


class Given(NamedTuple):
    """What a layer gave an op: all that its memory has learned from in one call."""

    function: Callable[..., Any]
    """Of ``innerloop.ops``."""
    tokens: tuple[Tensor, ...]
    options: dict[str, Any]
    """Gates, first weights and constants by name."""
    part: str
    """Which of the layer's memories, if it has several; else empty."""


Observer = Callable[[Given], None]


class Layer(nn.Module):
    """A memory with its projections: ``[B, T, D]`` to ``[B, T, D]``, and the state after it.

    A subclass names its rule and writes ``mix``, which is the paper's equations for tokens in sequences. Padding,
    packing, splitting and the state come from here.
    """

    rule: str = ""
    """The rule of ``innerloop.ops`` that it runs."""
    _observers: tuple[Observer, ...] = ()

    def __init__(self, width: int) -> None:
        """Keep the model width; the subclass adds its modules, whose initial values are their own business."""
        super().__init__()
        check_count("width", width)
        self.width = width

    def forward(
        self,
        x: Tensor,
        state: LayerState | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, LayerState]:
        """Run the layer over tokens, behind those that ``state`` has seen.

        Any split of a sequence into calls gives the same outputs and final state. What pads hold, even NaN, reaches
        nothing.

        Args:
            x: Tokens, ``[B, T, D]``.
            state: What the last call returned; None before the first token.
            attention_mask: Truths or 0 and 1, ``[B, T]``: which tokens of this call are real. Pads may stand on either
                side, and differ from call to call.
            cu_seqlens: Bounds of N packed sequences in one row (B=1), ``[N+1]``, int32 or int64; the state then has N
                rows. A mask beside it must be all ones.

        Returns:
            ``y`` of ``[B, T, D]``, 0 at pads, and the state after each row's last real token.

        Raises:
            TypeError: If an input has another type.
            ValueError: If a shape disagrees, or the state is another layer's.
        """
        packed = self._arranged(x, state, attention_mask, cu_seqlens)
        x = packed.pack(x)
        turn = Turn(self.rule, x, packed.sequences, state, self._observers)
        return packed.unpack(self.mix(x, turn)), turn.after()

    @contextmanager
    def observed(self, observer: Observer) -> Generator[None, None, None]:
        """Tell someone, inside the block, of every op that the layer runs, once it has run.

        Args:
            observer: Is called with what the memory was given.
        """
        self._observers = (*self._observers, observer)
        try:
            yield
        finally:
            self._observers = tuple(other for other in self._observers if other is not observer)

    def mix(self, x: Tensor, turn: Turn) -> Tensor:
        """Map the tokens of sequences; ``turn`` convolves, remembers and reads."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draw all initial values anew, as the constructor did: also what ``to_empty`` left without any."""
        reset_children(self)

    def _arranged(
        self, x: Tensor, state: LayerState | None, attention_mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> Packed:
        check_tensor("x", x)
        if x.ndim != 3 or x.shape[-1] != self.width:
            raise ValueError(f"x must have shape [B, T, D] with D={self.width}; got {list(x.shape)}")
        rows = x.shape[0]
        if cu_seqlens is not None:
            check_packing(cu_seqlens, rows)
            if readable(cu_seqlens):
                check_bounds(cu_seqlens, x.shape[1])
            rows = cu_seqlens.shape[0] - 1
        if attention_mask is not None:
            check_mask(attention_mask, x)
            if cu_seqlens is not None and readable(attention_mask) and not bool(attention_mask.all()):
                raise ValueError("attention_mask must be all ones beside cu_seqlens, which already says what is real")
        if state is not None:
            _check_state(state, self.rule, rows)
        return arrange(x, attention_mask, cu_seqlens)


class Turn:
    """One call of a layer: it lends the state's parts to those who ask for them, and keeps what they become."""

    def __init__(
        self,
        rule: str,
        x: Tensor,
        sequences: Sequences,
        past: LayerState | None,
        observers: tuple[Observer, ...] = (),
    ) -> None:
        """Start where the past ends."""
        self.observers = observers
        self.rule, self.sequences, self.past = rule, sequences, past
        self.memory: State = None
        self.windows: dict[str, Tensor] = {}
        rows = x.shape[0] if sequences.bounds is None else sequences.bounds.shape[0] - 1
        self.rows = rows
        self.position = x.new_zeros(rows, dtype=torch.int64) if past is None else past.position
        self._placed = x

    def convolve(self, name: str, convolution: ShortConvolution, x: Tensor) -> Tensor:
        """Return the convolution of ``[B, T, C]``, whose last inputs the state keeps under this name."""
        y, self.windows[name] = convolution(x, self._window(name, convolution.taps - 1, x), self.sequences.bounds)
        return y

    def shift(self, name: str, x: Tensor) -> Tensor:
        """Return for each token the one before it in its sequence, zeros before the first."""
        row, place, self.windows[name] = self.sequences.behind(self._window(name, 1, x), x)
        return row[:, :-1] if place is None else row[:, (place - 1).clamp(min=0)]

    def positions(self) -> Tensor:
        """Return each token's place in its sequence, ``[B, T]``."""
        return self.sequences.positions(self._placed, self.position)

    def read(self, function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Run an op of ``innerloop.ops`` from the state's memory on, and keep the memory after it."""
        q, k = q.to(v.dtype), k.to(v.dtype)
        o, self.memory = function(
            q,
            k,
            v,
            initial_state=None if self.past is None else self.past.memory,
            output_final_state=True,
            cu_seqlens=self.sequences.bounds,
            **options,
        )
        self.tell(function, (q, k, v), options)
        return o

    def tell(
        self, function: Callable[..., Any], tokens: tuple[Tensor, ...], options: dict[str, Any], part: str = ""
    ) -> None:
        """Tell those who observe the layer what its memory was given."""
        for observer in self.observers:
            observer(Given(function, tokens, options, part))

    def learn(self, function: Callable[..., Any], *tokens: Tensor, part: str = "", **options: Any) -> Tensor:
        """Run an op whose memory is a network; a layer's second memory is kept under the name of its ``part``."""
        before = None if self.past is None else self.past.memory
        rule = find(getattr(function, "__name__", ""))
        assert rule is not None
        if part and self.past is not None:
            own = {name: x for name, x in self.past.windows.items() if name.startswith(f"{part}.")}
            before = rule.from_named({name.removeprefix(f"{part}."): x for name, x in own.items()})
        o, after = function(
            *tokens, initial_state=before, output_final_state=True, cu_seqlens=self.sequences.bounds, **options
        )
        self.tell(function, tokens, options, part)
        if part:
            self.windows |= {f"{part}.{name}": x for name, x in rule.named(after).items()}
        else:
            self.memory = after
        return o

    def look_back(self, name: str, x: Tensor, width: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Put the last tokens of ``[B, T, C]`` in front of each sequence, as ``shift`` does.

        Returns:
            The longer row or rows, where each token stands in it if not behind, and for each place of it the sequence
            that it belongs to and its position there, below 0 before the first token.
        """
        row, place, self.windows[name] = self.sequences.behind(self._window(name, width - 1, x), x)
        before = self.position[:, None] + torch.arange(1 - width, 0, device=x.device)
        owner = torch.arange(self.rows, device=x.device)[:, None].expand_as(before)
        bounds = self.sequences.bounds
        mine = torch.arange(self.rows, device=x.device)[:, None].expand(x.shape[:2]) if bounds is None else (
            own(bounds, x.shape[1])[None]
        )  # fmt: skip
        pairs = ((before, self.positions()), (owner, mine))
        spot, owner = (self.sequences.behind(old[..., None], new[..., None])[0][..., 0] for old, new in pairs)
        return row, place, owner, spot

    def held(self, name: str, shape: tuple[int, int]) -> Tensor:
        """Return what the state keeps under a name, ``[N, *shape]``."""
        assert self.past is not None
        found = self.past.windows.get(name)
        if found is None or tuple(found.shape[1:]) != shape:
            got = "none" if found is None else list(found.shape)
            raise ValueError(f"the state's window {name!r} must have shape {[self.rows, *shape]}; got {got}. "
                             "Give a layer only what it or one built alike has returned.")  # fmt: skip
        return found

    def after(self) -> LayerState:
        """Return the state after this call."""
        return LayerState(self.rule, self.memory, self.windows, self.position + self.sequences.lengths(self._placed))

    def _window(self, name: str, width: int, x: Tensor) -> Tensor:
        wanted = (self.rows, width, x.shape[-1])
        if self.past is None:
            return x.new_zeros(wanted, dtype=compute_dtype(x.dtype))
        window = self.past.windows.get(name)
        if window is None or tuple(window.shape) != wanted:
            got = "none" if window is None else list(window.shape)
            raise ValueError(f"the state's window {name!r} must have shape {list(wanted)}; got {got}. "
                             "Give a layer only what it or one built alike has returned.")  # fmt: skip
        return window


def reset_children(module: nn.Module) -> None:
    """Draw the initial values of all that a module has below it anew, each by its own ``reset_parameters``."""
    for child in module.children():
        reset = getattr(child, "reset_parameters", None)
        if reset is None:
            reset_children(child)
        else:
            reset()


def check_mask(mask: Tensor, x: Tensor) -> None:
    """Check a mask's type, and its shape by that of ``[B, T, ...]``."""
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.is_complex():
        raise TypeError("attention_mask must be a tensor of truths, or of the whole numbers 0 and 1; "
                        f"got {mask.dtype if isinstance(mask, Tensor) else type(mask).__name__}")  # fmt: skip
    if mask.shape != x.shape[:2]:
        raise ValueError(f"attention_mask must have shape [B, T] = {list(x.shape[:2])}; got {list(mask.shape)}")


def _check_state(state: LayerState, rule: str, rows: int) -> None:
    if not isinstance(state, LayerState):
        raise TypeError(f"state must be a LayerState that a layer has returned; got {type(state).__name__}")
    if state.rule != rule:
        raise ValueError(f"state must be one of {rule}; got one of {state.rule}")
    if state.position.shape[0] != rows:
        raise ValueError(f"state must have N={rows} rows; got {state.position.shape[0]}")
