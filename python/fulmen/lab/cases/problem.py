# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""From a Case to arrays: the problem as the oracle sees it and the call as a user writes it.

Both hold the same numbers. The problem has them head by head, contiguous; the call has them in the
strides, offsets and gaps that the case asks for, and names its options as fulmen.attention does.
The seed is the name of the case.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

import fulmen
from fulmen import masks
from fulmen.masks import Documents, Tree

from . import block_lists, inputs, pages, quantised, records, views
from .arrays import Array, dtype_of, parameter_dtype
from .case import Case
from .expressions import EXPRESSIONS
from .scores import Scalars
from .visible import Options, Problem


@dataclass
class Call:
    """What the public functions are called with; packed tensors are (row, head, dim)."""

    q: Array
    k: Array
    v: Array
    do: Array | None
    dlse: Array | None
    options: dict[str, Any]

    def inputs(self) -> list[Array]:
        """Every array that the call must leave as it was."""
        found = [self.q, self.k, self.v, self.do, self.dlse]
        for value in self.options.values():
            found += list(value) if isinstance(value, tuple) else [value]
        return [x for x in found if isinstance(x, np.ndarray)]


def seed_of(name: str) -> int:
    """The seed of a case."""
    return zlib.crc32(name.encode())


def shape_of(case: Case, letters: str) -> tuple[int, ...]:
    """A shape from letters: "1h1k" is (1, heads, 1, kv_rows); "n" is too narrow for kv_rows."""
    q_rows, kv_rows = case.q_rows, case.kv_rows
    if case.packed:  # a mask or bias of packed sequences counts from the start of each
        q_rows, kv_rows = max(case.q_packed), max(case.kv_packed, default=kv_rows)
    sizes = {"b": case.batch, "h": case.heads, "q": q_rows, "k": kv_rows, "1": 1}
    sizes["n"] = case.kv_rows - 5
    return tuple(sizes[letter] for letter in letters)


def bool_mask(case: Case, rng: np.random.Generator, letters: str, content: Any) -> Array:
    """A boolean mask: a share that is visible, or a picture by name."""
    shape = shape_of(case, letters)
    if isinstance(content, float):
        mask = rng.random(shape) < content
        return mask
    mask = np.ones(shape, bool)
    if content == "lower":  # row i sees keys 0..i
        mask &= np.tri(shape[-2], shape[-1], dtype=bool)
    elif content == "empty_rows":  # a random half, and every third row nothing
        mask = rng.random(shape) < 0.5
        mask[..., ::3, :] = False
    elif content == "last_row_empty":
        mask &= np.tri(shape[-2], shape[-1], dtype=bool)
        mask[..., -1, :] = False
    elif content == "top_left_half":
        mask[..., shape[-2] // 2 :, :] = False
        mask[..., shape[-1] // 2 :] = False
    elif content == "last_key_hidden":
        mask[..., -1] = False
    elif content == "nothing":
        mask[...] = False
    elif content == "padded_band":  # sample b hides its last 2 b keys; band |i - j| <= 1
        i, j = np.arange(shape[-2])[:, None], np.arange(shape[-1])
        for b in range(shape[0]):
            mask[b] = (abs(i - j) <= 1) & (j < shape[-1] - 2 * b)
    elif content == "sink_and_window":  # the first 4 keys and the nearest 24
        i, j = np.arange(shape[-2])[:, None], np.arange(shape[-1])
        mask &= (i - j <= 23) | (j < 4)
    elif content != "everything":
        raise ValueError(f"{case.name}: no mask is called {content}")
    return mask


def documents(case: Case, rng: np.random.Generator, count: int, per_batch: bool) -> Documents:
    """Ids of `count` documents in order; the last of them has no query where there is a second."""
    rows = (case.batch,) if per_batch else ()
    q_ids = np.sort(rng.integers(0, count, (*rows, case.q_rows)), axis=-1).astype(np.int32)
    if case.q_rows == case.kv_rows:
        return Documents(q_ids)
    kv_ids = np.sort(rng.integers(0, count + 1, (*rows, case.kv_rows)), axis=-1).astype(np.int32)
    return Documents(q_ids, kv_ids)


def q_lens(case: Case) -> tuple[int, ...]:
    """How many queries each request has."""
    return case.q_packed or case.q_lengths or (case.q_rows,) * case.batch


def by_request(case: Case, rows: list[Array], rest: int, dtype: str) -> Array:
    """Numbers of each request's queries: packed, or (batch, q_row) with `rest` behind them."""
    if case.packed:
        return np.asarray(np.concatenate([*rows, np.full(case.q_tail, rest)]), dtype)
    found = np.full((case.batch, case.q_rows), rest, dtype)
    for b, row in enumerate(rows):
        found[b, : len(row)] = row
    return found


# What the queries of a tree see of its drafts, themselves always; bits beyond them are garbage.
def _chain(rng: np.random.Generator, n: int) -> Array:
    return np.tri(n, dtype=bool)


def _star(rng: np.random.Generator, n: int) -> Array:
    return np.asarray(np.eye(n, dtype=bool) | (np.arange(n) == 0))


def _branches(rng: np.random.Generator, n: int) -> Array:
    """Each draft has a parent among those before it, and sees what that one sees."""
    found = np.eye(n, dtype=bool)
    for i in range(1, n):
        found[i] |= found[rng.integers(0, i)]
    return found


def _holes(rng: np.random.Generator, n: int) -> Array:
    """Any drafts, those behind it too."""
    return np.asarray(rng.random((n, n)) < 0.5)


def _nothing(rng: np.random.Generator, n: int) -> Array:
    """No draft, not even itself: earlier keys only."""
    return np.zeros((n, n), bool)


TREES = {
    "chain": _chain, "star": _star, "branches": _branches, "holes": _holes, "nothing": _nothing,
}  # fmt: skip


def tree(case: Case, rng: np.random.Generator, kind: str) -> Tree:
    """The words of a tree for each request."""
    rows = []
    for n in q_lens(case):
        bits = np.ones((n, 64), bool)
        bits[:, :n] = TREES[kind](rng, n)
        powers = np.uint64(1) << np.arange(64, dtype=np.uint64)
        rows.append((bits * powers).sum(axis=1, dtype=np.uint64).view(np.int64))
    return Tree(by_request(case, rows, -1, "int64"))


def positions(case: Case, rng: np.random.Generator) -> Array | None:
    """Where queries stand: where they do by default, a little before that, or anywhere."""
    if not case.positions:
        return None
    rows = []
    for b, n in enumerate(q_lens(case)):
        length = case.kv_lengths[b] - (case.kv_start[b] if case.kv_start else 0)
        row = np.arange(n) + length - n
        if case.positions == "before":
            row = row - 3
        elif case.positions == "any":
            row = rng.integers(-2, length + 3, n)
        rows.append(row)
    return by_request(case, rows, 1000, case.offsets)


def masks_of(case: Case, rng: np.random.Generator) -> tuple[Any, ...]:
    """The mask values of a case."""
    made: list[Any] = []
    for kind, *arguments in case.masks:
        if kind == "bool":
            made.append(bool_mask(case, rng, arguments[0], arguments[1]))
        elif kind == "documents":
            made.append(documents(case, rng, arguments[0], "batch" in arguments[1:]))
        elif kind == "tree":
            made.append(tree(case, rng, arguments[0]))
        elif kind == "blocks":
            made.append(masks.blocks(block_lists.draw(rng, case, *arguments), arguments[0]))
        else:
            made.append(getattr(masks, kind)(*arguments))
    return tuple(made)


def both_sides(case: Case) -> tuple[int, int]:
    """The window as (left, right) with -1 for no limit."""
    if case.window is None:
        return -1, -1
    if isinstance(case.window, int):
        return case.window, 0 if case.causal else case.window
    left, right = case.window
    return -1 if left is None else left, -1 if right is None else right


def offsets_of(lengths: tuple[int, ...], dtype: str) -> Array | None:
    """Cumulative offsets of packed sequences."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(dtype) if lengths else None


def captures_of(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    """What the expression of a case reads."""
    made = EXPRESSIONS[case.expression].captures(case, rng) if case.expression else {}
    kind = parameter_dtype(case.dtype)
    return {name: x.astype(kind) if np.asarray(x).dtype == float and np.ndim(x) else x
            for name, x in made.items()}  # fmt: skip


def options_of(case: Case, rng: np.random.Generator) -> Options:
    """The options of a case with their arrays."""
    parameters = parameter_dtype(case.dtype)
    bias, alibi, sinks = None, None, None
    if case.bias:
        letters, dtype, kind, *_ = (*case.bias.split(), "", "")
        dtype, kind = dtype or case.dtype, kind or "normal"
        bias = inputs.bias_values(rng, shape_of(case, letters), kind)
        bias = bias.astype(dtype_of(case.dtype if dtype == "same" else dtype))
    if case.alibi:
        alibi = 2.0 ** (-4 * (np.arange(case.heads) + 1) / max(case.heads, 1))
        if case.alibi == "bh":
            alibi = alibi * (1 + np.arange(case.batch)[:, None])
        alibi = alibi.astype(parameters)
    if case.sinks:
        sinks = inputs.sink_values(rng, case.heads, case.sinks).astype(parameters)
    scalars = [field.name for field in fields(Scalars)]
    return Options(
        **{name: getattr(case, name) for name in scalars},
        window=both_sides(case),
        masks=masks_of(case, rng),
        bias=bias,
        alibi_slopes=alibi,
        sinks=sinks,
        q_lengths=np.array(case.q_lengths, np.int32) if case.q_lengths else None,
        kv_lengths=np.array(case.kv_lengths, np.int32) if case.kv_lengths else None,
        kv_start=np.array(case.kv_start, case.offsets) if case.kv_start else None,
        slotless=rng.random((case.batch, case.kv_rows)) < 0.25 if case.slots else None,
        positions=positions(case, rng),
        q_segments=np.array(case.q_segments, case.offsets) if case.q_segments else None,
        kv_segments=np.array(case.kv_segments, case.offsets) if case.kv_segments else None,
        cu_q=offsets_of(case.q_packed, case.offsets),
        cu_kv=offsets_of(case.kv_packed, case.offsets),
        expression=case.expression,
        captures=captures_of(case, rng),
        dropout_p=case.dropout_p,
        rng=case.rng,
        group=case.heads // max(case.kv_heads, 1),
        heads=case.heads,
    )


def tensors_of(case: Case) -> dict[str, str]:
    """The view of each tensor: later entries of case.views win."""
    found = dict.fromkeys(("q", "k", "v", "do"), "rows_first" if case.packed else "contiguous")
    for names, view in case.views:
        found.update((name, view) for name in names.split())
    return found


def build_problem(case: Case) -> Problem:
    """The problem of a case, poison included."""
    batch = () if case.packed else (case.batch,)
    kv_batch = (case.batch,) if case.page_size else batch
    shapes: dict[str, tuple[int, ...]] = {
        "q": (*batch, case.heads, case.q_rows, case.dim),
        "k": (*kv_batch, case.kv_heads, case.kv_rows, case.dim),
        "v": (*kv_batch, case.kv_heads, case.kv_rows, case.dim_v),
        "do": (*batch, case.heads, case.q_rows, case.dim_v),
    }
    seed = seed_of(case.name)
    rng = np.random.default_rng(seed + 1)
    options = options_of(case, rng)
    drawn = inputs.draw(case.inputs, seed, shapes, options.scale_for(case.dim) or 1.0)
    for name, view in tensors_of(case).items():
        if view.startswith("same_") and drawn[name].size:
            drawn[name] = np.array(views.VIEWS[view](drawn[name]))
    if case.shared:
        for name in ("k", "v"):
            drawn[name][1:, :, : case.shared] = drawn[name][:1, :, : case.shared]
    with np.errstate(over="ignore"):
        t = {name: x.astype(dtype_of(case.dtype)) for name, x in drawn.items()}
    dlse = rng.standard_normal(shapes["q"][:-1]).astype(parameter_dtype(case.dtype))
    problem = Problem(
        t["q"],
        t["k"],
        t["v"],
        options,
        do=t["do"] if case.gradients else None,
        dlse=dlse if case.dlse else None,
    )
    for name in "qkv"[0 if case.eight_bits else 1 :] if case.kv_dtype else ():
        scales = "head" if (case.scales, name != "v") == (quantised.CHANNEL, True) else case.scales
        problem.stored[name] = quantised.stored(drawn[name], name, case.kv_dtype, scales)
        setattr(problem, name, problem.stored[name].values)
    if case.records:
        made = records.appended if case.check == "appended" else records.record
        problem.records, problem.k = made(drawn["k"], case.records)
        problem.v = problem.k[..., : case.dim_v]
    if case.poison:
        inputs.plant(problem, case.poison, seed + 2)
        for name, kept in problem.stored.items():
            quantised.plant_nan(kept, getattr(problem, name))
    return problem


def scales_of(case: Case, problem: Problem) -> dict[str, Array]:
    """q_scale, k_scale, v_scale; of pages whose rows have scales, pages.place has them."""
    found = {}
    for name, kept in problem.stored.items():
        scale = kept.scale
        if scale is None or (case.page_size and kept.has_rows and name != "q"):
            continue
        found[f"{name}_scale"] = scale
    return found


def texts_of(options: Options) -> dict[str, Any]:
    """`score` and the mask of the expression of a case, each with what it reads."""
    if not options.expression:
        return {}
    made = EXPRESSIONS[options.expression]
    found: dict[str, Any] = {}
    for name, text, make in (
        ("score", made.score, fulmen.score),
        ("mask", made.mask, masks.expression),
    ):
        if text:
            words = set(re.findall(r"\w+", text))
            read = {name: x for name, x in options.captures.items() if name in words}
            found[name] = make(text, **read)
    return found


def build_call(case: Case, problem: Problem, placement: int = 0) -> Call:
    """The arguments of the public functions, in the memory that the case asks for.

    Args:
        case: what is asked.
        problem: its arrays.
        placement: of caches: another number, other pages.
    """
    options = problem.options
    scalars = [(field.name, getattr(options, field.name)) for field in fields(Scalars)]
    texts = texts_of(options)
    every_mask = (*options.masks, *([texts["mask"]] if "mask" in texts else []))
    given: dict[str, Any] = {
        **{name: value for name, value in scalars if value != getattr(Scalars, name)},
        "window": case.window,
        "mask": every_mask[0] if len(every_mask) == 1 else (every_mask or None),
        "score": texts.get("score"),
        "bias": options.bias,
        "alibi_slopes": options.alibi_slopes,
        "sinks": options.sinks,
        "q_lengths": options.q_lengths,
        "kv_lengths": options.kv_lengths,
        "kv_start": options.kv_start,
        "positions": options.positions,
        "q_segments": options.q_segments,
        "kv_segments": options.kv_segments,
        "cu_q": options.cu_q,
        "cu_kv": options.cu_kv,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if case.dropout_p:
        given.update(dropout_p=case.dropout_p, rng=case.rng)
    if case.precision:
        given.update(precision=case.precision)
    if case.max_rows and case.packed:
        given.update(max_q=max(case.q_packed) + case.max_rows - 1)
        given.update(max_kv=max(case.kv_packed) + case.max_rows - 1)
    given.update(scales_of(case, problem))
    if case.slots:
        given.update(slots=True)
    placed: dict[str, Array] = {}
    if case.page_size:
        seed = seed_of(case.name) + 3 + placement
        used = inputs.seen_pairs(problem)[0]["k"]
        placed["k"], placed["v"], table = pages.place(case, problem, used, seed)
        given.update(table)
        if case.kv_shared:
            given.update(kv_shared=np.array(case.kv_shared, case.offsets))
        if case.csr or options.bias is not None or options.masks:
            given.update(max_kv=max(case.kv_rows, 1))
    for name, view in tensors_of(case).items():
        kept = problem.stored.get(name)
        x = getattr(problem, name) if kept is None else kept.numbers
        if x is not None and name not in placed:
            placed[name] = views.VIEWS[view](x) if x.size else x
    if case.packed:
        placed = {name: x.swapaxes(-3, -2) for name, x in placed.items()}
        for name in ("q_scale", "k_scale", "v_scale"):
            if name in given and given[name].ndim > 2:
                given[name] = given[name].swapaxes(-3, -2)
    return Call(placed["q"], placed["k"], placed["v"], placed.get("do"), problem.dlse, given)
