# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory: the same problem in every arrangement of strides, offsets and gaps.

Views are those of views.VIEWS. Each is tried on q, k and v together, on k and v, on do alone, and
mixed with others; gaps hold NaN, so reading one shows, and inputs are compared with their bytes
before the call.
"""

from __future__ import annotations

from ..arrays import DTYPES
from ..case import Case
from ..views import VIEWS

ORDINARY = tuple(v for v in VIEWS if v != "contiguous" and not v.startswith("far"))
TARGETS = {"qkv": "q k v", "kv": "k v", "q": "q", "do": "do", "all": "q k v do"}
MIXED = (
    (("q", "rows_first"), ("k", "same_heads"), ("v", "gapped"), ("do", "same_scalar")),
    (("q", "offset_1"), ("k", "stepped"), ("v", "dims_first"), ("do", "rows_first")),
    (("q", "same_batch"), ("k v", "rows_first"), ("do", "gapped")),
    (("q", "dims_first"), ("k", "offset_3"), ("v", "same_rows"), ("do", "stepped")),
)


def views() -> list[Case]:
    """Each view on each set of tensors, two types each."""
    return [
        Case(
            f"view_{view}_{target}_{dtype}",
            ("memory",),
            views=((tensors, view),),
            batch=2,
            heads=4,
            kv_heads=4 if target == "qkv" else 2,
            q_rows=9,
            kv_rows=18,
            dim=8,
            dim_v=5,
            causal=target == "do",
            dtype=dtype,
            out="gapped" if target == "all" else "",
        )
        for n, view in enumerate(ORDINARY)
        for m, (target, tensors) in enumerate(TARGETS.items())
        for dtype in (DTYPES[(n + m) % 4], DTYPES[(n + m + 2) % 4])
    ]


def mixed() -> list[Case]:
    """Several views at once, dense and (where they allow it) packed."""
    return [
        Case(
            f"mixed{n}_{dtype}{'_packed' if packed else ''}",
            ("memory",),
            views=placed,
            heads=6,
            kv_heads=2,
            dim=24,
            dtype=dtype,
            **({"q_packed": (5, 0, 8), "kv_packed": (7, 6, 9)} if packed else {"batch": 2}),
        )
        for n, placed in enumerate(MIXED)
        for dtype in DTYPES
        for packed in (False, True)
        if not (packed and any(view == "same_batch" for _, view in placed))
    ]


def outputs() -> list[Case]:
    """The caller's own output, full of NaN, in every arrangement that can be written."""
    writable = ("contiguous", *(v for v in ORDINARY if not v.startswith("same")))
    return [
        Case(
            f"out_{view}_{dtype}",
            ("memory",),
            out=view,
            batch=2,
            q_rows=11,
            kv_rows=6,
            dim=8,
            causal=True,
            gradients=(),
            dtype=dtype,
        )
        for view in writable
        for dtype in ("float32", "bfloat16")
    ]


CASES = views() + mixed() + outputs()
