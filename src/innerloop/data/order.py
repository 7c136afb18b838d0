"""A shuffled order that needs no memory: any place of it can be asked for, so that a run goes on where it stopped."""

from __future__ import annotations

import numpy as np

_ROUNDS = 8
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WORD = (1 << 64) - 1


def shuffled(places: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return which of ``count`` things stand at ``places`` of a shuffled row of them.

    A Feistel network permutes the numbers of an even number of bits; those from ``count`` on are permuted again until
    they fall below it (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). A billion windows are no
    more to keep than ten.

    Args:
        places: Whole numbers from 0 to below ``count``, of any shape.
        count: How many things there are, at least 1.
        seed: Names the order, any whole number.

    Returns:
        As many numbers from 0 to below ``count``, int64; different places get different ones.

    Example:
        >>> import numpy as np
        >>> sorted(shuffled(np.arange(5), 5, seed=3).tolist())
        [0, 1, 2, 3, 4]
    """
    half = max(2, ((count - 1).bit_length() + 1) // 2)
    keys = [_mixed(seed * _ROUNDS + number + 1) for number in range(_ROUNDS)]
    found = _permuted(places.astype(np.uint64), half, keys)
    while (outside := found >= count).any():
        found[outside] = _permuted(found[outside], half, keys)
    return found.astype(np.int64)


def _permuted(numbers: np.ndarray, half: int, keys: list[int]) -> np.ndarray:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = numbers >> bits, numbers & mask
    for key in keys:
        left, right = right, left ^ (_hashed(right + np.uint64(key)) & mask)
    return left << bits | right


def _hashed(numbers: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014), on an array; sums and products wrap."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(_MIX[1])
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(_MIX[2])
    return numbers ^ (numbers >> np.uint64(31))


def _mixed(number: int) -> int:
    """The same on one number, spread first so that neighbouring seeds have nothing in common."""
    start = np.array([number * _MIX[0] & _WORD], np.uint64)
    return int(_hashed(start)[0])
