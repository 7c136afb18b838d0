"""What every compiled kernel must withstand: memory around its tensors, long strides, other threads, other calls.

`make sanitize` runs these tests and those of `test_native.py` once more against a library that watches its own memory.
"""

import os
import resource
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

from innerloop import ops, rules
from innerloop.checks import refusal
from innerloop.kernels.native import missing
from innerloop.rule import get
from innerloop.testing import assert_close, draw_call, gradients, outcome

SERVED = tuple(module.RULE.name for module in rules.ALL if not refusal(module.RULE))
WATCHED = "INNERLOOP_LIBRARY" in os.environ
"""Under a sanitizer times and memory are the sanitizer's."""
GUARD = 512
BOUNDS = torch.tensor([2, 5, 5, 38, 39, 64])
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "present")


def answers(call, **options):
    """Return values and gradients, by name."""
    return answers_of(call.tracked(), **options)


def answers_of(tracked, **options):
    values = outcome(tracked.rule, tracked.run(backend="cpu", **options))
    inputs = tracked.tensors()
    slopes = [slope_of(x) for x in values.values()]
    found = torch.autograd.grad(list(values.values()), list(inputs.values()), slopes)
    return {**values, **{f"d{name}": x for name, x in zip(inputs, found, strict=True)}}


def slope_of(x):
    """Return a slope that is the same for every row and token: a part of a batch has that part of the slopes."""
    return torch.arange(x.shape[2:].numel()).cos().to(x.dtype).view(x.shape[2:]).expand(x.shape)


def assert_same_bits(got, want):
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert torch.equal(got[name], x), name


def drawn(name, **sizes):
    return draw_call(name, **{"T": 70, "B": 2, "H": 2, "G": 4, "K": 13, "V": 11, "dtype": torch.float32, **sizes})


def packed(call):
    """Return the call's first row, in five sequences of which one is empty, with tokens in front and behind."""
    one = call.map(lambda _, x: x[:1] if x.shape[:1] == call.q.shape[:1] else x)
    one.state = None
    return one, {"cu_seqlens": BOUNDS}


def inside_nans(x):
    """Return the same numbers as a view with NaN around every row of every axis."""
    wide = torch.full([size + 2 for size in x.shape], torch.nan, dtype=x.dtype)
    view = wide[tuple(slice(1, -1) for _ in x.shape)]
    return view.copy_(x)


class Surrounded(TorchFunctionMode):
    """Gives every tensor that a call makes guards on both sides, and NaN inside."""

    def __init__(self):
        super().__init__()
        self.buffers = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        makers = {torch.empty, torch.empty_like, torch.Tensor.new_empty, torch.Tensor.new_zeros}
        if function not in makers or not made.is_floating_point() or not made.numel():
            return made
        buffer = torch.full((made.numel() + 2 * GUARD,), 7.0, dtype=made.dtype)
        buffer[GUARD:-GUARD] = 0 if function is torch.Tensor.new_zeros else torch.nan
        self.buffers.append(buffer)
        # No view: autograd would refuse to change it in place.
        return made.new_empty(0).set_(buffer.untyped_storage(), GUARD, made.shape, made.contiguous().stride())

    def untouched(self):
        assert self.buffers
        return all(bool((x[:GUARD] == 7).all() and (x[-GUARD:] == 7).all()) for x in self.buffers)


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize(("K", "V"), [(13, 11), (16, 32), (33, 1)])
def test_nothing_is_read_or_written_beside_a_tensor(name, K, V):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        whole = drawn(name, K=K, V=V, dtype=dtype, state=True)
        for call, options in ((whole, {}), packed(whole)):
            want = answers(call, **options)
            tracked = call.map(lambda _, x: inside_nans(x).requires_grad_())
            with Surrounded() as guards:
                got = answers_of(tracked, **options)
            assert_same_bits(got, want)
            assert guards.untouched()


@pytest.mark.parametrize("name", SERVED)
def test_nothing_is_read_or_written_beside_a_token(name):
    for dtype in (torch.float32, torch.bfloat16):
        call = drawn(name, T=1, dtype=dtype, state=True)
        timed = {gate.name for gate in call.rule.gates if "T" in gate.axes}

        def step(call, timed=timed):
            gates = {n: x[:, 0] if n in timed else x for n, x in call.gates.items()}
            return ops.step(call.rule, call.q[:, 0], call.k[:, 0], call.v[:, 0], state=call.state, **gates)

        want = outcome(call.rule, step(call))
        surrounded = call.map(lambda _, x: inside_nans(x))
        with Surrounded() as guards:
            got = outcome(call.rule, step(surrounded))
        assert_same_bits(got, want)
        assert guards.untouched()


@pytest.mark.parametrize("name", SERVED)
def test_what_a_call_leaves_behind_reaches_no_other(name):
    calls = [drawn(name, state=True), drawn(name, T=1, state=True), drawn(name, T=33, K=64, V=64, dtype=torch.float64)]
    want = [answers(call) for call in calls]
    for value in (torch.nan, torch.inf):
        for dtype in (torch.float32, torch.float64):
            foul = drawn(name, T=97, K=90, V=95, dtype=dtype, state=True)
            # Gates are checked for NaN, and what comes of the others is the caller's.
            q, k, v = (torch.full_like(x, value) for x in (foul.q, foul.k, foul.v))
            foul = type(foul)(foul.rule, q, k, v, foul.gates, foul.state, foul.options)
            answers(foul)
        for call, right in zip(calls, want, strict=True):
            assert_same_bits(answers(call), right)


def slopes(call, wanted, chosen, **options):
    """Return the gradients of some inputs through some outputs; the other inputs want none."""
    some = call.map(lambda name, x: x.detach().clone().requires_grad_(name in wanted))
    values = outcome(some.rule, some.run(**options))
    roots = [values[name] for name in chosen if values[name].requires_grad]
    inputs = {name: x for name, x in some.tensors().items() if name in wanted}
    if not roots:
        return {name: torch.zeros_like(x) for name, x in inputs.items()}
    found = torch.autograd.grad(roots, list(inputs.values()), [*map(slope_of, roots)], materialize_grads=True)
    return dict(zip(inputs, found, strict=True))


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("unit", [False, True])
def test_every_gradient_alone_is_that_of_the_token_loop(name, unit):
    for state in (False, True):
        call = drawn(name, T=40, K=6, V=5, dtype=torch.float64, state=state)
        call.options["use_qk_l2norm_in_kernel"] = unit
        if unit:
            call = call.map(lambda n, x: 1.7 * x if n in "qk" else x)
        for chosen in (("o",), tuple(call.rule.states), ("o", *call.rule.states)):
            want = slopes(call, set(call.tensors()), chosen, form="recurrent")
            for alone in want:
                got = slopes(call, {alone}, chosen, backend="cpu", chunk_size=16)
                assert_close(got, {alone: want[alone]}, torch.float64, "gradients", f"{chosen} by")


@pytest.mark.parametrize("name", SERVED)
def test_a_row_does_not_depend_on_the_rest_of_the_batch(name):
    call = drawn(name, B=3, T=50, state=True)
    shared = {gate.name for gate in call.rule.gates if "B" not in gate.axes}
    whole = answers(call)
    for row in range(3):
        alone = answers(call.map(lambda n, x, row=row: x if n in shared else x[row : row + 1]))
        for key, x in whole.items():
            if key.removeprefix("d") not in shared:
                assert torch.equal(alone[key], x[row : row + 1]), key


@pytest.mark.parametrize("name", ["gated_delta_rule", "kda", "momentum_delta_rule"])
def test_a_step_of_memories_beyond_the_caches_is_that_of_each_alone(name):
    # 14 MiB of float32, which other rows are asked for than of few
    call = draw_call(name, T=1, B=70, H=2, K=163, V=157, state=True, dtype=torch.float32)
    rule, parts = call.rule, call.rule.state_tensors(call.state)
    q, k, v, *gates = (x[:, 0] for x in (call.q, call.k, call.v, *call.gates.values()))
    out, after = ops.step(name, q, k, v, state=call.state, **dict(zip(call.gates, gates, strict=True)))
    for row in (slice(0, 1), slice(69, 70)):
        own = rule.packed_state([x[row] for x in parts])
        named = dict(zip(call.gates, (x[row] for x in gates), strict=True))
        alone, last = ops.step(name, q[row], k[row], v[row], state=own, **named)
        assert torch.equal(out[row], alone)
        for x, y in zip(rule.state_tensors(after), rule.state_tensors(last), strict=True):
            assert torch.equal(x[row], y)


@pytest.mark.parametrize("name", SERVED)
def test_a_packed_sequence_does_not_depend_on_the_others(name):
    call, options = packed(drawn(name, T=70))
    together = answers(call, **options)
    timed = {"q", "k", "v", *(gate.name for gate in call.rule.gates if "T" in gate.axes)}
    for begin, end in zip(BOUNDS[:-1].tolist(), BOUNDS[1:].tolist(), strict=True):
        alone = answers(call.tokens(begin, end))
        for key in ("o", *(f"d{n}" for n in timed)):
            assert torch.equal(alone[key], together[key][:, begin:end]), (key, begin)


@pytest.mark.parametrize("name", SERVED)
def test_a_sequence_without_tokens_hands_its_slope_on(name):
    # A wide memory, chunks of one token and no trail: what is written in no place of its own lies over all the rest.
    call = drawn(name, T=1, B=1, K=64, V=64, dtype=torch.float64)
    axes = {"G": 4, "K": 64, "V": 64}
    states = [torch.randn([3, *map(axes.get, letters)]).double() for letters in call.rule.states.values()]
    call.state = call.rule.packed_state(states)
    tracked = call.tracked()
    values = outcome(call.rule, tracked.run(backend="cpu", cu_seqlens=torch.tensor([0, 0, 1, 1])))
    inputs = tracked.rule.state_tensors(tracked.state)
    for state, x, slope in zip(call.rule.states, inputs, states, strict=True):
        (got,) = torch.autograd.grad(values[state], x, slope, retain_graph=True)
        for empty in (0, 2):
            assert torch.equal(values[state][empty], x[empty])
            assert torch.equal(got[empty], slope[empty])


@pytest.mark.parametrize("name", SERVED)
def test_a_thread_count_gives_the_same_bits_every_time(name):
    call = drawn(name, B=3, K=33, V=40, state=True)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        first = answers(call)
        for _ in range(4):
            assert_same_bits(answers(call), first)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", SERVED)
def test_python_threads_may_call_at_once(name):
    calls = [drawn(name, T=40 + 30 * i, K=8 + 7 * i, V=9 + 8 * i, state=True, seed=i) for i in range(4)]
    want, got = [answers(call) for call in calls], {}

    def several(index):
        got[index] = [answers(calls[index]) for _ in range(5)][-1]

    threads = [threading.Thread(target=several, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, right in enumerate(want):
        assert_same_bits(got[index], right)


@pytest.mark.skipif(not hasattr(os, "fork") or WATCHED, reason="needs fork, and no sanitizer")
def test_a_forked_process_may_call_with_one_thread():
    call = drawn(SERVED[0], B=4, K=64, V=64)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        want = answers(call)
    finally:
        torch.set_num_threads(threads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        torch.set_num_threads(1)  # as torch's own loaders of data do
        same = all(torch.equal(x, want[n]) for n, x in answers(call).items())
        os._exit(0 if same else 1)
    deadline = time.monotonic() + 60
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)


@pytest.mark.parametrize("name", SERVED)
def test_denormals_count_as_zero_within_a_call_and_only_there(name):
    # What they cost differs from processor to processor; that they are gone does not.
    call = drawn(name, state=True)
    tiny = call.map(lambda n, x: x * 1e-38 * 1e-3 if n == "v" or n in call.rule.states else x)
    assert tiny.v.any()
    assert not any(x.any() for x in outcome(call.rule, tiny.run(backend="cpu")).values())
    assert (torch.tensor([1e-40]) * 0.5).item() > 0


QUICK = {"gated_delta_rule", "rwkv7"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in SERVED])
def test_65537_tokens_stay_exact(name):
    call = draw_call(name, T=65_537, B=1, H=1, G=1, K=8, V=8, dtype=torch.float32)
    for gate in call.rule.gates:
        if gate.high == 0 and "T" in gate.axes:  # a decay: let a memory last
            call.gates[gate.name] = call.gates[gate.name] * 0.01
    exact = call.to(torch.float64).tracked()
    want, got = exact.run(backend="torch"), call.tracked()
    result = got.run(backend="cpu")
    assert_close(outcome(call.rule, result), outcome(call.rule, want), torch.float32)
    assert_close(gradients(got, result), gradients(exact, want), torch.float32, "gradients")


def far_apart(x, place):
    """Return the same numbers with 2^29 elements from token to token; only the pages in use take memory."""
    step, length = 2**29 + 24, x.shape[place]
    row = x.select(place, 0)
    strides = list(row.contiguous().stride())
    buffer = torch.empty(step * (length - 1) + row.numel(), dtype=x.dtype)
    strides.insert(place, step)
    return buffer.as_strided(x.shape, strides).copy_(x)


@pytest.mark.skipif(WATCHED, reason="a sanitizer shadows all of it")
@pytest.mark.parametrize("name", SERVED)
def test_offsets_go_beyond_what_32_bits_count(name):
    call = drawn(name, T=6, B=1, dtype=torch.bfloat16)
    axes = {**call.rule.axes, **{gate.name: gate.axes for gate in call.rule.gates}}
    far = call.map(lambda n, x: far_apart(x, axes[n].index("T")) if "T" in axes[n] else x)
    assert far.q.stride(axes["q"].index("T")) * 5 > 2**31
    slope = torch.randn(call.v.shape[:1] + call.q.shape[1:2] + call.v.shape[-2:], dtype=torch.bfloat16)

    def run(call, slope):
        tracked = call.map(lambda _, x: x.requires_grad_())
        o, state = tracked.run(backend="cpu")
        inputs = [x for x in (tracked.q, tracked.k, tracked.v, *tracked.gates.values())]
        return [o, state, *torch.autograd.grad(o, inputs, slope)]

    for got, want in zip(run(far, far_apart(slope, 1)), run(call, slope), strict=True):
        for x, y in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
            assert torch.equal(x, y)


@pytest.mark.slow
@pytest.mark.skipif(WATCHED, reason="a sanitizer shadows all of it")
@pytest.mark.parametrize("name", SERVED)
def test_outputs_go_beyond_what_32_bits_count(name):
    # Fewer tokens than a chunk and a value that is very wide: 2.3 GB of output from a few numbers.
    length, rows, width = 20, 110, 2**19
    call = draw_call(name, T=length, B=rows, H=1, G=1, K=1, V=1, dtype=torch.bfloat16)
    for gate in call.rule.gates:
        if gate.axes[-1] == "V":
            call.gates[gate.name] = call.gates[gate.name].expand(*call.gates[gate.name].shape[:-1], width)
    v = call.v.expand(*call.v.shape[:-1], width)
    o = ops.run(call.rule, call.q, call.k, v, backend="cpu", **call.gates, **call.options)[0]
    assert o.nbytes > 2**31
    narrow = draw_call(name, T=length, B=rows, H=1, G=1, K=1, V=1, dtype=torch.bfloat16)
    want = ops.run(narrow.rule, narrow.q, narrow.k, narrow.v, backend="cpu", **narrow.gates, **narrow.options)[0]
    for place in (0, width // 2, width - 1):
        assert torch.equal(o[..., place], want[..., 0])


@pytest.mark.skipif(WATCHED or not Path("/proc/self/statm").exists(), reason="needs /proc, and no sanitizer")
@pytest.mark.parametrize("name", SERVED)
def test_memory_does_not_grow_from_call_to_call(name):
    calls = [drawn(name, T=T, K=K, V=K, state=True) for T, K in ((70, 33), (1, 64), (40, 8))]

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def several(count):
        for _ in range(count):
            for call in calls:
                answers(call)

    # What leaks grows every time; what an allocator takes once, whatever ran before, does not.
    several(20)
    grown = []
    for _ in range(3):
        before = resident()
        several(20)
        grown.append(resident() - before)
    assert min(grown) < 1 << 17


LONG = """
import resource, torch
from innerloop.testing import draw_call, gradients
small = draw_call({name!r}, T=70, K=8, V=8, dtype=torch.float32).tracked()
def run(call):
    return gradients(call, call.run(backend="cpu"))
want = run(small)
long = draw_call({name!r}, T=64, B=1, H=1, G=1, K=256, V=256, dtype=torch.float32)
axes = {{**long.rule.axes, **{{gate.name: gate.axes for gate in long.rule.gates}}}}
def longer(n, x):
    return x.repeat(*(512 if a == "T" else 1 for a in axes[n])) if "T" in axes[n] else x
long = long.map(longer).tracked()
with open("/proc/self/statm") as file:
    taken = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (150 << 20),) * 2)
try:
    run(long)
except (MemoryError, RuntimeError) as error:
    print(type(error).__name__, error)
print(all(torch.equal(x, want[n]) for n, x in run(small).items()))
"""


@pytest.mark.skipif(WATCHED or sys.platform != "linux", reason="needs a limit on memory, and no sanitizer")
def test_too_little_memory_is_an_error_and_the_next_call_is_right():
    done = subprocess.run(
        [sys.executable, "-c", LONG.format(name="gated_delta_rule")], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    # The trail is torch's memory, the scratch the library's; which of them is missed first is the system's business.
    words, right = done.stdout.splitlines()
    assert (done.returncode, right) == (0, "True"), done.stderr
    assert words == "MemoryError no memory for a kernel's scratch" or "can't allocate memory" in words


FADED = [name for name in SERVED if any(gate.name == "g" for gate in get(name).gates)]


@pytest.mark.parametrize("name", FADED)
@pytest.mark.parametrize("strong", [-5.0, -15.0, -30.0])
def test_the_gradient_of_a_strong_decay_is_right_entry_by_entry(name, strong):
    call = drawn(name)
    g = torch.full_like(call.gates["g"], strong)
    if g.ndim > 1:
        g[:, ::7] = -0.003  # mild ones between: what passes over both must not hide what passes over the strong one
    call.gates["g"] = g

    def slope(call, **options):
        o = outcome(call.rule, call.run(**options))["o"]
        return torch.autograd.grad((o * slope_of(o)).sum(), call.gates["g"])[0]

    found, truth = (
        slope(x, **options)
        for x, options in (
            (call.tracked(), {"backend": "cpu"}),
            (call.to(torch.float64).tracked(), {"form": "recurrent"}),
        )
    )
    entries = g.expand(call.v.shape[0], -1, *g.shape[2:]) == strong if g.ndim > 1 else g == strong
    # Their own size is the measure: entries of e^-15 beside some of 1 pass any bar that the whole gradient passes.
    assert (found - truth).abs()[entries].max() <= 1e-4 * truth[entries].abs().max()
