# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The visible matrix against pictures drawn by hand, and fulmen.dense_mask against the matrix.

A picture is one word of 0 and 1 for each query, one character for each key.
"""

import numpy as np
import pytest

import fulmen
from fulmen.lab.cases import all_cases
from fulmen.lab.cases.problem import build_call, build_problem
from fulmen.lab.cases.visible import Options, distance, pair_shape, visible
from fulmen.masks import Chunks, Documents, Prefix, Tree

INF = float("inf")
CAUSAL = {"causal": True}
TOP_LEFT = {"causal": True, "alignment": "top_left"}

PICTURES = {
    "everything": ({}, "1111 1111"),
    # pytorch#108108 and others: the two meanings of causal
    "causal_2x5": (CAUSAL, "11110 11111"),
    "causal_5x2": (CAUSAL, "00 00 00 10 11"),
    "top_left_2x5": (TOP_LEFT, "10000 11000"),
    "top_left_5x2": (TOP_LEFT, "10 11 11 11 11"),
    "own_key_only": ({"window": (0, 0)}, "100 010 001"),
    "window_1_2": ({"window": (1, 2)}, "11100 11110 01111 00111 00011"),
    "window_left_only": ({"window": (1, -1)}, "1111 1111 0111 0011"),
    "window_right_only": ({"window": (-1, 1)}, "1100 1110 1111 1111"),
    "window_of_2_causal": ({**CAUSAL, "window": (1, 0)}, "1000 1100 0110 0011"),
    "window_bottom_right_3x5": ({"window": (1, 0)}, "01100 00110 00011"),
    "window_top_left_3x5": ({"window": (1, 0), "alignment": "top_left"}, "10000 11000 01100"),
    "prefix_2": ({**CAUSAL, "masks": (Prefix(2),)}, "1100 1100 1110 1111"),
    "prefix_0": ({**CAUSAL, "masks": (Prefix(0),)}, "100 110 111"),
    "prefix_in_window": (
        {**CAUSAL, "window": (1, 0), "masks": (Prefix(3),)},
        "1000 1100 0110 0011",
    ),
    "documents": ({"masks": (Documents([0, 0, 7, 7]),)}, "1100 1100 0011 0011"),
    "documents_2x3": ({"masks": (Documents([1, 2], [2, 1, 2]),)}, "010 101"),
    "documents_causal": ({**CAUSAL, "masks": (Documents([0, 0, 7, 7]),)}, "1000 1100 0010 0011"),
    "chunks_2": ({"masks": (Chunks(2),)}, "1100 1100 0011 0011"),
    "chunks_2_of_2x5": ({"masks": (Chunks(2),)}, "00110 00001"),
    "chunks_2_of_5x2": ({"masks": (Chunks(2),)}, "00 00 00 11 11"),
    "chunks_before_the_keys": ({"masks": (Chunks(4),)}, "00 00 00 11 11"),
    "chunks_top_left": ({"masks": (Chunks(2),), "alignment": "top_left"}, "11000 11000 00110"),
    "bool_columns": ({"masks": (np.array([True, False, True]),)}, "101 101"),
    "bool_and_causal": ({**CAUSAL, "masks": (np.array([True, False, True]),)}, "100 100 101"),
    "bias_hides": ({"bias": np.array([[0, -INF], [-1e38, 0], [-INF, -INF]])}, "10 11 00"),
    "lengths": ({"q_lengths": np.array([2]), "kv_lengths": np.array([3])}, "1110 1110 0000"),
    "lengths_causal": (
        {**CAUSAL, "q_lengths": np.array([2]), "kv_lengths": np.array([3])},
        "1100 1110 0000",
    ),
    "lengths_zero": ({**CAUSAL, "kv_lengths": np.array([0])}, "000 000"),
    "start": ({"kv_start": np.array([2])}, "00111 00111"),
    "start_causal": ({**CAUSAL, "kv_start": np.array([2])}, "00110 00111"),
    "start_top_left": ({**TOP_LEFT, "kv_start": np.array([2])}, "00100 00110"),
    "start_chunks": ({"masks": (Chunks(2),), "kv_start": np.array([1])}, "00011 00011"),
    "positions": ({**CAUSAL, "positions": np.array([2, 0, -1])}, "1110 1000 0000"),
    "positions_window": ({"positions": np.array([3, 0]), "window": (1, 0)}, "00110 10000"),
    "tree": ({"masks": (Tree(np.array([0b001, 0b010, 0b101])),)}, "11100 11010 11101"),
    "tree_ahead": ({"masks": (Tree(np.array([0b10, 0b11])),)}, "101 111"),
    "tree_causal": ({**CAUSAL, "masks": (Tree(np.array([0b11, 0b01])),)}, "110 110"),
    "tree_positions": (  # the drafts stand at 2 and 2: each sees the other
        {**CAUSAL, "masks": (Tree(np.array([0b11, 0b11])),), "positions": np.array([2, 2])},
        "1111 1111",
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name):
    fields, picture = PICTURES[name]
    rows = picture.split()
    got = visible(Options(**fields), 0, 0, len(rows), len(rows[0]))
    assert ["".join("01"[int(x)] for x in row) for row in got] == rows


def test_ids_and_masks_per_batch_and_head():
    ids = np.array([[0, 1], [1, 1]])
    options = Options(masks=(Documents(ids), np.array([[[[True]], [[False]]]])))
    assert visible(options, 0, 0, 2, 2).tolist() == [[True, False], [False, True]]
    assert visible(options, 1, 0, 2, 2).all()
    assert not visible(options, 0, 1, 2, 2).any()


def test_ids_of_packed_sequences():
    offsets = np.array([0, 2, 5])
    options = Options(masks=(Documents([0, 1, 0, 0, 1]),), cu_q=offsets, cu_kv=offsets)
    assert visible(options, 1, 0, 3, 3).tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]


def test_distances():
    assert distance(Options(), 0, 2, 4).tolist() == [[2, 1, 0, 1], [3, 2, 1, 0]]
    assert distance(Options(alignment="top_left"), 0, 2, 3).tolist() == [[0, 1, 2], [1, 0, 1]]
    lengths = Options(q_lengths=np.array([1]), kv_lengths=np.array([3]))
    assert distance(lengths, 0, 1, 4).tolist() == [[2, 1, 0, 1]]


MASK_OPTIONS = (
    "causal", "alignment", "window", "mask", "bias", "q_lengths", "kv_lengths", "kv_start",
    "positions", "cu_q", "cu_kv",
)  # fmt: skip


@pytest.mark.parametrize("tag", ["mask", "packed", "grid", "caches"])
def test_dense_mask_is_the_same_matrix(tag):
    for case in all_cases():
        if tag not in case.tags or case.check == "refused":
            continue
        if tag == "caches" and (case.packed or not case.kv_rows):
            continue  # dense_mask has keys of one kind with the queries
        problem = build_problem(case)
        options = problem.options
        expected = np.zeros(pair_shape(problem), bool)
        for b, h in np.ndindex(expected.shape[:2]):
            if options.cu_q is None:
                num_q, num_k = expected.shape[2:]
            else:
                num_q, num_k = (int(cu[b + 1] - cu[b]) for cu in (options.cu_q, options.cu_kv))
            expected[b, h, :num_q, :num_k] = visible(options, b, h, num_q, num_k)
        given = build_call(case, problem).options
        given = {name: given[name] for name in MASK_OPTIONS if name in given}
        if "bias" in given:  # dense_mask has no q that could name another type
            given["bias"] = given["bias"].astype(np.float32)
        got = fulmen.dense_mask(case.q_rows, case.kv_rows, **given)
        got = np.broadcast_to(np.asarray(got), expected.shape)
        if options.slotless is not None:  # it has no table either
            got = got & ~options.slotless[:, None, None]
        assert np.array_equal(got, expected), case.name
