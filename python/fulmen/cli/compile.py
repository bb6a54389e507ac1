# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen compile: GPU kernels ahead of time, without a GPU, in one file."""

from __future__ import annotations

import argparse
import os
import time
from itertools import product
from typing import Any

import numpy as np

import fulmen
from fulmen.lab.cases.quantised import MOST
from fulmen.options import implementations

from .arguments import DTYPES, new_file, positive
from .output import BadInputError, Output, bytes_text

DESCRIPTION = """\
Compiles the kernels of attention for GPUs that need not be here, and writes them into one file. A
machine without NVRTC runs them after fulmen.load_bundle(FILE), or with FULMEN_BUNDLE=FILE. A kernel
depends on head dims, dtype and the kind of mask, and on no length, batch or number of heads.
"""
# Lengths of a prompt and of a decode step: where a plan chooses between kernels, by both.
LENGTHS = ((4096, 4096), (1, 4096))
NORMAL_PAGE = 16
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 1024},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add = parser.add_argument
    add("-o", "--output", type=new_file, required=True, metavar="FILE", help="the bundle")
    add("--arch", action="append", required=True, metavar="GPU",
        help="sm_80, sm_90a, h100, ...; may be given several times")  # fmt: skip
    add("--dim", type=int, action="append", metavar="D", help="head dims; 64 and 128")
    add("--dtype", choices=DTYPES, action="append", help="bfloat16 and float16")
    add("--mask", choices=tuple(MASKS), action="append", help="full and causal")
    add("--forward-only", action="store_true", help="no gradients")
    add(
        "--page-size",
        type=positive,
        action="append",
        metavar="P",
        help="also over caches in pages of P rows, with the kernels that append rows and merge",
    )
    add("--kv-dtype", choices=tuple(MOST), action="append",
        help="also such caches, of 8 bits, in pages of 16 or of --page-size")  # fmt: skip
    add("--implementation", default="auto", choices=("auto", *implementations("cuda")))


def main(arguments: argparse.Namespace, output: Output) -> int:
    """The command."""
    problems = _problems(arguments)
    start = time.perf_counter()
    steps = len(problems) * len(arguments.arch)
    with output.progress("compiling", steps) as advance:
        plans = fulmen.compile_bundle(
            problems,
            arguments.output,
            archs=arguments.arch,
            progress=lambda done, total: advance(1),
        )
    found = {
        "path": str(arguments.output),
        "bytes": os.path.getsize(arguments.output),
        "archs": arguments.arch,
        "plans": plans,
        "seconds": time.perf_counter() - start,
    }
    output.line(
        f"{found['path']}: kernels of {plans} plans for {', '.join(arguments.arch)}, "
        f"{bytes_text(found['bytes'])}, {found['seconds']:.1f} s"
    )
    if output.as_json:
        output.json(found)
    return 0


def _problems(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A problem for each kind of kernel."""
    dims = arguments.dim or [64, 128]
    for dim in dims:
        if dim < 0:
            raise BadInputError(f"--dim is {dim}; at least 0 is allowed")
    dtypes = arguments.dtype or ["bfloat16", "float16"]
    masks = arguments.mask or ["full", "causal"]
    problems = []
    for dim, dtype, mask, (q_rows, kv_rows) in product(dims, dtypes, masks, LENGTHS):
        q, kv = (1, 8, q_rows, dim), (1, 8, kv_rows, dim)
        gradients = q_rows == kv_rows and not arguments.forward_only
        problems.append({
            "q": q, "k": kv, "v": kv, "dtype": dtype, **MASKS[mask],
            "implementation": arguments.implementation,
            "need": ("q", "k", "v") if gradients else (),
        })  # fmt: skip
    pages = arguments.page_size or ([NORMAL_PAGE] if arguments.kv_dtype else [])
    for dim, dtype, page, narrow in product(
        dims, dtypes, pages, [None, *(arguments.kv_dtype or ())]
    ):
        problems += [_over_pages(dim, dtype, page, narrow, rows) for rows, _ in LENGTHS]
    return problems


def _over_pages(dim: int, dtype: str, page: int, narrow: str | None, rows: int) -> dict[str, Any]:
    """The last rows of a request whose keys lie in pages."""
    pages = -(-LENGTHS[0][1] // page)
    pool = (pages, 8, page, dim)
    scales = {} if narrow is None else {"k_scale": 1.0, "v_scale": 1.0}
    return {
        "q": (1, 8, rows, dim), "k": pool, "v": pool, "dtype": dtype, "kv_dtype": narrow or dtype,
        "causal": True, "page_table": np.zeros((1, pages), np.int32),
        "kv_lengths": np.zeros(1, np.int32), **scales,
    }  # fmt: skip
