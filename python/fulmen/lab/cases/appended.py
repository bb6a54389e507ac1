# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Caches that append_kv filled: every row where it belongs, to the bit, and nothing elsewhere.

The first half of each request's keys goes to slots, a padded batch with rows that are skipped; the
rest, packed, behind them through the table. Then attention over these pools obeys the rule of the
case. A third append rotates: its keys have the bits of `rotary`, which is judged by the definition
in float64. Called by run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

import fulmen

from . import pages, records
from .arrays import Array, same_bits
from .case import Case
from .placement import Host, OnGpu
from .visible import Problem

DIGITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}


class MisplacedError(Exception):
    """Rows that are not where they belong, as one sentence."""


def filled(
    case: Case, problem: Problem, memory: Host | OnGpu
) -> tuple[Array, Array, dict[str, Array]]:
    """Pools of keys and of values that two appends have filled, and the table into them.

    Raises:
        MisplacedError: a row is not where it belongs, or something else was written.
    """
    rng = np.random.default_rng(len(case.name))
    of_requests, num_pages = pages.pages_of(case, rng)
    table = pages.table_of(case, of_requests, rng)
    k_pool, v_pool = empty_pools(case, problem, num_pages)
    first = np.array(case.kv_lengths, case.offsets) // 2
    slots = slots_of(case, of_requests, first)
    half = slots.shape[1]
    new = new_rows(problem)
    memory.append_kv(k_pool, v_pool, *(x if x is None else x[:, :, :half] for x in new), slots)
    rest = [slice(n, length) for n, length in zip(first, case.kv_lengths)]
    k, v = (
        x if x is None else np.concatenate([x[b, :, rows] for b, rows in enumerate(rest)], axis=1)
        for x in new
    )
    cu_new = np.cumsum([0, *(np.array(case.kv_lengths) - first)]).astype(case.offsets)
    indptr, entries = table.get("page_indptr"), table["page_table"]
    where = entries if indptr is None else (indptr, entries)
    memory.append_kv(k_pool, v_pool, k, v, (where, first), cu_new=cu_new, layout="hsd")
    if problem.records is not None:
        compare_records(case, k_pool, problem.records, of_requests)
        return k_pool, k_pool[..., : case.dim_v], table
    compare(case, "keys", k_pool, problem.k, of_requests)
    compare(case, "values", v_pool, problem.v, of_requests)
    return k_pool, v_pool, table


def new_rows(problem: Problem) -> tuple[Array, Any]:
    """Keys and values as append_kv takes them: records have both in one."""
    if problem.records is None:
        return problem.k, problem.v
    return problem.k.astype(problem.q.dtype), None


def empty_pools(case: Case, problem: Problem, num_pages: int) -> tuple[Array, Any]:
    """Pools of the case's layout, all NaN."""
    if problem.records is not None:
        shape = (num_pages, case.kv_heads, case.page_size, case.records)
        return np.full(shape, records.UNUSED, np.uint8), None
    shapes = [
        (num_pages, case.kv_heads, case.page_size, x.shape[-1]) for x in (problem.k, problem.v)
    ]
    return pages.POOLS[case.pool](shapes[0], shapes[1], problem.k.dtype)


def slots_of(case: Case, of_requests: list[Array], count: Array) -> Array:
    """(batch, row): the first `count[b]` rows of each request, then rows that are skipped."""
    slots = np.full((case.batch, max(int(count.max(initial=0)), 1)), -1, case.offsets)
    for b, ids in enumerate(of_requests):
        rows = np.arange(count[b])
        slots[b, : count[b]] = ids[rows // case.page_size] * case.page_size + rows % case.page_size
    return slots


def compare(case: Case, what: str, pool: Array, x: Array, of_requests: list[Array]) -> None:
    """Raises MisplacedError where the pool has not x in its pages, or anything beside."""
    rest = np.ones(pool.shape[0::2], bool)
    for b, ids in enumerate(of_requests):
        rows = np.arange(case.kv_lengths[b])
        page, row = ids[rows // case.page_size], rows % case.page_size
        found = pool[page, :, row].swapaxes(0, 1)
        if not same_bits(np.array(found), np.array(x[b, :, : len(rows)])):
            raise MisplacedError(f"the {what} of request {b} are not what was appended")
        rest[page, row] = False
    if not np.isnan(np.asarray(pool.swapaxes(1, 2)[rest], np.float64)).all():
        raise MisplacedError(f"the pool of {what} was written where no row goes")


def compare_records(case: Case, pool: Array, rows: Array, of_requests: list[Array]) -> None:
    """Raises MisplacedError where the pool has other bytes than these records in its pages."""
    expected = np.full_like(pool, records.UNUSED)
    for b, ids in enumerate(of_requests):
        for j in range(case.kv_lengths[b]):
            page = expected[ids[j // case.page_size], 0]
            records.put(page, j % case.page_size, rows[b, 0, j])
    if not same_bits(pool, expected):
        where = np.argwhere(pool != expected)[0].tolist()
        raise MisplacedError(f"the pool of records differs at {where} from what was appended")


def rotated_records(
    case: Case, problem: Problem, memory: Host | OnGpu
) -> Iterator[tuple[float, str]]:
    """The rotation inside of an append of records: what `rotary` makes of their last numbers."""
    assert problem.records is not None
    x, _ = new_rows(problem)
    rows = x.shape[2]
    case = replace(case, kv_lengths=(rows,) * case.batch)
    rng = np.random.default_rng(rows)
    positions = rng.integers(0, 1000, (case.batch, rows)).astype(case.offsets)
    cos, sin = fulmen.rotary_tables(1000, records.ROTARY)
    own = -(-rows // case.page_size)
    of_requests = [np.arange(b * own, (b + 1) * own) for b in range(case.batch)]
    slots = slots_of(case, of_requests, np.array(case.kv_lengths))
    last = np.ascontiguousarray(x[..., -records.ROTARY :].astype(np.float32))
    for interleaved in (False, True):
        how: dict[str, Any] = {"cos": cos, "sin": sin, "interleaved": interleaved}
        turned = memory.rotary(last, positions, **how)
        yield judged(replace(case, dtype="float32"), last, positions, turned, **how)
        pool, _ = empty_pools(case, problem, case.batch * own)
        memory.append_kv(pool, None, x, None, slots, positions=positions, **how)
        compare_records(case, pool, records.turned(problem.records, turned), of_requests)


def rotated(case: Case, problem: Problem, memory: Host | OnGpu) -> Iterator[tuple[float, str]]:
    """The rotation of keys by itself, by its definition; and inside of an append, by its bits."""
    if problem.records is not None:
        yield from rotated_records(case, problem, memory)
        return
    x = problem.k
    rows, dim = x.shape[2:]
    rng = np.random.default_rng(rows)
    positions = rng.integers(0, 1000, (case.batch, rows)).astype(case.offsets)
    wide = "float64" if case.dtype == "float64" else "float32"
    for interleaved in (False, True):
        cos, sin = fulmen.rotary_tables(1000, dim // 2 // 2 * 2 if interleaved else dim // 2 * 2,
                                        dtype=wide)  # fmt: skip
        how = {"cos": cos, "sin": sin, "interleaved": interleaved}
        found = memory.rotary(x, positions, **how)
        yield judged(case, x, positions, found, **how)
        k_pool, v_pool = empty_pools(case, problem, case.batch * -(-rows // case.page_size))
        slots = np.arange(case.batch * rows).reshape(case.batch, rows).astype(case.offsets)
        memory.append_kv(k_pool, v_pool, x, problem.v, slots, positions=positions, **how)
        page, row = slots // case.page_size, slots % case.page_size
        if not same_bits(np.array(k_pool[page, :, row].swapaxes(1, 2)), np.array(found)):
            raise MisplacedError("keys that append_kv rotates differ from those of rotary")


def judged(
    case: Case, x: Array, positions: Array, found: Array, cos: Array, sin: Array, interleaved: bool
) -> tuple[float, str]:
    """The largest error of a rotation relative to what one rounding of float32 sums may cost."""
    exact, terms = np.array(x, np.longdouble), np.abs(np.array(x, np.longdouble))
    half = cos.shape[1]
    order = np.arange(2 * half)
    pairs = order.reshape(half, 2).T if interleaved else order.reshape(2, half)
    c, s = (np.asarray(t, np.longdouble)[positions][:, None] for t in (cos, sin))
    x0, x1 = (np.array(x[..., at], np.longdouble) for at in pairs)
    for at, mine, other in ((pairs[0], x0 * c, -x1 * s), (pairs[1], x1 * c, x0 * s)):
        exact[..., at], terms[..., at] = mine + other, np.abs(mine) + np.abs(other)
    sums = "float64" if case.dtype == "float64" else "float32"
    allowed = 2.0 ** (1 - DIGITS[sums]) * terms + 2.0 ** -DIGITS[case.dtype] * np.abs(exact)
    error = np.abs(np.asarray(found, np.longdouble) - exact)
    allowed = allowed + np.finfo(np.float16).smallest_subnormal * (case.dtype == "float16")
    if not same_bits(np.array(found[..., 2 * half :]), np.array(x[..., 2 * half :])):
        raise MisplacedError("what does not rotate was changed")
    ratio = float(np.max(error / np.maximum(allowed, 1e-300), initial=0.0))
    return ratio, f"rotary: {ratio:.3f} of what rounding may cost"
