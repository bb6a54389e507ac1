# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The indexer of sparse latent attention against float64.

Its scores are sums in float32, and two that are nearer to each other than their bounds may come in
either order. So the rule is one of pairs: no key that is left out may be better than a chosen one
by more than the bounds of both; beside it what is exact: how many there are, that each is a key
that the row sees, in rising order, and the lower of two whose scores are 0 without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import fulmen

from .arrays import Array
from .case import Case
from .placement import Host, OnGpu
from .visible import Problem

HIGHEST = 1e300  # what NaN counts as


class MischosenError(Exception):
    """A choice that is not the indexer's, as one sentence."""


def weights_of(case: Case) -> Array:
    """(batch, head, row) of both signs."""
    rng = np.random.default_rng([case.batch, case.heads, case.q_rows])
    return rng.standard_normal((case.batch, case.heads, case.q_rows)).astype(np.float32)


def judged(
    case: Case, problem: Problem, call: Any, memory: Host | OnGpu
) -> Iterator[tuple[float, str]]:
    """The worst pair of each row, relative to its bounds.

    Raises:
        MischosenError: what is exact is not so.
    """
    weights = weights_of(case)
    options = {name: call.options.get(name) for name in ("page_table", "kv_lengths")}
    if options["kv_lengths"] is not None:
        options["kv_lengths"] = np.asarray(options["kv_lengths"], case.offsets)
    found = memory.mla_indexer(call.q, call.k, weights, case.topk, causal=case.causal, **options)
    if found.shape != (case.batch, case.q_rows, case.topk):
        raise MischosenError(f"indices have shape {found.shape}")
    for b, i in np.ndindex(case.batch, case.q_rows):
        keys = case.kv_lengths[b] if case.kv_lengths else case.kv_rows
        seen = max(keys - case.q_rows + i + 1, 0) if case.causal else keys
        chosen = chosen_keys(found[b, i], slots_of(case, options["page_table"], b, keys), seen)
        yield worst_pair(problem, weights, (b, i, seen), chosen)


def slots_of(case: Case, table: Array | None, b: int, keys: int) -> Array:
    """The slot of each key of a request."""
    key = np.arange(keys)
    if table is None:
        return b * case.kv_rows + key
    pages: Array = np.asarray(table)[b][key // case.page_size]
    return pages * case.page_size + key % case.page_size


def chosen_keys(indices: Array, slots: Array, seen: int) -> Array:
    """The numbers of the keys that a row of indices names."""
    number_of = {int(slot): key for key, slot in enumerate(slots[:seen])}
    count = min(len(indices), seen)
    if not (indices[count:] == -1).all():
        raise MischosenError(f"behind {count} keys there are {indices[count:].tolist()}, not -1")
    try:
        keys = np.array([number_of[int(slot)] for slot in indices[:count]], np.int64)
    except KeyError as slot:
        raise MischosenError(f"slot {slot} has no key that the row sees") from None
    if (np.diff(keys) <= 0).any():
        raise MischosenError(f"keys {keys.tolist()} do not rise")
    return keys


def worst_pair(
    problem: Problem, weights: Array, row: tuple[int, int, int], chosen: Array
) -> tuple[float, str]:
    """By how much a key that is left out is better than a chosen one, relative to their bounds."""
    b, i, seen = row
    q, k = problem.q[b, :, i].astype(np.float64), problem.k[b, 0, :seen].astype(np.float64)
    w = weights[b, :, i, None].astype(np.float64)
    score = (w * np.maximum(q @ k.T, 0)).sum(axis=0)
    terms = (np.abs(w) * (np.abs(q) @ np.abs(k).T)).sum(axis=0)
    bound = (q.shape[1] + q.shape[0] + 2) * 2.0**-23 * terms
    bound[np.isnan(score)] = 0
    score[np.isnan(score)] = HIGHEST
    left = np.setdiff1d(np.arange(seen), chosen)
    if not len(left) or not len(chosen):
        return 0.0, f"row {b}, {i}: all keys or none"
    better = score[left][:, None] - score[chosen][None]
    allowed = bound[left][:, None] + bound[chosen][None]
    is_tie = (better == 0) & (allowed == 0)
    if (is_tie & (left[:, None] < chosen[None])).any():
        raise MischosenError(f"row {b}, {i}: of keys with equal scores a higher one was chosen")
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(better <= 0, 0.0, better / allowed)
    at = np.unravel_index(int(ratio.argmax()), ratio.shape)
    return float(ratio[at]), f"row {b}, {i}: key {left[at[0]]} for {chosen[at[1]]}"


def takes(implementation: str) -> None:
    """Raises UnsupportedError where an implementation has no indexer of its own."""
    if implementation not in ("auto", "tiled", "simt"):
        raise fulmen.UnsupportedError("each backend has one indexer: with `tiled` and with `simt`")
