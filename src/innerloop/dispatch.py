"""From a public call to the form and backend that serve it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import _C, Tensor

from innerloop.checks import (
    Backend,
    Form,
    Look,
    check_inputs,
    check_options,
    check_overwrite,
    check_token,
    check_values,
    choose_form,
    refusal,
    serves,
)
from innerloop.kernels.alike import Alike, alike, is_open, is_plain
from innerloop.kernels.native import Native, Values
from innerloop.kernels.operator import Options
from innerloop.kernels.portable import full_precision
from innerloop.rule import Gates, Rule, State
from innerloop.shapes import readable


class Plan(NamedTuple):
    """Which path a call takes, and why."""

    rule: str
    form: str
    backend: str
    chunk_size: int | None
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """Return the plan in a few lines."""
        size = "" if self.chunk_size is None else f" in chunks of {self.chunk_size}"
        return "\n".join((
            f"{self.rule}: {self.form} form{size}, {self.backend} backend",
            *(f"  {x}" for x in self.reasons),
        ))


def call(
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    constants: tuple[float, ...] = (),
    *,
    scale: float | None,
    initial_state: State,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    use_qk_l2norm_in_kernel: bool,
    form: Form,
    chunk_size: int | None,
    backend: Backend | None,
) -> tuple[Tensor, State]:
    """Check a call, run it, and return ``(o, state)``; ``state`` is None unless asked for."""
    key, args = None, ()
    native = _direct(rule)
    if native is not None and cu_seqlens is None and backend != "torch" and form != "recurrent" and is_open():
        args = (q, k, v, *gates.values(), *_given(rule, initial_state))
        key = _key(initial_state, scale, output_final_state, use_qk_l2norm_in_kernel, chunk_size, form, backend)
        ready = _READY.get(rule)
        if ready is not None and ready.key == key and ready.alike(*args):
            check_values(ready.looks, gates)
            return _again(rule, ready, q, k, v, gates, initial_state, output_final_state)
    looks = check_inputs(rule, q, k, v, gates, initial_state, cu_seqlens)
    if output_final_state is not False and output_final_state is not True:
        raise TypeError(f"output_final_state must be True or False; got {output_final_state!r:.40}")
    chosen = choose_form(rule, q.shape[1], form)
    size = check_options(rule, constants, scale, chunk_size, backend, use_qk_l2norm_in_kernel)
    served = serves(rule, q, form, backend)
    gates = rule.complete(gates, v)
    if scale is None:
        scale = rule.default_scale(q.shape[-1])
    room = _room(rule, initial_state, cu_seqlens) if rule.grows and cu_seqlens is not None else 0
    options = Options(cu_seqlens, float(scale), use_qk_l2norm_in_kernel, size, constants, room, served)
    if key is not None and served and native is not None and is_plain(args):
        records = _records(args)
        inputs = _inputs(rule, native, q, k, v, gates, initial_state)
        held = native.as_read(inputs, None)
        direct = all(x is y for x, y in zip(held, inputs, strict=False))
        values = native.prepare(held, options, records)._replace(direct=direct)
        ready = _READY[rule] = _Ready(key, alike(args), looks, options, values)
        return _again(rule, ready, q, k, v, gates, initial_state, output_final_state)
    run = rule.recurrent if chosen == "recurrent" and not served else rule.chunk
    out, state = run(q, k, v, state=initial_state, options=options, **gates)
    return out, state if output_final_state else None


def _records(args: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and _C._any_requires_grad(*args)


def _room(rule: Rule, state: State, cu_seqlens: Tensor) -> int:
    """Return how many tokens the longest of packed sequences will have, its state's among them; 0 if none may look."""
    if not readable(cu_seqlens):
        return 0
    (held,) = [x for x, axes in zip(rule.state_tensors(state), rule.states.values(), strict=True) if not axes]
    lengths = cu_seqlens.diff() if held is None else cu_seqlens.diff() + held
    return max(1, int(lengths.max()))


class _Ready(NamedTuple):
    """A call that passed the checks, ready for tensors of the same structure."""

    key: list[Any]
    """What it was given beside tensors."""
    alike: Alike
    looks: Sequence[Look]
    options: Options
    values: Values


_READY: dict[Rule, _Ready] = {}
"""The newest native call of each rule."""


def _direct(rule: Rule) -> Native | None:
    """Return the native kernel that takes the rule's own inputs."""
    if rule.family is None or rule.axes is not Rule.axes:
        return None
    native = rule.family.native
    return native if native is not None and native.present else None


def _given(rule: Rule, state: State) -> tuple[Any, ...]:
    """Return a state's tensors, or what was given for a state: that it is none, the checks say."""
    if state is None or rule.state_type is None or type(state) is rule.state_type:
        return rule.state_tensors(state)
    return (state,)


def _inputs(
    rule: Rule, native: Native, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: State
) -> tuple[Tensor | None, ...]:
    return (q, k, v, *[gates.get(name) for name in native.gates], *rule.state_tensors(state))


def _again(
    rule: Rule, ready: _Ready, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: State, output_final_state: bool
) -> tuple[Tensor, State]:
    family = rule.family
    inputs = _inputs(rule, family.native, q, k, v, rule.complete(gates, v), state)  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]
    out, *states = family.again(ready.values, inputs, ready.options)  # pyright: ignore[reportOptionalMemberAccess]
    return out, rule.packed_state(states) if output_final_state else None


class _ReadyStep(NamedTuple):
    """The same of one token."""

    key: list[Any]
    alike: Alike
    values: Values
    width: int
    """How many of the call's tensors, from q on, are what the kernel takes; 0 where it takes others."""


_READY_STEPS: dict[Rule, _ReadyStep] = {}
"""The newest native step of each rule."""


def _key(state: State, *options: object) -> list[Any]:
    """Return all that two calls with tensors that are alike may differ in; types first, which compare with all."""
    return [type(state), *map(type, options), torch.get_num_threads(), torch.is_grad_enabled(), *options]


def _token(
    rule: Rule, native: Native, ready: _ReadyStep, args: Sequence[Any], gates: Gates, state: State, overwrite: bool
) -> tuple[Tensor, State]:
    inputs = args[: ready.width]
    if not inputs:
        gates = rule.complete(gates, args[2])
        inputs = (*args[:3], *[gates.get(name) for name in native.gates])
    out, states = native.token(ready.values, inputs, rule.state_tensors(state), overwrite)
    return out, state if overwrite and state is not None else rule.packed_state(states)


def step(
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    constants: tuple[float, ...] = (),
    *,
    state: State,
    scale: float | None,
    use_qk_l2norm_in_kernel: bool,
    overwrite_state: bool,
) -> tuple[Tensor, State]:
    """Check one token, write and read it; values are not looked at."""
    key, args = None, ()
    native = _direct(rule)
    if native is not None and is_open():
        args = (q, k, v, *gates.values(), *_given(rule, state))
        key = _key(state, scale, use_qk_l2norm_in_kernel, overwrite_state)
        ready = _READY_STEPS.get(rule)
        if ready is not None and ready.key == key and ready.alike(*args):
            return _token(rule, native, ready, args, gates, state, overwrite_state)
    check_token(rule, q, k, v, gates, state)
    if overwrite_state is not False and (overwrite_state is not True or state is not None):
        check_overwrite(rule, (q, k, v, *gates.values()), state, overwrite_state)
    check_options(rule, constants, scale, l2norm=use_qk_l2norm_in_kernel)
    if scale is None:
        scale = rule.default_scale(q.shape[-1])
    gates = rule.complete(gates, v)
    if serves(rule, q, "auto", None):
        if key is not None and native is not None and is_plain(args) and not _records(args):
            states = rule.state_tensors(state)
            values = native.prepare_token(q, k, v, gates, states, float(scale), use_qk_l2norm_in_kernel)
            straight = tuple(gates) == native.gates and type(rule).complete is Rule.complete
            ready = _ReadyStep(key, alike(args), values, 3 + len(gates) if straight else 0)
            _READY_STEPS[rule] = ready
            return _token(rule, native, ready, args, gates, state, overwrite_state)
        out, after = _long_step(rule, q, k, v, gates, constants, state, float(scale), use_qk_l2norm_in_kernel)
    elif _C._is_any_autocast_enabled():
        with full_precision(q):
            out, after = _step(rule, q, k, v, gates, constants, state, float(scale), use_qk_l2norm_in_kernel)
    else:
        out, after = _step(rule, q, k, v, gates, constants, state, float(scale), use_qk_l2norm_in_kernel)
    if not overwrite_state or state is None:
        return out, after
    for old, new in zip(rule.state_tensors(state), rule.state_tensors(after), strict=True):
        old.copy_(new)  # pyright: ignore[reportOptionalMemberAccess]
    return out, state


def _step(
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    constants: tuple[float, ...],
    state: State,
    scale: float,
    l2norm: bool,
) -> tuple[Tensor, State]:
    inputs = (q, k, v, *gates.values(), *rule.state_tensors(state))
    (q, k, value, *values), states = rule.loop.portable.aligned(inputs, l2norm, scale, v.shape[0])
    named: dict[str, Any] = dict(zip(gates, values, strict=True))
    if constants:
        named.update(zip((constant.name for constant in rule.constants), constants, strict=True))
    out, state = rule.step(q, k, value, state=rule.packed_state(states), **named)
    return out if out.dtype == v.dtype else out.to(v.dtype), state


def _long_step(
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    constants: tuple[float, ...],
    state: State,
    scale: float,
    l2norm: bool,
) -> tuple[Tensor, State]:
    """Take a step as a sequence of one token: for derivatives, compilers, and rules with several writes a token."""
    gates = {name: x if x is None else x.unsqueeze(1) for name, x in gates.items()}
    options = Options(None, scale, l2norm, 1, constants)
    out, state = rule.chunk(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), state=state, options=options, **gates)
    return out.squeeze(1), state


def plan(
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: State,
    constants: tuple[float, ...],
    *,
    scale: float | None,
    form: Form,
    chunk_size: int | None,
    backend: Backend | None,
) -> Plan:
    """Say which path a call with these inputs takes, and why."""
    chosen = choose_form(rule, q.shape[1], form)
    size = check_options(rule, constants, scale, chunk_size, backend)
    native = rule.family.native if serves(rule, q, form, backend) and rule.family is not None else None
    if native is not None:
        args = (q, k, v, *gates.values(), *rule.state_tensors(state))
        records = _records(args)
        # Of rules with several writes a token, these are what a sequence has.
        size = native.chunk_size(size, v.shape[1:-2].numel(), q.shape[-1], v.shape[-1], records)
    if form != "auto":
        why = f"form={form!r} was asked for"
    elif chosen == "recurrent":
        why = "T = 1: one token is one step" if rule.has_chunk else f"{rule.name} has no form that is parallel in time"
    else:
        why = f"T = {q.shape[1]}: the chunk form is parallel in time"
    asked = f"backend={backend!r} was asked for" if backend else refusal(rule, q, form) or "a native kernel serves it"
    return Plan(
        rule.name, chosen, "torch" if native is None else "cpu", size if chosen == "chunk" and not rule.grows else None,
        (why, asked),
    )  # fmt: skip
