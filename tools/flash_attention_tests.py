# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs FlashAttention's own test files against fulmen.compat, from a checkout of that project.

    python tools/flash_attention_tests.py CHECKOUT                all cases, on a GPU
    python tools/flash_attention_tests.py CHECKOUT --sample 6     6 of each test, on a CPU too
    python tools/flash_attention_tests.py CHECKOUT --sample 4000 --seconds 500 -n 12
                                                                  as many as 12 processes finish

The checkout is read where it lies and nothing of it is kept: the files are copied to a temporary
folder, where on a machine without a GPU "cuda" becomes "cpu". `flash_attn` and
`flash_attn_interface` are then fulmen's (fulmen.compat.flash_attn.install). Prints, for each
generation, how many cases passed, failed, were skipped, and were refused by name because they ask
for what fulmen does not have (FP8); then each reason why one did not pass, and how often. einops
must be installed, which the files import, and pytest-xdist for `-n`; other options are pytest's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import pytest

# The test file of each generation, in a folder whose other files it imports.
FILES = {"FA2": "tests/test_flash_attn.py", "FA3": "hopper/test_flash_attn.py"}
BESIDE = ("padding.py", "test_util.py")
README = Path(__file__).resolve().parent.parent / "tests" / "torch" / "README.md"
OUTCOMES = ("passed", "failed", "skipped", "refused")
TIME_IS_OUT = "the time of --seconds is out"
NOT_RUN = "not run"  # for that reason
AS_IF = (8, 0)  # the compute capability that the files are told of on the CPU


def run(checkout: Path, generation: str, settings: dict[str, Any], options: list[str]) -> Any:
    """The counts of one file by outcome, of all that it has, and why those that did not pass."""
    source = checkout / FILES[generation]
    with tempfile.TemporaryDirectory() as folder:
        for path in (source, *(source.parent / name for name in BESIDE)):
            if path.exists():
                text = path.read_text()
                text = text.replace('"cuda"', '"cpu"') if settings["on_cpu"] else text
                (Path(folder) / path.name).write_text(text)
        counts = Path(folder) / "counts.json"
        environment = {
            **os.environ,
            "FULMEN_FLASH_TESTS": json.dumps({**settings, "counts": str(counts)}),
            "FLASH_ATTENTION_DISABLE_FP8": "TRUE",
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parent), folder, os.environ.get("PYTHONPATH", "")]
            ),
        }
        subprocess.run(
            [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, "-q", "--tb=line",
             "-o", "addopts=", "-p", "no:cacheprovider", f"--rootdir={folder}", *options,
             str(Path(folder) / source.name)],
            env=environment, check=False, cwd=folder,
        )  # fmt: skip
        return json.loads(counts.read_text()) if counts.exists() else None


def _names(mark: Any) -> list[str]:
    names = mark.args[0]
    return names.split(",") if isinstance(names, str) else list(names)


class Counter:
    """The plugin: fulmen in the place of flash_attn, a sample of the cases, their outcomes."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.found: dict[str, Any] = dict.fromkeys(("cases", NOT_RUN, *OUTCOMES), 0)
        self.found["reasons"] = {}
        self.end = time.monotonic() + (self.settings["seconds"] or math.inf)

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Draws from the product of a test's parameters, which may have a million rows."""
        marks = list(metafunc.definition.iter_markers("parametrize"))
        names = [name.strip() for mark in marks for name in _names(mark)]
        axes = [list(mark.args[1]) for mark in marks]
        number = math.prod(len(axis) for axis in axes)
        self.found["cases"] += number
        if not marks or not self.settings["sample"] or number <= self.settings["sample"]:
            return
        rows = []
        for index in random.Random(0).sample(range(number), self.settings["sample"]):
            row: list[Any] = []
            for mark, axis in zip(marks, axes):
                own = index % len(axis)
                row += axis[own] if len(_names(mark)) > 1 else [axis[own]]
                index //= len(axis)  # noqa: PLW2901  a number written in digits of several bases
            rows.append(row)
        others = [x for x in metafunc.definition.own_markers if x.name != "parametrize"]
        metafunc.definition.own_markers[:] = others
        metafunc.parametrize(names, rows)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """In one order of all tests together, since time may end before the last."""
        if self.settings["seconds"]:
            random.Random(0).shuffle(items)

    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self.end:
            pytest.skip(TIME_IS_OUT)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        outcome = report.outcome
        if outcome == "skipped" and TIME_IS_OUT in str(report.longrepr):
            self.found[NOT_RUN] += 1
            return
        if outcome == "failed" and "UnsupportedError" in str(report.longrepr):
            outcome = "refused"
        self.found[outcome] += 1
        if outcome in ("failed", "refused"):
            crash = getattr(report.longrepr, "reprcrash", None)
            said = (crash.message if crash else str(report.longrepr)).strip() or "no message"
            test = report.nodeid.split("::")[-1]
            # Numbers differ from case to case; of a failed comparison the reason is which one.
            reason = f"{outcome}: {test.split('[')[0]}: {re.sub(r'[0-9.e+-]{3,}', '#', said[:300])}"
            seen = self.found["reasons"].setdefault(reason, {"count": 0, "first": test})
            seen["count"] += 1
            if seen["count"] == 1:
                print(f"\n{test}: {said[:300]}", file=sys.__stdout__, flush=True)

    def pytest_sessionfinish(self, session: Any) -> None:
        """A process of xdist says how many cases there are; the one that started it counts."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cases"] = self.found["cases"]
        else:
            Path(self.settings["counts"]).write_text(json.dumps(self.found))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.found["cases"] = getattr(node, "workeroutput", self.found)["cases"]


def pytest_configure(config: Any) -> None:
    """Makes this file the plugin of the run that `run` starts."""
    settings = json.loads(os.environ["FULMEN_FLASH_TESTS"])
    import torch

    from fulmen.compat import flash_attn

    flash_attn.install(override=True)
    if settings["on_cpu"]:
        cuda: Any = torch.cuda
        cuda.get_device_capability = lambda *_: AS_IF
        cuda.get_device_properties = lambda *_: types.SimpleNamespace(
            total_memory=2**40, major=AS_IF[0], minor=AS_IF[1], multi_processor_count=108
        )
        cuda.synchronize = lambda *_: None
    config.pluginmanager.register(Counter(settings))


def record(generation: str, device: str, sample: str, found: dict[str, Any]) -> None:
    """Writes the row of one file and device into tests/torch/README.md."""
    begin, end = (f"<!-- {x} rows of tools/flash_attention_tests.py -->" for x in ("begin", "end"))
    text = README.read_text()
    before, rest = text.split(begin)
    table, behind = rest.split(end)
    own = f"| {generation} | {device} |"
    rows = [row for row in table.strip().splitlines() if not row.startswith(own)]
    counts = " | ".join(f"{found[name]:,}" for name in OUTCOMES)
    rows.append(f"{own} {found['cases']:,} | {sample} | {counts} |")
    rows[2:] = sorted(rows[2:])
    README.write_text("\n".join([before + begin, *rows, end + behind]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="a checkout of FlashAttention")
    parser.add_argument("--sample", type=int, default=0, help="cases of each test; 0: all")
    parser.add_argument("--seconds", type=float, default=0, help="of each file; 0: no limit")
    parser.add_argument("--only", choices=FILES, help="one generation")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda, where there is one"
    )
    parser.add_argument("--record", action="store_true", help="write counts into tests/torch")
    arguments, options = parser.parse_known_args()
    import torch

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    failed = 0
    for generation, file in FILES.items():
        if arguments.only not in (None, generation):
            continue
        if not (arguments.checkout / file).exists():
            print(f"{generation}: {arguments.checkout} has no {file}")
            failed += 1
            continue
        sample, seconds = arguments.sample, arguments.seconds
        settings = {"sample": sample, "seconds": seconds, "on_cpu": device == "cpu"}
        found = run(arguments.checkout, generation, settings, options)
        if found is None or sum(found[name] for name in OUTCOMES) == 0:
            print(f"{generation}: the tests did not run; the output above says why")
            failed += 1
            continue
        counts = ", ".join(f"{found[name]} {name}" for name in OUTCOMES)
        late = f", {found[NOT_RUN]} not run: {TIME_IS_OUT}" if found[NOT_RUN] else ""
        print(f"{generation} on {device}: {found['cases']} cases; {counts}{late}")
        for reason, seen in sorted(found["reasons"].items()):
            print(f"{seen['count']} {reason!r}, first {seen['first']}")
        if arguments.record:
            how = str(sample or "all") + (f", those of {seconds:.0f} s" if seconds else "")
            record(generation, device, how, found)
        failed += found["failed"]
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
