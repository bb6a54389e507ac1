# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Numbers: every kind of input in every type, and NaN or infinity in every kind of entry.

Kinds are those of inputs.KINDS, poisons those of inputs.POISONS. Hidden poison must change
nothing; visible poison must show in exactly the rows that see it.
"""

from __future__ import annotations

from typing import Any

from ..arrays import DTYPES
from ..case import Case
from ..inputs import KINDS

OVERFLOWS = {
    "constant_133120": ("float16",),
    "vast": ("float16",),
}  # types that cannot hold the kind
BEYOND = ("beyond", "vast")  # scores above 1e6: gradients are promised finite, not exact

HIDDEN: dict[str, dict[str, Any]] = {
    "lengths": {"batch": 3, "q_lengths": (9, 0, 4), "kv_lengths": (0, 12, 5), "kv_rows": 12},
    "mask": {"masks": (("bool", "11qk", "top_left_half"),)},
    "mask_columns": {"batch": 2, "masks": (("bool", "b11k", 0.5),)},
    "window": {"q_rows": 7, "kv_rows": 40, "window": (3, 2)},
    "top_left": {"q_rows": 9, "kv_rows": 30, "causal": True, "alignment": "top_left"},
    "more_q_than_keys": {"q_rows": 30, "kv_rows": 9, "causal": True},
    "documents": {"q_rows": 20, "kv_rows": 31, "masks": (("documents", 3),)},
    "bias": {"bias": "11qk same hides", "masks": (("bool", "1h1k", 0.7),)},
    "packed": {"q_packed": (5, 0, 8), "kv_packed": (7, 6, 0), "q_tail": 3, "kv_tail": 4},
}


def kinds() -> list[Case]:
    """Every kind of numbers, full and causal with groups."""
    return [
        Case(
            f"{kind}_{dtype}{'_causal' if causal else ''}",
            ("numerics",),
            inputs=kind,
            dtype=dtype,
            heads=4,
            kv_heads=2 if causal else 4,
            q_rows=24,
            kv_rows=35,
            causal=causal,
            finite_gradients=kind in BEYOND,
        )
        for kind in KINDS
        for dtype in DTYPES
        if dtype not in OVERFLOWS.get(kind, ())
        for causal in (False, True)
    ]


def far_apart() -> list[Case]:
    """One query whose keys lie 50 nats apart: gradients of most keys are subnormal or smaller."""
    return [
        Case(
            f"one_row_spread_50_d{dim}_{dtype}",
            ("numerics",),
            inputs="spread_50",
            dtype=dtype,
            dim=dim,
            heads=1,
            q_rows=1,
            kv_rows=228,
        )
        for dim in (64, 128, 256)
        for dtype in DTYPES
    ]


def hidden() -> list[Case]:
    """NaN and infinities where nothing may look."""
    return [
        Case(
            f"{poison}_{where}_{dtype}",
            ("poison",),
            poison=poison,
            dtype=dtype,
            out="guarded",
            **{"q_rows": 10, "dim": 8, "dlse": True, **fields},
        )
        for n, (where, fields) in enumerate(HIDDEN.items())
        for m, poison in enumerate(("nan_hidden", "inf_hidden", "minus_inf_hidden"))
        for dtype in (DTYPES if poison == "nan_hidden" else (DTYPES[(n + m) % 4],))
    ]


def visible() -> list[Case]:
    """NaN where somebody looks: rows that see it, and no other."""
    return [
        Case(
            f"{poison}_{dtype}{'_causal' if causal else ''}",
            ("poison",),
            poison=poison,
            dtype=dtype,
            q_rows=20,
            kv_rows=40,
            dim=8,
            causal=causal,
            bias="11qk" if poison.endswith("bias") else "",
            gradients=() if poison == "inf_v" else ("q", "k", "v"),
        )
        for poison in ("nan_q", "nan_k", "nan_v", "nan_bias", "inf_bias", "inf_v", "nan_all_q")
        for dtype in DTYPES
        for causal in (False, True)
    ]


CASES = kinds() + far_apart() + hidden() + visible()
