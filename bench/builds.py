# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Two builds of fulmen beside each other on one GPU: whether a change of form changed a time.

    python bench/builds.py FIRST LAST [--rounds 3] [--implementation sm80 ...] [-o bench/results]

FIRST and LAST are folders with `python/` and `libfulmen.so` of a build. Each round runs both, in
random order, each in a process of its own, which times some cells of every kernel (the median of
calls on a flushed L2). One JSON object a line: the least median over the rounds, with the build's
commit. Only public calls are used, so that older builds run too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# dtype, head dim, rows, causal, option
TENSOR_CORE_CELLS: list[tuple[str, int, int, bool, str]] = [
    ("bfloat16", 64, 4096, True, ""),
    ("bfloat16", 128, 8192, False, ""),
    ("bfloat16", 256, 4096, True, ""),
    ("bfloat16", 128, 1024, True, ""),
    ("bfloat16", 128, 4096, True, "softcap"),
    ("bfloat16", 128, 4096, True, "documents"),
    ("bfloat16", 128, 4096, False, "window"),
    ("bfloat16", 64, 2048, False, "bias"),
]
CELLS: dict[str, list[tuple[str, int, int, bool, str]]] = {
    "sm90": TENSOR_CORE_CELLS,
    "sm80": [*TENSOR_CORE_CELLS, ("float32", 128, 2048, True, "3xtf32")],
    "simt": [("float32", dim, rows, dim == 64, "") for dim, rows in
             ((64, 1024), (128, 1024), (64, 2048))],
    "naive": [("float32", 64, 512, True, "")],
}  # fmt: skip
CALLS = 15


def options_of(option: str, rows: int, dtype: Any) -> dict[str, Any]:
    import torch

    import fulmen

    if option == "documents":
        ids = torch.arange(rows, device="cuda", dtype=torch.int32) // 512
        return {"mask": fulmen.masks.documents(ids)}
    if option == "bias":
        return {"bias": torch.randn(1, 1, rows, rows, device="cuda", dtype=dtype)}
    known: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": 30.0}, "window": {"window": (512, 0)},
        "3xtf32": {"precision": "3xtf32"}, "": {}}  # fmt: skip
    return known[option]


def median_ms(call: Callable[[], Any], flushed: Any) -> float:
    import torch

    times = []
    for index in range(CALLS + 3):
        flushed.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        if index >= 3:
            times.append(begin.elapsed_time(end))
    return sorted(times)[CALLS // 2]


def time_cell(implementation: str, cell: tuple[str, int, int, bool, str]) -> list[dict[str, Any]]:
    """The two passes of a cell by this process's build."""
    import torch

    import fulmen

    name, dim, rows, causal, option = cell
    dtype = getattr(torch, name)
    batch, heads = (max(1, 16384 // rows), 16) if name == "bfloat16" else (1, 8)
    shape = (batch, heads, rows, dim)
    q, k, v, do = (torch.randn(shape, device="cuda").to(dtype) for _ in range(4))
    given = {"causal": causal, "implementation": implementation,
             **options_of(option, rows, dtype)}  # fmt: skip
    made = fulmen.attention_forward(q, k, v, **given)
    passes = {
        "forward": lambda: fulmen.attention_forward(q, k, v, **given),
        "backward": lambda: fulmen.attention_backward(do, q, k, v, made.o, made.stats, **given),
    }
    flushed = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    return [
        {"grid": "builds", "op": op, "who": "fulmen", "implementation": implementation,
         "dtype": name, "batch": batch, "heads_q": heads, "heads_kv": heads, "seqlen_q": rows,
         "seqlen_kv": rows, "d_qk": dim, "d_v": dim, "causal": causal, "case": option or "plain",
         "p50_ms": median_ms(call, flushed)}
        for op, call in passes.items()
    ]  # fmt: skip


def time_this_build(implementations: list[str]) -> list[dict[str, Any]]:
    """The cells of one build, in this process."""
    import torch

    import fulmen

    torch.manual_seed(0)
    common = {
        "card": torch.cuda.get_device_name(0), "commit": fulmen.build_info()["commit"],
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "versions": {"fulmen": fulmen.__version__, "torch": torch.__version__},
    }  # fmt: skip
    return [
        {**record, **common}
        for implementation in implementations
        for cell in CELLS[implementation]
        for record in time_cell(implementation, cell)
    ]


def run_build(folder: Path, implementations: list[str]) -> list[dict[str, Any]]:
    env = {**os.environ, "FULMEN_LIBRARY": str(folder / "libfulmen.so"),
           "PYTHONPATH": f"{folder / 'python'}:{os.environ.get('PYTHONPATH', '')}"}  # fmt: skip
    command = [sys.executable, __file__, "--this", "--implementation", *implementations]
    text = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    found: list[dict[str, Any]] = json.loads(text.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("builds", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--implementation", nargs="+", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--this", action="store_true", help="time the build that is imported")
    arguments = parser.parse_args()
    if arguments.this:
        print(json.dumps(time_this_build(arguments.implementation)))
        return
    if len(arguments.builds) != 2:
        parser.error("two folders are needed, of the first and of the last build")
    best: dict[Path, list[dict[str, Any]]] = {}
    for _ in range(arguments.rounds):
        for build in random.sample(arguments.builds, 2):
            found = run_build(build.resolve(), arguments.implementation)
            known = best.setdefault(build, found)
            for old, new in zip(known, found):
                old["p50_ms"] = min(old["p50_ms"], new["p50_ms"])
    first, last = (best[build] for build in arguments.builds)
    for old, new in zip(first, last):
        new["of_first"] = new["p50_ms"] / old["p50_ms"]
        what = f"{new['implementation']} {new['op']} {new['dtype']} d{new['d_qk']}"
        rows = f"{new['seqlen_q']} {'causal' if new['causal'] else 'full'} {new['case']}"
        print(f"{what:36} {rows:24} {old['p50_ms']:9.4f} {new['p50_ms']:9.4f} "
              f"{new['of_first']:6.3f}")  # fmt: skip
    if arguments.output:
        card = re.sub(r"[^a-z0-9]+", "-", first[0]["card"].lower()).strip("-")
        path = arguments.output / f"{first[0]['date']}-builds-{card}.jsonl"
        lines = [json.dumps(record) + "\n" for record in [*first, *last]]
        path.write_text("".join(lines), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
