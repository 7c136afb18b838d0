"""The tasks: every label against a slow reading of the sequence, every chance level against counting."""

import dataclasses
import itertools
import math

import pytest
import torch

from innerloop.data.tasks import (
    IGNORED,
    TASKS,
    AssociativeRecall,
    Batch,
    Capacity,
    DriftingRegression,
    ModularArithmetic,
    MultiQueryRecall,
    Needle,
    OverwriteRecall,
    Parity,
    SelectiveCopying,
    WordProblem,
    generated,
    task,
)

TOKENS = [name for name in TASKS if TASKS[name]().channels]


def drawn(made, count=50, seed=0):
    return made.draw(count, torch.Generator().manual_seed(seed))


def rows(batch):
    return zip(batch.inputs.tolist(), batch.labels.tolist(), strict=True)


@pytest.mark.parametrize("name", TASKS)
def test_shapes_and_ranges_are_those_stated(name):
    made = task(name)
    batch = drawn(made)
    assert batch.inputs.shape[:2] == batch.labels.shape[:2] == batch.asked.shape == (50, made.length)
    assert batch.asked.any(1).all()
    if not made.channels:
        assert batch.inputs.shape[2] == made.features and batch.labels.shape[2] == made.outputs
        return
    assert batch.inputs.dtype == batch.labels.dtype == torch.int64
    columns = batch.inputs[..., None] if len(made.channels) == 1 else batch.inputs
    assert columns.shape[2:] == (len(made.channels),)
    for channel, size in zip(columns.unbind(-1), made.channels, strict=True):
        assert channel.min() >= 0 and channel.max() == size - 1, "every token occurs"
    answers = batch.labels[batch.asked]
    assert answers.min() == 0 and answers.max() == made.outputs - 1
    assert (batch.labels[~batch.asked] == IGNORED).all()


@pytest.mark.parametrize("name", TASKS)
def test_the_generator_alone_decides(name):
    made = task(name)
    torch.manual_seed(1)
    first, again = drawn(made), drawn(made)
    other = drawn(made, seed=1)
    assert torch.equal(first.inputs, again.inputs) and torch.equal(first.labels.nan_to_num(), again.labels.nan_to_num())
    assert not torch.equal(first.inputs, other.inputs)


@pytest.mark.parametrize("name", [name for name in TASKS if TASKS[name].stretch])
def test_a_longer_task_asks_the_same_of_longer_sequences(name):
    made = task(name)
    longer = made.longer(4)
    assert 2 * made.length < longer.length < 5 * made.length
    assert (longer.channels, longer.outputs) == (made.channels, made.outputs)
    assert made.longer(1) is made


@pytest.mark.parametrize("name", [name for name in TASKS if not TASKS[name].stretch])
def test_what_cannot_be_longer_says_so(name):
    with pytest.raises(ValueError, match=f"^{name} has no longer form"):
        task(name).longer(2)


def test_overwrites_answer_with_the_latest_value_of_each_key():
    made = OverwriteRecall(keys=5, values=7, writes=3)
    for tokens, labels in rows(drawn(made)):
        book, asked = {}, []
        for (key, content), label in zip(tokens, labels, strict=True):
            if content < made.values:
                assert label == IGNORED
                book[key] = content
            else:
                assert label == book[key]
                asked.append(key)
        keys = [key for key, content in tokens if content < made.values]
        assert sorted(keys) == sorted(3 * list(range(5))) and sorted(asked) == list(range(5))


def test_recall_answers_with_the_value_behind_the_key():
    made = AssociativeRecall(keys=6, values=5, pairs=4)
    for tokens, labels in rows(drawn(made)):
        *listed, question = tokens
        book = dict(zip(listed[::2], listed[1::2], strict=True))
        assert len(book) == 4 and max(book) < 6 <= min(book.values())
        assert labels == [IGNORED] * 8 + [book[question] - 6]


@pytest.mark.parametrize("blank", [False, True])
def test_many_queries_answer_with_the_value_behind_the_key(blank):
    made = MultiQueryRecall(pairs=4, vocabulary=20, tokens=40, blank=blank)
    for tokens, labels in rows(drawn(made)):
        book = dict(zip(tokens[:8:2], tokens[1:8:2], strict=True))
        assert len(book) == len(set(book.values())) == 4
        assert set(book) <= set(range(1, 10)) and set(book.values()) <= set(range(10, 20))
        asked = [(t, token) for t, (token, label) in enumerate(zip(tokens, labels, strict=True)) if label != IGNORED]
        assert sorted(key for _, key in asked) == sorted(book)
        assert all(labels[t] == book[key] - 10 and t >= 8 and t % 2 == 0 for t, key in asked)
        if blank:
            assert [tokens[t] for t in range(8, 40) if t not in dict(asked)] == [0] * 28


def test_the_gaps_of_many_queries_follow_the_power_law():
    made = MultiQueryRecall(pairs=1, vocabulary=8, tokens=34, tail=0.3)
    place = drawn(made, 20_000).asked.double().argmax(1)
    weight = torch.arange(1, 17, dtype=torch.float64) ** (0.3 - 1)
    share = torch.bincount((place - 2) // 2, minlength=16).double() / 20_000
    assert (share - weight / weight.sum()).abs().max() < 0.012, "four standard deviations"


def test_a_needle_is_found_behind_all_the_noise():
    made = Needle(keys=3, values=4, noise=5, distance=9)
    for tokens, labels in rows(drawn(made)):
        assert tokens[-1] == tokens[0] < 3 <= tokens[1] < 7
        assert len(tokens) == 12 and min(tokens[2:-1]) >= 7
        assert labels == [IGNORED] * 11 + [tokens[1] - 3]


def test_copying_repeats_the_words_in_their_order():
    made = SelectiveCopying(words=5, count=3, noise=6)
    for tokens, labels in rows(drawn(made)):
        told = [token for token in tokens[:9] if token < 5]
        assert len(told) == 3 and tokens[9:] == [6, 6, 6]
        assert labels == [IGNORED] * 9 + told


def test_parity_counts_the_ones():
    for tokens, labels in rows(drawn(Parity(bits=9))):
        assert labels == [sum(tokens[: t + 1]) % 2 for t in range(9)]


@pytest.mark.parametrize("signs", ["+-*", "*", "-+"])
def test_arithmetic_agrees_with_python(signs):
    made = ModularArithmetic(modulus=5, numbers=6, signs=signs)
    batch = drawn(made)
    for tokens, labels in zip(batch.inputs, batch.labels.tolist(), strict=True):
        for t, label in enumerate(labels):
            assert label == (eval(made.spell(tokens[: t + 1])) % 5 if t % 2 == 0 else IGNORED)


@pytest.mark.parametrize("signs", ["+-*", "*", "-"])
def test_the_chance_of_arithmetic_is_that_of_all_expressions(signs):
    made = ModularArithmetic(modulus=3, numbers=3, signs=signs)
    best = []
    for count in (1, 2, 3):
        seen = [0] * 3
        for numbers in itertools.product(range(3), repeat=count):
            for between in itertools.product(signs, repeat=count - 1):
                text = "".join(f"{x}{s}" for x, s in zip(numbers, (*between, ""), strict=True))
                seen[eval(text) % 3] += 1
        best.append(max(seen) / sum(seen))
    assert made.chance == pytest.approx(sum(best) / 3, abs=1e-12)


@pytest.mark.parametrize(("group", "order"), [("S3", 6), ("A5", 60), ("S5", 120), (((1, 2, 3, 0),), 4)])
@pytest.mark.parametrize("every", [False, True])
def test_words_agree_with_moving_the_points(group, order, every):
    made = WordProblem(group=group, letters=7, all_elements=every)
    assert len(made.elements) == made.outputs == order and made.elements[0] == tuple(range(len(made.elements[0])))
    for tokens, labels in rows(drawn(made)):
        places = list(made.elements[0])  # where each point stands
        for letter, label in zip(tokens, labels, strict=True):
            places = [made.alphabet[letter][place] for place in places]
            assert made.elements[label] == tuple(places)


def test_the_named_groups_are_those_of_their_names():
    def odd(p):
        return sum(a > b for a, b in itertools.combinations(p, 2)) % 2

    for name, points, wanted in (("S3", 3, (0, 1)), ("S5", 5, (0, 1)), ("A5", 5, (0,))):
        every = [p for p in itertools.permutations(range(points)) if odd(p) in wanted]
        assert WordProblem(group=name).elements == every


def test_the_chances_of_words_are_those_of_all_words():
    made = WordProblem(group="S3", letters=5)
    for t, chance in enumerate(made.chances().tolist(), start=1):
        reached = [0] * 6
        for word in itertools.product(range(2), repeat=t):
            element = 0
            for letter in word:
                element = int(made.table[element, letter])
            reached[element] += 1
        assert chance == pytest.approx(max(reached) / 2**t, abs=1e-12)


@pytest.mark.parametrize("generators", [[(1, 0), (0, 1, 2)], [(1, 1, 0)], []])
def test_what_generates_no_group_is_refused(generators):
    with pytest.raises(ValueError, match=r"^generators must be"):
        generated(generators)


def test_a_drift_is_seen_through_its_points():
    made = DriftingRegression(width=3, points=9, drift=0.2, noise=0.3)
    x, y, w = made.stream(4, torch.Generator().manual_seed(0))
    batch = drawn(made, 4)
    for b in range(4):
        for t in range(9):
            right = sum(w[b, t, i] * x[b, t, i] for i in range(3)) / math.sqrt(3)
            assert batch.labels[b, t, 0].item() == pytest.approx(right.item(), abs=1e-6)
            told = torch.cat((x[b, t - 1], y[b, t - 1, None])) if t else torch.zeros(4)
            assert torch.equal(batch.inputs[b, t], torch.cat((x[b, t], told)))
            if t:
                assert 0 < (w[b, t] - w[b, t - 1]).abs().max() < 1.2


def test_a_truth_that_stands_still_is_solved_by_least_squares():
    x, y, w = DriftingRegression(width=3, points=8, drift=0.0, noise=0.0).stream(5, torch.Generator().manual_seed(0))
    solved = torch.linalg.lstsq(x.double() / math.sqrt(3), y.double()[..., None]).solution
    torch.testing.assert_close(solved[..., 0], w[:, -1].double(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("drift", [0.0, 0.1, 1.0])
def test_who_answers_nothing_to_a_drift_explains_nothing(drift):
    made = DriftingRegression(drift=drift, points=32)
    labels = drawn(made, 4000).labels
    score = made.score(torch.zeros_like(labels), labels)
    assert score.mean().item() == pytest.approx(made.chance, abs=0.05)
    assert made.score(labels, labels).eq(1).all()


def test_capacity_asks_for_every_pair_once():
    made = Capacity(pairs=6, key_width=4, value_width=3)
    inputs, labels = drawn(made, 5)
    assert labels[:, :6].isnan().all() and inputs[:, 6:, 4:].eq(0).all()
    assert torch.allclose(inputs[..., :4].norm(dim=-1), torch.ones(5, 12))
    for b in range(5):
        book = {tuple(row[:4].tolist()): row[4:] for row in inputs[b, :6]}
        asked = [tuple(row[:4].tolist()) for row in inputs[b, 6:]]
        assert set(asked) == set(book) and len(book) == 6
        for key, right in zip(asked, labels[b, 6:], strict=True):
            assert torch.equal(book[key], right)


@pytest.mark.parametrize("name", TOKENS)
def test_chance_is_what_the_best_constant_scores(name):
    made = task(name)
    labels = drawn(made, 4000).labels
    best = total = 0
    for column in labels.unbind(1):
        found = column[column != IGNORED]
        best += torch.bincount(found, minlength=made.outputs).max().item() if len(found) else 0
        total += len(found)
    assert best / total == pytest.approx(made.chance, abs=0.02), "the best of many is a little high"


def test_a_shortcut_is_what_who_ignores_the_question_scores():
    made = AssociativeRecall()
    tokens, labels = drawn(made, 20_000)
    last = (tokens[:, -2] - made.keys == labels[:, -1]).double().mean().item()
    assert last == pytest.approx(made.shortcut, abs=0.015)
    over = OverwriteRecall(writes=2)
    inputs, labels = drawn(over, 5000)
    hits = []
    for (tokens, right) in zip(inputs.tolist(), labels.tolist(), strict=True):
        first = {}
        for (key, content), label in zip(tokens, right, strict=True):
            if content < over.values:
                first.setdefault(key, content)
            else:
                hits.append(first[key] == label)
    values = 1 / over.values
    # The first of two is never the last, but may be equal to it.
    assert sum(hits) / len(hits) == pytest.approx(values, abs=0.01)
    assert over.shortcut == pytest.approx((1 + values) / 2)


def test_scores_count_what_was_asked():
    made = Parity(bits=2)
    labels = torch.tensor([[IGNORED, 1], [0, 1]])
    logits = torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]])
    assert made.score(logits, labels).tolist() == [0.0, 1.0, 1.0]
    assert Batch(labels, labels).asked.tolist() == [[False, True], [True, True]]


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("chess", {}, "task must be one of overwrite,"),
        ("mqar", {"pair": 3}, "mqar has the sizes pairs, vocabulary"),
        ("mqar", {"pairs": 20, "tokens": 64}, "mqar's tokens must be even and at least 4"),
        ("mqar", {"pairs": 32, "tokens": 256}, "mqar's pairs must be at most vocabulary / 2 - 1 = 31"),
        ("mqar", {"tail": 0}, "mqar's tail must be above 0"),
        ("recall", {"pairs": 9}, "recall's pairs must be at most its keys=8"),
        ("parity", {"bits": 0}, "parity's bits must be a whole number of at least 1; got 0"),
        ("parity", {"bits": 2.5}, "parity's bits must be a whole number"),
        ("arithmetic", {"signs": "+/"}, "arithmetic's signs must be some of"),
        ("words", {"group": "M11"}, "words's group must be one of S3, A5, S5"),
        ("words", {"group": ((0, 0),)}, "generators must be permutations of range"),
        ("drift", {"drift": 1.5}, "drift's drift must lie in"),
    ],
)
def test_sizes_that_make_no_task_are_refused_in_a_line(name, sizes, said):
    with pytest.raises(ValueError, match="^" + said.replace("*", r"\*").replace("+", r"\+")) as caught:
        task(name, **sizes)
    assert "\n" not in str(caught.value)


def test_a_task_is_a_record():
    assert task("mqar", pairs=4) == MultiQueryRecall(pairs=4) != MultiQueryRecall()
    assert dataclasses.replace(Parity(), bits=3).length == 3
