# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Options one at a time: masks, bias, scale, cap, sinks, dropout, slopes, lse.

Each table below is one option with the values that matter, its edges first. Every case asks for all
gradients; those marked `need_each` ask for each alone as well. Combinations are in grid.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from ..arrays import DTYPES
from ..case import Case

Fields = dict[str, Any]

BROADCASTS = tuple("".join(letters) for letters in product("b1", "h1", "q1", "k1"))
SHORT = ("qk", "1k", "q1", "hqk", "h1k", "k")

SCALES = (0.0, -0.7, 1.0, 3.0, 1e-3)
CAPS = (0.5, 5.0, 50.0, 1e4)
WINDOWS: tuple[Any, ...] = (
    (0, 0), (3, 0), (0, 3), (5, 2), (-1, 2), (4, -1), (-1, -1), (None, 1), (100, 100), 3, 0,
)  # fmt: skip
ROWS = ((20, 20), (9, 30), (30, 9))
DROPOUTS = (1 / 65536, 0.1, 0.25, 0.5, 0.9, 65535 / 65536, 1.0)


# Those of the grid (grid.py), by name, and which of them mean nothing without causal.
MASKS: dict[Any, tuple[Any, ...]] = {
    None: (),
    "bool": (("bool", "b1qk", 0.6),),
    "documents": (("documents", 3),),
    "chunks": (("chunks", 11),),
    "prefix": (("prefix", 5),),
    "prefix and bool": (("prefix", 5), ("bool", "1h1k", 0.7)),
}
NEED_CAUSAL = ("prefix", "prefix and bool")

# What changes scores beside masks and bias: the values of the grid; and all at once (packed.py).
SCORE_OPTIONS: dict[str, tuple[Any, ...]] = {
    "alibi": ("", "h", "bh"),
    "softcap": (0.0, 3.0),
    "scale": (None, -0.4),
    "sinks": ("", "normal"),
}
ALL_SCORE_OPTIONS: Fields = {"alibi": "bh", "sinks": "normal", "softcap": 2.0}


def table(prefix: str, tags: tuple[str, ...], rows: dict[str, Fields], **common: Any) -> list[Case]:
    """One case for each row, the types one after the other unless the row names one."""
    return [
        Case(f"{prefix}_{name}", tags, **{"dtype": DTYPES[n % 4], "dim": 8, **common, **fields})
        for n, (name, fields) in enumerate(rows.items())
    ]


def biases() -> list[Case]:
    """A bias of every broadcast shape, in the type of q and in float32 beside 16 bits."""
    rows: dict[str, Fields] = {}
    for n, letters in enumerate(BROADCASTS + SHORT):
        rows[f"{letters}"] = {"bias": letters, "need_each": True}
        rows[f"{letters}_float32"] = {
            "bias": f"{letters} float32",
            "dtype": ("bfloat16", "float16")[n % 2],
            "causal": n % 3 == 0,
        }
        rows[f"{letters}_hides"] = {"bias": f"{letters} same hides", "kv_lengths": (7, 0)}
    for n, letters in enumerate(("11qk", "bhqk", "1h1k")):
        for kind in ("lowest", "minus_inf_row"):
            rows[f"{letters}_{kind}"] = {
                "bias": f"{letters} float32 {kind}",
                "dtype": DTYPES[1 + n],
            }
        rows[f"{letters}_distance"] = {
            "bias": f"{letters} same distance",
            "q_rows": 40,
            "kv_rows": 40,
        }
    return table("bias", ("bias",), rows, batch=2, heads=3, q_rows=6, kv_rows=11)


def masks() -> list[Case]:
    """A boolean mask of every broadcast shape and of some pictures."""
    rows: dict[str, Fields] = {}
    for n, letters in enumerate(BROADCASTS + SHORT):
        rows[letters] = {"masks": (("bool", letters, 0.5),), "causal": n % 3 == 0}
    pictures = ("lower", "empty_rows", "last_row_empty", "top_left_half", "last_key_hidden")
    for picture in (*pictures, "nothing", "everything", "sink_and_window"):
        for dtype in DTYPES:
            rows[f"{picture}_{dtype}"] = {"masks": (("bool", "11qk", picture),), "dtype": dtype}
    return table("mask", ("mask",), rows, batch=2, heads=3, q_rows=13, kv_rows=17, need_each=True)


def structured() -> list[Case]:
    """Prefix, documents and chunks, alone and together, at three shapes."""
    rows: dict[str, Fields] = {}
    values: dict[str, Fields] = {
        "prefix0": {"masks": (("prefix", 0),), "causal": True},
        "prefix1": {"masks": (("prefix", 1),), "causal": True},
        "prefix7": {"masks": (("prefix", 7),), "causal": True},
        "prefix99": {"masks": (("prefix", 99),), "causal": True},
        "prefix7_top_left": {"masks": (("prefix", 7),), "causal": True, "alignment": "top_left"},
        "prefix7_window": {"masks": (("prefix", 7),), "causal": True, "window": (4, 0)},
        "documents1": {"masks": (("documents", 1),)},
        "documents4": {"masks": (("documents", 4),)},
        "documents4_batch": {"masks": (("documents", 4, "batch"),)},
        "documents4_causal": {"masks": (("documents", 4),), "causal": True},
        "chunks1": {"masks": (("chunks", 1),)},
        "chunks4": {"masks": (("chunks", 4),)},
        "chunks64": {"masks": (("chunks", 64),)},
        "chunks7_causal": {"masks": (("chunks", 7),), "causal": True},
        "chunks7_top_left": {"masks": (("chunks", 7),), "alignment": "top_left"},
        "chunks7_lengths": {
            "masks": (("chunks", 7),), "q_lengths": (5, 9), "kv_lengths": (3, 8),
        },
        "all": {
            "masks": (("prefix", 6), ("documents", 2), ("chunks", 12), ("bool", "b11k", 0.8)),
            "causal": True,
        },
    }  # fmt: skip
    for (q, k), (name, fields) in product(ROWS, values.items()):
        rows[f"{name}_q{q}_k{k}"] = {**fields, "q_rows": q, "kv_rows": k}
    return table("structured", ("mask",), rows, batch=2, heads=2)


def windows() -> list[Case]:
    """Windows with both alignments, causal where they do not look ahead."""
    rows: dict[str, Fields] = {}
    for n, window in enumerate(WINDOWS):
        for alignment, (q, k) in product(("bottom_right", "top_left"), ROWS):
            name = "_".join(str(w).replace("-1", "all") for w in np_pair(window))
            rows[f"{name}_{alignment}_q{q}_k{k}"] = {
                "window": window,
                "alignment": alignment,
                "q_rows": q,
                "kv_rows": k,
                "causal": not isinstance(window, tuple) and n % 2 == 1,
            }
        if not isinstance(window, tuple) or window[1] in (0, -1):
            rows[f"{name}_causal"] = {"window": window, "causal": True, "q_rows": 20, "kv_rows": 27}
    return table("window", ("mask",), rows)


def np_pair(window: Any) -> tuple[Any, ...]:
    """A window as the words of its name."""
    return window if isinstance(window, tuple) else (f"int{window}",)


def alignments() -> list[Case]:
    """Causal, both alignments, around equal lengths and with lengths per batch entry."""
    rows: dict[str, Fields] = {}
    shapes = ((2, 5), (5, 2), (7, 7), (1, 9), (9, 1), (33, 65), (65, 33))
    for alignment, (q, k) in product(("bottom_right", "top_left"), shapes):
        rows[f"{alignment}_q{q}_k{k}"] = {"alignment": alignment, "q_rows": q, "kv_rows": k}
    for alignment in ("bottom_right", "top_left"):
        for dtype in DTYPES:
            rows[f"{alignment}_lengths_{dtype}"] = {
                "alignment": alignment,
                "dtype": dtype,
                "batch": 5,
                "q_rows": 12,
                "kv_rows": 15,
                "q_lengths": (12, 0, 5, 7, 1),
                "kv_lengths": (15, 4, 0, 3, 11),
                "dlse": True,
            }
    return table("causal", ("mask",), rows, causal=True)


def scalars() -> list[Case]:
    """Scale and softcap in each type."""
    rows: dict[str, Fields] = {}
    for scale, dtype in product(SCALES, DTYPES):
        rows[f"scale{scale:g}_{dtype}"] = {"scale": scale, "dtype": dtype, "dlse": True}
    for cap, dtype in product(CAPS, DTYPES):
        rows[f"cap{cap:g}_{dtype}"] = {"softcap": cap, "dtype": dtype, "inputs": "wide"}
        rows[f"cap{cap:g}_huge_{dtype}"] = {"softcap": cap, "dtype": dtype, "inputs": "huge"}
    for dtype in DTYPES:  # nothing that the cap divides by itself may overflow
        rows[f"cap1e-15_of_zeros_{dtype}"] = {"softcap": 1e-15, "dtype": dtype, "inputs": "zeros"}
    return table("scalar", ("numerics",), rows, q_rows=17, kv_rows=20)


def slopes() -> list[Case]:
    """ALiBi with (head,) and (batch, head) slopes, both alignments, true lengths."""
    rows: dict[str, Fields] = {}
    for shape, alignment, causal in product(
        ("h", "bh"), ("bottom_right", "top_left"), (False, True)
    ):
        for n, (q, k) in enumerate(ROWS):
            rows[f"{shape}_{alignment}_{'causal' if causal else 'full'}_q{q}_k{k}"] = {
                "alibi": shape,
                "alignment": alignment,
                "causal": causal,
                "q_rows": q,
                "kv_rows": k,
                "q_lengths": (q, q // 2) if n else (),
                "kv_lengths": (k // 3, k) if n else (),
            }
    return table("alibi", ("bias",), rows, batch=2, heads=3)


def sinks() -> list[Case]:
    """Sinks of every size, with empty rows and with a gradient through lse."""
    rows: dict[str, Fields] = {}
    for kind, dtype in product(("normal", "low", "high", "minus_inf"), DTYPES):
        rows[f"{kind}_{dtype}"] = {"sinks": kind, "dtype": dtype, "need_each": True}
        rows[f"{kind}_lse_{dtype}"] = {
            "sinks": kind,
            "dtype": dtype,
            "dlse": True,
            "causal": True,
            "q_rows": 14,
            "kv_rows": 9,
        }
    return table("sinks", ("sinks",), rows, batch=2, heads=6, kv_heads=2, q_rows=8, kv_rows=13)


def dropouts() -> list[Case]:
    """Dropout from none to all, seeds above 2^32, with everything that counts positions."""
    rows: dict[str, Fields] = {}
    for n, (p, dtype) in enumerate(product(DROPOUTS, DTYPES)):
        rows[f"p{p:.6g}_{dtype}"] = {"dropout_p": p, "dtype": dtype, "rng": (2**40 + n, n)}
    options: dict[str, Fields] = {
        "largest_rng": {"rng": (2**64 - 1, 2**32 - 1)},
        "gqa": {"heads": 6, "kv_heads": 2},
        "causal": {"causal": True},
        "sinks": {"sinks": "normal", "dlse": True},
        "lengths": {"q_lengths": (3, 17, 0), "kv_lengths": (20, 1, 5)},
        "packed": {"q_packed": (4, 0, 13), "kv_packed": (20, 3, 9)},
        "bias": {"bias": "1hqk"},
        "mask": {"masks": (("bool", "11qk", 0.5),)},
    }
    for name, fields in options.items():
        rows[name] = {"dropout_p": 0.3, "rng": (7, 11), "need_each": True, **fields}
    return table("dropout", ("dropout",), rows, batch=3, q_rows=17, kv_rows=20)


def through_lse() -> list[Case]:
    """Gradients through lse, and backward from lse where there are no stats."""
    rows: dict[str, Fields] = {}
    for dtype, causal in product(DTYPES, (False, True)):
        name = f"{'causal' if causal else 'full'}_{dtype}"
        shape = {"dtype": dtype, "causal": causal, "q_rows": 22, "kv_rows": 15}
        rows[f"dlse_{name}"] = {**shape, "dlse": True, "need_each": True}
        rows[f"from_lse_{name}"] = {**shape, "lse_only": True}
        rows[f"from_lse_dlse_{name}"] = {**shape, "lse_only": True, "dlse": True, "bias": "11qk"}
    return table("lse", ("lse",), rows, batch=2, heads=4, kv_heads=2)


def bits() -> list[Case]:
    """The same call twice, in other words, and one batch entry alone: the same bits."""
    rows: dict[str, Fields] = {}
    for dtype in DTYPES:
        again: Fields = {"dtype": dtype, "check": "same", "others": ({},)}
        rows[f"again_{dtype}"] = {**again, "bias": "1h1k", "sinks": "normal", "causal": True}
        rows[f"again_packed_{dtype}"] = {**again, "q_packed": (20, 3), "kv_packed": (9, 40)}
        ordered: Fields = {**again, "others": ({"deterministic": True},) * 2, "need_each": True}
        rows[f"deterministic_{dtype}"] = {**ordered, "kv_rows": 300}  # several blocks of keys
        rows[f"deterministic_bias_{dtype}"] = {**ordered, "bias": "1hqk", "sinks": "normal"}
        alone: Fields = {"dtype": dtype, "check": "alone", "batch": 3, "dlse": True}
        rows[f"alone_{dtype}"] = {**alone, "causal": True}
        rows[f"alone_lengths_{dtype}"] = {
            **alone,
            "q_lengths": (9, 40, 0),
            "kv_lengths": (5, 0, 70),
            "bias": "bhqk",
            "alibi": "bh",
        }
        rows[f"one_key_{dtype}"] = {"dtype": dtype, "exact": True, "kv_rows": 1, "inputs": "wide"}
        rows[f"one_key_each_{dtype}"] = {
            "dtype": dtype,
            "exact": True,
            "window": (0, 0),
            "inputs": "wide",
        }
    # The tiles of each head dimension; and more rows than 1,024, from where sums have an order on
    # Hopper instead of a kernel of their own.
    shapes = ((64, 200, True), (128, 200, False), (256, 200, True), (64, 1100, True),
              (128, 1100, False))  # fmt: skip
    for dim, size, causal in shapes:
        rows[f"deterministic_d{dim}_s{size}"] = {
            "dtype": "bfloat16",
            "check": "same",
            "others": ({},),
            "need_each": True,
            "dim": dim,
            "causal": causal,
            "heads": 2 if size < 1024 else 1,
            "kv_heads": 1,
            "q_rows": size,
            "kv_rows": size + 90,
        }
    return table("bits", ("bits",), rows, heads=4, kv_heads=2, q_rows=40, kv_rows=70)


def precisions() -> list[Case]:
    """float32 on tensor cores, where a GPU has them; elsewhere in float32."""
    rows: dict[str, Fields] = {}
    for precision in ("tf32", "3xtf32"):
        asked: Fields = {"precision": precision}
        for dim in (8, 32, 40, 64, 72, 96, 128, 160, 256):
            rows[f"{precision}_d{dim}"] = {**asked, "dim": dim, "causal": dim % 3 != 0}
        rows[f"{precision}_other_dim_v"] = {**asked, "dim": 24, "dim_v": 100}
        rows[f"{precision}_wide"] = {**asked, "inputs": "wide"}
        rows[f"{precision}_window"] = {**asked, "window": (9, 3)}
        rows[f"{precision}_bias"] = {**asked, "bias": "bhqk", "sinks": "normal"}
        rows[f"{precision}_bias_of_whole_units"] = {**asked, "bias": "bhqk", "kv_rows": 100}
        rows[f"{precision}_mask"] = {**asked, "masks": (("bool", "qk", 0.5),)}
        rows[f"{precision}_cap"] = {**asked, "softcap": 5.0, "alibi": "h"}
        rows[f"{precision}_dropout"] = {**asked, "dropout_p": 0.25, "rng": (5, 1)}
        rows[f"{precision}_lengths"] = {**asked, "kv_lengths": (0, 90), "q_lengths": (60, 7)}
        rows[f"{precision}_packed"] = {**asked, "q_packed": (20, 70), "kv_packed": (90, 33)}
    return table("precision", ("precision",), rows, dtype="float32", batch=2, heads=2, kv_heads=1,
                 q_rows=75, kv_rows=101)  # fmt: skip


def eight_bits() -> list[Case]:
    """16-bit q, k and v that may be rounded to e4m3, where Hopper has tensor cores of 8 bits."""
    rows: dict[str, Fields] = {
        f"d{dim}_{dim_v}": {"dim": dim, "dim_v": dim_v, "causal": n % 2 == 0,
                            "dtype": ("bfloat16", "float16")[n % 3 == 1]}
        for n, (dim, dim_v) in enumerate(
            ((64, 64), (128, 128), (96, 96), (80, 112), (192, 128), (256, 256), (16, 48))
        )
    }  # fmt: skip
    rows |= {
        "window": {"window": (30, 5)},
        "outlier": {"inputs": "outlier", "dim": 128},
        "wide": {"inputs": "wide"},  # not for e4m3: computed in 16 bits
        "odd_dims": {"dim": 40, "dim_v": 24},
        "sinks": {"sinks": "normal", "causal": True},
        "cap": {"softcap": 5.0},
        "bias": {"bias": "bhqk"},
        "dropout": {"dropout_p": 0.25, "rng": (5, 1)},
        "lengths": {"kv_lengths": (0, 90), "q_lengths": (60, 7), "causal": True},
        "hidden_nan": {"kv_lengths": (100, 33), "poison": "nan_hidden"},
        "nan_k": {"poison": "nan_k", "causal": True},
        "nan_v": {"poison": "nan_v", "causal": True},
        "packed": {"q_packed": (20, 0, 70), "kv_packed": (90, 5, 33), "causal": True},
        "float32_out": {"out_dtype": "float32"},
        "trained": {"gradients": ("q", "k", "v"), "causal": True},  # in 16 bits
        "trained_256": {"gradients": ("q", "k", "v"), "dim": 256, "inputs": "outlier"},
    }
    return table("fp8", ("precision",), rows, dtype="bfloat16", batch=2, heads=4, kv_heads=2,
                 dim=64, q_rows=75, kv_rows=101, precision="fp8", gradients=())  # fmt: skip


CASES = (
    biases() + masks() + structured() + windows() + alignments() + scalars() + slopes() + sinks()
    + dropouts() + through_lse() + bits() + precisions() + eight_bits()
)  # fmt: skip
