# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Philox4x32-10 against its published known answers, and the dropout contract word by word.

The known answers are those of Random123 (kat_vectors: philox4x32, 10 rounds).
"""

import numpy as np
import pytest

from fulmen.lab.cases.philox import drop_factors, philox4x32, threshold

KNOWN_ANSWERS = {
    "zero": ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_known_answers(name):
    counter, key, expected = KNOWN_ANSWERS[name]
    assert tuple(int(x) for x in philox4x32(np.array(counter, np.uint64), key)) == expected


def test_a_factor_follows_from_its_position_alone():
    """Counter (j / 8, i, plane, offset), key = seed, number j % 8, low half of word 0 first."""
    seed, offset, plane, p = 0x123456789ABCDEF, 77, 5, 0.4
    factors = drop_factors(p, (seed, offset), plane, 3, 21)
    for i in range(3):
        for j in range(21):
            words = philox4x32(
                np.array([j // 8, i, plane, offset], np.uint64), (seed & 0xFFFFFFFF, seed >> 32)
            )
            u = (int(words[j % 8 // 2]) >> (16 * (j % 2))) & 0xFFFF
            assert factors[i, j] == (0 if u < threshold(p) else 65536 / (65536 - threshold(p)))


def test_the_pattern_of_a_larger_problem_begins_with_that_of_a_smaller():
    small = drop_factors(0.5, (3, 4), 1, 5, 13)
    assert np.array_equal(drop_factors(0.5, (3, 4), 1, 9, 50)[:5, :13], small)


@pytest.mark.parametrize("p", [1 / 65536, 0.1, 0.5, 0.9, 65535 / 65536])
def test_the_share_that_is_dropped(p):
    kept = drop_factors(p, (1, 2), 0, 256, 256) != 0
    sigma = (p * (1 - p) / kept.size) ** 0.5
    assert abs((1 - kept.mean()) - p) < 5 * sigma


def test_both_ends():
    assert (drop_factors(0.0, (1, 2), 0, 9, 9) == 1).all()
    assert (drop_factors(1.0, (1, 2), 0, 9, 9) == 0).all()
    assert threshold(0.5) == 32768
