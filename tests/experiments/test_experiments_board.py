"""B6 keeps its rows one by one, and its check can fail."""

from dataclasses import asdict

import pytest

from innerloop.experiments import b06_scoreboard as b06
from innerloop.experiments.experiment import Settings
from innerloop.experiments.runner import Parts
from innerloop.training.scoreboard import Row


def row(pattern, **changed):
    numbers = {"perplexity": 300.0, "bits_per_character": 2.9, "loss": 5.7, "parameters": 7, "seconds": 1.0,
               "seconds_per_epoch": 3.0, "state_bytes": 64, "decode_tokens_per_second": 100.0,
               "losses": [7.0, 6.0]}  # fmt: skip
    return asdict(Row(pattern=pattern, seed=0, **{**numbers, **changed}))


def result(**changed):
    rows = [row(name, **(changed if name == "kda" else {})) for name in b06.LAYERS]
    return {"text": "x", "tokens": 1, "steps": b06.STEPS, "rows": rows, "frequencies": 372.0, "threads": 1}


def test_the_check_holds_every_layer_to_the_band():
    b06.check(result())
    for changed, words in (
        ({"perplexity": 520.0}, "kda ends at perplexity 520.0, wanted 513.5"),
        ({"perplexity": float("nan")}, "kda ends at perplexity nan"),
        ({"losses": [7.0, 7.1]}, "kda goes from a loss"),
    ):
        with pytest.raises(AssertionError, match=words):
            b06.check(result(**changed))
    short = result()
    short["rows"].pop()
    with pytest.raises(AssertionError, match=f"no row of {b06.LAYERS[-1]}"):
        b06.check(short)
    assert len(b06.tables(result())[0].rows) == len(b06.LAYERS)


def test_frequencies_alone_are_a_bar():
    import torch

    from innerloop.data import Windows

    stream = torch.tensor([0, 0, 0, 1] * 2000)
    data = Windows(stream[:7000].unfold(0, 5, 1), stream[7000:].unfold(0, 5, 1))
    assert b06.frequencies(data) == pytest.approx(1.7548 * 1.12, rel=0.05)  # 2^H(1/4), and a thousand unseen words


def test_an_interrupted_board_goes_on_with_the_rows_that_are_missing(tmp_path, monkeypatch):
    ran = []

    def made(name, *rest, **options):
        ran.append(name)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return Row(**row(name))

    monkeypatch.setattr(b06, "_row", made)
    monkeypatch.setattr(b06, "LAYERS", ("kda", "mamba2", "gla"))
    parts = Parts(tmp_path / "B6.parts", "key")
    with pytest.raises(KeyboardInterrupt):
        b06.run(Settings(quick=True, part=parts.part))
    found = b06.run(Settings(quick=True, part=parts.part))
    assert ran == ["kda", "mamba2", "gla", "gla"]
    assert [x["pattern"] for x in found["rows"]] == ["kda", "mamba2", "gla"]
    b06.run(Settings(quick=True, part=Parts(tmp_path / "B6.parts", "another").part))
    assert ran[4:] == ["kda", "mamba2", "gla"]
    parts.remove()
    assert not list(tmp_path.iterdir())
