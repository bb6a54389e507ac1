# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Records of runs that a page quotes: each as a sentence, and whether it is of the kernels that are
there.

Used by docs_tables.py, which writes the sentences: of `fulmen verify --backend cuda --record` into
the README, of `tools/plant_faults.py --record` into the emulator's page. The former is renewed on a
machine with a GPU; that it is of other kernels is said, and no failure.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from source_tree import ROOT

WORDS = {
    "en": {
        "ran": "The named cases on {cards} (`fulmen verify --backend cuda`, {cases}, commit "
        "{commit}, {date}): {passed} passed, {failed} failed{failures}, {skipped} were refused by "
        "name{crowded}.",
        "crowded": "; {} found no memory beside the other processes of the run",
        "all": "every case",
        "left": " but {not_run:,} for which there was no time",
        "card": "an {}",
    },
    "zh": {
        "ran": "{cards} 上的命名用例（`fulmen verify --backend cuda`，{cases}，提交 {commit}，"
        "{date}）：{passed} 次通过，{failed} 次失败{failures}，{skipped} 次按名字拒绝{crowded}。",
        "crowded": "；{} 次因同时运行的其他进程而没有得到显存",
        "all": "全部",
        "left": "（因时间不足，{not_run:,} 个未运行）",
        "card": "{}",
    },
}

PLANTED = {
    "en": {
        "ran": "The last run of all (commit {commit}, {date}): {planted} faults planted, {found} "
        "found{earlier}{passed}{unjudged}.",
        "earlier": ", {found} of them on the kernels of commit {commit}{changed}",
        "changed": ", of whose files {} changed since",
        "passed": "; no test sees {}",
        "unjudged": "; there was no time for {}",
    },
    "zh": {
        "ran": "最近一次全部运行（提交 {commit}，{date}）：植入 {planted} 个错误，发现 {found} 个"
        "{earlier}{passed}{unjudged}。",
        "earlier": "，其中 {found} 个是在提交 {commit} 的内核上发现的{changed}",
        "changed": "，此后这些内核的 {} 有改动",
        "passed": "；没有测试发现 {}",
        "unjudged": "；{} 没有来得及判断",
    },
}


def read(name: str) -> dict[str, Any]:
    """A record of the project."""
    found: dict[str, Any] = json.loads((ROOT / name).read_text(encoding="utf-8"))
    return found


def digest_of_kernels(root: Path) -> str:
    """What `fulmen.build_info()["kernels"]` is of a library that is built from this tree."""
    source = root / "src"
    paths = [path for suffix in ("cuh", "h") for path in source.glob(f"kernels/**/*.{suffix}")]
    digest = hashlib.sha256()
    for name in sorted(path.relative_to(source).as_posix() for path in paths):
        for field in (name.encode(), (source / name).read_bytes()):
            digest.update(b"%d:" % len(field) + field)
    return digest.hexdigest()


MOST_NAMED = 5


def listed(failures: list[dict[str, Any]]) -> str:
    """Failures by name; many of them by what they say."""
    if len(failures) <= MOST_NAMED:
        return ", ".join(f"`{x['case']}` ({x['implementation']})" for x in failures)
    counts = Counter(str(x["message"]) for x in failures)
    return ", ".join(f"{count} x `{message}`" for message, count in counts.most_common())


def sentence(name: str, language: str) -> str:
    """What a record says, for readers."""
    record, words = read(name), WORDS[language]
    wrong = [x for x in record["failures"] if not x["message"].startswith("OutOfMemoryError")]
    crowded = len(record["failures"]) - len(wrong)
    failures = listed(wrong)
    cases = words["all"] if record["cases"] == "all" else " ".join(record["cases"])
    if record["not_run"]:
        cases += words["left"].format(not_run=record["not_run"])
    return words["ran"].format(
        cards=", ".join(words["card"].format(card) for card in record["cards"]),
        cases=cases,
        commit=record["commit"],
        date=record["date"],
        failures=f": {failures}" if failures else "",
        crowded=words["crowded"].format(crowded) if crowded else "",
        passed=f"{record['passed']:,}",
        failed=f"{record['failed'] - crowded:,}",
        skipped=f"{record['skipped']:,}",
    )


def planted(name: str, language: str) -> str:
    """What a record of planted faults says, for readers."""
    record, words = read(name), PLANTED[language]

    def say(kind: str, names: list[str]) -> str:
        return words[kind].format(", ".join(f"`{x}`" for x in names)) if names else ""

    said = {kind: say(kind, record[kind]) for kind in ("passed", "unjudged")}
    said["earlier"] = "".join(  # found on kernels before, and not tried since for want of time
        words["earlier"].format(**{**run, "changed": say("changed", run["changed"])})
        for run in record.get("earlier", [])
    )
    return words["ran"].format(**{**record, **said})


def note(name: str) -> str:
    """Why a record is not of the kernels that are there; "" where it is."""
    record = read(name)
    if record["kernels"] == digest_of_kernels(ROOT):
        return ""
    return (
        f"{name} is of the kernels of commit {record['commit']}, not of these: on a GPU, "
        f"fulmen verify --backend cuda --record {name}"
    )
