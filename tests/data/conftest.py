"""The one text that several tests read."""

import pytest

from innerloop.data import Text, time_machine


@pytest.fixture(scope="session")
def book() -> Text:
    """The Time Machine, or a skip where it cannot be had."""
    text = time_machine()
    if not text.is_time_machine:
        pytest.skip(text.reason)
    return text
