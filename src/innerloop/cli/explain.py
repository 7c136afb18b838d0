"""Say which path a call takes, and why, without running it.

Only shapes and types are looked at: no tensor is filled.
"""

from __future__ import annotations

import argparse
import json
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from innerloop.cli.errors import InputError
from innerloop.cli.sizes import add_sizes, checked_sizes

if TYPE_CHECKING:
    from torch import Tensor

    from innerloop.dispatch import Plan
    from innerloop.rule import Rule

NAME = "explain"
_AXES = "B T H G K V n"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("rule", metavar="RULE", help="such as gated_delta_rule; innerloop rules lists them")
    add_sizes(parser, _AXES, B=1, H=4, K=64)
    parser.add_argument("--dtype", default="float32", help="float64, float32, bfloat16 or float16; float32")
    parser.add_argument("--form", default="auto", help="auto, recurrent or chunk; auto")
    parser.add_argument("--chunk-size", type=int, metavar="N", help="tokens a chunk; the rule's own if left out")
    parser.add_argument("--backend", help="the best present if left out")
    parser.add_argument(
        "--lengths", type=int, nargs="+", metavar="N", help="lengths of sequences that are packed in one row"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print which path the call takes.

    Args:
        arguments: What :func:`add` declared.

    Returns:
        0.

    Raises:
        InputError: If an argument is wrong, or the call would be.
    """
    sizes = checked_sizes(arguments, _AXES)
    lengths = arguments.lengths
    if lengths is not None and min(lengths) < 0:
        raise InputError(f"--lengths must be at least 0; got {min(lengths)}")
    if sizes["T"] is None:
        sizes["T"] = 2048 if lengths is None else sum(lengths)
    try:
        plan = _plan(arguments, sizes)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(str(error).partition("\n")[0]) from error
    packed = () if lengths is None else (f"packed: {len(lengths)} sequences; those of equal length run as one batch",)
    if arguments.json:
        print(json.dumps({**plan._asdict(), "reasons": [*plan.reasons, *packed]}, indent=1))
    else:
        print("\n".join((str(plan), *(f"  {line}" for line in packed))))
    return 0


def _plan(arguments: argparse.Namespace, sizes: dict[str, int]) -> Plan:
    import torch

    from innerloop import network, ops
    from innerloop.cli import networks
    from innerloop.rule import get, names

    rule = network.find(arguments.rule)
    if rule is None and arguments.rule not in names():
        raise InputError(f"rule must be one of {', '.join((*names(), *network.names()))}; got {arguments.rule!r}")
    known = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if arguments.dtype not in known:
        raise InputError(f"--dtype must be one of {', '.join(known)}; got {arguments.dtype}")
    bounds = None
    if arguments.lengths is not None:
        bounds = torch.tensor(list(accumulate(arguments.lengths, initial=0)))
    options: dict[str, Any] = {
        "cu_seqlens": bounds, "form": arguments.form, "chunk_size": arguments.chunk_size, "backend": arguments.backend,
    }  # fmt: skip
    if rule is not None:
        _check_steps(rule.name, sizes, several=False)
        return networks.plan(rule, sizes, known[arguments.dtype], **options)
    rule = get(arguments.rule)
    return ops.explain(ops.run, rule.name, **_tokens(rule, sizes, known[arguments.dtype]), **options)


def _check_steps(name: str, sizes: dict[str, int], *, several: bool) -> None:
    if sizes["n"] is not None and not several:
        raise InputError(f"--n counts the steps a token of rules that take several; {name} takes one. Leave it out")


def _tokens(rule: Rule, sizes: dict[str, int], dtype: Any) -> dict[str, Tensor]:  # ruff: ignore[any-type] - torch is not loaded yet
    """Return q, k, v and all gates, of the right shape and without memory."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    axes = {**rule.axes, **{gate.name: gate.axes for gate in rule.gates}}
    _check_steps(rule.name, sizes, several=any("n" in letters for letters in axes.values()))
    sizes = {**sizes, "Q": sizes["G"], "n": sizes["n"] or 2}
    with FakeTensorMode():
        return {name: torch.empty([sizes[x] for x in letters], dtype=dtype) for name, letters in axes.items()}
