"""The public functions: every rule by its name, any rule by ``run`` and ``step``, and what a call would do.

All take ``q, k`` as ``[B, T, H, K]`` and ``v`` as ``[B, T, G, V]`` and return ``(o, state)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from innerloop import dispatch
from innerloop.checks import Backend, Form, check_inputs, check_options, check_token, serves
from innerloop.dispatch import Plan
from innerloop.network import NetworkRule, find, named_arguments
from innerloop.network_call import planned, unlooked
from innerloop.rule import Rule, State, get, take_gates
from innerloop.rules.cms import CMSState, cms, cms_update
from innerloop.rules.delta_product import delta_product
from innerloop.rules.delta_rule import delta_rule
from innerloop.rules.gated_delta_rule import gated_delta_rule
from innerloop.rules.gdn2 import gdn2
from innerloop.rules.gla import gla
from innerloop.rules.hope import HopeState, HopeWeights, hope
from innerloop.rules.kda import kda
from innerloop.rules.linear_attention import linear_attention
from innerloop.rules.longhorn import longhorn
from innerloop.rules.longhorn_diagonal import longhorn_diagonal
from innerloop.rules.mamba2 import mamba2
from innerloop.rules.mesa import MesaState, mesa
from innerloop.rules.momentum_delta_rule import MomentumState, momentum_delta_rule
from innerloop.rules.normalized_linear_attention import NormalizedState, normalized_linear_attention
from innerloop.rules.recursive_least_squares import MomentState, recursive_least_squares
from innerloop.rules.retention import retention
from innerloop.rules.rwkv7 import rwkv7
from innerloop.rules.softmax_attention import AttentionState, softmax_attention
from innerloop.rules.titans import TitansState, titans
from innerloop.rules.ttt import TTTState, ttt
from innerloop.shapes import check_tensor

__all__ = [
    "AttentionState",
    "CMSState",
    "HopeState",
    "HopeWeights",
    "MesaState",
    "MomentState",
    "MomentumState",
    "NormalizedState",
    "TTTState",
    "TitansState",
    "cms",
    "cms_update",
    "delta_product",
    "delta_rule",
    "explain",
    "gated_delta_rule",
    "gdn2",
    "gla",
    "hope",
    "kda",
    "linear_attention",
    "longhorn",
    "longhorn_diagonal",
    "mamba2",
    "mesa",
    "momentum_delta_rule",
    "normalized_linear_attention",
    "recursive_least_squares",
    "retention",
    "run",
    "rwkv7",
    "softmax_attention",
    "step",
    "titans",
    "ttt",
]


def run(
    rule: str | Rule | NetworkRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    form: Form = "auto",
    chunk_size: int | None = None,
    backend: Backend | None = None,
    **gates: Any,
) -> tuple[Tensor, State]:
    r"""Run any registered rule over a sequence.

    .. math:: m_t = \mathrm{write}(m_{t-1}; k_t, v_t), \qquad o_t = m_t(q_t)

    Args:
        rule: A rule's name, or a registered Rule. ``hope`` and ``cms`` make their own keys and values: call them by
            their functions.
        q: Queries, ``[B, T, H, K]``.
        k: Keys, ``[B, T, H, K]``.
        v: Values, ``[B, T, G, V]``.
        scale: Finite number that multiplies the read; the rule's default if None.
        initial_state: The rule's state before the first token; empty if None.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of N packed sequences in one row (B=1), ``[N+1]``, int32 or int64.
        use_qk_l2norm_in_kernel: Make q and k unit length first, ``x * rsqrt(sum(x^2) + 1e-6)``.
        form: ``"recurrent"``, ``"chunk"`` or ``"auto"``.
        chunk_size: Tokens a chunk; changes nothing beyond rounding.
        backend: ``None`` for the best present, ``"torch"``, or ``"cpu"`` for the native kernel.
        **gates: The rule's gates and constants by name; of ``ttt`` and ``titans`` also all else that their functions
            take, such as ``weights``.

    Returns:
        ``o`` of ``[B, T, G, V]`` in v's dtype, and the final state or None.

    Raises:
        TypeError: If an input is no float tensor, or dtypes differ.
        ValueError: If the rule or a gate is unknown, a gate is missing, a shape disagrees or a value is out of range.
        RuntimeError: If a named backend cannot serve.

    Example:
        >>> import torch
        >>> from innerloop import ops
        >>> q, k, v = torch.randn(3, 1, 9, 2, 4).unbind(0)
        >>> o, _ = ops.run("delta_rule", q, k, v, beta=torch.rand(1, 9, 2))
        >>> ops.run("delta_rule", q, k, v)
        Traceback (most recent call last):
            ...
        ValueError: delta_rule needs the gate 'beta'; got none
    """
    if (network := find(rule)) is not None:
        return _public(network, gates)(
            q, k, v, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
            cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, form=form, chunk_size=chunk_size,
            backend=backend, **gates,
        )  # fmt: skip
    assert not isinstance(rule, NetworkRule)
    rule = get(rule)
    taken, constants = take_gates(rule, gates)
    return dispatch.call(
        rule,
        q,
        k,
        v,
        taken,
        constants,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        form=form,
        chunk_size=chunk_size,
        backend=backend,
    )


def step(
    rule: str | Rule | NetworkRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: State,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    overwrite_state: bool = False,
    **gates: Any,
) -> tuple[Tensor, State]:
    r"""Write one token into a rule's memory and read it.

    .. math:: m_t = \mathrm{write}(m_{t-1}; k_t, v_t), \qquad o_t = m_t(q_t)

    Args:
        rule: A rule's name, or a registered Rule; as in ``run``.
        q: Query, ``[B, H, K]``.
        k: Key, ``[B, H, K]``.
        v: Value, ``[B, G, V]``.
        state: The rule's state before this token; None before the first.
        scale: Finite number that multiplies the read; the rule's default if None.
        use_qk_l2norm_in_kernel: Make q and k unit length first, ``x * rsqrt(sum(x^2) + 1e-6)``.
        overwrite_state: Write the next state into the memory of the given one, which a loop that needs no other copy of
            it does twice as fast; without gradients only, and not for a state that grows.
        **gates: The rule's gates and constants by name, without a time axis; of ``ttt`` and ``titans`` also all else
            that their functions take. Values are not looked at.

    Returns:
        ``o`` of ``[B, G, V]`` in v's dtype, and the state after the token.

    Raises:
        TypeError: If an input is no float tensor, or dtypes differ.
        ValueError: If the rule or a gate is unknown, a gate is missing, a shape disagrees, or the state cannot be
            overwritten.

    Example:
        >>> import torch
        >>> from innerloop import ops
        >>> q, k, v = torch.randn(3, 1, 9, 2, 4).unbind(0)
        >>> whole, _ = ops.linear_attention(q, k, v)
        >>> state = None
        >>> for t in range(9):
        ...     o, state = ops.step("linear_attention", q[:, t], k[:, t], v[:, t], state=state)
        >>> torch.allclose(o, whole[:, -1], atol=1e-5)
        True
    """
    if (network := find(rule)) is not None:
        return _network_step(network, q, k, v, state, scale, use_qk_l2norm_in_kernel, overwrite_state, gates)
    assert not isinstance(rule, NetworkRule)
    rule = get(rule)
    taken, constants = take_gates(rule, gates)
    return dispatch.step(
        rule, q, k, v, taken, constants, state=state, scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        overwrite_state=overwrite_state,
    )  # fmt: skip


def _public(rule: NetworkRule, given: dict[str, Any]) -> Callable[..., Any]:
    """Return the function of a rule whose memory is a network, once it is seen to take all that is given."""
    function = globals()[rule.name]
    if tuple(rule.axes)[:3] != ("q", "k", "v"):
        raise ValueError(f"{rule.name} makes its own keys and values, and is not run on q, k, v; "
                         f"call innerloop.ops.{rule.name}({', '.join(rule.axes)}, ...)")  # fmt: skip
    named_arguments(rule, function, given)
    return function


def _network_step(
    rule: NetworkRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Any,  # ruff: ignore[any-type] - a state is any structure
    scale: float | None,
    l2norm: bool,
    overwrite_state: bool,
    given: dict[str, Any],
) -> tuple[Tensor, Any]:
    """Run a sequence of one token."""
    function = _public(rule, given)
    if overwrite_state:
        raise ValueError(f"overwrite_state is for states of matrices, and {rule.name} holds networks; leave it out")
    timed = {gate.name for gate in rule.gates}
    alike = {name: x for name, x in given.items() if name not in timed}
    for name, x in (("q", q), ("k", k), ("v", v), *((name, given[name]) for name in timed)):
        check_tensor(name, x)
    with unlooked():
        o, after = function(
            q[:, None], k[:, None], v[:, None], scale=scale, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=l2norm, **{name: given[name][:, None] for name in timed}, **alike,
        )  # fmt: skip
    return o[:, 0], after


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
    """Say which form and backend a call would take, and why, without running it.

    Args:
        function: One of this module's functions.
        *args: What it would be called with.
        **kwargs: What it would be called with.

    Returns:
        A Plan that prints as a few lines.

    Raises:
        TypeError: If ``function`` is not one of these functions, or the call's own TypeError.
        ValueError: If the call itself would raise it.

    Example:
        >>> import torch
        >>> from innerloop import explain, ops
        >>> q, k, v = torch.randn(3, 1, 100, 2, 8).unbind(0)
        >>> print(explain(ops.linear_attention, q, k, v, backend="torch"))
        linear_attention: chunk form in chunks of 64, torch backend
          T = 100: the chunk form is parallel in time
          backend='torch' was asked for
    """
    name = getattr(function, "__name__", "")
    if globals().get(name) is not function or name not in __all__ or name == "explain":
        raise TypeError(f"explain takes a function of innerloop.ops; got {function!r}")
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if (network := find(given["rule"] if function in (run, step) else name)) is not None:
        found = planned(function, *args, **kwargs)
        form = "step" if function is step else found.form
        return Plan(network.name, form, "torch", found.chunk_size, found.reasons)
    rule = get(given["rule"] if function in (run, step) else name)
    named = given.get("gates", {}) if function in (run, step) else given
    gates, constants = take_gates(rule, named if function in (run, step) else {x: named[x] for x in rule.takes})
    q, k, v = given["q"], given["k"], given["v"]
    if function is step:
        check_token(rule, q, k, v, gates, given["state"])
        check_options(rule, constants, given["scale"])
        backend = "cpu" if serves(rule, q, "auto", None) else "torch"
        return Plan(rule.name, "step", backend, None, ("one token is one step",))
    check_inputs(rule, q, k, v, gates, given["initial_state"], given["cu_seqlens"])
    return dispatch.plan(
        rule, q, k, v, gates, given["initial_state"], constants, scale=given["scale"], form=given["form"],
        chunk_size=given["chunk_size"], backend=given["backend"],
    )  # fmt: skip
