"""torch's number of threads, for the time of a block."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

MOST = 1024
"""Threads that a user may ask for. torch starts as many as it is told, and where there are no more it ends."""


@contextmanager
def threads(count: int) -> Generator[None, None, None]:
    """Let torch use ``count`` threads inside the block, and afterwards as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
