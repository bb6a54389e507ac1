# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""`fulmen doctor` on machines that are well and on others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from command_line import program


def test_doctor_finds_everything_well(command: Any) -> None:
    text = command("doctor")
    assert "everything works" in text
    found = command("doctor", "--json")
    assert found["healthy"]
    states = {f["what"]: f["state"] for f in found["findings"]}
    assert states["scalar"] == states["tiled"] == states["libfulmen"] == "ok"


def test_doctor_in_a_file_has_lines_for_people(command: Any) -> None:
    lines = command("doctor").splitlines()
    assert max(len(line) for line in lines if "/" not in line) <= 100  # a path is not broken
    assert not any(line.endswith(" ") for line in lines)


def test_doctor_outlives_bad_settings() -> None:
    bad = {
        "FULMEN_CACHE_LIMIT": "a lot",
        "FULMEN_CACHE_DIR": "/dev/null/no",
        "FULMEN_BUNDLE": "/nowhere/at.all",
        "FULMEN_NVRTC": "/nowhere/at.all",
    }
    fatal = {"FULMEN_NUM_THREADS": "many", "FULMEN_CPU_ISA": "mmx"}  # the library does not load
    for settings, missing in ((bad, None), (fatal, "libfulmen")):
        done = program("doctor", "--json", **settings)
        found = json.loads(done.stdout)["findings"]
        assert set(settings.items()) <= {(f["what"], f["found"]) for f in found}
        states = {f["what"]: f["state"] for f in found}
        assert states.get("tiled", "problem") == ("ok" if missing is None else "problem")
        assert missing is None or states[missing] == "problem"
        assert done.returncode == int("problem" in states.values())


def test_doctor_says_what_is_wrong(tmp_path: Path) -> None:
    path = str(tmp_path / "libfulmen.so")
    done = program("doctor", "--json", FULMEN_LIBRARY=path)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    bad = [f for f in found["findings"] if f["state"] == "problem"]
    assert [f["what"] for f in bad] == ["libfulmen"]
    assert path in bad[0]["found"]
