# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Segments with NumPy: parts of a sequence against the whole, and masks block by block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fulmen
from fulmen import masks

RNG = np.random.default_rng(27)
LENGTH = 40
CHUNKS = (0, 7, 18, 24, LENGTH)  # where chunks begin; rank r of two has chunks r and 3 - r
SLOPES = np.array([0.5, 0.1])
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (9, 4), "alibi_slopes": SLOPES},
    "prefix": {"causal": True, "mask": masks.prefix(10)},
    "chunks": {"mask": masks.chunks(6), "causal": True},
    "text": {"mask": "(i + j) % 3 != 1 and j <= p", "score": "s - 0.1 * abs(i - j)"},
    "dropout": {"causal": True, "dropout_p": 0.4, "rng": (3, 4)},
}


def shard(rank: int) -> tuple[list[int], list[list[int]]]:
    """The rows of a rank, and its segments."""
    rows: list[int] = []
    segments = []
    for chunk in (rank, 3 - rank):
        first, end = CHUNKS[chunk], CHUNKS[chunk + 1]
        segments.append([len(rows), end - first, first])
        rows += range(first, end)
    return rows, segments


@pytest.mark.parametrize("implementation", ["scalar", "tiled"])
@pytest.mark.parametrize("name", OPTIONS)
def test_parts_are_those_of_the_whole(name: str, implementation: str) -> None:
    options = {**OPTIONS[name], "implementation": implementation}
    q, k, v, do = (RNG.standard_normal((2, 2, LENGTH, 8)) for _ in range(4))
    whole = fulmen.attention_forward(q, k, v, **options)
    wanted = fulmen.attention_backward(do, q, k, v, whole.o, whole.stats, **options)
    gradients = [np.zeros_like(x) for x in (q, k, v)]
    for rank in range(2):
        rows, q_segments = shard(rank)
        parts = []
        for other in range(2):
            keys, kv_segments = shard(other)
            placed = {"q_segments": q_segments, "kv_segments": kv_segments, **options}
            arrays = q[:, :, rows], k[:, :, keys], v[:, :, keys]
            parts.append(fulmen.attention(*arrays, return_lse=True, **placed))
            found = fulmen.attention_backward(
                do[:, :, rows], *arrays, whole.o[:, :, rows], whole.stats[:, :, rows], **placed
            )
            for total, at, part in zip(gradients, (rows, keys, keys), found[:3]):
                total[:, :, at] += part
        o, lse = fulmen.merge(parts)
        np.testing.assert_allclose(o, whole.o[:, :, rows], atol=1e-13)
        np.testing.assert_allclose(lse, whole.lse[:, :, rows], atol=1e-13)
    for got, expected in zip(gradients, wanted[:3]):
        np.testing.assert_allclose(got, expected, atol=1e-12)


def test_rows_and_keys_of_no_segment_take_no_part() -> None:
    q, k, v = (RNG.standard_normal((1, 1, 6, 4)).astype(np.float32) for _ in range(3))
    k[..., 4:, :] = v[..., 4:, :] = np.nan
    segments = {"q_segments": [[1, 4, 0]], "kv_segments": [[0, 4, 0]]}
    o, lse = fulmen.attention(q, k, v, return_lse=True, **segments)
    assert np.isfinite(o).all()
    assert (o[0, 0, [0, 5]] == 0).all()
    assert (lse[0, 0, [0, 5]] == -np.inf).all()
    seen = fulmen.dense_mask(6, 6, **segments)
    assert seen.any(1).tolist() == [False, True, True, True, True, False]
    assert seen.any(0).tolist() == [True] * 4 + [False] * 2


@pytest.mark.parametrize("seed", range(30))
def test_blocks_are_what_their_pairs_are(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def drawn(rows: int) -> list[list[int]]:
        cuts = np.sort(rng.integers(0, rows + 1, 6)).reshape(3, 2)
        cuts = rng.permutation(cuts)
        return [[int(a), int(b - a), int(rng.integers(0, 90))] for a, b in cuts]

    options: dict[str, Any] = {"q_segments": drawn(50), "kv_segments": drawn(70)}
    options["causal"] = bool(seed % 2)
    options["window"] = [None, (20, 0), 30][seed % 3]
    options["mask"] = [None, masks.chunks(16), "i // 8 != j // 8"][seed // 2 % 3]
    seen = fulmen.dense_mask(50, 70, **options)
    kinds = fulmen.block_map(50, 70, size=(16, 10), **options).kinds[0, 0]
    exact = fulmen.block_map(50, 70, size=(16, 10), exact=True, **options).kinds[0, 0]
    for (row, key), kind in np.ndenumerate(kinds):
        block = seen[row * 16 : row * 16 + 16, key * 10 : key * 10 + 10]
        true = 0 if not block.any() else 2 if block.all() else 1
        assert exact[row, key] == true
        assert kind in (true, 1)


def test_whole_blocks_of_a_segment_are_told_without_their_pairs() -> None:
    segments = {"q_segments": [[0, 64, 64], [64, 64, 192]], "kv_segments": [[0, 256, 0]]}
    kinds = fulmen.block_map(128, 256, size=64, causal=True, **segments).kinds[0, 0]
    assert kinds.tolist() == [[2, 1, 0, 0], [2, 2, 2, 1]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_segments": [[0, 8, 0]]}, "kv_segments is given without q_segments"),
        ({"q_segments": [[0, 9, 0]]}, r"q_segments\[0, 0\] is \(0, 9, 0\)"),
        ({"q_segments": [[0, 5, 0], [4, 2, 9]]}, "share a row"),
        ({"q_segments": [[0, 8, 0]], "mask": masks.blocks([[[[0]]]], 64)}, "beside blocks"),
        ({"q_segments": [[0, 8, 0]], "kv_start": [0]}, "beside kv_start"),
        ({"q_segments": np.zeros((1, 1, 3))}, "int32 or int64"),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    x = np.zeros((1, 1, 8, 4), np.float32)
    with pytest.raises(fulmen.Error, match=words):
        fulmen.attention(x, x, x, **options)
