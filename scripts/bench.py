"""Time every rule on this machine: whole sequences forwards and backwards by length, and single tokens.

A backward pass that is linear in time doubles from column to column; softmax attention quadruples. Each number is the
best of a few, for the machine may be busy.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from innerloop import dispatch, ops, rules
from innerloop.kernels.operator import Operator, Options
from innerloop.rule import Gate, Rule, register
from innerloop.testing import Call, draw_call

LENGTHS = (512, 1024, 2048, 4096)
SHAPE = {"B": 1, "H": 2, "G": 2, "K": 64, "V": 64}
PATIENCE = 10.0  # seconds a measurement; longer sequences of a rule that takes more are left out
REPEATS = 3
STEPS = 100


def best_of(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the least seconds that the work took, after one run to warm up."""
    work()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def forward(call: Call) -> None:
    """Run a sequence without keeping what a gradient needs."""
    with torch.no_grad():
        call.run()


def forward_and_backward(call: Call) -> None:
    """Run a sequence and take every gradient."""
    tracked = call.tracked()
    tracked.run()[0].sum().backward()


def steps(call: Call) -> None:
    """Feed single tokens to a memory that holds a few."""
    token = call.tokens(0, 1)
    timed = {gate.name for gate in call.rule.gates if "T" in gate.axes}
    gates = {name: x[:, 0] if name in timed else x for name, x in token.gates.items()}
    q, k, v = token.q[:, 0], token.k[:, 0], token.v[:, 0]
    with torch.no_grad():
        state = token.run()[1]
        for _ in range(STEPS):
            _, state = ops.step(call.rule, q, k, v, state=state, **gates)


def measure(name: str) -> dict[str, dict[str, float]]:
    """Return milliseconds by length, forwards and both ways, and microseconds a token through ``step``."""
    found: dict[str, dict[str, float]] = {"forward": {}, "both": {}, "step": {}}
    for length in LENGTHS:
        call = draw_call(name, T=length, dtype=torch.float32, **SHAPE)
        for what, work in (("forward", forward), ("both", forward_and_backward)):
            found[what][str(length)] = 1e3 * best_of(lambda work=work, call=call: work(call))
        if found["both"][str(length)] > 1e3 * PATIENCE:
            break
    call = draw_call(name, T=1, dtype=torch.float32, **SHAPE)
    found["step"]["1"] = 1e6 / STEPS * best_of(lambda: steps(call))
    return found


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
            self,
            q,
            k,
            v,
            {"g": g, "beta": beta},
            (),
            scale=1.0,
            initial_state=initial_state,
            output_final_state=False,
            cu_seqlens=None,
            use_qk_l2norm_in_kernel=False,
            form="chunk",
            chunk_size=None,
            backend=None,
        )


def cost_of_a_call() -> dict[str, float]:
    """Return microseconds that are no arithmetic: of a step, of a call that records a gradient, and of its parts."""
    rule = _Empty()
    rule.operator = Operator(
        "bench_empty",
        lambda tokens, states, size, constants: (torch.empty_like(tokens[2]), (torch.empty_like(states[0]),)),
        gates=("g", "beta"),
        states=rule.states,
    )
    register(rule)
    call = draw_call(rule, T=1, B=1, H=2, G=2, K=8, V=8, dtype=torch.float32, state=True)
    q, k, v, g, beta = (x[:, 0] for x in (call.q, call.k, call.v, *call.gates.values()))
    tracked = call.tracked()
    inputs = (tracked.q, tracked.k, tracked.v, *call.gates.values(), call.state)
    rest = (None, 1.0, False, 64, [])
    works = {
        "step": lambda: ops.step(rule, q, k, v, g=g, beta=beta, state=call.state, scale=1.0),
        "call": lambda: rule(tracked.q, tracked.k, tracked.v, **call.gates, initial_state=call.state),
        "run": lambda: ops.run(
            rule, tracked.q, tracked.k, tracked.v, **call.gates, initial_state=call.state, form="chunk", scale=1.0
        ),
        "operator": lambda: rule.operator(*inputs[:3], inputs[3:5], inputs[5:], Options(*rest)),
        "dispatched": lambda: torch.ops.innerloop.bench_empty(*inputs, *rest),
        "torch.empty_like": lambda: torch.empty_like(g),
    }

    def several(work: Callable[[], object]) -> None:
        for _ in range(20):
            work()

    return {what: 1e6 / 20 * best_of(lambda work=work: several(work), 500) for what, work in works.items()}


def line(name: str, found: dict[str, dict[str, float]]) -> str:
    """Return one row of the table."""
    columns = [found[what].get(str(length)) for what in ("forward", "both") for length in LENGTHS]
    numbers = "".join(f"{'-' if number is None else f'{number:.1f}':>9}" for number in columns)
    return f"{name:<30}{numbers}{found['step']['1']:>9.0f}"


def main() -> int:
    """Measure what was asked for and print a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rules", nargs="*", help="rules to time; all if none is named")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    arguments = parser.parse_args()
    known = [module.RULE.name for module in rules.ALL]
    unknown = sorted(set(arguments.rules) - set(known))
    if unknown:
        print(f"bench: a rule must be one of {' '.join(known)}; got {' '.join(unknown)}", file=sys.stderr)
        return 2
    shape = " ".join(f"{axis}={size}" for axis, size in SHAPE.items())
    print(f"{shape}, float32, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'':<30}{'forward, ms at T =':<36}{'and backward, ms at T =':<36}{'step, µs':>9}")
    print(f"{'':<30}{''.join(f'{length:>9}' for length in LENGTHS) * 2}")
    rows = {}
    cost = cost_of_a_call()
    for name in arguments.rules or known:
        rows[name] = measure(name)
        print(line(name, rows[name]), flush=True)
    print("cost of a call with nothing in it, µs: " + ", ".join(f"{what} {time:.1f}" for what, time in cost.items()))
    if arguments.json:
        machine = {"cpu": platform.processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        arguments.json.write_text(
            json.dumps({"shape": SHAPE, "machine": machine, "rows": rows, "call": cost}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
