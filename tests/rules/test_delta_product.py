"""DeltaProduct: n steps a token are n tokens, read once."""

import pytest
import torch

from innerloop import ops
from innerloop.testing import assert_close, draw_call, gradients, outcome

DOUBLE = torch.float64


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_delta_product_takes_gradient_steps_on_its_pairs_in_order(form):
    call = draw_call("delta_product", B=1, T=5, H=1, G=1, state=True)
    state, outputs = call.state, []
    for t in range(5):
        state = call.gates["g"][:, t, :, None, None].exp() * state
        for i in range(2):
            leaf = state.detach().requires_grad_()
            error = torch.einsum("bgkv,bgk->bgv", leaf, call.k[:, t, i]) - call.v[:, t, i]
            (slope,) = torch.autograd.grad(0.5 * error.square().sum(), leaf)
            state = state - call.gates["beta"][:, t, i, :, None, None] * slope
        outputs.append(torch.einsum("bgkv,bgk->bgv", state, call.q[:, t]))
    o, after = call.run(form=form, scale=1.0)
    assert_close(o, torch.stack(outputs, 1), DOUBLE)
    assert_close(after, state, DOUBLE)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_delta_product_of_one_step_is_the_gated_delta_rule(form):
    call = draw_call("gated_delta_rule", state=True, edges=True)
    want = outcome(call.rule, call.run())
    once = {"k": call.k[:, :, None], "v": call.v[:, :, None], "beta": call.gates["beta"][:, :, None]}
    options = {"initial_state": call.state, "output_final_state": True, "form": form}
    assert_close(outcome(call.rule, ops.delta_product(call.q, **once, g=call.gates["g"], **options)), want, DOUBLE)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@pytest.mark.parametrize("n", [2, 3])
def test_delta_product_of_n_steps_is_the_delta_rule_over_n_times_as_many_tokens(form, n):
    call = draw_call("delta_rule", T=12 * n, state=True, edges=True).tracked()
    truth = call.run()
    want = {"o": truth[0][:, n - 1 :: n], "S": truth[1]}
    k, v, beta = (x.unflatten(1, (12, n)) for x in (call.k, call.v, call.gates["beta"]))
    got = ops.delta_product(
        call.q[:, n - 1 :: n], k, v, beta=beta, initial_state=call.state, output_final_state=True, form=form
    )
    assert_close(outcome(call.rule, got), want, DOUBLE)
    assert_close(gradients(call, got), gradients(call, (want["o"], truth[1])), DOUBLE, "gradients")


def test_delta_product_fades_once_a_token_and_counts_packed_tokens_not_steps():
    call = draw_call("delta_product", B=1, T=9)
    k, v = call.k.flatten(1, 2), call.v.flatten(1, 2)
    beta, g = call.gates["beta"].flatten(1, 2), call.gates["g"].repeat_interleave(2, 1)
    g[:, 1::2] = 0
    whole, state = ops.gated_delta_rule(
        call.q.repeat_interleave(2, 1), k, v, g=g, beta=beta, cu_seqlens=torch.tensor([0, 8, 18]),
        output_final_state=True,
    )  # fmt: skip
    for form in ("recurrent", "chunk"):
        o, after = call.run(form=form, cu_seqlens=torch.tensor([0, 4, 9]))
        assert_close(o, whole[:, 1::2], DOUBLE)
        assert_close(after, state, DOUBLE)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_delta_product_without_a_decay_has_one_of_zero(form):
    call = draw_call("delta_product", state=True)
    call.gates["g"][:] = 0
    want = outcome(call.rule, call.run(form=form))
    del call.gates["g"]
    assert_close(outcome(call.rule, call.run(form=form)), want, DOUBLE)
    packed = draw_call("delta_product", B=1, T=9)
    packed.gates["g"][:] = 0
    want = outcome(packed.rule, packed.run(form=form, cu_seqlens=torch.tensor([0, 4, 9])))
    del packed.gates["g"]
    assert_close(outcome(packed.rule, packed.run(form=form, cu_seqlens=torch.tensor([0, 4, 9]))), want, DOUBLE)
