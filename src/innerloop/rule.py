"""What a memory rule is: how it writes and reads one token, what feeds it, and where it is found by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any, ClassVar

import torch
from torch import Tensor

from innerloop.kernels.loop import token_loop
from innerloop.kernels.operator import Operator, Options
from innerloop.recipe import Recipe

State = Any
"""A tensor, or a NamedTuple of tensors where a rule keeps several."""

Gates = dict[str, Any]
"""A tensor by the name of each gate, or None where it was left out."""

_TAKEN = frozenset(
    "q k v state scale initial_state output_final_state cu_seqlens use_qk_l2norm_in_kernel form chunk_size backend "
    "rule options".split()
)


@dataclass(frozen=True)
class Gate:
    """What a token says beside its query, key and value."""

    name: str
    low: float
    """Smallest value with a meaning; ``-inf`` is legal where it is this."""
    high: float
    """Largest value with a meaning."""
    feeds: str = ""
    """The recipe's field that takes it, such as ``solver.rate``; empty if the recipe has none."""
    axes: tuple[str, ...] = ("B", "T", "G")
    """One on the key side has H for G, and like q and k comes to ``step`` with value heads. One that is not given anew
    for every token (no B, T) is given to each by the rule's ``complete``."""
    optional: bool = False
    enforced: bool = False
    """Whether a value outside of ``[low, high]`` is an error (NaN always is)."""
    drawn: tuple[float, float] | None = None
    """What tests draw, if not all of ``[low, high]``."""

    @property
    def bounds(self) -> str:
        """What a value must do, in words, such as "lie in [0, 1]"."""
        if self.high == torch.finfo(torch.float32).max:
            return f"be finite and at least {self.low:.2g}"
        return f"lie in [{self.low:g}, {self.high:g}]"


@dataclass(frozen=True)
class Constant:
    """A number of a whole call."""

    name: str
    default: float
    above: float
    """Values must be larger than this."""
    whole: bool = False
    """Whether values must be whole numbers."""
    drawn_by_width: float | None = None
    """What tests draw, as a multiple of K; the default if None."""


class Rule:
    """A way to write a pair into a memory and to read it, one token at a time.

    A subclass says ``name``, ``gates``, ``states``, either ``recipe`` or ``departs``, and writes ``step``; a ``chunk``
    that is parallel in time may follow. Everything else (both forms with gradients, packing, compile, export, vmap,
    streaming, the contract tests) comes from these.

    Example:
        >>> import torch, innerloop
        >>> from innerloop.recipe import GradientStep, LinearMap, Recipe, Uniform
        >>> class HalfDelta(innerloop.Rule):
        ...     name = "half_delta_example"
        ...     recipe = Recipe(Uniform(), LinearMap(), GradientStep(rate=0.5))
        ...     def step(self, q, k, v, *, state):
        ...         error = v - torch.einsum("bgkv,bgk->bgv", state, k)
        ...         state = state + 0.5 * k[..., None] * error[..., None, :]
        ...         return torch.einsum("bgkv,bgk->bgv", state, q), state
        >>> _ = innerloop.register(HalfDelta())
        >>> q, k, v = torch.randn(3, 1, 6, 2, 4).unbind(0)
        >>> o, _ = innerloop.ops.run("half_delta_example", q, k, v)
        >>> o.shape
        torch.Size([1, 6, 2, 4])
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    """Where it was published: authors (year), arXiv id."""
    recipe: ClassVar[Recipe | None] = None
    """The three choices; a test executes it and compares with ``step``."""
    departs: ClassVar[str] = ""
    """Why the update is not one step on one loss, for a rule without a recipe."""
    gates: ClassVar[tuple[Gate, ...]] = ()
    states: ClassVar[dict[str, tuple[str, ...]]] = {"S": ("G", "K", "V")}
    """Name to axes of each state tensor, without the leading N; no axes: a count of tokens."""
    state_type: ClassVar[type | None] = None
    """The NamedTuple that holds several states; None for a single tensor."""
    constants: ClassVar[tuple[Constant, ...]] = ()
    """Numbers that a call may change."""
    axes: ClassVar[dict[str, tuple[str, ...]]] = {
        "q": ("B", "T", "H", "K"),
        "k": ("B", "T", "H", "K"),
        "v": ("B", "T", "G", "V"),
    }
    grouped: ClassVar[bool] = False
    """Whether q's heads are a multiple of k's and v's, instead of v's a multiple of q's and k's."""
    grows: ClassVar[bool] = False
    """Whether the state keeps every token."""
    nonnegative: ClassVar[bool] = False
    """Whether q and k are meant to be at least 0."""
    unit_scale: ClassVar[bool] = False
    """Whether ``scale=None`` means 1 rather than K^-1/2."""
    chunk_size: ClassVar[int] = 64
    """Tokens a chunk, where the call names none."""
    family: ClassVar[Operator | None] = None
    """What the chunk form maps onto, if that is one operator: its native kernel serves the rule, in ``step`` too."""

    loop: Operator
    """The token loop over ``step`` as an operator; made when the rule is registered."""
    takes: tuple[str, ...]
    """Names of its gates and constants; made when the rule is registered."""

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, state: State, **gates: Any) -> tuple[Tensor, State]:
        """Write one token ``[B, G, .]`` and read; heads are aligned, q carries the scale, gates come by name."""
        raise NotImplementedError

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, *, state: State, options: Options, **gates: Any
    ) -> tuple[Tensor, State]:
        """Run the whole sequence, parallel in time, on inputs as given: any dtype, heads not aligned."""
        raise NotImplementedError

    def complete(self, gates: Gates, v: Tensor) -> Gates:
        """Fill in what an optional gate defaults to, one value a token where ``v`` is ``[..., G, V]``."""
        del v
        return gates

    @property
    def has_chunk(self) -> bool:
        """Whether the rule has a form that is parallel in time."""
        return type(self).chunk is not Rule.chunk

    def default_scale(self, width: int) -> float:
        """Return the scale that ``None`` stands for with keys of this width."""
        return 1.0 if self.unit_scale else width**-0.5

    def packed_state(self, states: Sequence[Tensor]) -> State:
        """Return the tensors as callers see them: one alone, or the rule's NamedTuple."""
        return states[0] if self.state_type is None else self.state_type(*states)

    def state_tensors(self, state: State) -> tuple[Any, ...]:
        """Return the state's tensors in order; Nones where there is no state yet."""
        if state is None:
            return (None,) * len(self.states)
        return (state,) if self.state_type is None else tuple(state)

    def recurrent(
        self, q: Tensor, k: Tensor, v: Tensor, *, state: State, options: Options, **gates: Any
    ) -> tuple[Tensor, State]:
        """Run the definition: a token loop over ``step``."""
        out, *after = self.loop(q, k, v, tuple(gates.values()), self.state_tensors(state), options)
        return out, self.packed_state(after)

    def _make_loop(self) -> Operator:
        names = [gate.name for gate in self.gates]

        def dense(
            tokens: Sequence[Tensor | None], states: tuple[Tensor, ...], chunk_size: int, constants: Sequence[float]
        ) -> tuple[Tensor, tuple[Tensor, ...]]:
            del chunk_size
            numbers = dict(zip((constant.name for constant in self.constants), constants, strict=True))

            def step(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
                *gates, states = rest
                named = dict(zip(names, gates, strict=True))
                found = self.step(q, k, v, state=self.packed_state(states), **named, **numbers)
                if not isinstance(found, tuple) or len(found) != 2:
                    raise TypeError(f"{self.name}.step must return (o, state); got {type(found).__name__}")
                return found[0], self.state_tensors(found[1])

            return token_loop(step, tokens, states)

        return Operator(
            f"{self.name}_loop",
            dense,
            gates=names,
            states=self.states,
            keyed={
                gate.name: gate.axes.index("H") - len(gate.axes)
                for gate in self.gates
                if "H" in gate.axes and gate.axes[0] == "B"
            },
            grouped=self.grouped,
            grows=self.grows,
            fresh=False,
        )


_RULES: dict[str, Rule] = {}


def register(rule: Rule) -> Rule:
    """Make a rule known by its name, for ``ops.run``, ``ops.step`` and the contract tests.

    Args:
        rule: An instance of a subclass of Rule.

    Returns:
        The rule itself.

    Raises:
        TypeError: If ``rule`` is not an instance of a subclass of Rule.
        ValueError: If its name is taken or no identifier, a gate's name is taken, or it has not exactly one of
            ``recipe`` and ``departs``.

    Example:
        >>> import innerloop
        >>> innerloop.register(object())
        Traceback (most recent call last):
            ...
        TypeError: rule must be an instance of a subclass of innerloop.Rule; got object
    """
    if not isinstance(rule, Rule):
        got = f"the class {rule.__name__}, not yet called" if isinstance(rule, type) else type(rule).__name__
        raise TypeError(f"rule must be an instance of a subclass of innerloop.Rule; got {got}")
    _check_definition(rule)
    rule.loop = rule._make_loop()
    rule.takes = tuple(x.name for x in (*rule.gates, *rule.constants))
    _RULES[rule.name] = rule
    if rule.state_type is not None:
        # A saved state loads with torch.load's defaults, which unpickle nothing unknown.
        torch.serialization.add_safe_globals([rule.state_type])
    return rule


def _check_definition(rule: Rule) -> None:
    kind = type(rule).__name__
    if not isinstance(rule.name, str) or not rule.name.isidentifier() or iskeyword(rule.name):
        raise ValueError(f"{kind}.name must be a Python identifier; got {rule.name!r}")
    if rule.name in _RULES:
        raise ValueError(f"{kind}.name must be new; {rule.name!r} is taken. Give the rule another name.")
    if type(rule).step is Rule.step:
        raise ValueError(f"{kind} must define step(q, k, v, *, state, **gates); it has none")
    if (rule.recipe is None) == (not rule.departs):
        raise ValueError(f"{kind} must state either its recipe or, in departs, why it has none; it has "
                         f"{'neither' if rule.recipe is None else 'both'}")  # fmt: skip
    if (rule.state_type is None) != (len(rule.states) == 1):
        raise ValueError(f"{kind} must set state_type to a NamedTuple for several states, and only then; "
                         f"it has {len(rule.states)} states and {rule.state_type}")  # fmt: skip
    for field, kind_of in (("gates", Gate), ("constants", Constant)):
        values = getattr(rule, field)
        if not isinstance(values, tuple) or not all(isinstance(x, kind_of) for x in values):
            raise TypeError(f"{kind}.{field} must be a tuple of {kind_of.__name__}; got {values!r}")
    names = [*(x.name for x in (*rule.gates, *rule.constants)), *rule.states]
    for name in names:
        if name in _TAKEN or names.count(name) > 1 or not name.isidentifier() or iskeyword(name):
            raise ValueError(f"{kind} must give each gate, constant and state a name of its own; {name!r} is taken")
    _check_axes(rule, kind)
    takes = inspect.signature(rule.step).parameters
    wanted = [*(x.name for x in (*rule.gates, *rule.constants)), "state"]
    missing = [name for name in wanted if name not in takes]
    if missing and not any(x.kind is x.VAR_KEYWORD for x in takes.values()):
        raise ValueError(f"{kind}.step must take {', '.join(wanted)} by keyword; it does not take {', '.join(missing)}")


def _check_axes(rule: Rule, kind: str) -> None:
    for gate in rule.gates:
        if unknown := set(gate.axes) - {"B", "T", "n", "H", "G", "K", "V"}:
            raise ValueError(
                f"{kind}: gate {gate.name} must have axes of B, T, n, H, G, K, V; got {', '.join(sorted(unknown))}"
            )
        if gate.axes[:2] != ("B", "T") and type(rule).complete is Rule.complete:
            raise ValueError(
                f"{kind}: gate {gate.name} must have axes that begin with B, T, or the rule must define "
                f"complete(gates, v), which gives every token its own; got {', '.join(gate.axes)}"
            )
        if not gate.low < gate.high:
            raise ValueError(f"{kind}: gate {gate.name} must have low < high; got {gate.low} and {gate.high}")
    for name, axes in rule.states.items():
        if unknown := set(axes) - {"S", "H", "G", "K", "V"}:
            raise ValueError(f"{kind}: state {name} must have axes of G, K, V, H, S; got {', '.join(sorted(unknown))}")
    fields = getattr(rule.state_type, "_fields", None)
    if rule.state_type is not None and fields != tuple(rule.states):
        raise ValueError(f"{kind}.state_type must be a NamedTuple of {', '.join(rule.states)}; its fields are {fields}")


def get(rule: str | Rule) -> Rule:
    """Return the rule of this name, or the rule itself.

    Args:
        rule: A name, or a registered rule.

    Returns:
        The rule.

    Raises:
        TypeError: If it is neither.
        ValueError: If no rule has the name, or a rule was never registered.
    """
    if isinstance(rule, Rule):
        if _RULES.get(rule.name) is not rule:
            raise ValueError(f"rule {rule.name!r} must be registered before it is used; call innerloop.register(rule)")
        return rule
    if not isinstance(rule, str):
        raise TypeError(f"rule must be a name or a registered Rule; got {type(rule).__name__}")
    found = _RULES.get(rule)
    if found is None:
        raise ValueError(f"rule must be one of {', '.join(_RULES)}, or registered first; got {rule!r}")
    return found


def names() -> tuple[str, ...]:
    """Return the names of all registered rules, ours first."""
    return tuple(_RULES)


def take_gates(rule: Rule, given: Mapping[str, Any]) -> tuple[Gates, tuple[float, ...]]:
    """Sort what a caller passed by name.

    Args:
        rule: Whose gates they are.
        given: Gates and constants by name.

    Returns:
        All gates by name, None where left out, and the constants in order.

    Raises:
        ValueError: If a required gate is missing or a name is unknown.
    """
    for name in given:
        if name not in rule.takes:
            raise ValueError(f"{rule.name} takes {', '.join(rule.takes) or 'no gates'}; got an unknown {name!r}")
    gates = {}
    for gate in rule.gates:
        value = gates[gate.name] = given.get(gate.name)
        if value is None and not gate.optional:
            got = ", ".join(name for name, value in given.items() if value is not None)
            raise ValueError(f"{rule.name} needs the gate {gate.name!r}; got {got or 'none'}")
    return gates, tuple([given.get(constant.name, constant.default) for constant in rule.constants])
