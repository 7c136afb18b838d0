"""The package's own experiments, without running them."""

from __future__ import annotations

import re

import pytest

from innerloop import experiments

NAMES = list(experiments.modules())


def test_they_come_in_the_documents_order():
    order = [(name[0], int(name[1:])) for name in NAMES]
    assert order == sorted(order)
    assert len(NAMES) == len(set(NAMES)) > 0


@pytest.mark.parametrize("name", NAMES)
def test_each_is_complete_and_answers_to_its_name(name):
    experiment = experiments.load(name)
    assert experiment.name == name
    for text in (experiment.title, experiment.claim, experiment.source, experiment.setting, experiment.band):
        assert text.strip()
    assert experiment.seconds > 0
    assert experiment.quick_seconds is None or 0 < experiment.quick_seconds <= experiment.seconds


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=re.escape(f"one of {' '.join(NAMES)}; got 'Z9'")):
        experiments.load("Z9")
