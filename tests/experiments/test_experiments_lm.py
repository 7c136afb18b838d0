"""The language-model row and the documents' HOPE block: right blocks, checks that can fail, pictures from JSON."""

import copy
import functools
import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure as Canvas
from torch import nn

from innerloop import experiments, ops
from innerloop.data import PairTokenizer, Windows, pydoc_topics, windows
from innerloop.experiments import b05_language_model as b05
from innerloop.experiments import c01_recall, c04_one_recall
from innerloop.experiments.blocks import head_loss as head
from innerloop.experiments.blocks import hope_layer, recall, training
from innerloop.experiments.blocks.gated_delta_net import GatedDeltaNetBlock, LanguageModel
from innerloop.experiments.blocks.hope import HopeBlock
from innerloop.experiments.experiment import Settings
from innerloop.probe.trial import one_thread
from innerloop.report import drawing
from innerloop.testing import assert_close

NAMES = ["B5", "C1", "C2", "C3", "C4"]


@pytest.fixture(autouse=True)
def keep_random_state():
    """Leave the global generator as it was found: tests here seed it where a document does."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def slopes(output, named):
    """Gradients of a fixed functional of ``output``, by name."""
    total = (output * torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)).sum()
    found = torch.autograd.grad(total, list(named.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(named, found, strict=True))


def same(ours, wanted, named):
    """Hold values and gradients in float64 to the library's bars."""
    assert_close(ours, wanted, torch.float64)
    assert_close(slopes(ours, named), slopes(wanted, named), torch.float64, "gradients")


# The Gated DeltaNet block and the model made of it.


def test_the_model_has_the_document_s_parameters():
    assert sum(parameter.numel() for parameter in LanguageModel(1_027).parameters()) == 562_315


def test_the_decay_gate_starts_by_keeping():
    block = GatedDeltaNetBlock(16, heads=4)
    assert block.gates.bias[:4].tolist() == [2.0] * 4
    assert not torch.equal(block.gates.bias[4:], torch.full((4,), 2.0))


def gated_delta_net_by_the_document(block, x):
    """The document's forward pass, time first, from its own equations; without dropout."""
    x = x.transpose(0, 1)
    h = block.norm1(x)
    q, k, v = block.qkv(h).reshape(*x.shape[:2], block.heads, 3, -1).unbind(3)
    q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    alpha, beta = torch.sigmoid(block.gates(h)).chunk(2, -1)
    memory, read = x.new_zeros(x.shape[1], block.heads, q.shape[-1], v.shape[-1]), []
    for t in range(len(x)):
        memory = alpha[t][..., None, None] * memory
        error = v[t] - torch.einsum("bhkv,bhk->bhv", memory, k[t])
        memory = memory + torch.einsum("bhk,bhv->bhkv", beta[t][..., None] * k[t], error)
        read.append(torch.einsum("bhkv,bhk->bhv", memory, q[t]))
    o = block.norm(torch.stack(read)) * F.silu(block.output_gate(h)).reshape_as(v)
    x = x + block.output(o.reshape_as(x))
    return (x + block.mlp(block.norm2(x))).transpose(0, 1)


@pytest.mark.parametrize("form", ["operator", "loop"])
def test_gated_delta_net_is_the_document_s(form):
    block = GatedDeltaNetBlock(16, heads=2, form=form).double()
    x = torch.randn(3, 9, 16, dtype=torch.float64, requires_grad=True)
    same(block(x), gated_delta_net_by_the_document(block, x), {"x": x, **dict(block.named_parameters())})


def test_a_seed_draws_the_document_s_weights():
    torch.manual_seed(5)
    drawn = [
        *(nn.Linear(16, 48, bias=False), nn.Linear(16, 4), nn.Linear(16, 16), nn.Linear(16, 16, bias=False)),
        *(nn.Linear(16, 32), nn.Linear(32, 16)),
    ]
    torch.manual_seed(5)
    block = GatedDeltaNetBlock(16, heads=2)
    ours = (block.qkv, block.gates, block.output_gate, block.output, block.mlp[0], block.mlp[2])
    assert all(torch.equal(mine.weight, theirs.weight) for mine, theirs in zip(ours, drawn, strict=True))


# Not one token: RMSNorm then cancels the gates, whose gradients are rounding alone.
@pytest.mark.parametrize("length", [2, 7, 32])
def test_gated_delta_net_through_the_operator_equals_the_token_loop(length):
    block = GatedDeltaNetBlock(16, heads=2, dropout=0.3).double()
    x = torch.randn(3, length, 16, dtype=torch.float64, requires_grad=True)
    found = []
    for form in ("operator", "loop"):
        block.form = form
        torch.manual_seed(3)  # the same dropout in both
        found.append(block(x))
    same(*found, {"x": x, **dict(block.named_parameters())})


def test_a_token_at_a_time_equals_the_whole_window():
    model = LanguageModel(50, width=16).double().eval()
    for block in model.blocks:
        block.norm.eps = 0.1  # large enough that the norm does not hide the scale of a read
    tokens = torch.randint(50, (3, 9))
    state, logits = model.empty_state(3), []
    for token in tokens.unbind(1):
        read, state = model.step(token, state)
        logits.append(read)
    assert_close(torch.stack(logits, 1), model.head(model(tokens)), torch.float64)
    assert [memory.shape for memory in state] == [(3, 2, 8, 8)] * 2


@pytest.mark.parametrize("rows", [1, 3, 512])
def test_head_loss_equals_cross_entropy(rows, monkeypatch):
    monkeypatch.setattr(head, "_ROWS", rows)
    x, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((10, 4), (7, 4), (7,))
    )
    target = torch.randint(7, (10,))
    ours = head.head_loss(x, weight, bias, target)
    wanted = F.cross_entropy(F.linear(x, weight, bias), target, reduction="sum")
    same(ours, wanted, {"x": x, "weight": weight, "bias": bias})


def test_head_loss_keeps_nothing_where_nothing_is_learned():
    weight = torch.randn(7, 4, requires_grad=True)
    with torch.no_grad():
        assert not head.head_loss(torch.randn(10, 4), weight, torch.zeros(7), torch.zeros(10, dtype=torch.long)).grad_fn


# Training and writing.


def test_an_update_does_not_depend_on_the_pieces(monkeypatch):
    batch, learners = torch.randint(50, (10, 9)), []
    for piece in (10, 3):
        monkeypatch.setattr(training, "_PIECE", piece)
        torch.manual_seed(1)
        learners.append(training.Learner(LanguageModel(50, width=16).double()))
        assert learners[-1].update(batch).loss == pytest.approx(math.log(50), rel=0.2)
    for one, other in zip(*(learner.model.parameters() for learner in learners), strict=True):
        assert (one - other).abs().max() < 1e-9


def test_an_update_is_the_document_s():
    torch.manual_seed(1)
    learner = training.Learner(LanguageModel(50, width=16).double())
    model, batch = copy.deepcopy(learner.model), torch.randint(50, (10, 9))
    with torch.no_grad():
        model.head.weight.mul_(30)  # steep enough that the gradient is clipped
        learner.model.head.weight.mul_(30)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    loss = F.cross_entropy(model.head(model(batch[:, :-1])).flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1
    optimizer.step()
    assert learner.update(batch).loss == pytest.approx(loss.item(), rel=1e-9)
    for one, other in zip(learner.model.parameters(), model.parameters(), strict=True):
        assert (one - other).abs().max() < 1e-9


def test_validation_leaves_dropout_out_and_counts_every_token():
    model, held = LanguageModel(50, width=16, dropout=0.5).double(), torch.randint(50, (7, 9))
    wanted = F.cross_entropy(model.eval().head(model(held[:, :-1])).flatten(0, 1), held[:, 1:].flatten())
    model.train()
    assert training.mean_loss(model, held) == pytest.approx(wanted.item(), rel=1e-9)


def test_an_update_drops_out_also_after_a_validation():
    learner, batch = training.Learner(LanguageModel(50, width=16, dropout=0.5)), torch.randint(50, (7, 9))
    again = training.Learner(copy.deepcopy(learner.model))
    training.mean_loss(learner.model, batch)
    assert learner.update(batch).loss != again.update(batch).loss


def test_an_epoch_shows_every_window_once():
    data = Windows(torch.zeros(2_500, 3), torch.zeros(1, 3))
    batches = training.shuffled(data)
    assert [len(batch) for batch in batches] == [1_024, 1_024, 452]
    assert torch.cat(batches).sort().values.tolist() == list(range(2_500))


def test_what_is_written_depends_on_the_seed_alone():
    tokenizer = PairTokenizer.learn([pydoc_topics()], 300)
    model = LanguageModel(300, width=16)
    first, again, other = (training.write(model, tokenizer, "the", 20, seed) for seed in (0, 0, 1))
    assert first == again != other


class Stopped(Exception):
    """Raised from inside a training."""


def trained(monkeypatch, kept, stop_after=None):
    """Train a small model for three epochs of two batches; stop in the middle if told to."""
    monkeypatch.setattr(training, "BATCH", 8)
    torch.manual_seed(7)
    model, steps = LanguageModel(50, width=16, dropout=0.3), []

    def progress(fraction):
        steps.append(fraction)
        if len(steps) == stop_after:
            raise Stopped

    data = Windows(torch.randint(50, (16, 5)), torch.randint(50, (8, 5)))
    settings = Settings(progress=progress, kept=lambda name: None if kept is None else kept / name)
    result = b05.train(model, data, 3, 1, settings)
    clocked = {"seconds": [result.pop("seconds")], "ways": [result[way].pop("seconds") for way in ("operator", "loop")]}
    assert all(clocked.values())
    return result, model.state_dict(), steps


@pytest.mark.parametrize("stop_after", [3, 6])
def test_a_training_that_was_stopped_goes_on_to_the_same_bits(stop_after, tmp_path, monkeypatch):
    wanted, weights, _ = trained(monkeypatch, None)
    with pytest.raises(Stopped):
        trained(monkeypatch, tmp_path, stop_after)
    got, ours, steps = trained(monkeypatch, tmp_path)
    assert len(steps) == {3: 4, 6: 2}[stop_after], "epochs that had ended are not trained again"
    assert got == wanted
    assert all(torch.equal(ours[name], weights[name]) for name in weights)


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:-9]), lambda path: path.unlink()])
def test_a_training_begins_anew_where_nothing_whole_was_kept(damage, tmp_path, monkeypatch):
    with pytest.raises(Stopped):
        trained(monkeypatch, tmp_path, 3)
    damage(tmp_path / "training.safetensors")
    assert len(trained(monkeypatch, tmp_path)[2]) == 6


# The HOPE block and its task.


def hope_by_the_document(block, sequence):
    """The document's loop over tokens: memory V by K, keeps with alpha, learns with eta, the last read answers."""
    x = block.embedding(sequence)
    x = x + block.convolution(x.transpose(1, 2))[:, :, : sequence.shape[1]].transpose(1, 2)
    memory = x.new_zeros(len(x), x.shape[-1], x.shape[-1])
    read = x.new_zeros(len(x), x.shape[-1])
    for token in x.unbind(1):
        k, q = F.normalize(block.key(token), dim=-1), F.normalize(block.query(token), dim=-1)
        if not block.memory:
            read = block.feed_forward(q)
            continue
        error = torch.einsum("bvk,bk->bv", memory, k) - block.target(block.value(token))
        eta, alpha = block.rate(token).sigmoid(), block.keep(token).sigmoid()
        memory = alpha[..., None] * memory - eta[..., None] * torch.einsum("bv,bk->bvk", error, k)
        read = torch.einsum("bvk,bk->bv", memory, q)
    return block.head(block.feed_forward(read))


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("pairs", [1, 4, 8])
def test_hope_block_equals_the_document_s_loop(memory, pairs):
    block = HopeBlock(20, 12, width=8, memory=memory).double()
    sequence, _ = recall.draw(5, pairs, torch.Generator().manual_seed(0))
    same(block(sequence), hope_by_the_document(block, sequence), dict(block.named_parameters()))


@pytest.mark.parametrize(
    ("seed", "printed", "answer"),
    [(2, "k0 v7 k4 v8 k7 v3 k2 v6 k4", "v8"), (123, "k6 v5 k2 v11 k1 v10 k3 v11 k2", "v11")],
)
def test_the_draws_are_the_document_s(seed, printed, answer):
    sequence, value = recall.draw(1, 4, torch.Generator().manual_seed(seed))
    assert " ".join(recall.spell(token) for token in sequence[0].tolist()) == printed
    assert f"v{value.item()}" == answer


def test_training_starts_as_the_document_prints():
    losses = recall.train(1, 101).losses
    assert f"{losses[0]:.3f}" == "2.484"
    assert losses[100] == pytest.approx(0.863, abs=0.001)


def test_training_leaves_threads_and_the_global_generator_alone():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    recall.train(5, 2)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match="inside"), one_thread():
        assert torch.get_num_threads() == 1
        raise ValueError("inside")
    assert torch.get_num_threads() == threads


def test_training_happens_once_and_reports_either_way():
    seen = []
    first = recall.train(6, 3, progress=seen.append)
    assert seen == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert recall.train(6, 3, progress=seen.append) is first
    assert seen[4:] == [1.0]
    assert recall.train(7, 3).losses != first.losses


def test_asking_early_equals_running_the_shorter_list():
    block = HopeBlock(20, 12)
    sequence = torch.tensor([0, 9, 3, 15])
    early = recall.chances(block, sequence)
    assert early.shape == (4, 8, 12)
    wanted = block(torch.tensor([[0, 9, 5]])).softmax(-1)[0]
    assert (early[1, 5] - wanted).abs().max() < 1e-6


# The experiments: what a short run leaves, what the checks make of it, and how it is shown.


def untrained(monkeypatch):
    """Let C1 to C4 find blocks that were never trained, with the losses of one that was."""
    losses = [2.484, *[1.5] * 99, 0.863, *[0.2] * 99, *[0.005] * 100, *[0.0] * 400]
    for seed in (1, 2, 3):
        for steps, memory, settle in ((700, True, False), (700, True, True), (500, False, False)):
            block = HopeBlock(20, 12, memory=memory)
            monkeypatch.setitem(recall._trained, (seed, steps, memory, settle), recall.Trained(block, losses))
        for steps, memory in ((hope_layer.STEPS, True), (500, False)):
            layer = hope_layer.HopeLayerBlock(remembers=memory, **hope_layer.OPTIONS)
            monkeypatch.setitem(hope_layer._trained, f"{seed} {steps} {memory}", hope_layer.Trained(layer, losses))


def shortened(monkeypatch, tmp_path):
    """Let B5 find no text, few windows and small batches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("INNERLOOP_DATA", raising=False)
    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr(b05, "windows", functools.partial(windows, length=6, train=40, validation=8))
    monkeypatch.setattr(training, "BATCH", 8)


def refuse(url, timeout):
    raise OSError("no network")


@pytest.fixture(scope="module")
def short_runs(tmp_path_factory):
    """What each experiment returns, through JSON, and the progress it reported."""
    found = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        untrained(monkeypatch)
        shortened(monkeypatch, tmp_path_factory.mktemp("cache"))
        for name in NAMES:
            seen = []
            result = experiments.load(name).run(Settings(quick=True, progress=seen.append))
            found[name] = json.dumps(result), seen
    return found


@pytest.fixture
def reproduced(short_runs):
    """Results as a run that reproduces its claim leaves them: a short run's, with the numbers that training changes."""
    results = {name: json.loads(stored) for name, (stored, _) in short_runs.items()}
    del results["B5"]["short"]
    results["B5"] |= {"text": "The Time Machine", "tokens": 62_808, "perplexity": [313.7]}
    for row in (*results["C1"]["seeds"].values(), *results["C1"]["layer"].values()):
        row["accuracy"] = 1.0
    for row in (*results["C2"]["seeds"].values(), *results["C2"]["layer"].values()):
        row |= {"accuracy": 0.32, "places": [0.1, 0.1, 0.12, 0.9]}
    results["C3"]["seeds"] = {"1": [1.0, 1.0, 1.0], "2": [0.994, 0.984, 0.965], "3": [0.926, 0.855, 0.791]}
    results["C3"]["settled"] = {"1": [1.0, 1.0, 0.9]}
    results["C3"]["layer"] = {"1": [1.0, 0.99, 0.985]}
    for answers, chances in zip(results["C4"]["answers"], results["C4"]["chances"], strict=True):
        for key, value in ((6, "v5"), (2, "v11"), (1, "v10"), (3, "v11")):
            answers[key], chances[key] = value, 0.99
    return results


FULL = [313.7, 198.2, 137.5, 109.7, 95.6, 88.7, 85.6, 85.7, 87.3, 90.8]
DOCTORED = [
    ("B5", ("parameters",), 562_314),
    ("B5", ("tokens",), 65_690),
    ("B5", ("perplexity", 0), 322.5),
    ("B5", ("perplexity", 0), 297.5),
    ("B5", ("perplexity",), FULL[:9]),
    ("B5", ("perplexity",), [max(perplexity, 88.5) for perplexity in FULL]),
    ("B5", ("perplexity",), [*FULL[:9], 93.5]),
    ("B5", ("loop", "loss", 1), 6.9),
    ("B5", ("loop", "loss"), []),
    ("C1", ("seeds", "1", "loss", 0), 2.486),
    ("C1", ("seeds", "1", "loss", 20), 0.8645),
    ("C1", ("seeds", "1", "loss", 40), 0.007),
    ("C1", ("seeds", "1", "loss", 120), 0.002),
    ("C1", ("seeds", "1", "loss"), [2.484, 0.863]),
    ("C1", ("seeds", "1", "accuracy"), 0.998),
    ("C1", ("seeds", "3", "accuracy"), 0.3),
    ("C1", ("layer", "1", "accuracy"), 0.98),
    ("C1", ("layer",), {}),
    ("C2", ("layer", "3", "accuracy"), 0.9),
    ("C2", ("layer",), {}),
    ("C3", ("layer", "1", 2), 0.97),
    ("C3", ("layer",), {}),
    ("C3", ("settled", "1"), [1.0]),
    ("C2", ("seeds", "1", "accuracy"), 0.5),
    ("C2", ("seeds", "2", "accuracy"), 0.1),
    ("C2", ("seeds", "1", "places", 0), 0.6),
    ("C3", ("seeds", "1", 2), 0.97),
    ("C3", ("seeds", "3", 1), 0.4),
    ("C3", ("seeds", "2"), [1.0]),
    ("C4", ("sequence", 0), "k5"),
    ("C4", ("right",), "v10"),
    ("C4", ("answers", -1, 2), "v10"),
    ("C4", ("answers", -1, 6), "v6"),
    ("C4", ("answers", 1, 6), "v6"),
    ("C4", ("chances", -1, 3), 0.4),
    ("C4", ("chances", 3, 2), 0.5),
]


@pytest.mark.parametrize("name", NAMES)
def test_check_accepts_a_reproduced_result(name, reproduced):
    experiments.load(name).check(reproduced[name])


def test_check_accepts_the_full_run_of_the_language_model(reproduced):
    b05.check(reproduced["B5"] | {"perplexity": FULL})


@pytest.mark.parametrize(("name", "path", "value"), DOCTORED)
def test_check_fails_on_a_doctored_result(name, path, value, reproduced):
    *way, last = path
    functools.reduce(lambda inner, key: inner[key], way, reproduced[name])[last] = value
    with pytest.raises(AssertionError, match=r"\d"):
        experiments.load(name).check(reproduced[name])


def with_every_float(value, number):
    if isinstance(value, dict):
        return {key: with_every_float(inner, number) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_every_float(inner, number) for inner in value]
    return number if isinstance(value, float) else value


@pytest.mark.parametrize("name", NAMES)
def test_check_fails_where_nothing_is_a_number(name, reproduced):
    with pytest.raises(AssertionError):
        experiments.load(name).check(with_every_float(reproduced[name], math.nan))


@pytest.mark.parametrize("name", ["C1", "C2", "C3", "C4"])
def test_check_fails_on_blocks_that_learned_nothing(name, short_runs):
    with pytest.raises(AssertionError):
        experiments.load(name).check(json.loads(short_runs[name][0]))


def test_on_another_text_no_band_is_checked_and_the_result_says_so(short_runs):
    result = json.loads(short_runs["B5"][0])
    assert result["text"] == "pydoc topics"
    assert "no network" in result["short"]
    b05.check(result)
    with pytest.raises(AssertionError, match="token loop"):
        b05.check(result | {"loop": {"loss": [0.0] * 3, "seconds": [1.0] * 3}})


def test_the_language_model_compares_both_ways_on_the_same_batches(short_runs):
    result = json.loads(short_runs["B5"][0])
    assert len(result["operator"]["loss"]) == len(result["loop"]["loss"]) == b05.QUICK_COMPARED
    assert result["operator"]["loss"] == result["batch_loss"][: b05.QUICK_COMPARED]
    assert result["operator"]["loss"] == pytest.approx(result["loop"]["loss"], abs=1e-4)
    assert result["operator"]["loss"][0] != result["operator"]["loss"][1]
    assert result["state_bytes"] == 2 * 2 * 64 * 64 * 4


def test_a_wrong_operator_is_noticed_beside_the_token_loop(monkeypatch, tmp_path):
    def one_token_late(q, k, v, *, g, beta, scale):
        return right(q, k, v, g=g, beta=beta, scale=scale)[0].roll(1, 1), None

    right = ops.gated_delta_rule
    shortened(monkeypatch, tmp_path)
    monkeypatch.setattr(ops, "gated_delta_rule", one_token_late)
    with pytest.raises(AssertionError, match="through the token loop"):
        b05.check(b05.run(Settings(quick=True)))


def test_the_language_model_repeats_to_the_digit(short_runs, monkeypatch, tmp_path):
    shortened(monkeypatch, tmp_path)
    again = b05.run(Settings(quick=True))
    first = json.loads(short_runs["B5"][0])
    for key in ("batch_loss", "loss", "sample"):
        assert again[key] == first[key]


@pytest.mark.parametrize("name", NAMES)
def test_progress_rises_to_one(name, short_runs):
    _, seen = short_runs[name]
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1.0)


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_whole_and_leave_the_result_alone(name, reproduced):
    before = copy.deepcopy(reproduced[name])
    tables = experiments.load(name).tables(reproduced[name])
    assert tables and reproduced[name] == before
    for table in tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.columns)}
        assert not any(re.search(r"\bnan\b", str(cell)) for row in table.rows for cell in row)


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_drawn_from_the_stored_result(name, reproduced):
    for number, figure in enumerate(experiments.load(name).figures(reproduced[name])):
        panels = [Canvas().add_subplot() for _ in range(figure.panels)]
        figure.draw(*panels)
        assert all(axes.get_title() and axes.get_xlabel() and axes.get_ylabel() for axes in panels)
        assert all(panel.inline.startswith("<svg") for panel in drawing.draw(figure, f"{name}-{number}"))


def test_the_picture_of_a_recall_names_every_answer(reproduced):
    (figure,) = c04_one_recall.figures(reproduced["C4"])
    (panel,) = drawing.draw(figure, "c4")
    assert panel.inline.count(">v11<") >= 2 * 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["C1", "C2", "C3", "C4"])
def test_claim_is_reproduced(name):
    experiment = experiments.load(name)
    experiment.check(json.loads(json.dumps(experiment.run(Settings()))))
    assert c01_recall.STEPS == 700
