"""Endless streams: what rounding does to a state carried from piece to piece, and that memory stays constant."""

import subprocess
import sys

import pytest
import torch

from innerloop import rule as registry
from innerloop import rules, states
from innerloop.testing import draw_call, error, outcome

NAMES = [module.RULE.name for module in rules.ALL]
BOUNDED = [name for name in NAMES if not registry.get(name).grows]
EPSILON = torch.finfo(torch.float32).eps
PIECE = 2048


def solves(rule):
    """Whether a read solves a system: it errs by the condition number of what was carried, |H| / ridge."""
    return any(axes == ("G", "K", "K") for axes in rule.states.values())


def forgets(rule):
    return any(gate.low == -torch.inf for gate in rule.gates)


def drift(name, pieces):
    """Stream in float32 beside the float64 chunk form; return the largest error of output and states by piece."""
    state, exact, worst = None, None, []
    for number in range(pieces):
        call = draw_call(name, B=1, T=PIECE, H=1, G=1, K=8, V=8, seed=number, dtype=torch.float32)
        wide = call.to(torch.float64)
        call.state, wide.state = state, exact
        with torch.no_grad():
            got, want = call.run(), wide.run()
        state, exact = got[1], want[1]
        truth = outcome(call.rule, want)
        worst.append(max(error(x, truth[key]) for key, x in outcome(call.rule, got).items()))
    return worst


def hold_to_the_bound(name, errors):
    """Without decay c sqrt(T) eps; with decay, where it is drawn, flat."""
    rule = registry.get(name)
    size = 16 if solves(rule) else 1
    for number, found in enumerate(errors):
        tokens = PIECE * (number + 1)
        bar = size * EPSILON * (8 if forgets(rule) else tokens**0.5)
        assert found <= bar, f"off by {found:.1e} after {tokens} tokens; the bar is {bar:.1e}"


@pytest.mark.parametrize("name", BOUNDED)
def test_rounding_stays_within_its_bound_over_some_pieces(name):
    hold_to_the_bound(name, drift(name, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDED)
def test_rounding_stays_within_its_bound_over_65536_tokens(name):
    errors = drift(name, 65_536 // PIECE)
    hold_to_the_bound(name, errors)
    if forgets(registry.get(name)):
        assert max(errors) <= 4 * max(errors[:4])


@pytest.mark.parametrize("name", BOUNDED)
def test_a_state_is_as_large_after_many_tokens_as_after_one(name):
    sizes = {states.nbytes(draw_call(name, T=length).run()[1]) for length in (1, 2, 64, 300)}
    assert len(sizes) == 1


STREAM = """
import sys
import torch
from innerloop import rule as registry
from innerloop import rules
from innerloop.testing import draw_call

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def stream(name, pieces):
    for _ in range(pieces):
        call.state = call.run()[1]

torch.set_grad_enabled(False)
for name in [m.RULE.name for m in rules.ALL if not m.RULE.grows]:
    call = draw_call(name, B=1, T=256, H=1, G=1, K=8, V=64, dtype=torch.float32)
    stream(name, 12)
    before = resident()
    stream(name, 40)
    print(name, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident memory from /proc")
def test_streaming_holds_no_memory_of_what_has_passed():
    done = subprocess.run([sys.executable, "-c", STREAM], capture_output=True, text=True, check=True, timeout=300)
    grown = {name: int(count) for name, count in (line.split() for line in done.stdout.splitlines())}
    assert list(grown) == BOUNDED
    kept = 40 * 256 * 64 * 4  # bytes that the outputs of these pieces alone would take: 2.6 MB
    for name, count in grown.items():
        assert count < kept / 3, f"{name} grew by {count} bytes"
