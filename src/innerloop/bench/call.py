"""What a call costs that is no arithmetic: checks, dispatch, and the way through autograd."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from innerloop import dispatch, ops
from innerloop.kernels.native import missing
from innerloop.kernels.operator import Operator, Options
from innerloop.rule import Gate, Rule, register
from innerloop.testing import draw_call


class _Empty(Rule):
    """A rule that does nothing: what is left is the cost of a call."""

    name = "bench_empty"
    departs = "it computes nothing"
    gates = (
        Gate("g", low=-math.inf, high=0.0, enforced=True),
        Gate("beta", low=0.0, high=2.0),
    )
    operator: Operator

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return what was given."""
        return v, state

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, state: Tensor | None, options: Options
    ) -> tuple[Tensor, Tensor]:
        """Call an operator that only makes room for its outputs."""
        out, after = self.operator(q, k, v, (g, beta), (state,), options)
        return out, after

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, initial_state: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Call as the written-out functions of ``innerloop.ops`` do."""
        return dispatch.call(
            self, q, k, v, {"g": g, "beta": beta}, (), scale=1.0, initial_state=initial_state, output_final_state=False,
            cu_seqlens=None, use_qk_l2norm_in_kernel=False, form="chunk", chunk_size=None, backend=None,
        )  # fmt: skip


@functools.cache
def _rule() -> _Empty:
    rule = _Empty()
    rule.operator = Operator(
        "bench_empty",
        lambda tokens, states, size, constants: (torch.empty_like(tokens[2]), (torch.empty_like(states[0]),)),
        gates=("g", "beta"),
        states=rule.states,
    )
    register(rule)
    return rule


def cost_of_a_call(repeats: int = 300) -> dict[str, float]:
    """Return the least microseconds of a step, of a call that records a gradient, of its parts, and of a kernel's call.

    The least, not the median: what an operating system adds is not the library's.
    """
    rule = _rule()
    call = draw_call(rule, T=1, B=1, H=2, G=2, K=8, V=8, dtype=torch.float32, state=True)
    q, k, v, g, beta = (x[:, 0] for x in (call.q, call.k, call.v, *call.gates.values()))
    tracked = call.tracked()
    inputs = (tracked.q, tracked.k, tracked.v, *call.gates.values(), call.state)
    rest = (None, 1.0, False, 64, ())
    given: dict[str, Any] = {**call.gates, "initial_state": call.state, "form": "chunk", "scale": 1.0}
    works = {
        "step": lambda: ops.step(rule, q, k, v, g=g, beta=beta, state=call.state, scale=1.0),
        "call": lambda: rule(tracked.q, tracked.k, tracked.v, **call.gates, initial_state=call.state),
        "run": lambda: ops.run(rule, tracked.q, tracked.k, tracked.v, **given),
        "operator": lambda: rule.operator(*inputs[:3], inputs[3:5], inputs[5:], Options(*rest)),
        "dispatched": lambda: torch.ops.innerloop.bench_empty(*inputs, *rest, 0, True),
        "torch.empty_like": lambda: torch.empty_like(g),
    }
    if not missing():
        # As little arithmetic as there can be, through the library and back.
        works["native step"] = lambda: ops.step(
            "gated_delta_rule", q, k, v, g=g, beta=beta, state=call.state, scale=1.0
        )
        works["native call"] = lambda: ops.gated_delta_rule(tracked.q, tracked.k, tracked.v, **given)
    return {what: 1e6 * _least(work, repeats) for what, work in works.items()}


def _least(work: Callable[[], object], repeats: int, inner: int = 20) -> float:
    least = math.inf
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(inner):
            work()
        least = min(least, (time.perf_counter() - begin) / inner)
    return least
