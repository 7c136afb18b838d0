"""What every rule is held to, one property a function."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from innerloop import ops
from innerloop.rule import Rule, get
from innerloop.shapes import align_heads
from innerloop.testing.compare import CHUNK, assert_close, compare_all_forms, forms, gradients, outcome, truth
from innerloop.testing.draw import Call, draw_call


def step_equals_the_executed_recipe(rule: Rule) -> None:
    """Compare the token loop over ``step`` with the recipe, run by autograd on its stated loss."""
    if rule.recipe is None:
        return
    call = draw_call(rule, T=11)
    heads = max(call.q.shape[-2], call.v.shape[-2])
    q, k, v = (align_heads(x, heads) for x in (call.q, call.k, call.v))
    complete = rule.complete(call.gates, call.v)
    gates = {gate.feeds: complete[gate.name] for gate in rule.gates}
    want, _ = rule.recipe.run(q * rule.default_scale(q.shape[-1]), k, v, gates=gates)
    assert_close(call.run(form="recurrent")[0], want, torch.float64, what="o")


def chunk_equals_recurrent(rule: Rule) -> None:
    """Compare values and gradients at every chunk size and length, from an initial state."""
    for length in (1, CHUNK - 1, CHUNK, CHUNK + 1, 37):
        call = draw_call(rule, T=length, state=True)
        compare_all_forms(call, f"T={length}")


def every_precision_meets_its_bar(rule: Rule) -> None:
    """Compare float32 and the half types with the float64 loop on the same numbers."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        compare_all_forms(draw_call(rule, T=67, K=16, V=8, state=True, dtype=dtype), str(dtype))


def edges_are_exact(rule: Rule) -> None:
    """Compare values and gradients with every gate at its extremes, repeated and zero keys among others."""
    for dtype in (torch.float64, torch.float32):
        for seed in range(3):
            call = draw_call(rule, T=53, seed=seed, edges=True, state=True, dtype=dtype)
            compare_all_forms(call, f"seed {seed} {dtype}")


def nothing_in_nothing_out(rule: Rule) -> None:
    """Run no tokens: an empty output, the state as it was, a gradient that passes through."""
    for form in forms(rule):
        call = draw_call(rule, T=0, state=True).tracked()
        out, state = call.run(**form)
        assert out.shape == (*call.q.shape[:2], max(call.q.shape[-2], call.v.shape[-2]), call.v.shape[-1]), out.shape
        for got, want in zip(rule.state_tensors(state), rule.state_tensors(call.state), strict=True):
            assert got is not want, "the state must be a new tensor"
            assert torch.equal(got, want), "no token may change the state"
        assert all(x.isfinite().all() for x in gradients(call, (out, state)).values())


def split_equals_whole(rule: Rule) -> None:
    """Cut a sequence anywhere, hand the state over, and get the same."""
    call = draw_call(rule, T=37, edges=True, state=True)
    values, _ = truth(call)
    for form in forms(rule):
        for cuts in ((0, 1, 37), (0, 16, 37), (0, 36, 37), (0, 5, 5, 23, 37)):
            state, outputs = call.state, []
            for start, stop in pairwise(cuts):
                piece = call.tokens(start, stop)
                piece.state = state
                out, state = piece.run(**form)
                outputs.append(out)
            got = outcome(rule, (torch.cat(outputs, 1), state))
            if rule.grows:  # capacity may differ, what is kept may not
                got, values = {"o": got["o"]}, {"o": values["o"]}
            assert_close(got, values, torch.float64, what=f"{form} cut at {cuts}")


def step_loop_equals_whole(rule: Rule) -> None:
    """Feed tokens one at a time through ``ops.step``."""
    call = draw_call(rule, T=19, edges=True, state=True)
    values, _ = truth(call)
    state, outputs = call.state, []
    for t in range(19):
        piece = call.tokens(t, t + 1)
        timed = {gate.name for gate in rule.gates if "T" in gate.axes}
        gates: dict[str, Any] = {name: x[:, 0] if name in timed else x for name, x in piece.gates.items()}
        out, state = ops.step(rule, piece.q[:, 0], piece.k[:, 0], piece.v[:, 0], state=state, **gates)
        outputs.append(out)
    assert_close(torch.stack(outputs, 1), values["o"], torch.float64, what="o")


def rows_are_independent(rule: Rule) -> None:
    """Change one row of the batch; every other row stays the same to the bit."""
    call = draw_call(rule, B=3, T=37, state=True)
    other = draw_call(rule, B=3, T=37, seed=9, state=True)
    fixed = {gate.name for gate in rule.gates if "B" not in gate.axes}

    def mix(name: str, x: Tensor) -> Tensor:
        return x if name in fixed else torch.cat((other.tensors()[name][:1], x[1:]))

    for form in forms(rule):
        left, right = outcome(rule, call.run(**form)), outcome(rule, call.map(mix).run(**form))
        for name, x in left.items():
            assert torch.equal(x[1:], right[name][1:]), f"{form}: {name} of row 1 follows row 0"


def runs_repeat_to_the_bit(rule: Rule) -> None:
    """Run twice, values and gradients, and leave the inputs as they were."""
    for form in forms(rule):
        call = draw_call(rule, T=37, edges=True, state=True, dtype=torch.float32).tracked()
        before = {name: x.detach().clone() for name, x in call.tensors().items()}
        runs = [call.run(**form) for _ in range(2)]
        first, second = ({**outcome(rule, run), **gradients(call, run)} for run in runs)
        for name, x in first.items():
            assert torch.equal(x, second[name]), f"{form}: {name} differs between two runs"
        for name, x in call.tensors().items():
            assert torch.equal(x, before[name]), f"{form}: {name} was changed"


def strides_do_not_matter(rule: Rule) -> None:
    """Pass views: interleaved, transposed, expanded; the surrounding memory is NaN."""

    def view(_: str, x: Tensor) -> Tensor:
        around = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan, dtype=x.dtype)
        around[..., 1::2] = x
        return around.transpose(0, -1).contiguous().transpose(0, -1)[..., 1::2]

    call = draw_call(rule, T=37, state=True)
    values, _ = truth(call)
    for form in forms(rule):
        assert_close(outcome(rule, call.map(view).run(**form)), values, torch.float64, what=str(form))


def heads_are_shared(rule: Rule) -> None:
    """Give key heads to several value heads; it equals repeating them, and their gradients add up."""
    call = draw_call(rule, H=2, G=6).tracked()
    repeated = {"k", "v"} if rule.grouped else {"q", "k"}
    repeated |= {gate.name for gate in rule.gates if "H" in gate.axes}
    apart = call.map(lambda name, x: x.repeat_interleave(3, -2) if name in repeated else x)
    for form in forms(rule):
        together, separate = call.run(**form), apart.run(**form)
        assert_close(together[0], separate[0], torch.float64, what=f"{form} o")
        slopes = (
            torch.autograd.grad(run[0].square().sum(), list(call.tensors().values())) for run in (together, separate)
        )
        for name, got, want in zip(call.tensors(), *slopes, strict=True):
            assert_close(got, want, torch.float64, "gradients", f"{form} gradient of {name}")


def options_do_what_they_say(rule: Rule) -> None:
    """Scale and unit length inside equal the same outside."""
    call = draw_call(rule, T=19, dtype=torch.float64)
    unit = {
        name: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for name, x in (("q", call.q), ("k", call.k))
    }
    outside = call.map(lambda name, x: unit.get(name, x))
    outside.q = outside.q * 0.7 / rule.default_scale(call.q.shape[-1])
    for form in forms(rule):
        got = call.run(scale=0.7, use_qk_l2norm_in_kernel=True, **form)
        assert_close(got[0], outside.run(form="recurrent")[0], torch.float64, what=f"{form} o")


def packed_equals_separate(rule: Rule) -> None:
    """Pack sequences of any length into one row, NaN around them; they never see each other."""
    bounds = [2, 2, 19, 20, 20, 37, 50]
    call = draw_call(rule, B=1, T=53, edges=True)
    starts = draw_call(rule, B=len(bounds) - 1, T=3, state=True).state
    timed = {"q", "k", "v", *(gate.name for gate in rule.gates if "T" in gate.axes)}

    def surround(name: str, x: Tensor) -> Tensor:
        if name not in timed or name not in ("q", "k", "v"):
            return x  # a NaN gate is an error wherever it stands
        x = x.clone()
        x[:, : bounds[0]] = x[:, bounds[-1] :] = torch.nan
        return x

    packed = call.map(surround)
    packed.state = starts
    packed = packed.tracked()
    for form in forms(rule):
        out, state = packed.run(cu_seqlens=torch.tensor(bounds), **form)
        slopes = gradients(packed, (out[:, bounds[0] : bounds[-1]], state))
        assert all(x.isfinite().all() for x in slopes.values()), f"{form}: junk reached a gradient"
        for n, (start, stop) in enumerate(pairwise(bounds)):
            piece = call.tokens(start, stop)
            piece.state = rule.packed_state([x[n : n + 1] for x in rule.state_tensors(starts)])
            want, after = piece.run(form="recurrent")
            assert_close(out[:, start:stop], want, torch.float64, what=f"{form} sequence {n} o")
            for got, end in zip(rule.state_tensors(state), rule.state_tensors(after), strict=True):
                got = got[n : n + 1, : end.shape[1]] if end.ndim > 1 else got[n : n + 1]
                assert_close(got, end, torch.float64, what=f"{form} sequence {n} state")


def derivatives_are_right(rule: Rule) -> None:
    """Compare first derivatives with finite differences, every input at once."""
    for form in forms(rule, (4,)):
        _finite_differences(rule, form, torch.autograd.gradcheck)


def second_derivatives_are_right(rule: Rule) -> None:
    """Compare second derivatives with finite differences of the first, in fast mode."""
    for form in forms(rule, (4,)):
        _finite_differences(rule, form, torch.autograd.gradgradcheck)


def _rebuilt(call: Call, tensors: tuple[Tensor, ...]) -> Call:
    given = dict(zip(call.tensors(), tensors, strict=True))
    return call.map(lambda name, _: given[name])


def _finite_differences(rule: Rule, form: dict[str, Any], check: Callable[..., bool]) -> None:
    call = draw_call(rule, B=1, T=6, H=1, G=2, K=3, V=2, state=True).tracked()

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(outcome(rule, _rebuilt(call, tensors).run(**form)).values())

    check(function, tuple(call.tensors().values()), fast_mode=True)


def transforms_compose(rule: Rule) -> None:
    """``torch.func``: vmap equals a stack of calls, grad equals backward, also inside each other."""
    call = draw_call(rule, T=9, state=True)
    names = list(call.tensors())
    several = [torch.stack((x, 0.5 * x)) for x in call.tensors().values()]
    for form in forms(rule, (4,)):

        def loss(*tensors: Tensor, form: dict[str, Any] = form) -> Tensor:
            return _rebuilt(call, tensors).run(**form)[0].square().sum()

        slopes = torch.func.vmap(torch.func.grad(loss, argnums=tuple(range(len(names)))))(*several)
        for i in range(2):
            leaves = [x[i].clone().requires_grad_() for x in several]
            want = torch.autograd.grad(loss(*leaves), leaves)
            for name, got, truth_ in zip(names, slopes, want, strict=True):
                assert_close(got[i], truth_, torch.float64, "gradients", f"{form} vmap(grad) of {name}")


CONTRACT: tuple[Callable[[Rule], None], ...] = (
    step_equals_the_executed_recipe,
    chunk_equals_recurrent,
    every_precision_meets_its_bar,
    edges_are_exact,
    nothing_in_nothing_out,
    split_equals_whole,
    step_loop_equals_whole,
    rows_are_independent,
    runs_repeat_to_the_bit,
    strides_do_not_matter,
    heads_are_shared,
    options_do_what_they_say,
    packed_equals_separate,
    derivatives_are_right,
    second_derivatives_are_right,
    transforms_compose,
)
"""What every rule is held to, in the order of reading."""


def check_rule(rule: str | Rule) -> None:
    """Hold a registered rule to the whole contract.

    Args:
        rule: The rule or its name.

    Raises:
        AssertionError: Naming the property that failed, with the error and its bar, or what was raised on the way.
        ValueError: If the rule is not registered.

    Example:
        >>> from innerloop.testing import check_rule
        >>> check_rule("linear_attention")
    """
    rule = get(rule)
    for check in CONTRACT:
        try:
            check(rule)
        except Exception as failure:
            what = str(failure).strip().partition("\n")[0] or type(failure).__name__
            raise AssertionError(f"{rule.name}: {check.__name__.replace('_', ' ')}: {what}") from failure
