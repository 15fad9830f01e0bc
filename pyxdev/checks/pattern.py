"""What the checks write and look for: bytes that are unique by position and iteration, and names for wrong ones.

The pattern is a stream of 64-bit little-endian words; word w of (seed, iteration) is mix64(key(seed, iteration) + w).
mix64 is a bijection, so a word found in the wrong place tells where it belongs. kernels.py has the same for GPUs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]

MASK = (1 << 64) - 1
# The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
_INVERSES = tuple(pow(factor, -1, 1 << 64) for factor in FACTORS)

REMEMBERED = 8  # iterations back that a wrong word is looked for in


def mix64(value: int) -> int:
    value ^= value >> SHIFTS[0]
    value = value * FACTORS[0] & MASK
    value ^= value >> SHIFTS[1]
    value = value * FACTORS[1] & MASK
    return value ^ value >> SHIFTS[2]


def key(seed: int, iteration: int) -> int:
    """The 64-bit key that a fill or a check of this seed and iteration takes."""
    return mix64((mix64(seed & MASK) + iteration) & MASK)


def poison(iteration: int) -> int:
    """The byte that destinations and guards hold before the copy of this iteration."""
    return 0xA0 + iteration % 32


def _mix(words: Words) -> Words:
    words ^= words >> np.uint64(SHIFTS[0])
    words *= np.uint64(FACTORS[0])
    words ^= words >> np.uint64(SHIFTS[1])
    words *= np.uint64(FACTORS[1])
    words ^= words >> np.uint64(SHIFTS[2])
    return words


def _unmix(words: Words) -> Words:
    def unshift(words: Words, shift: int) -> Words:
        found = words
        for _ in range(64 // shift):
            found = words ^ found >> np.uint64(shift)
        return found

    words = unshift(words, SHIFTS[2]) * np.uint64(_INVERSES[1])
    words = unshift(words, SHIFTS[1]) * np.uint64(_INVERSES[0])
    return unshift(words, SHIFTS[0])


def make(key: int, first: int, nbytes: int) -> Bytes:
    """Bytes first .. first + nbytes - 1 of the pattern, uint8 of shape (nbytes,)."""
    word = first // 8
    count = (first + nbytes + 7) // 8 - word
    words = np.arange(count, dtype=np.uint64)
    words += np.uint64((key + word) & MASK)
    return _mix(words).view(np.uint8)[first % 8 : first % 8 + nbytes]


def name_damage(found: Bytes, wanted_first: int, seed: int, iteration: int, extent: int) -> str:
    """What the wrong bytes in `found` are; "" if none is wrong.

    found: bytes read back, of shape (n,), n at most a few thousand. wanted_first: the pattern position that found[0]
    should hold. extent: bytes of the whole copy; a position outside of it is chance, not a finding.
    """
    wanted = make(key(seed, iteration), wanted_first, len(found))
    wrong = np.flatnonzero(found != wanted)
    if not len(wrong):
        return ""
    values = found[wrong]
    if not values.any():
        return "zeros"
    if (values == poison(iteration)).all():
        return "poison: never written"
    for back in range(1, REMEMBERED + 1):
        if iteration >= back and (values == make(key(seed, iteration - back), wanted_first, len(found))[wrong]).all():
            return f"data of iteration {iteration - back}, not {iteration}"
    if flipped := _flipped(found, wanted, wrong):
        return flipped
    return _displaced(found, wrong, wanted_first, seed, iteration, extent) or "unknown bytes"


def _flipped(found: Bytes, wanted: Bytes, wrong: NDArray[Any]) -> str:
    """A few wrong bits, far from each other, are no copy gone astray."""
    bits = int(np.unpackbits(found[wrong] ^ wanted[wrong]).sum())
    if bits > 2:
        return ""
    return f"{bits} flipped bit{'s' if bits > 1 else ''}"


def _displaced(found: Bytes, wrong: NDArray[Any], wanted_first: int, seed: int, iteration: int, extent: int) -> str:
    """Looks for a whole pattern word that belongs elsewhere, at each of the eight alignments."""
    begin, end = int(wrong[0]), int(wrong[-1]) + 1
    for alignment in range(8):
        part = found[begin + alignment : end]
        part = part[: len(part) // 8 * 8]
        if not len(part):
            continue
        words = _unmix(np.ascontiguousarray(part).view(np.uint64))
        places = wanted_first + begin + alignment + 8 * np.arange(len(words), dtype=np.int64)
        for back in range(REMEMBERED + 1):
            if iteration < back:
                break
            home = words - np.uint64(key(seed, iteration - back))
            inside = home < np.uint64(max(1, (extent + 7) // 8))
            if inside.any():
                at = int(np.flatnonzero(inside)[0])
                shift = int(home[at]) * 8 - int(places[at])
                return f"data of offset {shift:+d}" + (f" of iteration {iteration - back}" if back else "")
    return ""
