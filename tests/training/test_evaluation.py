"""A score is the text's own cross entropy, however it is cut; the tokenizer tells bytes and characters."""

import math

import pytest
import torch

from innerloop.data import ByteTokenizer, pydoc_topics
from innerloop.lm import Config, LanguageModel
from innerloop.training import Score, evaluate, windows_score

TEXT = pydoc_topics()[:300] + " é漢🌀"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LanguageModel(Config(vocab_size=259, width=16, heads=2, pattern="mamba2+attention", dropout=0.5)).double()


def by_hand(model, ids):
    """Sum the cross entropies of one forward pass over all of it."""
    model.eval()
    logits, _ = model(ids[None, :-1])
    model.train()
    return -logits[0].log_softmax(-1).gather(1, ids[1:, None]).sum().item()


@pytest.mark.parametrize("piece", [1, 7, 64, 10_000])
def test_a_carried_state_gives_the_score_of_the_whole(piece, model):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(TEXT)
    want = by_hand(model, ids)
    for parts in ([ids], list(ids.split(5)), [ids[:0], ids[:1], ids[1:2], ids[2:], ids[:0]]):
        score = evaluate(model, tokenizer, [parts], piece=piece)
        assert score.nats == pytest.approx(want, rel=1e-10)
        assert score.tokens == len(ids) - 1
    assert model.training


def test_documents_and_windows_know_nothing_of_each_other(model):
    tokenizer = ByteTokenizer()
    first, second = tokenizer.encode(TEXT[:90]), tokenizer.encode(TEXT[90:])
    want = by_hand(model, first) + by_hand(model, second)
    score = evaluate(model, tokenizer, [[first], [second]], piece=13)
    assert score.nats == pytest.approx(want, rel=1e-10)
    ids = tokenizer.encode(TEXT[:100])
    apart = sum(by_hand(model, ids[start : start + 41]) for start in (0, 40, 80))
    for piece in (1, 7, 40, 1000):
        score = evaluate(model, tokenizer, [ids.split(9)], piece=piece, window=40)
        assert score.nats == pytest.approx(apart, rel=1e-10)
    windows = torch.stack([ids[:33], ids[32:65], ids[64:97]])
    score = windows_score(model, tokenizer, windows, rows=2)
    assert score.nats == pytest.approx(sum(by_hand(model, row) for row in windows), rel=1e-10)
    assert score.tokens == 96


def test_a_score_counts_bytes_and_characters_of_what_was_predicted(model):
    tokenizer = ByteTokenizer()
    score = evaluate(model, tokenizer, [[tokenizer.encode(TEXT)]])
    assert (score.bytes, score.characters) == (len(TEXT.encode()) - 1, len(TEXT) - 1)
    assert score.bits_per_byte == pytest.approx(score.nats / math.log(2) / score.bytes)
    assert score.bits_per_character > score.bits_per_byte
    assert score.perplexity == pytest.approx(math.exp(score.nats / score.tokens))


def test_a_model_that_knows_nothing_needs_as_many_bits_as_there_are():
    blank = Score(1000 * math.log(256), 1000, 1000, 500)
    assert blank.perplexity == pytest.approx(256)
    assert (blank.bits_per_byte, blank.bits_per_character) == (pytest.approx(8), pytest.approx(16))
    assert Score(1e9, 1, 1, 1).perplexity == math.inf
    assert math.isnan(Score(0.0, 0, 0, 0).loss)


def test_one_token_predicts_nothing(model):
    assert evaluate(model, ByteTokenizer(), [[torch.tensor([5])], [torch.tensor([], dtype=torch.int64)]]).tokens == 0
