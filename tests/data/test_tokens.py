"""Tokens and windows: counted, reversible, and never copied."""

import builtins
import hashlib
import subprocess
import sys

import pytest
import torch

from innerloop.data import PairTokenizer, pydoc_topics, windows
from innerloop.data.tokenizer import RESERVED


def learned(text):
    return PairTokenizer.learn([text], alphabet="seen")


@pytest.fixture(scope="module")
def topics():
    return learned(pydoc_topics())


def test_the_time_machine_has_the_stated_number_of_tokens(book):
    tokens = learned(book.content).encode(book.content)
    assert len(tokens) == 62_808
    assert int(tokens.max()) == 1_026


def test_the_time_machine_survives_encoding(book):
    tokenizer = learned(book.content)
    assert tokenizer.decode(tokenizer.encode(book.content)) == book.content


def test_the_topics_fill_the_same_vocabulary_and_enough_windows(topics):
    tokens = topics.encode(pydoc_topics())
    assert len(topics) == 1_027
    assert windows(tokens).train.shape == (50_000, 33)
    assert topics.decode(tokens) == pydoc_topics()


def test_reserved_ids_never_occur_in_a_text(topics):
    assert int(topics.encode(pydoc_topics()).min()) >= len(RESERVED)


def test_merges_do_not_depend_on_the_process():
    program = (
        "import hashlib; from innerloop.data import PairTokenizer, pydoc_topics as t;"
        "learned = PairTokenizer.learn([t()[:100_000]]);"
        "print(hashlib.sha256(learned.encode(t()).numpy().tobytes()).hexdigest())"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    here = PairTokenizer.learn([pydoc_topics()[:100_000]])
    assert hashlib.sha256(here.encode(pydoc_topics()).numpy().tobytes()).hexdigest() == other


def test_a_text_too_short_for_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="wanted 1027, got"):
        learned("too short")


def test_a_missing_library_names_the_extra(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "tokenizers":
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RuntimeError, match=r"innerloop\[lm\]") as caught:
        learned("any")
    assert "\n" not in str(caught.value)


def test_windows_share_the_memory_of_the_tokens():
    tokens = torch.arange(200)
    for part in windows(tokens, length=8, train=100, validation=50):
        assert part.untyped_storage().data_ptr() == tokens.untyped_storage().data_ptr()


def test_validation_windows_follow_the_training_ones_by_one_token():
    train, validation = windows(torch.arange(200), length=8, train=100, validation=50)
    assert train[:, 0].tolist() == list(range(100))
    assert validation[:, 0].tolist() == list(range(100, 150))
    assert validation[-1].tolist() == list(range(149, 158))


def test_windows_need_no_token_more_than_they_read():
    assert windows(torch.arange(158), length=8, train=100, validation=50).validation.shape == (50, 9)
    with pytest.raises(ValueError, match="158; got 157"):
        windows(torch.arange(157), length=8, train=100, validation=50)
