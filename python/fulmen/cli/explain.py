# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen explain: the implementation that a shape would get, why, and what it costs."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import fulmen
from fulmen.array_types import named_dtype
from fulmen.layouts import phantom
from fulmen.options import implementations

from . import count
from .arguments import DTYPES, add_options, options_of, positive, shape_of
from .output import BadInputError, Output, bytes_text

DESCRIPTION = """\
Says which implementation a call would use, why, why each other one not, and its arithmetic, on the
first GPU where one is. SHAPE is BATCHxHEADSxROWSxDIM, such as 2x8x1024x64. Nothing runs and no
tensor is made; but with --count the kernels run in the emulator, which counts what they do.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add = parser.add_argument
    add("shape", metavar="SHAPE", help="of q: BATCHxHEADSxROWSxDIM")
    add("--kv-heads", type=int, help="heads of k and v; as q")
    add("--kv-rows", type=int, help="rows of k and v; as q")
    add("--dim-v", type=int, help="dim of v; as q")
    add("--page-size", type=positive, metavar="ROWS", help="k and v lie in pages of so many rows")
    add("--dtype", choices=DTYPES, help="default: on a GPU bfloat16, which its fast kernels take, "
        "on the CPU float32")  # fmt: skip
    add("--layout", choices=("bhsd", "bshd"), default="bhsd", help="order of the axes in memory")
    add("--backward", action="store_true", help="the gradients instead of the forward pass")
    add_options(parser, dropout_p="dropout")
    add("--device", metavar="GPU", help="CUDA's number of a GPU that is here, or the name of one "
        "that need not be: h100, a100, sm_90a")  # fmt: skip
    add("--count", action="store_true", help="run the kernels in the emulator, which "
        "FULMEN_EMULATOR names, and show what they moved and computed")  # fmt: skip


def main(arguments: argparse.Namespace, output: Output) -> int:
    """The command."""
    if arguments.count and arguments.page_size:
        raise BadInputError("--count is given with --page-size; it counts calls without pages")
    if arguments.count:
        count.start()  # before the library looks for a GPU
    target = _target(arguments)
    arguments.dtype = arguments.dtype or ("bfloat16" if target else "float32")
    e = explained(arguments, target)
    found: dict[str, Any] = {}
    if arguments.count:
        found = count.counted(_shapes(arguments), arguments.dtype, _options(arguments), e)
    if output.as_json:
        output.json(e | found)
        return 0
    output.line(f"{arguments.shape} {arguments.dtype}, {_where(e)}")
    output.line(f"{e['operation']}: {e['implementation']} on {e['backend']}: {e['reason']}")
    readable = {
        "workspace": bytes_text(e["workspace_bytes"]),
        "arithmetic": f"{e['flops'] / 1e9:.4g} GFLOP",
        "arrays": f"{bytes_text(e['bytes'])} read or written",
    }
    for name, text in e.lines():
        output.line(f"  {name:<13}{readable.get(name, text)}")
    if found:
        count.report(found, output)
    return 0


def _where(e: fulmen.Explanation) -> str:
    device = e.get("device")
    return f"on {device['name']} ({device['arch']})" if device else "on the CPU"


def explained(arguments: argparse.Namespace, target: dict[str, Any]) -> fulmen.Explanation:
    """The explanation of the library.

    Raises:
        BadInputError: SHAPE is not one.
    """
    dtype = named_dtype(arguments.dtype)
    shapes, caches = _shapes(arguments), {}
    if arguments.page_size:
        caches = _caches(shapes, arguments)
    q, k, v = (phantom(shape, dtype) for shape in shapes)
    return fulmen.explain(
        q,
        k,
        v,
        operation="backward" if arguments.backward else "forward",
        **caches,
        **_options(arguments),
        **target,
    )


def _caches(shapes: list[tuple[int, ...]], arguments: argparse.Namespace) -> dict[str, Any]:
    """The table and the lengths of a call whose keys fill pages; k and v in `shapes` are pools."""
    rows = 1 if arguments.layout == "bshd" else 2  # the axis
    batch, size = shapes[0][0], arguments.page_size
    width = -(-shapes[1][rows] // size)
    for index in (1, 2):
        pool = [batch * width, *shapes[index][1:]]
        pool[rows] = size
        shapes[index] = tuple(pool)
    return {
        "page_table": phantom((batch, width), np.int32),
        "kv_lengths": phantom((batch,), np.int32),
    }


def _shapes(arguments: argparse.Namespace) -> list[tuple[int, ...]]:
    """Of q, k and v, in the order of --layout.

    Raises:
        BadInputError: SHAPE is not one, or a size is negative.
    """
    batch, heads, rows, dim = shape_of(arguments.shape)
    kv_heads, kv_rows, dim_v = (
        given if given is not None else same
        for given, same in (
            (arguments.kv_heads, heads),
            (arguments.kv_rows, rows),
            (arguments.dim_v, dim),
        )
    )
    for name, value in (("--kv-heads", kv_heads), ("--kv-rows", kv_rows), ("--dim-v", dim_v)):
        if value < 0:
            raise BadInputError(f"{name} is {value}; at least 0 is allowed")
    shapes = [(heads, rows, dim), (kv_heads, kv_rows, dim), (kv_heads, kv_rows, dim_v)]
    if arguments.layout == "bshd":
        return [(batch, rows, heads, dim) for heads, rows, dim in shapes]
    return [(batch, *shape) for shape in shapes]


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """As fulmen.attention names them."""
    options = {"layout": arguments.layout, **options_of(arguments)}
    return {**options, "rng": (0, 0)} if "dropout_p" in options else options


def _target(arguments: argparse.Namespace) -> dict[str, Any]:
    """The GPU that is asked for, else the first one that is here; {} for the CPU."""
    device = arguments.device
    if device is not None:
        return {"device": int(device)} if device.isdecimal() else {"device_name": device}
    if arguments.backend == "cpu" or arguments.implementation in implementations("cpu"):
        return {}
    is_gpu = arguments.backend == "cuda" or arguments.implementation in implementations("cuda")
    return {"device": 0} if is_gpu or fulmen.gpu_info()["devices"] else {}
