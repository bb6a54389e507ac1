# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What the emulator counts of a kernel against what a GPU's own counters say of it.

python bench/counters.py emulate FILE       in the emulator: FULMEN_EMULATOR, check off
ncu ... python bench/counters.py run        the same calls on a GPU: `ncu_command` prints the whole
python bench/counters.py join FILE NCU.CSV CARD > bench/results/DATE-counters-CARD.jsonl
"""

from __future__ import annotations

import csv
import json
import sys
from typing import Any, NamedTuple

import fulmen

METRICS = (
    "lts__t_sectors_srcunit_tex_op_read.sum",
    "lts__t_sectors_srcunit_tex_op_write.sum",
    "dram__bytes_read.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
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

    from fulmen.cases import emulator
    from fulmen.kinds import named_dtype

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


def join(emulated: str, measured: str, card: str) -> None:
    """One line of JSON for each shape: both, and their ratio."""
    with open(emulated, encoding="utf-8") as file:
        counted = json.load(file)
    launches: dict[str, dict[str, float]] = {}
    with open(measured, encoding="utf-8") as file:
        rows = [line for line in file if line.startswith('"')]
    for row in csv.DictReader(rows):
        value = float(row["Metric Value"].replace(",", ""))
        launches.setdefault(row["ID"], {})[row["Metric Name"]] = value
    for shape, mine, theirs in zip(SHAPES, counted, launches.values(), strict=True):
        loaded = sum(x["loaded_bytes"] for x in mine["arrays"].values())
        stored = sum(x["stored_bytes"] for x in mine["arrays"].values())
        pairs = {
            "l2_read_bytes": (loaded, SECTOR_BYTES * theirs[METRICS[0]]),
            "l2_write_bytes": (stored, SECTOR_BYTES * theirs[METRICS[1]]),
            "shared_wavefronts": (
                sum(x["wavefronts"] for x in mine["shared"]),
                theirs[METRICS[3]] + theirs[METRICS[4]],
            ),
            "bank_conflicts": (
                sum(x["conflicts"] for x in mine["shared"]),
                theirs[METRICS[5]] + theirs[METRICS[6]],
            ),
        }  # fmt: skip
        print(json.dumps({
            "what": "counters", "gpu": card, **shape._asdict(),
            **{name: {"emulator": a, "ncu": b} for name, (a, b) in pairs.items()},
            "dram_read_bytes": theirs[METRICS[2]],
        }))  # fmt: skip


def main(arguments: list[str]) -> None:
    """The command line."""
    commands = {"emulate": emulate, "run": run, "join": join}
    if not arguments or arguments[0] not in commands:
        sys.exit(__doc__)
    commands[arguments[0]](*arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
