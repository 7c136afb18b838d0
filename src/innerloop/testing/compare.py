"""The distance to truth, and the one table of bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from innerloop.checks import refusal
from innerloop.rule import Rule, State
from innerloop.shapes import compute_dtype
from innerloop.testing.draw import Call

TOLERANCES: dict[str, dict[torch.dtype, float]] = {
    "values": {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2},
    "gradients": {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-1, torch.float16: 2e-1},
    # At beta |k|^2 near 2 a repeated key is reflected, never damped: any chunk form is at 5e-5 to 1e-4 (T <= 512).
    "reflections": {torch.float64: 1e-10, torch.float32: 2e-4},
}
CHUNK = 16
"""The chunk size around which lengths are chosen."""


def error(got: Tensor, want: Tensor) -> float:
    """Return ``max|got - want| / max|want|``; inf where one is not finite and the other is not the same."""
    got, want = got.detach().double(), want.detach().double()
    if got.shape != want.shape:
        raise AssertionError(f"shape {list(got.shape)} instead of {list(want.shape)}")
    if got.numel() == 0 or torch.equal(got, want):
        return 0.0
    difference = (got - want).abs().amax().item()
    if difference != difference:
        return float("inf")
    return difference / max(want.abs().amax().item(), torch.finfo(torch.float64).tiny)


Tensors = Tensor | dict[str, Tensor]


def assert_close(got: Tensors, want: Tensors, dtype: torch.dtype, kind: str = "values", what: str = "") -> None:
    """Compare tensors, or dicts of them, with truth at the table's bar for ``kind`` and ``dtype``."""
    if isinstance(want, dict) and isinstance(got, dict):
        for name, truth in want.items():
            assert_close(got[name], truth, dtype, kind, f"{what} {name}".strip())
        return
    assert isinstance(got, Tensor) and isinstance(want, Tensor)
    found, bar = error(got, want), TOLERANCES[kind][dtype]
    if not found <= bar:
        raise AssertionError(f"{what or 'value'} is off by {found:.1e}; the bar for {kind} in {dtype} is {bar:.0e}")


def outcome(rule: Rule, result: tuple[Tensor, State]) -> dict[str, Tensor]:
    """Return the output and the float states of a run by name."""
    out, state = result
    named = {"o": out, **dict(zip(rule.states, rule.state_tensors(state), strict=True))}
    return {name: x for name, x in named.items() if x is not None and x.is_floating_point()}


def gradients(call: Call, result: tuple[Tensor, State]) -> dict[str, Tensor]:
    """Return the gradient of a fixed random functional of output and final state for every tensor of a tracked call."""
    generator = torch.Generator().manual_seed(5)
    total = torch.zeros((), dtype=torch.float64)
    for x in outcome(call.rule, result).values():
        total = total + (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()
    tensors = call.tensors()
    found = torch.autograd.grad(total, list(tensors.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(tensors, found, strict=True))


def truth(call: Call) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return values and gradients of the float64 token loop on a call's own numbers."""
    exact = call.to(torch.float64).tracked()
    result = exact.run(form="recurrent")
    return outcome(call.rule, result), gradients(exact, result)


def compare_all_forms(call: Call, what: str) -> None:
    """Hold values and gradients of every form to the truth of this call."""
    dtype = call.v.dtype
    values, slopes = truth(call)
    for form in forms(call.rule):
        got = call.tracked()
        result = got.run(**form)
        wide = {x.dtype for name, x in outcome(call.rule, result).items() if name != "o"}
        assert result[0].dtype == dtype, f"{what} {form}: o is {result[0].dtype} instead of {dtype}"
        assert wide <= {compute_dtype(dtype)}, f"{what} {form}: a state is {wide} instead of {compute_dtype(dtype)}"
        assert_close(outcome(call.rule, result), values, dtype, "values", f"{what} {form}")
        assert_close(gradients(got, result), slopes, dtype, "gradients", f"{what} {form} gradient of")


def forms(rule: Rule, sizes: Sequence[int] = (1, 4, CHUNK, 128)) -> Iterator[dict[str, Any]]:
    """Yield the options of every form, the chunk form at several sizes on every backend that serves the rule here."""
    yield {"form": "recurrent"}
    if rule.has_chunk:
        for backend in ("torch",) if refusal(rule) else ("torch", "cpu"):
            yield from ({"form": "chunk", "chunk_size": size, "backend": backend} for size in sizes)
