# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""bench/results: files of one format, each explained in the table of its README."""

import json
import re

import pytest
from markdown_pages import ROOT

RESULTS = ROOT / "bench" / "results"
FILES = sorted(RESULTS.glob("*.jsonl"))
SHORT_CARDS = {"h100", "h200", "zen3", "zen4", "zen5", "cpu"}
ROWS = re.findall(
    r"^\| ([a-z0-9, -]+) \|", (RESULTS / "README.md").read_text("utf-8"), re.MULTILINE
)
KINDS = {what for row in ROWS for what in row.split(", ")} - {"what", "---"}


def kind_of(name: str, card: str) -> str:
    """What a file DATE-WHAT-CARD.jsonl measures."""
    full = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    stem = name.removesuffix(".jsonl")[len("YYYY-MM-DD-") :]
    ending = next(end for end in (full, *SHORT_CARDS) if stem.endswith(f"-{end}"))
    return stem.removesuffix(f"-{ending}")


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_records_say_where_they_come_from(file) -> None:
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert records
    for record in records:
        assert file.name.startswith(record["date"])
        assert isinstance(record["versions"], dict)
        assert all(record[key] for key in ("card", "versions", "commit"))
        assert record.get("dtype") in (None, "none", "bfloat16", "float16", "float32")
    assert kind_of(file.name, records[0]["card"]) in KINDS


def test_the_table_names_nothing_that_is_not_there() -> None:
    names = {kind_of(file.name, json.loads(file.open().readline())["card"]) for file in FILES}
    assert names == KINDS
