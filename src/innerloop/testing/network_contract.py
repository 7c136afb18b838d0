"""What every rule is held to whose memory is a network, one property a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from innerloop.network import NetworkRule, find
from innerloop.shapes import compute_dtype
from innerloop.testing.compare import assert_close
from innerloop.testing.network_draw import VARIANTS, NetworkCall, draw_network_call


def forms(sizes: tuple[int, ...] = (1, 3, 128)) -> Iterator[dict[str, Any]]:
    """Yield the options of both forms, the chunk form with pieces of several sizes."""
    yield {"form": "recurrent"}
    yield from ({"form": "chunk", "chunk_size": size} for size in sizes)


def outcome(call: NetworkCall, result: tuple[Tensor, Any]) -> dict[str, Tensor]:
    """Return the output and the float tensors of the state by name."""
    named = {"o": result[0], **call.rule.named(result[1])}
    return {name: x for name, x in named.items() if x.is_floating_point()}


def gradients(call: NetworkCall, result: tuple[Tensor, Any]) -> dict[str, Tensor]:
    """Return the gradient of a fixed random functional of output and state for every tensor of a tracked call."""
    generator = torch.Generator().manual_seed(5)
    total = torch.zeros((), dtype=torch.float64)
    for x in outcome(call, result).values():
        total = total + (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()
    tensors = call.tensors()
    found = torch.autograd.grad(total, list(tensors.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(tensors, found, strict=True))


def truth(call: NetworkCall) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return values and gradients of the float64 token loop on a call's own numbers."""
    exact = call.to(torch.float64).tracked()
    result = exact.run(form="recurrent")
    return outcome(exact, result), gradients(exact, result)


def compare_all_forms(call: NetworkCall, what: str, sizes: tuple[int, ...] = (1, 3, 128)) -> None:
    """Hold values and gradients of every form to the truth of this call."""
    dtype = call.tokens[next(iter(call.rule.axes))].dtype
    values, slopes = truth(call)
    for form in forms(sizes):
        got = call.tracked()
        result = got.run(**form)
        assert result[0].dtype == dtype, f"{what} {form}: o is {result[0].dtype} instead of {dtype}"
        states = {x.dtype for name, x in outcome(got, result).items() if name != "o"}
        assert states == {compute_dtype(dtype)}, f"{what} {form}: the state is {states}"
        assert_close(outcome(got, result), values, dtype, "values", f"{what} {form}")
        assert_close(gradients(got, result), slopes, dtype, "gradients", f"{what} {form} gradient of")


def chunk_equals_recurrent(rule: NetworkRule) -> None:
    """Compare values and gradients of every variant, from rows at different places of their mini-batches."""
    for variant in VARIANTS[rule.name]:
        compare_all_forms(draw_network_call(rule, variant, T=19, state=True), f"{variant} T=19")
        compare_all_forms(draw_network_call(rule, variant, T=17), f"{variant} from the first weights", (128,))
    for length in (1, 4):
        compare_all_forms(draw_network_call(rule, T=length, state=True), f"T={length}", (1, 128))


def every_precision_meets_its_bar(rule: NetworkRule) -> None:
    """Compare float32 and the half types with the float64 loop on the same numbers."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        compare_all_forms(draw_network_call(rule, T=20, K=8, V=8, state=True, dtype=dtype), str(dtype), (128,))


def edges_are_exact(rule: NetworkRule) -> None:
    """Compare values and gradients with gates at their extremes, repeated and zero keys among others."""
    for variant in VARIANTS[rule.name]:
        compare_all_forms(draw_network_call(rule, variant, T=18, edges=True, state=True), variant, (128,))


def nothing_in_nothing_out(rule: NetworkRule) -> None:
    """Run no tokens: an empty output, the state as it was, a gradient that passes through."""
    for form in forms((128,)):
        call = draw_network_call(rule, T=0, state=True).tracked()
        out, state = call.run(**form)
        assert out.shape[:2] == (2, 0), out.shape
        for got, want in zip(pytree.tree_leaves(state), pytree.tree_leaves(call.state), strict=True):
            assert got is not want, "the state must be a new tensor"
            assert torch.equal(got, want), "no token may change the state"
        assert any(x.any() for x in gradients(call, (out, state)).values())


def split_equals_whole(rule: NetworkRule) -> None:
    """Cut a sequence anywhere, hand the state over, and get the same."""
    for variant in VARIANTS[rule.name]:
        call = draw_network_call(rule, variant, B=1, G=2, T=37)
        values = outcome(call, call.run(form="recurrent"))
        for form in forms((128,)):
            for cuts in ((0, 1, 37), (0, 16, 37), (0, 5, 5, 23, 37)):
                state: Any = None
                outputs = []
                for start, stop in pairwise(cuts):
                    piece = call.between(start, stop)
                    piece.state = state
                    out, state = piece.run(**form)
                    outputs.append(out)
                got = outcome(call, (torch.cat(outputs, 1), state))
                assert_close(got, values, torch.float64, what=f"{variant} {form} cut at {cuts}")
                assert state.position.tolist() == [37], "every token counts"


def rows_are_independent(rule: NetworkRule) -> None:
    """Change one row of the batch; every other row stays the same to the bit."""
    call = draw_network_call(rule, B=3, T=21, state=True)
    other = draw_network_call(rule, B=3, T=21, seed=9, state=True).tensors()

    def mix(name: str, x: Tensor) -> Tensor:
        return x if "shared" in name else torch.cat((other[name][:1], x[1:]))

    for form in forms((128,)):
        left, right = outcome(call, call.run(**form)), outcome(call, call.map(mix).run(**form))
        for name, x in left.items():
            assert torch.equal(x[1:], right[name][1:]), f"{form}: {name} of row 1 follows row 0"


def runs_repeat_to_the_bit(rule: NetworkRule) -> None:
    """Run twice, values and gradients, and leave the inputs, first weights among them, as they were."""
    for form in forms((128,)):
        call = draw_network_call(rule, T=37, state=True, dtype=torch.float32).tracked()
        before = {name: x.detach().clone() for name, x in call.tensors().items()}
        runs = [call.run(**form) for _ in range(2)]
        first, second = ({**outcome(call, run), **gradients(call, run)} for run in runs)
        for name, x in first.items():
            assert torch.equal(x, second[name]), f"{form}: {name} differs between two runs"
        for name, x in call.tensors().items():
            assert torch.equal(x, before[name]), f"{form}: {name} was changed"


def states_are_their_own(rule: NetworkRule) -> None:
    """Overwrite a state: nothing else changes, neither what was given nor another part of it."""
    for length in (0, 3, 16, 20):
        for start in (False, True):
            for form in forms((128,)):
                call = draw_network_call(rule, T=length, state=start)
                before = {name: x.clone() for name, x in call.tensors().items()}
                named = rule.named(call.run(**form)[1])
                for i, (name, x) in enumerate(named.items()):
                    x.fill_(i)
                    assert all(bool((y == j).all()) for j, y in enumerate(list(named.values())[: i + 1])), name
                for name, x in call.tensors().items():
                    assert torch.equal(x, before[name]), f"{form}: {name} is part of the state"


def strides_do_not_matter(rule: NetworkRule) -> None:
    """Pass views: interleaved, transposed; the surrounding memory is NaN."""

    def view(_: str, x: Tensor) -> Tensor:
        around = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan, dtype=x.dtype)
        around[..., 1::2] = x
        return around.transpose(0, -1).contiguous().transpose(0, -1)[..., 1::2]

    call = draw_network_call(rule, T=21, state=True)
    values, _ = truth(call)
    for form in forms((128,)):
        assert_close(outcome(call, call.map(view).run(**form)), values, torch.float64, what=str(form))


def packed_equals_separate(rule: NetworkRule) -> None:
    """Pack sequences of any length into one row, NaN around them; they never see each other."""
    bounds = [2, 2, 19, 20, 20, 37, 50]
    call = draw_network_call(rule, B=1, T=53, edges=True)
    starts = draw_network_call(rule, B=len(bounds) - 1, T=3, state=True).state
    for name in rule.axes:
        call.tokens[name][:, : bounds[0]] = call.tokens[name][:, bounds[-1] :] = torch.nan
    for state in (None, starts):
        call.state = state
        packed = call.tracked()
        for form in forms((128,)):
            out, after = packed.run(cu_seqlens=torch.tensor(bounds), **form)
            slopes = gradients(packed, (out, after))
            assert all(x.isfinite().all() for x in slopes.values()), f"{form}: junk reached a gradient"
            assert not out[:, : bounds[0]].any() and not out[:, bounds[-1] :].any(), "o is 0 outside of all sequences"
            for n, (start, stop) in enumerate(pairwise(bounds)):
                piece = call.between(start, stop)
                piece.state = None if state is None else pytree.tree_map(lambda x, n=n: x[n : n + 1], state)
                want = outcome(call, piece.run(form="recurrent"))
                got = outcome(call, (out[:, start:stop], pytree.tree_map(lambda x, n=n: x[n : n + 1], after)))
                assert_close(got, want, torch.float64, what=f"{form} sequence {n}")


def derivatives_are_right(rule: NetworkRule) -> None:
    """Compare first derivatives with finite differences, every input at once."""
    _finite_differences(rule, torch.autograd.gradcheck)


def second_derivatives_are_right(rule: NetworkRule) -> None:
    """Compare second derivatives with finite differences of the first, in fast mode."""
    _finite_differences(rule, torch.autograd.gradgradcheck)


def _finite_differences(rule: NetworkRule, check: Callable[..., bool]) -> None:
    # The token loop once: that its gradients are the other form's is compared for every variant elsewhere.
    for variant, form in ((None, "recurrent"), *((variant, "chunk") for variant in VARIANTS[rule.name])):
        call = draw_network_call(rule, variant, B=1, T=3, H=1, G=1, K=3, V=2, state=True).tracked()

        def function(*tensors: Tensor, call: NetworkCall = call, form: str = form) -> tuple[Tensor, ...]:
            outputs = outcome(call, rebuilt(call, tensors).run(form=form)).values()
            return tuple(x if x.requires_grad else x + 0 * tensors[0].sum() for x in outputs)  # a fresh sum is constant

        check(function, tuple(call.tensors().values()), fast_mode=True)


def rebuilt(call: NetworkCall, tensors: tuple[Tensor, ...]) -> NetworkCall:
    """Return the call with these tensors for its own, in their order."""
    given = dict(zip(call.tensors(), tensors, strict=True))
    return call.map(lambda name, _: given[name])


def transforms_compose(rule: NetworkRule) -> None:
    """``torch.func``: vmap of grad equals backward, call by call."""
    call = draw_network_call(rule, T=9, state=True)
    several = [torch.stack((x, 0.5 * x)) for x in call.tensors().values()]
    for form in forms((128,)):

        def loss(*tensors: Tensor, form: dict[str, Any] = form) -> Tensor:
            return rebuilt(call, tensors).run(**form)[0].square().sum()

        slopes = torch.func.vmap(torch.func.grad(loss, argnums=tuple(range(len(several)))))(*several)
        for i in range(2):
            leaves = [x[i].clone().requires_grad_() for x in several]
            want = torch.autograd.grad(loss(*leaves), leaves, allow_unused=True, materialize_grads=True)
            for name, got, slope in zip(call.tensors(), slopes, want, strict=True):
                assert_close(got[i], slope, torch.float64, "gradients", f"{form} vmap(grad) of {name}")


NETWORK_CONTRACT: tuple[Callable[[NetworkRule], None], ...] = (
    chunk_equals_recurrent,
    every_precision_meets_its_bar,
    edges_are_exact,
    nothing_in_nothing_out,
    split_equals_whole,
    rows_are_independent,
    runs_repeat_to_the_bit,
    states_are_their_own,
    strides_do_not_matter,
    packed_equals_separate,
    derivatives_are_right,
    second_derivatives_are_right,
    transforms_compose,
)
"""What every rule with a network for its memory is held to, in the order of reading."""


def check_network_rule(rule: str | NetworkRule) -> None:
    """Hold a rule whose memory is a network to the whole contract.

    Args:
        rule: The rule or its name.

    Raises:
        AssertionError: Naming the property that failed, with the error and its bar.
        ValueError: If no such rule is known.
    """
    found = find(rule)
    if found is None:
        raise ValueError(f"rule must be one of {', '.join(VARIANTS)}; got {rule!r}")
    for check in NETWORK_CONTRACT:
        try:
            check(found)
        except Exception as failure:
            what = str(failure).strip().partition("\n")[0] or type(failure).__name__
            raise AssertionError(f"{found.name}: {check.__name__.replace('_', ' ')}: {what}") from failure
