# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""A fuzzer of caches: what a server does to pages, against contiguous keys in float64.

    python tests/python/fuzz_caches.py --steps 10000              # from a new seed, which it prints
    python tests/python/fuzz_caches.py --arrays torch --seed 7    # on a GPU

Requests are appended to, forked (they share their pages until one of them writes), cut, freed and
begun with the full pages of another; in between, some of them are attended to, with one query each,
with drafts of a tree, or with chunks of queries of many lengths. Each request has its keys and
values a second time, one after the other: the oracle sees only those, and the error rule judges.
Pools may be of 8 bits, with scales for all, for a head or for a row: powers of two, so that
quotients are exact. Rows of the pools that belong to no key are NaN (of int8 their scales, where
they have some), entries of tables past a length are garbage. The
end of a line that says FAULT is the command that does the same again.

A GPU compiles kernels for each kind of call: --kinds says how many a world has, --world how long it
lasts; `--arrays torch --kinds 2 --world 300` is quick there.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import fulmen
from fulmen.lab.cases.arrays import dtype_of
from fulmen.lab.cases.error_rule import consult, judge
from fulmen.lab.cases.pages import garbage
from fulmen.lab.cases.placement import Host
from fulmen.lab.cases.quantised import MOST
from fulmen.lab.cases.visible import Options, Problem

MOST_REQUESTS = 8
MOST_KEYS = 90
ALIGNMENTS = ("bottom_right", "top_left")
MANY = 2**60  # kinds of calls: no two alike


def unused(dtype: Any) -> Any:
    """What stands where no key is: NaN, or of integers a number that no key has."""
    return -128 if np.dtype(dtype) == np.int8 else np.nan


@dataclass
class Request:
    """One request: its pages, and its keys and values in order."""

    pages: list[int]
    k: Any  # (key, kv_head, dim)
    v: Any

    @property
    def length(self) -> int:
        return len(self.k)


@dataclass
class World:
    """Pools of pages and the requests that have them."""

    rng: random.Random
    numbers: np.random.Generator
    memory: Any  # of placement: where the library gets the arrays
    where: dict[str, str]
    kinds: int = MANY  # of calls: which options they have
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng
        self.first_kind = rng.getrandbits(60)
        self.dtype = rng.choice(("float64", "float32", "float16", "bfloat16"))
        self.page_size = rng.choice((1, 2, 3, 5, 16, 64))
        self.group, self.kv_heads = rng.choice((1, 2, 4)), rng.choice((1, 2, 3))
        self.dim, self.dim_v = rng.choice(((8, 8), (16, 4), (3, 7), (32, 32)))
        self.is_rows_first = rng.random() < 0.5
        self.kv_dtype = self.dtype
        if self.dtype != "float64" and rng.random() < 0.4:
            self.kv_dtype = rng.choice(tuple(MOST))
        pages = MOST_REQUESTS * (MOST_KEYS // self.page_size + 1) + 2
        shape = (pages, self.kv_heads, self.page_size)
        self.pools = [self.empty((*shape, dim), self.kv_dtype) for dim in (self.dim, self.dim_v)]
        self.scales = self.drawn_scales(shape) if self.is_quantised else []
        self.users = [0] * pages

    def kind(self) -> random.Random:
        """What draws the options of a call, though not their values."""
        return random.Random(self.first_kind + self.rng.randrange(self.kinds))

    @property
    def is_quantised(self) -> bool:
        return self.kv_dtype != self.dtype

    @property
    def of_rows(self) -> list[Any]:
        """What has a row for each row of a page: pools, and scales where rows have their own."""
        return self.pools + [x for x in self.scales if np.ndim(x) == 4]

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A pool full of NaN, (page, kv_head, row, dim), with one of two orders in memory."""
        pages, heads, rows, dim = shape
        in_memory = (pages, rows, heads, dim) if self.is_rows_first else shape
        pool = np.full(in_memory, unused(dtype_of(dtype)), dtype_of(dtype))
        return pool.swapaxes(1, 2) if self.is_rows_first else pool

    def powers(self, shape: Any) -> Any:
        """Scales; normal numbers fit beside the least."""
        least = {"int8": -4, "float8_e4m3fn": -6, "float8_e5m2": -9}[self.kv_dtype]
        return np.exp2(self.numbers.integers(least, 1, shape)).astype(np.float32)

    def drawn_scales(self, shape: tuple[int, ...]) -> list[Any]:
        """Of K and of V: a number, one a head, or one a row."""
        kind = self.rng.choice(("tensor", "head", "row"))
        if kind == "row":
            return [self.empty((*shape, 1), "float32") for _ in self.pools]
        drawn = [self.powers((self.kv_heads, 1, 1) if kind == "head" else ()) for _ in self.pools]
        return drawn if kind == "head" else [float(x) for x in drawn]

    @property
    def values(self) -> Any:
        """The dtype in which the keys and values of requests are exact."""
        return np.float64 if self.is_quantised else dtype_of(self.dtype)

    # ---- pages ----

    def take(self) -> int:
        free = [page for page, users in enumerate(self.users) if users == 0]
        page = self.rng.choice(free)
        self.users[page] = 1
        return page

    def release(self, page: int) -> None:
        self.users[page] -= 1
        if self.users[page] == 0:
            for pool in self.of_rows:
                pool[page] = unused(pool.dtype)

    def own_last_page(self, request: Request) -> None:
        """Before a write: a last page that others have too is copied."""
        if request.length % self.page_size == 0 or self.users[request.pages[-1]] == 1:
            return
        page, rows = self.take(), request.length % self.page_size
        for pool in self.of_rows:
            pool[page, :, :rows] = pool[request.pages[-1], :, :rows]
        self.release(request.pages[-1])
        request.pages[-1] = page

    # ---- what a server does ----

    def begin(self) -> str:
        if len(self.requests) < MOST_REQUESTS:
            empty = np.zeros((0, self.kv_heads, self.dim + self.dim_v), self.values)
            self.requests.append(Request([], *np.split(empty, [self.dim], -1)))
        return "begin"

    def append(self) -> str:
        request = self.rng.choice(self.requests)
        count = min(self.rng.choice((1, 1, 2, 7, 20)), MOST_KEYS - request.length)
        self.own_last_page(request)
        drawn = self.numbers.standard_normal((count, self.kv_heads, self.dim + self.dim_v))
        k, v = np.split(drawn.astype(dtype_of(self.dtype)), [self.dim], -1)
        while len(request.pages) * self.page_size < request.length + count:
            request.pages.append(self.take())
        k, v = self.write(request, k, v)
        request.k, request.v = np.concatenate([request.k, k]), np.concatenate([request.v, v])
        return f"append {count}"

    def stored(self, x: Any, scale: Any) -> tuple[Any, Any]:
        """Rows (row, kv_head, dim) as a pool has them, and the values that they stand for."""
        most, dtype = MOST[self.kv_dtype], dtype_of(self.kv_dtype)
        ratio = np.clip(x.astype(np.float32) / scale, -most, most)
        made = (np.rint(ratio) if self.kv_dtype == "int8" else ratio).astype(dtype)
        return made, made.astype(np.float64) * scale

    def write(self, request: Request, k: Any, v: Any) -> tuple[Any, Any]:
        """New rows (row, kv_head, dim) behind the keys of a request, by fulmen.append_kv.

        Returns:
            What they are worth when they are read.
        """
        row = request.length + np.arange(len(k))
        page = np.array(request.pages, np.int64)[row // self.page_size]
        slots: Any = (page * self.page_size + row % self.page_size)[None]
        if self.rng.random() < 0.5:
            slots = (np.array([request.pages], np.int64), np.array([request.length]))
        stored, values = (k, v), (k, v)
        if self.is_quantised:
            at = (page, slice(None), row % self.page_size)
            own = [self.scale_of_rows(x, at) for x in self.scales]
            stored, values = zip(*(self.stored(x, scale) for x, scale in zip((k, v), own)))
        new = [x.swapaxes(0, 1)[None] for x in (k, v)]
        memory = self.memory()
        scales = dict(zip(("k_scale", "v_scale"), self.scales))
        if memory.name == "jax":  # whose arrays cannot be written to
            for pool, x in zip(self.pools, stored):
                pool[page, :, row % self.page_size] = x
        elif memory.name == "numpy":
            fulmen.append_kv(*self.pools, *new, slots, **scales)
        else:
            arrays = [memory.put(x) for x in (*self.pools, *new)]
            is_table = isinstance(slots, tuple)
            slots = tuple(map(memory.put, slots)) if is_table else memory.put(slots)
            scales = {
                name: memory.put(x) if isinstance(x, np.ndarray) else x
                for name, x in scales.items()
            }
            fulmen.append_kv(*arrays, slots, **scales)
            for pool, written in zip(self.pools, arrays):
                pool[...] = memory.owner.get(written)
        return values

    def scale_of_rows(self, scale: Any, at: Any) -> Any:
        """The scales of new rows as they go with (row, kv_head, dim); rows of their own are new."""
        if np.ndim(scale) == 4:
            scale[at] = self.powers((len(at[0]), self.kv_heads, 1))
            return scale[at]
        return np.reshape(scale, (-1, 1)) if np.ndim(scale) else scale

    def fork(self) -> str:
        return self._begun_like(None)

    def share(self) -> str:
        """A request that begins with the full pages of another."""
        return self._begun_like(self.page_size)

    def _begun_like(self, multiple: int | None) -> str:
        if len(self.requests) == MOST_REQUESTS:
            return "no room"
        other = self.rng.choice(self.requests)
        length = other.length if multiple is None else other.length // multiple * multiple
        pages = other.pages[: -(-length // self.page_size)]
        for page in pages:
            self.users[page] += 1
        self.requests.append(Request(list(pages), other.k[:length], other.v[:length]))
        return "fork" if multiple is None else "share"

    def cut(self) -> str:
        """Drafts that were not accepted: the last keys go, what they wrote stays behind."""
        request = self.rng.choice(self.requests)
        length = max(request.length - self.rng.choice((1, 3, 30)), 0)
        keep = -(-length // self.page_size)
        for page in request.pages[keep:]:
            self.release(page)
        request.pages = request.pages[:keep]
        request.k, request.v = request.k[:length], request.v[:length]
        return "cut"

    def free(self) -> str:
        request = self.requests.pop(self.rng.randrange(len(self.requests)))
        for page in request.pages:
            self.release(page)
        if not self.requests:
            self.begin()
        return "free"

    # ---- attention ----

    def decode(self) -> str:
        return self.attend([1] * self.rng.choice((1, 2, 3, 5, 9, 12)), packed=False)

    def draft(self) -> str:
        count = self.rng.randint(1, 9)
        return self.attend([count] * self.rng.randint(1, 3), packed=False, is_tree=True)

    def chunk(self) -> str:
        counts = [self.rng.choice((0, 1, 1, 4, 17, 33)) for _ in range(self.rng.randint(1, 5))]
        return self.attend(counts, packed=True, is_tree=self.rng.random() < 0.2)

    def attend(self, counts: list[int], packed: bool, is_tree: bool = False) -> str:
        """A call over some requests with so many queries each; what the error rule says of it."""
        rng = self.rng
        kind = self.kind()
        chosen = [rng.choice(self.requests) for _ in counts]
        heads, dtype = self.group * self.kv_heads, dtype_of(self.dtype)
        rows = (sum(counts),) if packed else (len(counts), counts[0])
        q = self.numbers.standard_normal((*rows[:-1], heads, rows[-1], self.dim)).astype(dtype)
        lengths = np.array([x.length for x in chosen], np.int32)
        options = self.drawn_options(kind, rows, lengths, is_tree)
        if packed:
            options["cu_q"] = np.cumsum([0, *counts]).astype(np.int32)
        problem = Problem(q, *self.dense(chosen), Options(kv_lengths=lengths, **options))
        masks = options.pop("masks", ())
        given = {"kv_lengths": lengths, **options, **self.table(chosen, kind), **self.where}
        given.update(zip(("k_scale", "v_scale"), self.scales))
        given["layout"] = "hsd" if packed else "bhsd"
        if packed and is_tree:  # at most 64 queries a request
            given["max_q"] = max(counts)
        if masks:
            given["mask"] = masks
        if kind.random() < 0.4:
            given["kv_shared"] = np.array([self.shared(chosen)], np.int32)
        found = self.memory().attention_forward(q, *self.pools, **given)
        oracle = consult(problem, self.dtype)
        for name in ("o", "lse"):
            verdict = judge(name, np.asarray(getattr(found, name)), oracle)
            if not verdict.passed:
                return f"FAULT {name}: {verdict.message} with {sorted(given)}"
        return "attend"

    def drawn_options(self, kind: random.Random, rows: Any, lengths: Any, is_tree: bool) -> Any:
        found: dict[str, Any] = {"causal": kind.random() < 0.6}
        if kind.random() < 0.3:
            right = 0 if found["causal"] else self.rng.randint(0, 9)
            found["window"] = (self.rng.randint(0, 40), right)
        if kind.random() < 0.2:
            found["softcap"] = 3.0
        if kind.random() < 0.2:
            found["alignment"] = kind.choice(ALIGNMENTS)
        wide = np.float64 if self.dtype == "float64" else np.float32
        if kind.random() < 0.2:
            found["sinks"] = self.numbers.standard_normal(self.group * self.kv_heads).astype(wide)
        if kind.random() < 0.2:
            found["alibi_slopes"] = self.numbers.random(self.group * self.kv_heads).astype(wide)
        if kind.random() < 0.2:
            found["kv_start"] = (lengths * self.numbers.random(len(lengths))).astype(np.int32)
        if kind.random() < 0.2:
            found["positions"] = self.numbers.integers(0, MOST_KEYS, rows).astype(np.int64)
        if is_tree:
            words = self.numbers.integers(-(2**63), 2**63 - 1, rows, dtype=np.int64)
            found["masks"] = (fulmen.masks.tree(words),)
        return found

    def dense(self, chosen: list[Request]) -> tuple[Any, Any]:
        """Keys and values (request, kv_head, key, dim), zeros behind."""
        longest = max(x.length for x in chosen)
        k, v = (np.zeros((len(chosen), self.kv_heads, longest, dim), self.values)
                for dim in (self.dim, self.dim_v))  # fmt: skip
        for b, request in enumerate(chosen):
            k[b, :, : request.length] = request.k.swapaxes(0, 1)
            v[b, :, : request.length] = request.v.swapaxes(0, 1)
        return k, v

    def shared(self, chosen: list[Request]) -> int:
        """How many first keys these requests may say that they share: some of what they do."""
        lists = [x.pages for x in chosen if x.length]
        common = 0
        while len({x[common] for x in lists if len(x) > common}) == 1:
            common += 1
        most = common * self.page_size
        return most if self.rng.random() < 0.7 else self.rng.randint(0, most)

    def table(self, chosen: list[Request], kind: random.Random) -> dict[str, Any]:
        dtype = kind.choice(("int32", "int64"))
        rows = [np.array(x.pages, dtype) for x in chosen]
        if kind.random() < 0.3:
            ends = [garbage(self.numbers, self.rng.randint(0, 2), dtype) for _ in rows]
            rows = [np.append(*parts) for parts in zip(rows, ends)]
            offsets = np.cumsum([0, *map(len, rows)]).astype(dtype)
            return {"page_table": np.concatenate(rows).astype(dtype), "page_indptr": offsets,
                    "max_kv": MOST_KEYS}  # fmt: skip
        width = max(map(len, rows)) + self.rng.randint(0, 3)
        table = garbage(self.numbers, (len(rows), max(width, 1)), dtype)
        for entries, pages in zip(table, rows):
            entries[: len(pages)] = pages
        return {"page_table": table}

    def step(self) -> str:
        """Something that a server does; FAULT and what it was, where a result is wrong."""
        ways = {
            self.begin: 2, self.append: 8, self.fork: 2, self.share: 2, self.cut: 2, self.free: 1,
            self.decode: 6, self.draft: 3, self.chunk: 5,
        }  # fmt: skip
        return self.rng.choices(list(ways), list(ways.values()))[0]()


def world(seed: int, arrays: str, implementation: str, kinds: int = MANY) -> World:
    """A new one: of the same seed, the same."""

    def memory() -> Any:
        if arrays == "numpy":
            return Host()
        from fulmen.lab.cases.gpu_arrays import placed

        return placed(arrays)

    where = {"implementation": implementation}
    made = World(random.Random(seed), np.random.default_rng(seed), memory, where, kinds)
    made.begin()
    return made


STEPS_OF_A_WORLD = 60


def steps_of(
    seed: int, steps: int, arrays: str, implementation: str,
    kinds: int = MANY, steps_of_a_world: int = STEPS_OF_A_WORLD,
) -> Iterator[str]:  # fmt: skip
    """So many steps, in worlds one after the other; of each what was wrong, mostly nothing."""
    for number in range(steps):
        own, within = seed + number // steps_of_a_world, number % steps_of_a_world
        if within == 0:
            made = world(own, arrays, implementation, kinds)
        said = made.step()
        again = f"--seed {own} --steps {within + 1} --world {steps_of_a_world} --arrays {arrays}"
        again += f" --implementation {implementation}" + f" --kinds {kinds}" * (kinds != MANY)
        yield f"{said}: {again}" if said.startswith("FAULT") else ""


def faults(seed: int, steps: int, arrays: str, implementation: str) -> list[str]:
    """What was wrong in so many steps."""
    return [said for said in steps_of(seed, steps, arrays, implementation) if said]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--arrays", default="numpy", help="numpy, torch, cupy, jax, emulated")
    parser.add_argument("--implementation", default="auto")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after that")
    parser.add_argument("--kinds", type=int, default=MANY, help="of calls in a world")
    parser.add_argument("--world", type=int, default=STEPS_OF_A_WORLD, help="steps of a world")
    asked = parser.parse_args()

    def say(text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    say(f"seed {asked.seed}")
    end = time.monotonic() + asked.seconds
    made = found = 0
    for fault in steps_of(
        asked.seed, asked.steps, asked.arrays, asked.implementation, asked.kinds, asked.world
    ):
        made += 1
        if fault:
            found += 1
            say(fault)
        if made % 500 == 0:
            say(f"{made} steps")
        if time.monotonic() > end:
            break
    say(f"{made} steps, {found} faults")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
