"""The commands that show the rules and the path of a call: what they say, and what they refuse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from innerloop import ops, rules, states
from innerloop.cli import main
from innerloop.cli import rules as command
from innerloop.testing import draw_call, draw_network_call

ROOT = Path(__file__).parents[2]
RULES = {module.RULE.name: module.RULE for module in rules.ALL}
NETWORKS = {module.RULE.name: module.RULE for module in rules.NETWORKS}
NAMES = [*RULES, *NETWORKS]


def said(words, capsys):
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(words, capsys):
    try:
        code = main(words)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    return err


def test_the_page_is_what_the_command_writes(capsys):
    assert (ROOT / "docs/rules.md").read_text("utf-8") == said(["rules", "--markdown"], capsys), "run `make docs`"


def test_every_rule_is_in_every_form_of_the_table(capsys):
    listed = json.loads(said(["rules", "--json"], capsys))["rules"]
    assert [row["name"] for row in listed] == NAMES
    text = said(["rules"], capsys)
    assert [line for line in text.splitlines()[:-1] if line[:1].strip()] == NAMES
    page = said(["rules", "--markdown"], capsys)
    assert re.findall(r"^\| `(\w+)`", page, re.MULTILINE) == NAMES
    assert len({line.count(" | ") for line in page.splitlines() if line.startswith("|")}) == 1


@pytest.mark.parametrize("name", RULES)
def test_a_row_says_what_the_rule_says(name, capsys):
    rule = RULES[name]
    (row,) = json.loads(said(["rules", name, "--json"], capsys))["rules"]
    assert (row["departs"] is None) == (rule.recipe is not None)
    if rule.recipe is not None:
        assert (row["weights"], row["class"], row["solver"]) == rule.recipe.describe()
    assert [gate["name"] for gate in row["gates"]] == [gate.name for gate in rule.gates]
    for shown, gate in zip(row["gates"], rule.gates, strict=True):
        assert (float(shown["low"]), float(shown["high"])) == (gate.low, gate.high)
        assert tuple(shown["axes"]) == gate.axes
    assert row["forms"] == ["recurrent", "chunk"][: 1 + rule.has_chunk]
    assert "torch" in row["backends"]
    assert row["paper"]


@pytest.mark.parametrize("name", RULES)
def test_the_bytes_are_those_of_the_state_that_a_call_returns(name):
    sizes = {"B": 3, "T": 11, "H": 2, "G": 4, "K": 5, "V": 7}
    _, state = draw_call(name, **sizes, dtype=torch.float32).run()
    assert command.state_bytes(RULES[name], sizes) == states.nbytes(state)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_s_row_says_what_the_rule_says_and_its_bytes_are_those_of_a_call(name, capsys):
    words = ["rules", name, "--json", "--B", "3", "--H", "2", "--G", "4", "--K", "5", "--V", "5", "--T", "11"]
    (row,) = json.loads(said(words, capsys))["rules"]
    rule = NETWORKS[name]
    assert (row["departs"], row["paper"], row["backends"]) == (rule.departs, rule.paper, ["torch"])
    assert [gate["name"] for gate in row["gates"]] == [gate.name for gate in rule.gates]
    K = 5
    mlp = (torch.ones(4, K, 4 * K), torch.ones(4, 4 * K, K))
    pair = tuple(x[:2] for x in mlp)
    maps = [(torch.ones(2, K, width),) for width in (K, K, 1, 1, K)]
    shared = {
        "ttt": {"weights": (torch.ones(4, K, K), torch.ones(4, K)), "mini_batch": 16, "position_offset": None},
        "titans": {"weights": mlp},
        "hope": {"weights": ops.HopeWeights(*maps, torch.ones(2), torch.ones(2))},
        "cms": {"weights": (pair,) * 3},
    }[name]
    call = draw_network_call(name, T=11, B=3, H=2, G=4, K=K, V=K, dtype=torch.float32)
    call.shared |= shared
    call.settings = {key: x for key, x in call.settings.items() if key == "periods"}
    _, state = call.run()
    assert row["state_bytes"] == states.nbytes(state)
    assert list(row["state"]) == [field for field in rule.state_type._fields if field != "pending"]


def test_a_path_of_a_network_is_explained_as_the_library_explains_it(capsys):
    for name in NETWORKS:
        out = said(["explain", name, "--T", "4000000000", "--G", "8", "--dtype", "bfloat16"], capsys)
        assert out.startswith(f"{name}: chunk form in chunks of 128, torch backend\n"), out
        assert "T = 4000000000: the chunk form is parallel in time" in out
        assert f"{name} has no native kernel" in out
        assert "gradients are taken where a mini-batch of " in out
    call = draw_network_call("titans", T=9)
    plan = ops.explain(ops.titans, **call.tokens, **call.shared, mini_batch=7, form="recurrent")
    assert (plan.rule, plan.form, plan.backend, plan.chunk_size) == ("titans", "recurrent", "torch", None)
    assert plan.reasons[-1] == "gradients are taken where a mini-batch of 7 began"
    assert "packed: 2 sequences" in said(["explain", "hope", "--lengths", "3", "5"], capsys)


def test_the_table_takes_a_shape_and_names(capsys):
    words = ["rules", "delta_rule", "--B", "2", "--H", "3", "--G", "6", "--K", "5", "--V", "7", "--T", "9"]
    assert f"{2 * 6 * 5 * 7 * 4:,} bytes" in said(words, capsys)
    assert "softmax" not in said(words, capsys).splitlines()[0]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["rules", "delta"], "NAME must be one of softmax_attention, .*; got delta"),
        (["rules", "--G", "3", "--H", "2"], "--G must be a multiple of --H; got 3 and 2"),
        (["rules", "--K", "0"], "--K must be at least 1; got 0"),
        (["rules", "--json", "--markdown"], "not allowed with argument"),
        (["explain"], "required: RULE"),
        (["explain", "delta"], "rule must be one of"),
        (["explain", "delta_rule", "--n", "2"], "delta_rule takes one"),
        (["explain", "delta_rule", "--form", "fast"], "form must be one of .*; got 'fast'"),
        (["explain", "delta_rule", "--backend", "metal"], "backend must be None or one of .*; got 'metal'"),
        (["explain", "delta_rule", "--chunk-size", "0"], "chunk_size must be at least 1; got 0"),
        (["explain", "delta_rule", "--T", "-1"], "--T must be at least 0; got -1"),
        (["explain", "delta_rule", "--T", "four"], "invalid int value: 'four'"),
        (["explain", "delta_rule", "--B", "2", "--lengths", "3", "4"], "B must be 1; got B=2"),
        (["explain", "delta_rule", "--T", "5", "--lengths", "3", "4"], r"at most T=5; got \[0, 3, 7\]"),
        (["explain", "delta_rule", "--lengths", "3", "-4"], "--lengths must be at least 0; got -4"),
        (["explain", "ttt", "--V", "32"], "V must equal K=64; got 32"),
        (["explain", "titans", "--n", "2"], "titans takes one"),
        (["explain", "cms", "--backend", "cpu"], "backend='cpu' cannot serve: cms has no native kernel"),
        (["explain", "delta_rule", "--dtype", "int8"], "--dtype must be one of .*; got int8"),
    ],
)
def test_bad_input_is_one_line(words, line, capsys):
    assert re.search(line, refused(words, capsys))


@pytest.mark.parametrize("name", RULES)
def test_a_path_is_explained_as_the_library_explains_it(name, capsys):
    call = draw_call(name, B=1, T=100, H=2, G=4, K=8, V=8, dtype=torch.bfloat16)
    want = ops.explain(ops.run, name, call.q, call.k, call.v, **call.gates)
    words = ["explain", name, "--T", "100", "--H", "2", "--G", "4", "--K", "8", "--dtype", "bfloat16"]
    assert said(words, capsys) == f"{want}\n"
    told = json.loads(said([*words, "--form", "recurrent", "--json"], capsys))
    assert (told["rule"], told["form"], told["chunk_size"]) == (name, "recurrent", None)


def test_a_packed_path_says_so_and_fills_no_tensor(capsys):
    words = ["explain", "gated_delta_rule", "--lengths", "0", "4000000000", "7", "--H", "64", "--K", "256"]
    out = said([*words, "--chunk-size", "32"], capsys)
    assert "chunk form in chunks of 32" in out
    assert "T = 4000000007" in out
    assert "packed: 3 sequences" in out
    assert "recurrent form" in said(["explain", "delta_rule", "--T", "1"], capsys)


def test_a_reader_that_has_seen_enough_is_no_error():
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m innerloop rules | head -1"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "softmax_attention\n"
    assert done.stderr == ""


def test_help_is_quick():
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-m", "innerloop", "--help"], capture_output=True, check=True)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.5
