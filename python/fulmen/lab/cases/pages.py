# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Caches: the keys and values of a problem in the pages of two pools, found through a table.

The oracle knows nothing of pages: a problem has its keys in order. Here each key that some query
sees is put into the row of a page; every other row of the pools is NaN, and every entry of the
table that no length reaches is garbage. `seed` changes where pages lie and how many there are, and
nothing else: results keep their bits. Called by problem.build_call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import records, views
from .arrays import Array, unused
from .case import Case
from .visible import Problem

Shape = tuple[int, ...]  # of a pool: (page, kv_head, row of the page, dim)


def _empty(shape: Shape, dtype: Any) -> Array:
    return np.full(shape, unused(dtype), dtype)


def _heads_first(k: Shape, v: Shape, dtype: Any) -> tuple[Array, Array]:
    """Two pools; a page has the rows of each head together."""
    return _empty(k, dtype), _empty(v, dtype)


def _rows_first(k: Shape, v: Shape, dtype: Any) -> tuple[Array, Array]:
    """Two pools; a page has the heads of each row together."""
    return views.rows_first(_empty(k, dtype)), views.rows_first(_empty(v, dtype))


def _interleaved(k: Shape, v: Shape, dtype: Any) -> tuple[Array, Array]:
    """One pool; each page has its keys, then its values."""
    pages, heads, rows, dim = k
    both = _empty((pages, 2, rows, heads, max(dim, v[3])), dtype).swapaxes(2, 3)
    return both[:, 0, ..., :dim], both[:, 1, ..., : v[3]]


def _side_by_side(k: Shape, v: Shape, dtype: Any) -> tuple[Array, Array]:
    """One pool; each row has its key, then its value."""
    both = _empty((*k[:3], k[3] + v[3]), dtype)
    return both[..., : k[3]], both[..., k[3] :]


def _latent(k: Shape, v: Shape, dtype: Any) -> tuple[Array, Array]:
    """One pool of keys; the first dims of each are its value: inputs of that name."""
    pool = _rows_first(k, v, dtype)[0]
    return pool, pool[..., : v[3]]


def _layers(k: Shape, v: Shape, dtype: Any) -> tuple[Array, Array]:
    """Pages of three layers each, of which this is the second: pages lie far apart."""
    first, second = (_empty((x[0], 3, *x[1:]), dtype)[:, 1] for x in (k, v))
    return first, second


def _far(k: Shape, v: Shape, dtype: Any) -> tuple[Array, Array]:
    """Pages 2^30 elements apart: the product of page and stride passes 2^32."""
    return views.far(0)(_empty(k, dtype)), views.far(0)(_empty(v, dtype))


Pools = Callable[[Shape, Shape, Any], "tuple[Array, Array]"]
POOLS: dict[str, Pools] = {
    "heads_first": _heads_first,
    "rows_first": _rows_first,
    "interleaved": _interleaved,
    "side_by_side": _side_by_side,
    "layers": _layers,
    "latent": _latent,
    "far": _far,
}


def pages_of(case: Case, rng: np.random.Generator) -> tuple[list[Array], int]:
    """The pages of each request in order, and how many there are in the pool."""
    needed = [-(-length // case.page_size) for length in case.kv_lengths]
    num_shared = case.shared // case.page_size
    own = sum(max(n - num_shared, 0) for n in needed)
    num_pages = num_shared + own + int(rng.integers(1, 4))
    ids = rng.permutation(num_pages)
    shared, rest = ids[:num_shared], ids[num_shared:]
    found = []
    for n in needed:
        taken, rest = rest[: max(n - num_shared, 0)], rest[max(n - num_shared, 0) :]
        found.append(np.concatenate([shared[:n], taken]))
    return found, num_pages


def slots_of(case: Case, rng: np.random.Generator) -> tuple[list[Array], int]:
    """The slot of each key of each request, and how many pages there are in the pool."""
    num_pages = -(-sum(case.kv_lengths) // case.page_size) + int(rng.integers(1, 4))
    slots = rng.permutation(num_pages * case.page_size)
    return np.split(slots, np.cumsum(case.kv_lengths))[:-1], num_pages


def places_of(case: Case, entries: Array, length: int) -> tuple[Array, Array]:
    """Page and row of each key of a request."""
    if case.slots:
        page, row = np.divmod(entries, case.page_size)
        return page, row
    rows = np.arange(length)
    return entries[rows // case.page_size], rows % case.page_size


def seen_entries(problem: Problem, entries: list[Array]) -> list[Array]:
    """The entries of each request, without those of keys that have no slot."""
    missing = problem.options.slotless
    if missing is None:
        return entries
    return [np.where(missing[b, : len(ids)], -1, ids) for b, ids in enumerate(entries)]


def garbage(rng: np.random.Generator, shape: Any, dtype: str) -> Array:
    """What stands in a table where nobody looks: negative, far too large, or a page."""
    limits = np.iinfo(np.dtype(dtype))
    kinds: list[Any] = [-1, 0, limits.min, limits.max]
    return np.asarray(np.array(kinds, dtype)[rng.integers(0, len(kinds), shape)])


def table_of(case: Case, pages: list[Array], rng: np.random.Generator) -> dict[str, Array]:
    """page_table, padded with garbage; or page_indptr and the list of entries: pages or slots."""
    if case.csr:  # some requests own more entries than their length needs
        spare = rng.integers(0, 2, len(pages))
        entries = [
            np.concatenate([ids, garbage(rng, extra, case.offsets)])
            for ids, extra in zip(pages, spare)
        ]
        counts = np.cumsum([0, *(len(x) for x in entries)])
        return {
            "page_table": np.concatenate(entries).astype(case.offsets),
            "page_indptr": counts.astype(case.offsets),
        }
    # As wide wherever pages lie: the width bounds the keys, and plans go by bounds.
    spare_width = np.random.default_rng([case.page_size, *case.kv_lengths]).integers(0, 3)
    keys = 1 if case.slots else case.page_size
    width = max(-(-case.kv_rows // keys), 1) + int(spare_width)
    table = garbage(rng, (len(pages), width), case.offsets)
    for row, ids in zip(table, pages):
        row[: len(ids)] = ids
    return {"page_table": table}


def place_records(
    case: Case,
    problem: Problem,
    entries: list[Array],
    num_pages: int,
    used: Array,
    rng: np.random.Generator,
) -> tuple[Array, Array, dict[str, Array]]:
    """As `place`, of records: one pool of bytes, NaN where nobody looks."""
    assert problem.records is not None
    pool = np.full((num_pages, 1, case.page_size, case.records), records.UNUSED, np.uint8)
    for b, ids in enumerate(entries):
        page, row = places_of(case, ids, case.kv_lengths[b])
        for j in np.flatnonzero(used[b, 0, : case.kv_lengths[b]]):
            records.put(pool[page[j], 0], row[j], problem.records[b, 0, j])
    return pool, pool[..., : case.dim_v], table_of(case, seen_entries(problem, entries), rng)


def place(
    case: Case, problem: Problem, used: Array, seed: int
) -> tuple[Array, Array, dict[str, Array]]:
    """The pools of keys and of values, (page, kv_head, row, dim), and the table into them; beside
    it the pools of scales where each row has its own.

    Args:
        case: what is asked.
        problem: its keys and values in order.
        used: (batch, kv_head, kv_row), the keys that some query sees.
        seed: of the placement.
    """
    rng = np.random.default_rng(seed)
    entries, num_pages = (slots_of if case.slots else pages_of)(case, rng)
    if problem.records is not None:
        return place_records(case, problem, entries, num_pages, used, rng)
    sources = {"k": problem.k, "v": problem.v}
    for name, kept in problem.stored.items():
        if name == "q":
            continue
        sources[name] = kept.numbers
        if kept.has_rows and kept.scale is not None:
            sources[f"{name}_scale"] = kept.scale
    shapes = {
        name: (num_pages, case.kv_heads, case.page_size, x.shape[-1]) for name, x in sources.items()
    }
    k, v = POOLS[case.pool](shapes["k"], shapes["v"], sources["k"].dtype)
    scales = {name: _empty(shapes[name], np.float32) for name in sources if name not in ("k", "v")}
    pools = {"k": k, "v": v, **scales}
    for b, ids in enumerate(entries):
        rows = np.arange(case.kv_lengths[b])
        page, row = places_of(case, ids, len(rows))
        for name, x in sources.items():
            for head in range(case.kv_heads):
                seen = used[b, head, : len(rows)]
                pools[name][page[seen], head, row[seen]] = x[b, head, : len(rows)][seen]
    return k, v, {**table_of(case, seen_entries(problem, entries), rng), **scales}
