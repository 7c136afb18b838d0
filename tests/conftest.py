"""What all tests share."""

import pytest

COLLECTED = pytest.StashKey[set[str]]()


@pytest.hookimpl(tryfirst=True)  # before marks deselect some
def pytest_collection_modifyitems(config, items):
    config.stash[COLLECTED] = {item.nodeid for item in items}


@pytest.fixture
def collected(request):
    """Return the names of the tests that this run has collected, run or not."""
    return frozenset(request.config.stash[COLLECTED])
