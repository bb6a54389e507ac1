# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What the kernels of a call do, counted by the emulator, beside the IO model of the papers.

Called by explain.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

import fulmen
from fulmen.array_types import named_dtype
from fulmen.options import implementations

from . import io_model
from .output import BadInputError, Output, bytes_text

MOST_FLOPS = 1e10  # the emulator takes about a second for 1e8
COUNTED = (
    *("products", "product_flops", "multiply_adds", "exponentials", "conversions"),
    *("barrier_waits", "shuffles"),
    *("cluster_loaded_bytes", "cluster_stored_bytes"),
)


def start() -> None:
    """Puts the emulator where the library looks for a GPU.

    Raises:
        BadInputError: there is none.
    """
    from fulmen.lab.cases import emulator

    try:
        emulator.start()
    except emulator.NoEmulatorError as error:
        raise BadInputError(str(error)) from error


def counted(
    shapes: list[tuple[int, ...]], dtype: str, options: dict[str, Any], e: fulmen.Explanation
) -> dict[str, Any]:
    """Runs a call in the emulator.

    Args:
        shapes: of q, k and v.
        dtype: by name.
        options: of fulmen.attention.
        e: the explanation of the same call.

    Returns:
        "counted", the counters, and "model_bytes" by the naive and the tiled way.

    Raises:
        BadInputError: a call of the CPU, or one that takes the emulator too long.
    """
    if e["backend"] != "cuda":
        *others, last = implementations("cuda")
        raise BadInputError(
            f"--count is of GPU kernels: add --implementation {', '.join(others)} or {last}"
        )
    if e["flops"] > MOST_FLOPS:
        raise BadInputError(
            f"the call has {e['flops']:.3g} flops and at most {MOST_FLOPS:.0e} are counted; fewer "
            "rows show the same"
        )
    return {
        "counted": _run(shapes, dtype, options, e["operation"]),
        "model_bytes": _model(shapes, dtype, options, e),
    }


def _run(shapes: Any, dtype: str, options: dict[str, Any], operation: str) -> dict[str, Any]:
    from fulmen.lab.cases import emulator

    rng = np.random.default_rng(0)

    def drawn(shape: tuple[int, ...], name: str) -> Any:
        return emulator.copied(rng.standard_normal(shape).astype(named_dtype(dtype)), name)

    q, k, v = (drawn(shape, name) for shape, name in zip(shapes, ("q", "k", "v")))
    found, counters = emulator.counted(lambda: fulmen.attention_forward(q, k, v, **options))
    if operation == "forward":
        return counters
    do = drawn(found.o.shape, "do")
    return emulator.counted(
        lambda: fulmen.attention_backward(do, q, k, v, found.o, found.stats, **options)
    )[1]


def _model(
    shapes: Any, dtype: str, options: dict[str, Any], e: fulmen.Explanation
) -> dict[str, int]:
    order = (0, 2, 1, 3) if options["layout"] == "bshd" else (0, 1, 2, 3)
    q, k, v = (tuple(shape[axis] for axis in order) for shape in shapes)
    call = io_model.Call(
        q_rows=q[2], kv_rows=k[2], heads=prod(q[:2]), kv_heads=prod(k[:2]), dim=q[3], dim_v=v[3],
        size=np.dtype(named_dtype(dtype)).itemsize, pairs=e["pairs"],
        causal=bool(options.get("causal")),
    )  # fmt: skip
    found = {"naive": io_model.naive(call, e["operation"])}
    if tile := e["tile"]:
        found["tiled"] = io_model.tiled(call, e["operation"], tile["rows"], tile["columns"])
    return found


def report(found: dict[str, Any], output: Output) -> None:
    """The counters as tables."""
    counters = found["counted"]
    arrays = sorted(counters["arrays"].items())
    moved = [(name, x["loaded_bytes"], x["stored_bytes"]) for name, x in arrays]
    rows = [(name, bytes_text(loaded), bytes_text(stored)) for name, loaded, stored in moved]
    output.line()
    output.table(("global memory", "loaded", "stored"), rows)
    every = sum(loaded + stored for _, loaded, stored in moved)
    for name, size in [("counted", every), *found["model_bytes"].items()]:
        output.line(f"  {name:<15}{bytes_text(size)}")
    output.line()
    output.table(
        ("shared memory", "accesses", "wavefronts", "conflicts"),
        [(x["site"], *(str(x[what]) for what in ("accesses", "wavefronts", "conflicts")))
         for x in counters["shared"]],
    )  # fmt: skip
    for name in COUNTED:
        output.line(f"  {name.replace('_', ' '):<22}{counters[name]:.6g}")
