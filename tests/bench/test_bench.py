"""What `innerloop bench` measures and says: works take turns, contenders answer the same, rows are judged."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch

from innerloop import rules
from innerloop.bench import contenders, everything, networks, rows
from innerloop.bench.compare import Pace, compare
from innerloop.bench.contenders import AGAINST, Absent, Contender, transformers_version
from innerloop.bench.curves import curves
from innerloop.bench.machine import describe, file_name, in_place, products
from innerloop.bench.measure import interleaved
from innerloop.bench.memory import peak
from innerloop.bench.neighbours import beside_neighbours
from innerloop.bench.page import kept, page
from innerloop.bench.workload import WAYS, Workload
from innerloop.checks import refusal
from innerloop.cli import main
from innerloop.experiments.blocks.hope import HopeBlock

RULES = tuple(module.RULE.name for module in rules.ALL)
SMALL = {"B": 1, "T": 70, "H": 2, "K": 8}
PACE = Pace(seconds=0.02, memory=False)


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when a work says so, and the order in which works ran."""

    class Clock:
        now, ran = 0.0, []

        def work(self, name, seconds):
            def run():
                self.now += seconds
                self.ran.append(name)

            return run

    mine = Clock()
    mine.ran = []
    monkeypatch.setattr("innerloop.bench.measure.time.perf_counter", lambda: mine.now)
    return mine


def test_works_take_turns_and_each_comes_first(clock):
    interleaved({name: clock.work(name, 0.006) for name in "abc"}, seconds=9.0, rounds=3)
    assert clock.ran[:6] == list("aabbcc")  # to warm up, and to see how long one takes
    assert clock.ran[6:] == [*"abc", *"bca", *"cab"]


def test_a_median_is_the_median_and_a_short_work_is_repeated_within_a_sample(clock):
    lengths = iter([9.0, 1.0, 1.0, 2.0, 3.0, 4.0, 50.0])

    def uneven():
        clock.now += 0.01 * next(lengths)

    found = interleaved({"short": clock.work("short", 1e-4), "uneven": uneven}, seconds=9.0, rounds=5)
    want = {"median": 0.03, "low": 0.02, "high": 0.04, "least": 0.01, "samples": 5}
    assert found["uneven"] == pytest.approx(want)
    assert found["short"]["median"] == pytest.approx(1e-4)
    assert clock.ran.count("short") == 2 + 5 * 50


def test_a_slow_work_sits_out_while_the_others_go_on(clock):
    works = {"endless": clock.work("endless", 9.0), "slow": clock.work("slow", 1.0), "quick": clock.work("quick", 0.01)}
    found = interleaved(works, seconds=5.0, rounds=8)
    assert {name: x["samples"] for name, x in found.items()} == {"endless": 2, "slow": 3, "quick": 3}
    assert clock.ran.count("endless") == 2
    clock.ran.clear()
    found = interleaved({"slow": works["slow"], "quick": works["quick"]}, seconds=5.0, rounds=8, known={"slow": 1.0})
    assert (found["slow"]["samples"], clock.ran.count("slow"), found["quick"]["samples"]) == (3, 2, 8)


def test_arithmetic_is_counted_as_stated():
    forward = Workload("gated_delta_rule", "forward", T=10, H=3, K=16, V=8)
    per_token = 6 * 16 * 8 + (2 * 32 + 16) * (16 + 8)
    assert forward.flops() == 30 * per_token
    assert forward.at(way="both").flops() == 30 * (per_token + 12 * 16 * 8 + 10 * 12 * 32)
    assert forward.at(G=6).flops() == 60 * per_token
    assert forward.at(rule="momentum_delta_rule").flops() == 30 * (per_token + 6 * 16 * 8)
    assert forward.at(rule="softmax_attention").flops() == forward.at(way="decode").flops() == 0


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_drawn_and_run_every_way(name):
    for way in WAYS:
        workload = Workload(name, way, **{**SMALL, "T": 300})
        call = workload.draw()
        assert call.q.shape[1] == (1 if way == "decode" else 300)
        compared = compare(workload, ["torch"], PACE, rates=False)
        assert set(compared["contenders"]) == {"innerloop", "torch"}
        assert compared["contenders"]["torch"]["error"] < 2e-5
        assert compared["kernel"] == (not refusal(call.rule))


@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda"])
def test_contenders_answer_the_same_with_gradients(rule):
    peers = ("torch", "loop", "transformers") if rule == "gated_delta_rule" else ("torch", "transformers")
    for way in ("both", "decode"):
        workload = Workload(rule, way, **SMALL)
        call = workload.draw()
        for name in peers:
            want = Contender("innerloop", workload, call)  # anew: a step writes its memory where it lies
            try:
                peer = Contender(name, workload, call)
            except Absent:
                assert (name, way) == ("loop", "decode") or not transformers_version()
                continue
            got, right = peer(), want()
            if way == "both":
                pairs = list(zip(got, right, strict=True))
                assert len(pairs) == 6
            else:
                pairs = [(got[0].reshape(right[0].shape), right[0]), (got[1], right[1])]
            for x, y in pairs:
                assert (x - y).abs().max() < 1e-4 * y.abs().max(), name


def test_whoever_is_absent_is_a_line(monkeypatch):
    monkeypatch.setattr(contenders, "transformers_version", lambda: "")
    found = compare(Workload("gated_delta_rule", "forward", **SMALL), AGAINST, PACE)
    assert found["absent"] == {"transformers": "transformers is not installed: pip install 'innerloop[bench]'"}
    assert set(found["contenders"]) == {"innerloop", "torch", "sdpa", "loop"}
    assert "no mesa" in compare(Workload("mesa", "forward", **SMALL), ["transformers"], PACE)["absent"]["transformers"]


def test_another_version_without_the_function_is_a_line_too(monkeypatch):
    monkeypatch.setattr(contenders, "transformers_version", lambda: "9.9")
    monkeypatch.setattr(contenders, "_MODELS", {"gated_delta_rule": ("no_such_model",)})
    found = compare(Workload("gated_delta_rule", "forward", **SMALL), ["transformers"], PACE, rates=False)
    assert found["absent"] == {"transformers": "transformers 9.9 has no torch_chunk_gated_delta_rule"}


def test_shares_and_floors_are_of_what_the_machine_did():
    found = compare(Workload("gated_delta_rule", "forward", **SMALL), [], PACE)
    time_taken = found["contenders"]["innerloop"]["times"]["median"]
    assert found["share"]["large"] == pytest.approx(found["flops"] / time_taken / found["rates"]["large"])
    found = compare(Workload("gated_delta_rule", "decode", **SMALL), [], PACE)
    assert found["rates"]["in_place"] * found["floor"] == pytest.approx(2 * 2 * 8 * 8 * 4)
    assert found["of_floor"] * found["floor"] == pytest.approx(found["contenders"]["innerloop"]["times"]["median"])


def test_the_machines_own_works_do_what_they_are_counted_as():
    for work, count in products().values():
        results = work().numel()
        assert count in (2 * results * inner for inner in (128, 1024))
    changed = in_place(400)()
    assert changed.nbytes == 400


def test_a_machine_is_named_by_processor_and_cores_alone():
    name = file_name({"cpu": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "cores": 4})
    assert name == "intel-xeon-platinum-8481c-4-cores.json"
    machine = describe()
    assert machine["torch"] == torch.__version__ and machine["threads"] == torch.get_num_threads()
    assert str(machine["cores"]) in file_name(machine)


def test_peak_memory_is_what_a_call_adds():
    workload = Workload("gated_delta_rule", "both", T=8192, H=4, K=64)
    least = 4 * 4 * 8192 * 4 * 64  # the output and three gradients
    found = peak("innerloop", workload, threads=1)
    assert found is None or least < found < 3 * least


@pytest.mark.parametrize(
    ("ratio", "share", "verdict", "aimed"),
    [(6.0, 0.8, "pass", True), (6.0, 0.5, "pass", False), (4.9, 0.8, "short", True), (None, None, "absent", False)],
)
def test_a_row_is_judged_by_what_it_must_reach(monkeypatch, ratio, share, verdict, aimed):
    contenders = {} if ratio is None else {"transformers": {"ratio": ratio}}
    found = {"contenders": contenders, "share": {} if share is None else {"large": share}, "absent": {}, "kernel": True}
    monkeypatch.setattr(rows, "compare", lambda *_: found)
    row = rows.Versus(Workload("gated_delta_rule", "forward"), 5.0, 0.75).measure(PACE)
    assert (row["verdict"], row["aimed"], row["wanted"], row["hoped"]) == (verdict, aimed, "≥ 5×", "≥ 75%")


def test_rows_for_which_less_is_better_are_judged_so(monkeypatch):
    workload = Workload("gated_delta_rule", "both", **SMALL)
    monkeypatch.setattr(rows, "peak_here", lambda name, _: 100 if name == "innerloop" else 500)
    row = rows.Memory(workload, 0.25, 0.125, against="torch").measure(PACE)
    assert (row["value"], row["verdict"], row["aimed"]) == (0.2, "pass", False)
    times = {64: 2.0, 128: 0.5, 256: 3.0, 512: 4.0}
    monkeypatch.setattr(rows, "compare", lambda x, *_, **__: {"contenders": {"sdpa": {"ratio": times[x.T]}}})
    row = rows.Crossover(workload, 512, 256, lengths=tuple(times)).measure(PACE)
    assert (row["value"], row["verdict"], row["aimed"]) == (256, "pass", True)
    row = rows.Crossover(workload, 64, 64, lengths=(128,)).measure(PACE)
    assert (row["value"], row["verdict"]) == (256, "short")


def test_what_a_call_costs_is_measured_through_the_kernels_where_they_are():
    found = rows.Cost(Workload("gated_delta_rule", "decode"), 15.0, 8.0).measure(PACE)
    parts = found["cost"]
    assert found["value"] == parts.get("native step", parts["step"])
    assert 0 < parts["torch.empty_like"] < parts["operator"] < parts["call"]


def test_curves_leave_out_who_has_become_too_slow(monkeypatch):
    monkeypatch.setattr("innerloop.bench.curves._PATIENCE", 0.0)
    found = curves("gated_delta_rule", PACE, lengths=(8, 16), batches=(1, 2), H=1, K=8)
    assert [size for size, _ in found["forward"]["innerloop"]] == [8, 16]
    assert [size for size, _ in found["forward"]["torch"]] == [8]
    assert [size for size, _ in found["decode"]["floor"]] == [1, 2]


@pytest.mark.slow
def test_a_busy_neighbour_is_there_and_gone_again():
    found = beside_neighbours(1, Workload("gated_delta_rule", "both", **SMALL), seconds=0.02)
    assert [(x["busy"], x["policy"]) for x in found] == [
        (busy, policy) for busy in (False, True) for policy in ("unset", "active", "passive")
    ]
    assert all(x["ours"] > 0 and x["mm"] > 0 for x in found)


@pytest.fixture
def short(monkeypatch):
    """A table of a few rows, and everything else small."""
    workload = Workload("gated_delta_rule", "forward", **SMALL)
    chosen = (
        rows.Versus(workload, 0.0, 0.0, against="torch"),
        rows.Token(workload.at(way="decode"), 1e9, 0.0, against="torch"),
        rows.Versus(workload.at(rule="mesa"), 1.0, 1.0),
        rows.Halves(workload.at(dtype="bfloat16"), 0.0, 9e9),
        rows.Flat(workload, 1e9, 0.0, long=140),
    )
    monkeypatch.setattr(everything, "ROWS", chosen)
    monkeypatch.setattr(everything, "every_rule", lambda *_: [
        {"rule": "mesa", "kernel": False, **{way: {"innerloop": 1e-3, "torch": 1e-3} for way in WAYS}}
    ])  # fmt: skip
    few = curves("gated_delta_rule", PACE, lengths=(8, 16), batches=(1, 2), H=1, K=8)
    monkeypatch.setattr(everything, "curves", lambda *_, **__: few)
    beside = [{"busy": True, "policy": "unset", "ours": 1.0, "mm": 2.0}]
    monkeypatch.setattr(everything, "beside_neighbours", lambda _: beside)
    return chosen


def test_the_whole_table_becomes_numbers_a_page_and_figures(short, tmp_path, capsys):
    target = tmp_path / "page.md"
    words = ["--seconds", "0.02", "--no-memory", "--json", str(tmp_path), "--page", str(target)]
    assert main(["bench", *words]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "3 pass, 1 short, 1 absent"
    written = tmp_path / file_name(describe())
    result = json.loads(written.read_text())
    assert [row["verdict"] for row in result["rows"]] == ["pass", "short", "absent", "pass", "pass"]
    text = target.read_text()
    for row, measured in zip(short, result["rows"], strict=True):
        assert row.title in text and row.title in said
        assert f"**{measured['verdict']}**" in text
    assert "transformers has no mesa" in text and "transformers has no mesa" in said
    for name in ("length", "decode"):
        assert f"images/bench-{name}.svg" in text
        assert (tmp_path / "images" / f"bench-{name}.svg").read_text().startswith("<svg")
    target.write_text(text + "\nwritten by hand\n")
    assert main(["bench", "--results", str(written), "--page", str(target)]) == 0
    assert target.read_text() == page(result, "written by hand")
    assert kept(target.read_text()) == "written by hand"


def test_rows_are_measured_again_in_their_places(short, tmp_path, capsys, monkeypatch):
    words = ["--seconds", "0.02", "--no-memory"]
    written, target = tmp_path / "numbers.json", tmp_path / "page.md"
    assert main(["bench", *words, "--json", str(written)]) == 0
    before = json.loads(written.read_text())
    capsys.readouterr()
    monkeypatch.setattr(everything, "commit_of", lambda _: "a later commit")
    again = [*words, "--results", str(written), "--page", str(target), "--row", short[1].title]
    assert main(["bench", *again]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    after = json.loads(written.read_text())
    assert [row["title"] for row in after["rows"]] == [row["title"] for row in before["rows"]]
    same = [x == y for x, y in zip(before["rows"], after["rows"], strict=True)]
    assert same == [True, False, True, True, True]
    assert f"Measured again, at commit a later commit: {short[1].title}.\n" in target.read_text()
    elsewhere = {**before, "machine": {**before["machine"], "cpu": "another"}}
    written.write_text(json.dumps(elsewhere))
    assert main(["bench", *again]) == 2
    assert "must be of this machine" in capsys.readouterr().err
    assert json.loads(written.read_text()) == elsewhere


def test_one_rule_is_compared_in_one_shape(tmp_path, capsys):
    file = tmp_path / "numbers.json"
    words = "--rule delta_rule --shape B=2,T=40,H=2,K=8,G=4,V=6 --way both --against torch --against sdpa"
    assert main(["bench", *words.split(), "--seconds", "0.02", "--no-memory", "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("delta_rule forward+backward B2 T40 H2 K8 G4 V6")
    (found,) = json.loads(file.read_text())["comparisons"]
    assert found["workload"]["G"] == 4
    assert set(found["contenders"]) == {"innerloop", "torch", "sdpa"}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--rule no_such", "no_such"),
        ("--rule mesa --shape T", "B=1,T=2048"),
        ("--rule mesa --shape T=0", "'T=0'"),
        ("--rule mesa --shape H=2,G=3", "multiple"),
        ("--rule mesa --shape Q=2", "'Q=2'"),
        ("--rule mesa --against nobody", "nobody"),
        ("--rule mesa --page x.md", "--page is for the whole table"),
        ("--shape T=5", "name it with --rule"),
        ("--seconds 0", "--seconds"),
        ("--seconds nan", "--seconds"),
        ("--threads 0", "--threads"),
        ("--json /no/such/folder/x.json", "folder that exists"),
        ("--results nothing.json", "--page"),
        ("--results /no/such.json --page x.md", "whole table"),
        ("--row no_such_row", "part of a row's title"),
        ("--row titans --rule titans", "leave --rule out"),
        ("--row titans --page x.md", "name --results"),
        ("--rule titans --shape T=5", "timed at the table's shapes"),
        ("--rule cms", "has rows for titans, ttt, hope"),
        ("surplus", "surplus"),
    ],
)
def test_wrong_arguments_are_one_line(words, why, capsys):
    try:
        code = main(["bench", *words.split()])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert why in err


def small(row):
    """The same row at sizes that take no time."""
    return dataclasses.replace(row, workload=row.workload.at(B=2, T=64, K=8), shorter=min(row.shorter, 4))


@pytest.mark.parametrize("row", networks.NETWORK_ROWS, ids=lambda row: row.title)
def test_a_network_s_row_times_all_that_it_names(row):
    found = small(row).measure(rows.Pace(0.02, memory=False))
    if found["verdict"] == "absent":
        assert "titans-pytorch is not installed" in found["note"]
        return
    assert found["value"] > 0
    assert set(found["times"]) == {"ours", "other", *(name for name, _ in row.beside)}
    assert all(f"{name} " in found["note"] for name, _ in row.beside)


def test_a_peer_that_is_absent_is_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "titans_pytorch", None)
    found = small(networks.NETWORK_ROWS[0]).measure(PACE)
    assert (found["verdict"], found["value"]) == ("absent", None)
    assert found["note"].startswith("titans-pytorch is not installed: pip install 'innerloop[bench]'")


def test_the_documents_loop_answers_what_the_block_answers():
    torch.manual_seed(0)
    block = HopeBlock(20, 12)
    loop = networks.LoopBlock(20, 12)
    loop.load_state_dict(block.state_dict())
    sequence = torch.randint(20, (3, 9))
    assert (loop(sequence) - block(sequence)).abs().max() <= 1e-5


def test_the_rows_of_one_network_are_printed(monkeypatch, capsys):
    monkeypatch.setattr(networks, "NETWORK_ROWS", tuple(map(small, networks.NETWORK_ROWS)))
    assert main(["bench", "--rule", "ttt", "--seconds", "0.02"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0].split()[1] == "ttt"
    assert "ours" in said and "other" in said
