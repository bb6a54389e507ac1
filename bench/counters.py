# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What the emulator counts of a kernel against what a GPU's own counters say of it.

python bench/counters.py emulate FILE       FULMEN_EMULATOR and ..._MULTIPROCESSORS=132 are set
ncu --clock-control none --cache-control all -k fulmen_kernel --page raw --csv --print-units base
    --metrics ... python bench/counters.py run > NCU.CSV    the same on a GPU; METRICS for ...
python bench/counters.py join FILE NCU.CSV CARD > bench/results/DATE-counters-CARD.jsonl
"""

from __future__ import annotations

import csv
import datetime
import json
import sys
from typing import Any, NamedTuple

import fulmen

# What reaches the multiprocessors, before the L2 merges what several of them ask for at once; what
# their stores touch, spills apart; what the L2 is given to write, spills and all; wavefronts and
# conflicts of loads and stores; matrix instructions of warps.
METRICS = (
    "l1tex__m_xbar2l1tex_read_bytes.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum",
    "lts__t_sectors_srcunit_tex_op_write.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "sm__inst_executed_pipe_tensor.sum",
    "dram__bytes_read.sum",
)
SECTOR_BYTES = 32


class Shape(NamedTuple):
    """One call of the forward pass."""

    implementation: str
    batch: int
    heads: int
    rows: int
    dim: int
    dtype: str
    causal: bool

    def call(self, q: Any, k: Any, v: Any) -> Any:
        """Runs it."""
        options = {"causal": self.causal, "implementation": self.implementation}
        return fulmen.attention_forward(q, k, v, backend="cuda", **options)


SHAPES = (
    Shape("simt", 1, 2, 512, 64, "float32", False),
    Shape("sm80", 1, 4, 1024, 64, "bfloat16", True),
    Shape("sm80", 1, 2, 768, 128, "float16", False),
    Shape("sm90", 1, 4, 1024, 64, "bfloat16", False),
    Shape("sm90", 1, 2, 1024, 128, "bfloat16", True),
)


def emulate(path: str) -> None:
    """Counts in the emulator."""
    import numpy as np

    from fulmen.array_types import named_dtype
    from fulmen.lab.cases import emulator

    found = []
    for shape in SHAPES:
        rng = np.random.default_rng(1)
        size = (shape.batch, shape.heads, shape.rows, shape.dim)
        q, k, v = (
            emulator.copied(rng.standard_normal(size).astype(named_dtype(shape.dtype)), name)
            for name in ("q", "k", "v")
        )
        found.append(emulator.counted(lambda: shape.call(q, k, v))[1])  # noqa: B023
    with open(path, "w", encoding="utf-8") as file:
        json.dump(found, file)


def run() -> None:
    """The same calls on a GPU, each launched once."""
    import torch

    for shape in SHAPES:
        size = (shape.batch, shape.heads, shape.rows, shape.dim)
        dtype = getattr(torch, shape.dtype)
        q, k, v = (torch.randn(size, dtype=dtype, device="cuda") for _ in "qkv")
        shape.call(q, k, v)
    torch.cuda.synchronize()


def record(grid: str, shape: Shape, card: str, found: dict[str, Any]) -> str:
    """A line of bench/results: what was found of one call."""
    name, batch, heads, rows, dim, dtype, causal = shape
    return json.dumps({
        "grid": grid, "op": "forward", "who": "fulmen", "implementation": name, "dtype": dtype,
        "batch": batch, "heads_q": heads, "heads_kv": heads, "seqlen_q": rows, "seqlen_kv": rows,
        "d_qk": dim, "d_v": dim, "causal": causal, **found, "card": card,
        "versions": {"fulmen": fulmen.__version__}, "commit": fulmen.build_info()["commit"],
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    })  # fmt: skip


def join(emulated: str, measured: str, card: str) -> None:
    """One line of JSON for each shape: both, and their ratio."""
    with open(emulated, encoding="utf-8") as file:
        counted = json.load(file)
    with open(measured, encoding="utf-8") as file:
        rows = csv.DictReader(line for line in file if line.startswith('"'))
        launches = list(rows)[1:]  # behind the units
    for shape, mine, row in zip(SHAPES, counted, launches, strict=True):
        theirs = [float(row[metric].replace(",", "")) for metric in METRICS]
        loaded, stored = (
            SECTOR_BYTES * sum(x[how] for x in mine["arrays"].values())
            for how in ("loaded_sectors", "stored_sectors")
        )
        wavefronts, conflicts = (
            sum(x[how] for x in mine["shared"]) for how in ("wavefronts", "conflicts")
        )
        warps = 4 if shape.implementation == "sm90" else 1  # of a product
        pairs = {
            "l2_read_bytes": (loaded, theirs[0]),
            "stored_bytes": (stored, SECTOR_BYTES * theirs[1]),
            "shared_wavefronts": (wavefronts, theirs[4] + theirs[5]),
            "bank_conflicts": (conflicts, theirs[6] + theirs[7]),
            "matrix_instructions": (warps * mine["products"], theirs[8]),
        }
        found = {
            **{name: {"emulator": a, "ncu": b} for name, (a, b) in pairs.items()},
            "spilled_bytes": SECTOR_BYTES * theirs[2],
            "l2_write_bytes": SECTOR_BYTES * theirs[3],
            "dram_read_bytes": theirs[9],
        }
        print(record("counters", shape, card, found))


def main(arguments: list[str]) -> None:
    """The command line."""
    commands = {"emulate": emulate, "run": run, "join": join}
    if not arguments or arguments[0] not in commands:
        sys.exit(__doc__)
    commands[arguments[0]](*arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
