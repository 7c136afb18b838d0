"""Tokens on disk are the text's, whatever the pieces; batches are an order of windows that can be entered anywhere."""

import json
import os
import resource
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from innerloop.data import SEPARATOR, ByteTokenizer, PairTokenizer, Tokens, pydoc_topics, shuffled, write_tokens
from innerloop.data import sources as module

TEXT = pydoc_topics()[:20_000]


@pytest.fixture
def place(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT, "utf-8")
    return str(tmp_path / "book.txt")


@pytest.mark.parametrize("pairs", [False, True])
def test_the_file_holds_what_encoding_the_whole_text_gives(pairs, place, tmp_path, monkeypatch):
    tokenizer = PairTokenizer.learn([TEXT], 400) if pairs else ByteTokenizer()
    monkeypatch.setattr(module, "_BLOCK", 1000)
    monkeypatch.setattr(module.cut, "__defaults__", (300,))
    seen = []
    tokens = write_tokens(tmp_path / "tokens", place, tokenizer, hold_out=0.25, progress=seen.append)
    whole = tokenizer.encode(TEXT)
    assert tokens.piece(0, tokens.count).equal(whole)
    assert tokens.split == len(whole) - len(whole) // 4
    assert tokens.kind == "uint16" and tokens.documents == 1
    assert len(seen) > 20 and seen == sorted(seen) and seen[-1] == 1
    again = Tokens.open(tmp_path / "tokens")
    assert again == tokens
    assert isinstance(again.numbers, np.memmap)


def test_documents_are_separated_and_empty_ones_left_out(tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in ("", "ab", "", "c", "")))
    tokens = write_tokens(tmp_path / "tokens", str(tmp_path / "x.jsonl"), ByteTokenizer(), hold_out=0.0)
    a, b, c = ByteTokenizer().encode("abc").tolist()
    assert tokens.piece(0, 99).tolist() == [a, b, SEPARATOR, c]
    assert (tokens.documents, tokens.split) == (2, 4)


def test_a_validation_text_of_its_own_stands_behind_the_other(place, tmp_path):
    (tmp_path / "other.txt").write_text("validate on this")
    tokens = write_tokens(tmp_path / "tokens", place, ByteTokenizer(), validation=str(tmp_path / "other.txt"))
    assert tokens.split == len(TEXT.encode())
    assert ByteTokenizer().decode(tokens.piece(tokens.split, tokens.count)) == "validate on this"


def test_many_ids_take_wider_numbers(place, tmp_path, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "__len__", lambda self: 70_000)
    tokens = write_tokens(tmp_path / "tokens", place, ByteTokenizer())
    assert tokens.kind == "uint32"
    assert tokens.piece(0, tokens.count).equal(ByteTokenizer().encode(TEXT))


@pytest.mark.parametrize("fault", ["empty", "missing", "binary", "full"])
def test_a_text_that_fails_leaves_no_folder(fault, place, tmp_path):
    path = tmp_path / "book.txt"
    if fault == "empty":
        path.write_text("")
    elif fault == "missing":
        path.unlink()
    elif fault == "binary":
        path.write_bytes(b"word " * 1000 + b"\xff")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if fault == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError if fault == "full" else ValueError):
            write_tokens(tmp_path / "tokens", place, ByteTokenizer())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert set(os.listdir(tmp_path)) <= {"book.txt"}


@pytest.mark.parametrize("fault", ["version", "format", "torn", "cut", "fields"])
def test_a_folder_that_is_something_else_is_refused_in_one_line(fault, place, tmp_path):
    write_tokens(tmp_path / "tokens", place, ByteTokenizer())
    facts = tmp_path / "tokens" / "tokens.json"
    stored = json.loads(facts.read_text())
    if fault == "cut":
        os.truncate(tmp_path / "tokens" / "tokens.bin", 100)
    stored |= {"version": {"version": 99}, "format": {"format": "x"}, "fields": {"more": 1}}.get(fault, {})
    facts.write_text("{" if fault == "torn" else json.dumps(stored))
    with pytest.raises(ValueError, match="must") as caught:
        Tokens.open(tmp_path / "tokens")
    assert "\n" not in str(caught.value)


def test_a_round_of_batches_holds_every_window_once_and_the_next_one_too(place, tmp_path):
    tokens = write_tokens(tmp_path / "tokens", place, ByteTokenizer(), hold_out=0.9)
    length, stride, rows = 8, 5, 7
    count = tokens.training_windows(length, stride)
    starts = range(0, tokens.split - length, stride)
    assert count == len(starts)
    wanted = Counter(tuple(tokens.piece(x, x + length + 1).tolist()) for x in starts)
    batches = [tokens.batch(n, rows, length, stride, seed=3) for n in range(2 * count // rows + 2)]
    seen = [tuple(row.tolist()) for batch in batches for row in batch]
    assert Counter(seen[:count]) == Counter(seen[count : 2 * count]) == wanted
    assert seen[:count] != seen[count : 2 * count]
    assert tokens.batch(3, rows, length, stride, seed=3).equal(batches[3])
    assert not tokens.batch(3, rows, length, stride, seed=4).equal(batches[3])


def test_training_windows_end_before_the_split_and_validation_begins_there(place, tmp_path):
    tokens = write_tokens(tmp_path / "tokens", place, ByteTokenizer(), hold_out=0.1)
    length = 10
    last = (tokens.training_windows(length, 1) - 1) + length
    assert last == tokens.split - 1
    held = tokens.validation(length, 10_000)
    assert held[0, 0] == tokens.numbers[tokens.split]
    assert held[:-1, -1].equal(held[1:, 0])
    assert (tokens.count - tokens.split) - held[:, 1:].numel() <= length
    few = tokens.validation(length, 5)
    assert len(few) == 5 and few[0].equal(held[0]) and few[-1].equal(held[-1])
    assert tokens.validation(5000, 5).shape == (0, 5001)


@settings(max_examples=100, deadline=None)
@given(count=st.integers(1, 700), seed=st.integers(-(2**63), 2**70))
def test_an_order_names_everything_once(count, seed):
    order = shuffled(np.arange(count), count, seed)
    assert sorted(order.tolist()) == list(range(count))
    assert shuffled(np.array([count // 2]), count, seed)[0] == order[count // 2]


def test_orders_are_as_good_as_drawn():
    for count in (5, 40):
        orders = np.stack([shuffled(np.arange(count), count, seed) for seed in range(600)])
        for place in (0, count - 1):
            found = np.bincount(orders[:, place], minlength=count)
            chi = ((found - 600 / count) ** 2 / (600 / count)).sum()
            assert chi < count + 6 * (2 * count) ** 0.5, (count, place, chi)
        after = np.bincount((orders[:, 1] - orders[:, 0]) % count, minlength=count)
        assert after[0] == 0
        chi = ((after[1:] - 600 / (count - 1)) ** 2 / (600 / (count - 1))).sum()
        assert chi < count + 6 * (2 * count) ** 0.5
    assert np.corrcoef(shuffled(np.arange(10**5), 10**5, 1), np.arange(10**5))[0, 1] < 0.02


def test_a_place_among_a_trillion_costs_nothing():
    found = shuffled(np.arange(5), 10**12, seed=0)
    assert len(set(found.tolist())) == 5 and found.max() < 10**12
