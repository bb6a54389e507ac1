# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""explain, dense_mask, build_info."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import fulmen
from fulmen import masks
from fulmen.layouts import phantom

Q = np.zeros((2, 4, 128, 64), np.float32)


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("implementation", ["auto", "scalar", "tiled"])
def test_explanations_say_what_was_chosen_and_why(operation: str, implementation: str) -> None:
    e = fulmen.explain(Q, Q, Q, operation=operation, implementation=implementation, causal=True)
    assert e["operation"] == operation
    if implementation != "auto":
        assert e["implementation"] == implementation
    assert e["reason"]
    others = {other["implementation"] for other in e["rejected"]}
    assert others == {"scalar", "tiled"} - {e["implementation"]}
    assert all(other["reason"] for other in e["rejected"])
    assert json.loads(json.dumps(e)) == e
    text = str(e)
    assert e["reason"] in text
    assert "flops" in text


def test_flops_count_visible_pairs() -> None:
    pairs = 2 * 4 * 128 * 129 // 2
    forward = fulmen.explain(Q, Q, Q, causal=True)
    assert forward["flops"] == 2 * (64 + 64) * pairs
    assert fulmen.explain(Q, Q, Q, causal=True, operation="backward")["flops"] == pytest.approx(
        2.5 * forward["flops"]
    )


def test_explaining_takes_no_memory() -> None:
    x = phantom((64, 64, 131072, 128), np.dtype(np.float16))
    assert fulmen.explain(x, x, x)["flops"] == 4 * 128 * 64 * 64 * 131072.0**2


def test_explaining_refuses_what_the_call_refuses() -> None:
    with pytest.raises(fulmen.ArgumentError, match="softcap"):
        fulmen.explain(Q, Q, Q, softcap=-1.0)
    with pytest.raises(fulmen.ArgumentError, match="operation"):
        fulmen.explain(Q, Q, Q, operation="sideways")


def test_dense_mask_of_each_option() -> None:
    seen = fulmen.dense_mask
    assert seen(2, 3).all()
    assert seen(2, 3).dtype == bool
    np.testing.assert_array_equal(seen(2, 3, causal=True), np.tri(2, 3, 1, bool))
    np.testing.assert_array_equal(
        seen(2, 3, causal=True, alignment="top_left"), np.tri(2, 3, 0, bool)
    )
    np.testing.assert_array_equal(
        seen(2, 4, causal=True, alignment="top_left", mask=masks.prefix(2)),
        [[1, 1, 0, 0], [1, 1, 0, 0]],
    )
    np.testing.assert_array_equal(seen(2, 2, mask=masks.documents([3, 4])), np.eye(2, dtype=bool))
    np.testing.assert_array_equal(
        seen(3, 3, mask=masks.chunks(2)), [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    )
    np.testing.assert_array_equal(seen(1, 2, bias=np.array([[0, -np.inf]], np.float32)), [[1, 0]])


def test_dense_mask_takes_the_axes_of_its_options() -> None:
    assert fulmen.dense_mask(2, 3, mask=np.ones((5, 1, 3), bool)).shape == (1, 5, 2, 3)
    lengths = fulmen.dense_mask(2, 3, q_lengths=[1, 2], kv_lengths=[3, 0])
    assert lengths.shape == (2, 1, 2, 3)
    assert lengths.sum() == 3
    per_batch = fulmen.dense_mask(2, 2, mask=masks.documents(np.array([[0, 1], [0, 0]])))
    assert per_batch[:, 0].sum(axis=(1, 2)).tolist() == [2, 4]
    packed = fulmen.dense_mask(5, 4, cu_q=[0, 2, 5], cu_kv=[0, 1, 4], causal=True)
    np.testing.assert_array_equal(
        packed[:, 0].astype(int),
        [[[0, 0, 0], [1, 0, 0], [0, 0, 0]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]],
    )


def test_dense_mask_refuses_what_the_call_refuses() -> None:
    with pytest.raises(fulmen.ArgumentError, match="set causal"):
        fulmen.dense_mask(2, 3, mask=masks.prefix(1))
    with pytest.raises(fulmen.ShapeError, match="skv is -3"):
        fulmen.dense_mask(2, -3)


def test_build_info_names_the_build() -> None:
    info = fulmen.build_info()
    assert info["version"] == fulmen.__version__
    assert info["isa"] in info["isas"]
    assert info["threads"] >= 1
    assert info["library"].endswith("so")


def test_the_hash_of_the_kernels_is_that_of_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(root / "tools")
    verified = import_module("verified")
    assert fulmen.build_info()["kernels"] == verified.digest_of_kernels(root)
