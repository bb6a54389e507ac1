# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Caches: keys and values in pages, decode, drafts, chunks of a prompt, and all of them mixed.

Every row of a pool that no query sees holds NaN, every entry of a table past a length is garbage,
and pages lie in a random order: pages.py. Forward only, as caches are. Names from b on are those of
reports about caches of other libraries that docs do not number.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from ..arrays import DTYPES
from ..case import Case
from .options import MASKS, NEED_CAUSAL, Fields, table

PAGE_SIZES = (1, 3, 16, 64)
POOLS = ("heads_first", "rows_first", "interleaved", "side_by_side", "layers", "far")
TREES = ("chain", "star", "branches", "holes", "nothing")
LONGEST = 130  # of the residues
Q_LENS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64)
DIMS = ((8, 8), (16, 5), (3, 24), (40, 40), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
GROUPS = ((1, 1), (4, 1), (8, 1), (8, 2), (6, 2), (7, 1), (12, 4))


def caches(name: str, rows: dict[str, Fields], **common: Any) -> list[Case]:
    """A table of cases without gradients."""
    fields: Fields = {"gradients": (), "page_size": 16, "heads": 4, "kv_heads": 2, **common}
    return table(f"caches_{name}", ("caches",), rows, **fields)


def residues() -> list[Case]:
    """Every length up to two tiles, two of them beside an empty request."""
    rows: dict[str, Fields] = {}
    for n in range(0, LONGEST + 1, 2):
        rows[f"k{n}"] = {
            "kv_lengths": (n, 0, n + 1),
            "kv_rows": n + 1,
            "q_rows": 1 + n % 3,
            "page_size": PAGE_SIZES[n // 2 % 4],
            "causal": n % 4 == 2,
            "csr": n % 5 == 0,
            "offsets": ("int32", "int64")[n % 7 % 2],
            "dtype": DTYPES[n // 8 % 4],
        }
    return caches("residue", rows, batch=3)


def memory() -> list[Case]:
    """Pools of every layout with pages of every size, both kinds of table, shared pages."""
    rows: dict[str, Fields] = {}
    for n, (pool, size) in enumerate(product(POOLS, PAGE_SIZES)):
        rows[f"{pool}_page{size}"] = {
            "pool": pool,
            "page_size": size,
            "csr": n % 3 == 0,
            "shared": 33 if n % 2 else 0,
            "kv_lengths": (70, 35, 0, 41),
            "offsets": ("int32", "int64")[n % 2],
            "check": "rule" if pool == "far" else "moved",
        }
    for n, size in enumerate((70, 71, 128)):  # a page is the cache of a request
        rows[f"batch_index_page{size}"] = {
            "page_size": size,
            "kv_lengths": (70, 1, 0, 69),
            "pool": ("heads_first", "rows_first")[n % 2],
            "check": "moved",
        }
    for n, dtype in enumerate(DTYPES):
        rows[f"all_shared_{dtype}"] = {
            "dtype": dtype, "shared": 64, "kv_lengths": (64, 64, 64, 64), "check": "alone",
        }  # fmt: skip
        rows[f"out_{dtype}"] = {
            "dtype": dtype, "out": ("guarded", "rows_first")[n % 2], "kv_lengths": (9, 0, 70, 16),
        }  # fmt: skip
    for dtype in ("float16", "bfloat16"):
        rows[f"float32_out_{dtype}"] = {"dtype": dtype, "out_dtype": "float32"}
    return caches("memory", rows, batch=4, q_rows=2, kv_rows=70, causal=True)


def shapes() -> list[Case]:
    """Groups, dims, and 1 to 64 queries."""
    rows: dict[str, Fields] = {}
    for n, (heads, kv_heads) in enumerate(GROUPS):
        for dtype in (DTYPES[n % 4], DTYPES[(n + 1) % 4]):
            rows[f"heads{heads}_{kv_heads}_{dtype}"] = {
                "heads": heads, "kv_heads": kv_heads, "dtype": dtype,
                "page_size": PAGE_SIZES[n % 4],
            }  # fmt: skip
    for n, (dim, dim_v) in enumerate(DIMS):
        for dtype in (DTYPES[1 + n % 3], DTYPES[1 + (n + 1) % 3]):
            rows[f"dim{dim}_{dim_v}_{dtype}"] = {
                "dim": dim, "dim_v": dim_v, "dtype": dtype, "page_size": PAGE_SIZES[n % 4],
                "heads": 2, "kv_heads": 1,
            }  # fmt: skip
    for n, q_len in enumerate(Q_LENS):
        for causal in (False, True):
            rows[f"q{q_len}_{'causal' if causal else 'full'}"] = {
                "q_rows": q_len, "causal": causal, "kv_lengths": (75, q_len, max(q_len - 1, 0)),
                "page_size": PAGE_SIZES[n % 4], "dtype": DTYPES[1 + n % 3],
            }  # fmt: skip
    common: Fields = {"batch": 3, "q_rows": 3, "kv_rows": 75, "kv_lengths": (75, 0, 33)}
    return caches("shape", rows, **common, causal=True)


OPTIONS: dict[str, Fields] = {
    "window": {"window": (20, 0), "causal": True},
    "window_both": {"window": (9, 3)},
    "window_of_one": {"window": (0, 0)},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": "normal"},
    "high_sinks": {"sinks": "high"},
    "alibi": {"alibi": "h", "causal": True},
    "alibi_batch": {"alibi": "bh"},
    "scale": {"scale": -0.7},
    "top_left": {"alignment": "top_left", "causal": True},
    "mask_of_heads": {"masks": (("bool", "1h1k", 0.6),), "causal": True},
    "bias": {"bias": "bhqk"},
    "bias_hides": {"bias": "11qk same hides", "causal": True},
    "q_lengths": {"q_lengths": (5, 0, 3), "causal": True},
    "start": {"kv_start": (7, 0, 20)},
    "start_causal": {"kv_start": (1, 0, 33), "causal": True},
    "start_window": {"kv_start": (30, 0, 16), "window": (9, 0), "causal": True},
    "start_alibi": {"kv_start": (16, 0, 3), "alibi": "h", "causal": True},
    "start_top_left": {"kv_start": (5, 0, 3), "alignment": "top_left", "causal": True},
    "positions": {"positions": "any", "causal": True},
    "positions_default": {"positions": "default", "causal": True},
    "positions_window": {"positions": "before", "window": (9, 2)},
    "positions_alibi": {"positions": "any", "alibi": "h"},
    "positions_start": {"positions": "any", "kv_start": (7, 0, 20), "causal": True},
    "opposed": {"inputs": "opposed_2e5"},
    "outlier": {"inputs": "outlier", "causal": True},
    "nan_q": {"poison": "nan_q"},
    "nan_k": {"poison": "nan_k"},
    "nan_v": {"poison": "nan_v", "causal": True},
    "all": {
        "window": (25, 0), "causal": True, "softcap": 3.0, "sinks": "normal", "alibi": "bh",
        "kv_start": (3, 0, 1), "q_lengths": (5, 2, 4),
    },
}  # fmt: skip


def masks() -> dict[str, Fields]:
    """Each mask alone, behind padding, and with positions."""
    found: dict[str, Fields] = {}
    for name, mask in MASKS.items():
        common: Fields = {"masks": mask, "causal": name in NEED_CAUSAL}
        found[f"{name}"] = common
        found[f"start_{name}"] = {**common, "kv_start": (5, 0, 3)}
        found[f"positions_{name}"] = {**common, "positions": "any"}
    return found


def options() -> list[Case]:
    """Options one at a time and together."""
    rows: dict[str, Fields] = {}
    for n, (name, fields) in enumerate((OPTIONS | masks()).items()):
        for m in range(2):
            dtype = DTYPES[1 + (n + m) % 3]
            rows[f"{name}_{dtype}"] = {
                **fields, "dtype": dtype, "page_size": PAGE_SIZES[(n + 2 * m) % 4],
                "pool": ("heads_first", "rows_first")[(n + m) % 2],
            }  # fmt: skip
    common: Fields = {"batch": 3, "q_rows": 5, "kv_rows": 70, "kv_lengths": (70, 0, 34)}
    return caches("option", rows, **common)


def trees() -> list[Case]:
    """Drafts of every kind, with and without positions and other masks."""
    rows: dict[str, Fields] = {}
    for n, kind in enumerate(TREES):
        tree: Fields = {"masks": (("tree", kind),)}
        for m, q_len in enumerate((1, 2, 7, 33, 64)):
            rows[f"{kind}_q{q_len}"] = {
                **tree, "q_rows": q_len, "kv_lengths": (q_len, 80, q_len + 5),
                "page_size": PAGE_SIZES[(n + m) % 4], "dtype": DTYPES[1 + (n + m) % 3],
            }  # fmt: skip
        rows[f"{kind}_causal"] = {**tree, "causal": True}
        rows[f"{kind}_window"] = {**tree, "window": (6, 2)}
        rows[f"{kind}_positions"] = {**tree, "positions": "before", "causal": True}
        rows[f"{kind}_positions_alibi"] = {**tree, "positions": "any", "alibi": "h"}
        rows[f"{kind}_start"] = {**tree, "kv_start": (3, 60, 0), "window": (20, 20)}
        rows[f"{kind}_lengths"] = {**tree, "q_lengths": (6, 1, 0), "softcap": 2.0}
        rows[f"{kind}_packed"] = {
            **tree, "q_packed": (5, 1, 0), "q_tail": 2, "sinks": "normal",
        }  # fmt: skip
        rows[f"{kind}_more_drafts_than_keys"] = {**tree, "kv_lengths": (2, 0, 6)}
    common: Fields = {"batch": 3, "q_rows": 6, "kv_rows": 80, "kv_lengths": (80, 66, 9)}
    return caches("tree", rows, **common)


MIXED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "decodes": ((1, 1, 1, 1), (5, 70, 1, 31)),
    "one": ((9,), (13,)),
    "chunks_and_decodes": ((1, 40, 1, 17), (33, 64, 65, 17)),
    "zero_queries": ((0, 5, 0, 6, 0), (3, 0, 4, 7, 0)),
    "zero_keys": ((4, 5), (0, 0)),
    "nothing": ((0, 0, 0), (0, 0, 0)),
    "total_below_batch": ((0, 0, 0, 1), (9, 0, 0, 16)),
    "tiles": ((64, 16, 65), (128, 16, 66)),
    "speculative": ((4, 1, 4, 2, 8), (64, 17, 4, 70, 90)),
}


def mixed() -> list[Case]:
    """Batches in which each request has queries of its own number."""
    rows: dict[str, Fields] = {}
    for n, (name, (q, k)) in enumerate(MIXED.items()):
        shape: Fields = {"q_packed": q, "kv_lengths": k, "kv_rows": max(1, *k)}
        for m, dtype in enumerate(DTYPES):
            rows[f"{name}_{dtype}"] = {
                **shape, "dtype": dtype, "page_size": PAGE_SIZES[(n + m) % 4], "causal": True,
                "csr": m == 0, "pool": ("heads_first", "rows_first")[m % 2],
                "offsets": ("int32", "int64")[(n + m) % 2],
            }  # fmt: skip
        rows[f"{name}_tail"] = {
            **shape, "q_tail": 3, "out": "contiguous", "check": "moved", "dtype": "bfloat16",
        }  # fmt: skip
        rows[f"{name}_options"] = {
            **shape, "window": (19, 0), "causal": True, "softcap": 3.0, "sinks": "normal",
            "alibi": "bh", "positions": "before",
        }  # fmt: skip
        rows[f"{name}_bias"] = {**shape, "bias": "hqk", "masks": (("bool", "qk", 0.7),)}
    return caches("mixed", rows)


def promises() -> list[Case]:
    """Bits that must be equal, and values that must matter."""
    rows: dict[str, Fields] = {}
    for dtype, size in product(DTYPES, (1, 16)):
        common: Fields = {"dtype": dtype, "page_size": size}
        rows[f"moved_{dtype}_page{size}"] = {**common, "check": "moved", "shared": 20}
        rows[f"alone_{dtype}_page{size}"] = {**common, "check": "alone"}
        rows[f"alone_tree_{dtype}_page{size}"] = {
            **common, "check": "alone", "masks": (("tree", "branches"),), "positions": "before",
            "kv_start": (0, 3, 9),
        }  # fmt: skip
    rows["default_positions"] = {
        "positions": "default", "causal": True, "check": "same", "others": ({"positions": None},),
    }  # fmt: skip
    rows["a_chain_is_causal"] = {
        "masks": (("tree", "chain"),), "check": "same",
        "others": ({"mask": None, "causal": True}, {"causal": True}),
    }  # fmt: skip
    rows["bound"] = {"check": "same", "others": ({"max_kv": 70}, {"max_kv": 10**6})}
    rows["window_and_start_differ"] = {
        "check": "differs", "others": ({"window": (9, 0)}, {"kv_start": [5, 5, 5]}),
    }  # fmt: skip
    shape: Fields = {"batch": 3, "q_rows": 4, "kv_rows": 70, "kv_lengths": (70, 12, 34)}
    return caches("promise", rows, **shape)


def shared() -> list[Case]:
    """Row tiles so few that clusters of multiprocessors share each on Hopper.

    With 132 of them eight heads of keys of a request, or of eight requests; two where a card with
    four is emulated.
    """
    rows: dict[str, Fields] = {}
    for n, (batch, kv_heads) in enumerate(((1, 8), (8, 8), (1, 2), (2, 1))):
        for m, (q_rows, page_size) in enumerate(product((1, 3), (0, 16))):
            lengths = [(300, 0, 17, 256, 129, 1, 299, 64)[i % 8] for i in range(batch)]
            rows[f"b{batch}_h{kv_heads}_q{q_rows}_page{page_size}"] = {
                "batch": batch, "heads": 4 * kv_heads, "kv_heads": kv_heads, "q_rows": q_rows,
                "page_size": page_size, "dtype": ("float16", "bfloat16")[(n + m) % 2],
                "kv_lengths": tuple(lengths) if m else (), "causal": q_rows > 1, "dim": 64,
            }  # fmt: skip
    return caches("shared", rows, kv_rows=300)


BUGS = [
    Case("u08_nan_in_unused_slots", ("bug", "caches"), "flash-attention#1745", batch=2, heads=1,
         q_rows=1, kv_rows=3, dim=64, kv_lengths=(1, 3), page_size=3, dtype="float16",
         inputs="ones", gradients=()),
    Case("u10_more_queries_than_keys_in_pages", ("bug", "caches"), "flashinfer#4452", q_rows=40,
         kv_rows=9, page_size=16, causal=True, dtype="bfloat16", gradients=()),
    Case("u81_placement_of_pages", ("bug", "caches"), "pytorch#182593", batch=2, heads=4, dim=64,
         q_rows=16, kv_rows=128, kv_lengths=(128, 77), page_size=8, causal=True, check="moved",
         dtype="bfloat16", gradients=()),
    Case("u82_two_equal_requests", ("bug", "caches"), "flashinfer#725", batch=2, heads=32,
         kv_heads=8, dim=64, q_packed=(1, 1), kv_lengths=(2, 2), kv_rows=2, page_size=16, shared=2,
         csr=True, dtype="float16", gradients=()),
    Case("u83_partial_last_page", ("bug", "caches"), "flashinfer#760", heads=32, dim=128, q_rows=1,
         kv_rows=130, page_size=64, csr=True, dtype="float16", gradients=()),
    Case("u101_capacity", ("bug", "caches"), "flash-attention#1417", heads=4, dim=128, q_rows=1,
         kv_rows=409, page_size=2621, check="moved", dtype="float16", gradients=()),
    Case("b02_far_pages", ("caches",), "flashinfer#3130, #3136", batch=2, heads=4,
         kv_heads=2, dim=8, q_rows=1, kv_rows=50, kv_lengths=(50, 20), page_size=4, pool="far",
         dtype="float16", gradients=()),
    Case("b03_mean_of_v", ("caches",), "flashinfer#3716, #3717", heads=4, kv_heads=1, dim=64,
         q_rows=1, kv_rows=16, page_size=16, inputs="zeros", dtype="float16", gradients=()),
    *(Case(f"b05_{q}_new_rows_each", ("caches",), "flashinfer#3871", batch=3, heads=8,
           kv_heads=kv, dim=64, q_rows=q, kv_rows=54, kv_lengths=(54, q, 31), page_size=8,
           causal=True, dtype="float16", gradients=()) for q in (2, 3) for kv in (2,)),
    Case("b06_window_of_each_draft", ("caches",), "flashinfer#4137", heads=4, dim=32,
         q_rows=4, kv_rows=40, page_size=16, window=(7, 0), causal=True, masks=(("tree", "holes"),),
         dtype="bfloat16", gradients=()),
    Case("b08_drafts_window_sinks", ("caches",), "masks of drafts that are not causal",
         batch=2, heads=8, kv_heads=1, dim=32, q_rows=5, kv_rows=60, kv_lengths=(60, 33),
         page_size=16, masks=(("tree", "holes"),), window=(30, 8), sinks="normal",
         dtype="bfloat16", gradients=()),
    Case("b09_packed_pages_of_many", ("caches",), "flash-attention#1217", heads=8, kv_heads=2,
         dim=64, q_packed=(1, 3, 1, 7), kv_lengths=(300, 17, 129, 64), kv_rows=300, page_size=16,
         causal=True, check="moved", dtype="bfloat16", gradients=()),
    Case("b11_rows_of_padding", ("caches",), "vllm#35969, sglang#5875", batch=4, heads=4,
         dim=64, q_rows=1, kv_rows=33, kv_lengths=(33, 0, 0, 0), page_size=16, dtype="bfloat16",
         gradients=()),
    Case("b17_strides_of_two_pools", ("caches",), "vllm#47783", batch=2, heads=4, kv_heads=2,
         dim=64, dim_v=32, q_rows=2, kv_rows=50, page_size=16, pool="interleaved", causal=True,
         dtype="bfloat16", gradients=()),
    Case("b22_holes_below_the_diagonal", ("caches",), "TensorRT-LLM#13081", heads=4, dim=32,
         q_rows=37, kv_rows=90, page_size=16, masks=(("tree", "holes"),), dtype="float16",
         gradients=()),
    Case("b30_pages_of_one", ("caches",), "sglang-jax#1074", batch=3, heads=4, kv_heads=2,
         dim=64, q_rows=1, kv_rows=37, kv_lengths=(37, 1, 20), page_size=1, pool="rows_first",
         dtype="bfloat16", gradients=()),
]  # fmt: skip

CASES = [
    *BUGS, *residues(), *memory(), *shapes(), *options(), *trees(), *mixed(), *promises(),
    *shared(),
]  # fmt: skip
