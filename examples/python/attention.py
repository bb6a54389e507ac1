# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Attention and its gradients in NumPy arrays, compared with float64 written out.

python examples/python/attention.py    prints the largest errors; ends with 1 if any is large
"""

from __future__ import annotations

import sys

import numpy as np

import fulmen

BATCH, HEADS, KV_HEADS, ROWS, DIM = 2, 4, 2, 200, 64


def in_float64(q, k, v, do):
    """O, dq, dk and dv of causal attention, the whole matrix at once."""
    q, do = q.astype(float), do.astype(float)
    k, v = (np.repeat(x.astype(float), HEADS // KV_HEADS, axis=1) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) / np.sqrt(DIM)
    s = np.where(np.tri(ROWS, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    o = p @ v
    ds = p * (do @ v.swapaxes(-1, -2) - (do * o).sum(axis=-1, keepdims=True)) / np.sqrt(DIM)
    groups = (BATCH, KV_HEADS, HEADS // KV_HEADS, ROWS, DIM)
    dk, dv = ((x.swapaxes(-1, -2) @ y).reshape(groups).sum(axis=2) for x, y in ((ds, q), (p, do)))
    return {"o": o, "dq": ds @ k, "dk": dk, "dv": dv}


def main() -> int:
    """Computes both and prints how far they are from each other."""
    rng = np.random.default_rng(0)
    q, do = rng.standard_normal((2, BATCH, HEADS, ROWS, DIM), dtype=np.float32)
    k, v = rng.standard_normal((2, BATCH, KV_HEADS, ROWS, DIM), dtype=np.float32)

    forward = fulmen.attention_forward(q, k, v, causal=True)
    gradients = fulmen.attention_backward(do, q, k, v, forward.o, forward.stats, causal=True)

    print(f"chosen: {fulmen.explain(q, k, v, causal=True)['reason']}")
    got = {"o": forward.o, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
    worst = 0.0
    for name, truth in in_float64(q, k, v, do).items():
        error = float(np.abs(got[name] - truth).max())
        worst = max(worst, error)
        print(f"{name}: largest error {error:.1e} against float64")
    return int(worst > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
