"""Who runs a workload: this library, its portable form, and what people run without it."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from innerloop import ops
from innerloop.bench.workload import DTYPES, Workload
from innerloop.checks import Backend, refusal
from innerloop.experiments.blocks.gated_delta_net import token_loop
from innerloop.rule import get
from innerloop.testing import Call

Answer = Callable[..., Tensor]
AGAINST = ("torch", "transformers", "sdpa", "loop")
"""Whom a rule can be compared with: our portable form, transformers without its GPU kernels, softmax attention, and a
loop over tokens as the documents write it."""
_FALLBACKS = {
    ("gated_delta_rule", False): "torch_chunk_gated_delta_rule",
    ("gated_delta_rule", True): "torch_recurrent_gated_delta_rule",
    ("kda", False): "chunk_kimi_delta_attention",
    ("kda", True): "recurrent_kimi_delta_attention",
}
"""What transformers runs without a GPU kernel, for a sequence and for a token."""
_MODELS = {"gated_delta_rule": ("qwen3_5", "qwen3_next", "olmo_hybrid"), "kda": ("kimi_linear", "glm5_next")}
"""Whose files hold it, by version."""


class Absent(Exception):
    """Someone who cannot run the workload here, and why, in one line."""


class Contender:
    """Someone with a workload's inputs in hand.

    Args:
        name: ``innerloop`` or one of :data:`AGAINST`.
        workload: What to run.
        call: Its inputs, where they are drawn already.

    Raises:
        Absent: If it is not installed, or has no such rule.
    """

    def __init__(self, name: str, workload: Workload, call: Call | None = None) -> None:
        """Bring the inputs into the layout that it wants, which is not timed."""
        self.name, self.workload = name, workload
        makers = {"innerloop": _ours, "torch": _portable, "transformers": _transformers, "sdpa": _sdpa, "loop": _loop}
        answer = makers[name](workload)
        call = workload.draw() if call is None else call
        if workload.way == "decode":
            self._run = _decoder(name, answer, call, workload)
            # What it answers first: its memory is another one after every run.
            self._asked = lambda: _decoder(name, answer, call, workload)()
            return
        self._leaves = [x.detach().clone() for x in _inputs(name, call)]
        self._answer = answer
        if workload.way == "both":
            self._leaves = [x.requires_grad_() for x in self._leaves]
            shape = (workload.B, *_order(name, workload.T, workload.heads), workload.width)
            slope = torch.linspace(-1, 1, workload.width, dtype=DTYPES[workload.dtype])
            self._slope = slope.expand(shape).contiguous()
        self._asked = self._run = self._both if workload.way == "both" else self._forward

    def __call__(self) -> object:
        """Run the workload once."""
        return self._run()

    def output(self) -> Tensor:
        """Return what it answers, ``[B, T, G, V]``, to compare with another."""
        found = self._asked()
        out = found[0] if isinstance(found, tuple) else found
        assert isinstance(out, Tensor)
        return out.transpose(1, 2) if self.name == "sdpa" else out

    def _forward(self) -> Tensor:
        with torch.no_grad():
            return self._answer(*self._leaves)

    def _both(self) -> tuple[Tensor, ...]:
        out = self._answer(*self._leaves)
        return (out.detach(), *torch.autograd.grad(out, self._leaves, self._slope))


def transformers_version() -> str:
    """Return the version of transformers, or an empty string."""
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return ""


def title(name: str, workload: Workload) -> str:
    """Return whom a contender is, with version, for a line of text."""
    if name == "transformers":
        found = _FALLBACKS.get((workload.rule, workload.way == "decode"))
        return f"transformers {transformers_version()} {found or ''}".strip()
    words = {
        "innerloop": "innerloop", "torch": "our portable form", "loop": "the documents' token loop",
        "sdpa": f"softmax attention of torch {torch.__version__.partition('+')[0]}",
    }  # fmt: skip
    return words[name]


def _order(name: str, length: int, heads: int) -> tuple[int, int]:
    """Return tokens and heads in the order in which a contender has them."""
    return (heads, length) if name == "sdpa" else (length, heads)


def _inputs(name: str, call: Call) -> list[Tensor]:
    if name == "sdpa":
        q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
        q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
        return [x.contiguous() for x in (q, k, v)]
    return [call.q, call.k, call.v, *call.gates.values()]


def _through(workload: Workload, backend: Backend | None) -> Answer:
    rule = get(workload.rule)
    names = [gate.name for gate in rule.gates]
    constants = {x.name: x.drawn_by_width * workload.K for x in rule.constants if x.drawn_by_width}

    def answer(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        named: dict[str, Any] = dict(zip(names, gates, strict=True))
        return ops.run(rule, q, k, v, backend=backend, **constants, **named)[0]

    return answer


def _ours(workload: Workload) -> Answer:
    return _through(workload, None)


def _portable(workload: Workload) -> Answer:
    return _through(workload, "torch")


def _transformers(workload: Workload) -> Answer:
    name = _FALLBACKS.get((workload.rule, workload.way == "decode"))
    if name is None:
        raise Absent(f"transformers has no {workload.rule}")
    if not transformers_version():
        raise Absent("transformers is not installed: pip install 'innerloop[bench]'")
    function = _found(workload.rule, name)
    if workload.way == "decode":
        return function
    return lambda q, k, v, g, beta: function(q, k, v, g=g, beta=beta)[0]


def _found(rule: str, name: str) -> Answer:
    for model in _MODELS[rule]:
        try:
            return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
        except (ImportError, AttributeError):
            continue
    raise Absent(f"transformers {transformers_version()} has no {name}")


def _sdpa(workload: Workload) -> Answer:
    if workload.way == "decode":
        raise Absent("softmax attention has no state of one size to decode from")
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _loop(workload: Workload) -> Answer:
    if workload.rule != "gated_delta_rule" or workload.way == "decode":
        raise Absent(f"the documents have no token loop of {workload.rule} to time so")
    scale = workload.K**-0.5
    return lambda q, k, v, g, beta: scale * token_loop(q, k, v, g, beta)


def _decoder(name: str, answer: Answer, call: Call, workload: Workload) -> Callable[[], object]:
    """Return one step from a state that stays, as a server's next token is one; none of its inputs wants a gradient."""
    state = call.run()[1]
    if name == "transformers":
        given = {**call.gates, "initial_state": state, "output_final_state": True}
        return lambda: answer(call.q, call.k, call.v, **given)
    if name == "torch":
        token = replace(call, state=state)
        return lambda: token.run(backend="torch")
    timed = {gate.name for gate in call.rule.gates if "T" in gate.axes}
    gates: dict[str, Any] = {n: x[:, 0] if n in timed else x for n, x in call.gates.items()}
    q, k, v = call.q[:, 0], call.k[:, 0], call.v[:, 0]
    native = refusal(call.rule) == "" and state is not None  # only a kernel writes a memory where it lies
    return lambda: ops.step(workload.rule, q, k, v, state=state, overwrite_state=native, **gates)
