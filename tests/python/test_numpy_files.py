# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""`fulmen run` on the files of NumPy: .npz and .npy, whole and broken."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import fulmen


def numpy_files(folder: Path) -> dict[str, Any]:
    """One problem as x.npz and, with a prefix, as .npy files."""
    x = np.random.default_rng(2).standard_normal((3, 2, 8, 16)).astype(np.float32)
    tensors = dict(zip("qkv", x))
    tensors["o"] = fulmen.attention(*x, causal=True, scale=0.5, layout="hsd")
    np.savez(folder / "x.npz", **tensors, causal=True, scale=0.5, layout="hsd")
    for name, tensor in tensors.items():
        np.save(folder / f"layer0.{name}.npy", tensor)
    return tensors


def test_files_of_numpy(command: Any, tmp_path: Path) -> None:
    tensors = numpy_files(tmp_path)
    out = tmp_path / "out.npz"
    text = command("run", tmp_path / "x.npz", "--repeat", 1, "-o", out)
    assert re.search("^o .*within rule +file", text, re.MULTILINE)
    with np.load(out) as written:
        np.testing.assert_array_equal(written["o"], tensors["o"])
        assert written["layout"] == "hsd"
    words = ("--causal", "--scale", 0.5, "--json", "--repeat", 1)
    found = command("run", tmp_path / "layer0.q.npy", *words)["problems"]
    assert [problem["name"] for problem in found] == ["layer0"]
    assert all(line["passed"] for line in found[0]["accuracy"])
    x = np.ones((3, 1, 4, 8), ml_dtypes.bfloat16)  # which NumPy writes without its name
    np.savez(tmp_path / "b.npz", **dict(zip("qkv", x)))
    assert command("run", tmp_path / "b.npz", "--json", "--repeat", 1)["problems"][0]["dtype"] == (
        "bfloat16"
    )


def test_broken_files_of_numpy(command: Any, tmp_path: Path) -> None:
    numpy_files(tmp_path)
    for name in ("x.npz", "layer0.q.npy"):
        file = tmp_path / name
        file.write_bytes(file.read_bytes()[:200])
        assert "is not a whole" in command("run", file, code=2)
    assert "name q.npy" in command("run", tmp_path / "layer0.k.npy", code=2)
    (tmp_path / "layer0.v.npy").unlink()
    np.save(tmp_path / "layer0.q.npy", np.ones((2, 8, 16), np.float32))
    assert "no layer0.v" in command("run", tmp_path / "layer0.q.npy", code=2)
    np.savez(tmp_path / "objects.npz", q=np.array([None, 3]))
    assert "is not a whole npz file" in command("run", tmp_path / "objects.npz", code=2)
