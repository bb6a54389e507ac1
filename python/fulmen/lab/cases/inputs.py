# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The numbers in q, k, v and do, by kind, and what is planted among them afterwards.

Gaussian numbers hide bugs: heads with one large channel, scores far from zero, gradients of uneven
size and memory that holds NaN where no call may look are what real calls bring. All kinds follow
from a seed. A kind gives float64; `problem.build` rounds to the type of the case, so every
arithmetic starts from the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .arrays import Array
from .visible import Problem, pair_shape, segments, visible

Draw = Callable[[np.random.Generator, dict[str, Array], float], None]


def _normal(rng: np.random.Generator, t: dict[str, Array], scale: float) -> None:
    """As drawn."""


def _wide(rng: np.random.Generator, t: dict[str, Array], scale: float) -> None:
    """N(0, 3): sharper rows."""
    for x in t.values():
        np.multiply(x, 3, out=x)


def _outlier(rng: np.random.Generator, t: dict[str, Array], scale: float) -> None:
    """One channel of q, k and v a hundred times the others, as in trained models."""
    for name in ("q", "k", "v"):
        if t[name].shape[-1]:
            t[name][..., rng.integers(t[name].shape[-1])] *= 100


def _shifted(by: float) -> Draw:
    def draw(rng: np.random.Generator, t: dict[str, Array], scale: float) -> None:
        """Channel 0 adds the same large number to every score; the others stay normal."""
        size = math.sqrt(abs(by) / abs(scale))
        t["q"][..., 0] = size
        t["k"][..., 0] = math.copysign(size, by * scale)

    return draw


def _scores(size: float) -> Draw:
    def draw(rng: np.random.Generator, t: dict[str, Array], scale: float) -> None:
        """Scores of both signs, about as large as `size`."""
        factor = math.sqrt(size / (abs(scale) * math.sqrt(max(t["q"].shape[-1], 1))))
        t["q"] *= factor
        t["k"] *= factor

    return draw


def _constant(q: float, k: float) -> Draw:
    def draw(rng: np.random.Generator, t: dict[str, Array], scale: float) -> None:
        """Every q and every k the same number: all scores are equal, all rows uniform."""
        t["q"][...] = q
        t["k"][...] = k

    return draw


def _opposed(size: float) -> Draw:
    def draw(rng: np.random.Generator, t: dict[str, Array], scale: float) -> None:
        """Queries near +c, keys near -c: every score is about -size, with a little noise."""
        c = math.sqrt(size / (abs(scale) * max(t["q"].shape[-1], 1)))
        t["q"][...] = c * (1 + 0.03 * t["q"])
        t["k"][...] = -c * (1 + 0.03 * t["k"])

    return draw


def _tiny(rng: np.random.Generator, t: dict[str, Array], scale: float) -> None:
    """2^-20: below the normal numbers of float16."""
    for x in t.values():
        np.multiply(x, 2.0**-20, out=x)


def _per_head(rng: np.random.Generator, t: dict[str, Array], scale: float) -> None:
    """Head h of do times 2^-12 to 2^8, one power for each head and, dense, for each batch."""
    do = t["do"]
    steps = np.linspace(-12, 8, max(int(np.prod(do.shape[:-2])), 1)).round()
    do *= np.exp2(steps[: int(np.prod(do.shape[:-2]))]).reshape((*do.shape[:-2], 1, 1))


def _uneven(rng: np.random.Generator, t: dict[str, Array], scale: float) -> None:
    """Row i of do times 2^-16 to 2^4: a loss that looks at few rows."""
    t["do"] *= np.exp2(rng.integers(-16, 5, t["do"].shape[:-1]))[..., None]


def _ones_do(rng: np.random.Generator, t: dict[str, Array], scale: float) -> None:
    """All of do 1, q, k and v N(0, 3): the gradient of a sum."""
    _wide(rng, t, scale)
    t["do"][...] = 1


def _one_hot(rng: np.random.Generator, t: dict[str, Array], scale: float) -> None:
    """Keys that are large multiples of one query each: rows with one probability near 1."""
    t["q"] *= 8
    rows = min(t["q"].shape[-2], t["k"].shape[-2])
    heads = t["k"].shape[-3]
    t["k"][..., :rows, :] = t["q"][..., :heads, :rows, :]


def _latent(rng: np.random.Generator, t: dict[str, Array], scale: float) -> None:
    """Values that are the first dims of the keys: latent attention."""
    t["v"][...] = t["k"][..., : t["v"].shape[-1]]


KINDS: dict[str, Draw] = {
    "normal": _normal,
    "wide": _wide,
    "outlier": _outlier,
    "shift_minus_100": _shifted(-100.0),
    "shift_minus_1e4": _shifted(-1e4),
    "shift_minus_1e5": _shifted(-1e5),
    "shift_plus_1e5": _shifted(1e5),
    "huge": _scores(1e6),
    "beyond": _scores(1e8),
    "vast": _scores(1e12),
    "spread_50": _scores(50.0),
    "opposed_100": _opposed(100.0),
    "opposed_2e5": _opposed(2e5),
    "zeros": _constant(0.0, 0.0),
    "ones": _constant(1.0, 1.0),
    "constant_1000": _constant(1000.0, 1000.0),
    "constant_8192": _constant(8192.0, 8192.0),
    "constant_133120": _constant(133120.0, 133120.0),
    "tiny": _tiny,
    "per_head_do": _per_head,
    "uneven_do": _uneven,
    "ones_do": _ones_do,
    "one_hot": _one_hot,
    "latent": _latent,
}


def draw(
    kind: str, seed: int, shapes: Mapping[str, tuple[int, ...]], scale: float
) -> dict[str, Array]:
    """q, k, v and do of one kind, in float64.

    Args:
        kind: a key of KINDS.
        seed: what everything follows from.
        shapes: of "q", "k", "v" and "do"; (..., head, row, dim).
        scale: of the scores: kinds that aim at a score need it.
    """
    rng = np.random.default_rng(seed)
    tensors = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    KINDS[kind](rng, tensors, scale)
    return tensors


# ---- planted values ----


def seen_pairs(problem: Problem) -> tuple[dict[str, Array], Array | None]:
    """Which rows of q and of k take part at all, and which entries of the bias do."""
    used = {"q": np.zeros(problem.q.shape[:-1], bool), "k": np.zeros(problem.k.shape[:-1], bool)}
    bias = problem.options.bias
    pairs = None if bias is None else np.zeros(pair_shape(problem), bool)
    for at in segments(problem):
        num_q, num_k = len(problem.q[at.q_at]), len(problem.k[at.kv_at])
        see = visible(problem.options, at.batch, at.head, num_q, num_k)
        used["q"][at.q_at] |= see.any(axis=1)
        used["k"][at.kv_at] |= see.any(axis=0)
        if pairs is not None:
            pairs[at.batch, at.head, :num_q, :num_k] = see
    if bias is None or pairs is None:
        return used, None
    full = (1,) * (4 - bias.ndim) + bias.shape
    axes = tuple(a for a in range(4) if full[a] == 1)
    bias_used: Array = np.any(pairs, axis=axes, keepdims=True).reshape(bias.shape)
    return used, bias_used


def plant_hidden(problem: Problem, value: float) -> None:
    """Fills what no call may look at: keys that no row sees, rows that see no key."""
    used, bias_used = seen_pairs(problem)
    bias = problem.options.bias
    problem.q[~used["q"]] = value
    problem.k[~used["k"]] = value
    problem.v[~used["k"]] = value
    if problem.do is not None:
        problem.do[~used["q"]] = value
    if problem.dlse is not None:
        problem.dlse[~used["q"]] = value
    if bias is not None and bias_used is not None:
        bias[~bias_used & (bias != -np.inf)] = value


def plant_visible(problem: Problem, tensor: str, value: float, seed: int) -> None:
    """Puts one value into one row that takes part; v and bias get it in one element only."""
    rng = np.random.default_rng(seed)
    used, bias_used = seen_pairs(problem)
    if tensor == "bias":
        assert problem.options.bias is not None
        assert bias_used is not None
        indices = np.argwhere(bias_used)
        problem.options.bias[tuple(indices[rng.integers(len(indices))])] = value
        return
    x: Array = getattr(problem, tensor)
    indices = np.argwhere(used["q" if tensor == "q" else "k"])
    row = tuple(int(n) for n in indices[rng.integers(len(indices))])
    x[row][int(rng.integers(x.shape[-1]))] = value


POISONS: dict[str, tuple[str, float]] = {
    "nan_hidden": ("hidden", np.nan),
    "inf_hidden": ("hidden", np.inf),
    "minus_inf_hidden": ("hidden", -np.inf),
    "nan_q": ("q", np.nan),
    "nan_k": ("k", np.nan),
    "nan_v": ("v", np.nan),
    "nan_bias": ("bias", np.nan),
    "inf_bias": ("bias", np.inf),
    "inf_v": ("v", np.inf),
    "nan_all_q": ("all_q", np.nan),
}


def plant(problem: Problem, poison: str, seed: int) -> None:
    """Plants a poison of POISONS into the tensors of a problem, in place."""
    where, value = POISONS[poison]
    if where == "hidden":
        plant_hidden(problem, value)
    elif where == "all_q":
        problem.q[...] = value
    else:
        plant_visible(problem, where, value, seed)


def bias_values(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> Array:
    """An additive bias, by kind: "normal", "hides" (a fifth is -inf) and those named below."""
    bias = rng.standard_normal(shape)
    if kind == "hides":
        bias[rng.random(shape) < 0.2] = -np.inf
    elif kind == "lowest":  # row 0 (or all, where rows broadcast): the lowest finite float32
        bias[...] = 1
        bias[..., 0, :] = np.finfo(np.float32).min
    elif kind == "lowest_left":  # the first 128 columns
        bias[...] = 0
        bias[..., :128] = np.finfo(np.float32).min
    elif kind == "distance":  # q_row - kv_row, up to the length: large numbers in 16 bits
        bias[...] = np.arange(shape[-2])[:, None] - np.arange(shape[-1])
    elif kind == "minus_inf_row":
        bias[..., 0, :] = -np.inf
    elif kind != "normal":
        raise ValueError(f"no bias is called {kind}")
    return bias


def sink_values(rng: np.random.Generator, heads: int, kind: str) -> Array:
    """One logit a head: "normal", "low" (-1e4), "high" (+1e4), "minus_inf"."""
    level: dict[str, Any] = {"low": -1e4, "high": 1e4, "minus_inf": -np.inf}
    sinks = rng.standard_normal(heads)
    return np.full(heads, level[kind]) if kind in level else sinks
