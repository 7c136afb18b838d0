"""An example run as it says, and by the float64 token loop, and the distance between the two."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from scripts.fuzz.example import DTYPES, Example, bounds, build, laid_out
from torch import Tensor

from innerloop import ops
from innerloop.rule import Rule, State, get
from innerloop.shapes import compute_dtype
from innerloop.testing import TOLERANCES, Call


def run(example: Example, call: Call) -> tuple[Tensor, State]:
    """Run the call as the example says."""
    options: dict[str, Any] = {"scale": example.scale, "use_qk_l2norm_in_kernel": example.l2norm}
    if example.form == "step" and not example.lengths and call.q.shape[1]:
        return stepped(call, options)
    options["output_final_state"] = example.final
    if example.form != "step" and not (example.form == "chunk" and not call.rule.has_chunk):
        options["form"] = example.form
    options["chunk_size"] = example.chunk_size
    packing = bounds(example)
    if packing is not None:
        return call.run(cu_seqlens=torch.tensor(packing), **options)
    if example.cut is None or example.cut > call.q.shape[1]:
        return call.run(**options)
    first, second = call.tokens(0, example.cut), call.tokens(example.cut, call.q.shape[1])
    first.state = call.state
    out, second.state = first.run(**{**options, "output_final_state": True})
    rest, state = second.run(**options)
    return torch.cat((out, rest), 1), state


def stepped(call: Call, options: dict[str, Any]) -> tuple[Tensor, State]:
    """Feed tokens one at a time through ``ops.step``."""
    timed = {gate.name for gate in call.rule.gates if "T" in gate.axes}
    state, outputs = call.state, []
    for t in range(call.q.shape[1]):
        gates: dict[str, Any] = {name: x[:, t] if name in timed else x for name, x in call.gates.items()}
        out, state = ops.step(call.rule, call.q[:, t], call.k[:, t], call.v[:, t], state=state, **options, **gates)
        outputs.append(out)
    return torch.stack(outputs, 1), state


def truth(example: Example, exact: Call) -> tuple[Tensor, State]:
    """Run the token loop in float64, every packed sequence by itself."""
    options = {"scale": example.scale, "use_qk_l2norm_in_kernel": example.l2norm, "form": "recurrent"}
    packing = bounds(example)
    if packing is None:
        return exact.run(**options)
    outputs, states = [], []
    for n, (start, stop) in enumerate(pairwise(packing)):
        piece = exact.tokens(start, stop)
        if exact.state is not None:
            piece.state = exact.rule.packed_state([x[n : n + 1] for x in exact.rule.state_tensors(exact.state)])
        out, state = piece.run(**options)
        outputs.append(out)
        states.append(exact.rule.state_tensors(state))
    around = [outputs[0].new_zeros((1, n, *outputs[0].shape[2:])) for n in example.junk]
    joined = [torch.cat(filled_up(parts)) for parts in zip(*states, strict=True)]
    return torch.cat([around[0], *outputs, around[1]], 1), exact.rule.packed_state(joined)


def filled_up(parts: Sequence[Tensor]) -> list[Tensor]:
    """Give states that grow with their sequence one capacity."""
    if parts[0].ndim < 2 or len({x.shape[1] for x in parts}) == 1:
        return list(parts)
    room = max(x.shape[1] for x in parts)
    return [torch.cat((x, x.new_zeros((x.shape[0], room - x.shape[1], *x.shape[2:]))), 1) for x in parts]


def outcome(rule: Rule, result: tuple[Tensor, State]) -> dict[str, Tensor]:
    """Return what can be compared: output and states, those that grow up to what the longest row keeps."""
    out, state = result
    if state is None:
        return {"o": out}
    named = dict(zip(rule.states, rule.state_tensors(state), strict=True))
    if rule.grows:
        room = max(int(x.max()) for name, x in named.items() if not rule.states[name])
        named = {name: x[:, :room] if rule.states[name] else x for name, x in named.items()}
    return {"o": out, **named}


def check(example: Example) -> None:
    """Hold values and gradients to the truth; raises AssertionError, or whatever the call raises."""
    call = build(example)
    names = [name for i, name in enumerate(call.tensors()) if example.tracked >> i & 1]
    exact = call.map(lambda _, x: x.detach().double().requires_grad_(bool(names)))
    call = call.map(lambda name, x: x.detach().requires_grad_(name in names))
    got, want = outcome(call.rule, run(example, call)), outcome(call.rule, truth(example, exact))
    compare(got, want, "values", example)
    roots = [name for name, x in got.items() if x.requires_grad]
    if names and roots:
        seeds = cotangents([got[name] for name in roots], example)
        pulled = gradients(got, call, roots, names, seeds)
        exactly = gradients(want, exact, roots, list(call.tensors()), [x.double() for x in seeds])
        compare(pulled, exactly, "gradients", example)


def cotangents(roots: Sequence[Tensor], example: Example) -> list[Tensor]:
    """Draw what is pulled back, in the layout of the inputs."""
    generator = torch.Generator().manual_seed(example.seed + 1)
    drawn = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in roots]
    layout = random.Random(example.seed + 1)
    return [laid_out(x, example.layout, ("B", "T", "G", "V")[: x.ndim], layout) for x in drawn]


def gradients(
    found: dict[str, Tensor], call: Call, roots: Sequence[str], names: Sequence[str], seeds: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Pull the cotangents of some outcomes back to some of the call's tensors."""
    leaves = [call.tensors()[name] for name in names]
    outputs = [found[name] for name in roots]
    pulled = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True, materialize_grads=True)
    return {f"gradient of {name}": x for name, x in zip(names, pulled, strict=True)}


def compare(got: dict[str, Tensor], want: dict[str, Tensor], kind: str, example: Example) -> None:
    """Raise AssertionError unless each tensor is within its bar.

    A tensor may also be off by the rounding of what it is made from, as large as the largest of the others: where
    terms cancel, nothing is left to be relative to.
    """
    sizes = {name: largest(x) for name, x in want.items()}
    around = max((size for size in sizes.values() if size < torch.inf), default=0.0)
    for name, x in got.items():
        assert x.shape == want[name].shape, f"{name} has shape {list(x.shape)} instead of {list(want[name].shape)}"
        if not x.is_floating_point():
            assert torch.equal(x, want[name]), f"{name} is {x.tolist()} instead of {want[name].tolist()}"
            continue
        dtype = max((DTYPES[example.dtype], x.dtype), key=lambda dtype: torch.finfo(dtype).eps)
        if sizes[name] > torch.finfo(x.dtype).max:
            continue  # the definition itself leaves the range of this dtype
        error = largest(x.double() - want[name])
        limit = bar(kind, dtype, example) * sizes[name] + rounding(dtype) * around + vanishing(dtype)
        words = f"{name} is off by {error:.1e}; allowed are {limit:.1e} ({example.dtype}, at most {sizes[name]:.1e})"
        assert error <= limit, words


def largest(x: Tensor) -> float:
    """Return the largest magnitude; 0 of nothing."""
    return x.detach().abs().amax().item() if x.numel() else 0.0


def rounding(dtype: torch.dtype) -> float:
    """Return what a few operations in the precision of arithmetic for ``dtype`` may round away."""
    return 8 * torch.finfo(compute_dtype(dtype)).eps


def vanishing(dtype: torch.dtype) -> float:
    """Return the size below which numbers of ``dtype`` may vanish; decays are clamped at e^-120, about 1e-52."""
    return max(torch.finfo(dtype).tiny, 1e-50)


def bar(kind: str, dtype: torch.dtype, example: Example) -> float:
    """Return the table's bar; a repeated key that is reflected has one of its own."""
    found = TOLERANCES[kind][dtype]
    reflects = any(gate.high == 2 for gate in get(example.rule).gates) and example.edges != "none"
    if reflects and dtype in TOLERANCES["reflections"]:
        tenfold = TOLERANCES[kind][dtype] / TOLERANCES["values"][dtype]
        return max(found, tenfold * TOLERANCES["reflections"][dtype])
    return found
