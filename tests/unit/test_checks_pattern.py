"""The pattern is unique by position and iteration, and every way of being wrong has its name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyxdev.checks import pattern

SEED, ITERATION, SIZE = 7, 9, 1 << 14


@pytest.fixture
def right() -> pattern.Bytes:
    return pattern.make(pattern.key(SEED, ITERATION), 0, SIZE)


def name(found: pattern.Bytes) -> str:
    return pattern.name_damage(found, 0, SEED, ITERATION, SIZE)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**34), st.integers(0, 300))
def test_any_part_is_the_same_bytes_as_the_words_say(key: int, first: int, nbytes: int) -> None:
    made = pattern.make(key, first, nbytes)
    expected = [
        pattern.mix64((key + place // 8) % 2**64) >> place % 8 * 8 & 255 for place in range(first, first + nbytes)
    ]
    assert made.tolist() == expected


def test_words_never_repeat_within_and_between_iterations() -> None:
    words = [pattern.make(pattern.key(SEED, i), 0, SIZE).view(np.uint64) for i in range(8)]
    assert len(np.unique(np.concatenate(words))) == 8 * SIZE // 8


def test_right_bytes_have_no_name(right: pattern.Bytes) -> None:
    assert name(right) == ""
    assert pattern.name_damage(right[13:100], 13, SEED, ITERATION, SIZE) == ""


def test_names(right: pattern.Bytes) -> None:
    def damaged(part: slice, values: object) -> pattern.Bytes:
        found = right.copy()
        found[part] = values
        return found

    part = slice(100, 4000)
    noise = np.random.default_rng(1).integers(0, 256, 3900, np.uint8)
    before = pattern.make(pattern.key(SEED, ITERATION - 2), 0, SIZE)
    assert name(damaged(part, 0)) == "zeros"
    assert name(damaged(part, pattern.poison(ITERATION))) == "poison: never written"
    assert name(damaged(part, before[part])) == f"data of iteration {ITERATION - 2}, not {ITERATION}"
    assert name(damaged(part, right[612:4512])) == "data of offset +512"
    assert name(damaged(part, right[97:3997])) == "data of offset -3"
    assert name(damaged(part, before[612:4512])) == f"data of offset +512 of iteration {ITERATION - 2}"
    assert name(damaged(part, noise)) == "unknown bytes"
    assert name(damaged(slice(100, 101), right[100] ^ 16)) == "1 flipped bit"


def test_a_word_from_beyond_the_copy_is_chance(right: pattern.Bytes) -> None:
    found = right.copy()
    found[8:16] = pattern.make(pattern.key(SEED, ITERATION), SIZE * 4, 8)
    assert name(found) == "unknown bytes"
