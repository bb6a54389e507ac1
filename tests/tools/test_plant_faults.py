# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""plant_faults.py: what it writes in a fault's place, which lists it refuses, what it says."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import plant_faults
from plant_faults import Fault
from source_tree import ROOT

TEXT = """\
// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
void f(int n) {
  wait();  // for all
  g(n + 1,
    n);
  h(n < 3);
}
"""


def fault(old: str, new: str, name: str = "some", context: str = "") -> Fault:
    return Fault(name, "a/b.cuh", old, new, "why", "Tests.*", context)


def tree(root: Path, old: str) -> Path:
    (root / "tests/emulator/planted").mkdir(parents=True)
    (root / "src/kernels/a").mkdir(parents=True)
    (root / "src/kernels/a/b.cuh").write_text(TEXT)
    entry = f"name='x'\nfile='a/b.cuh'\nold='{old}'\nnew='{old}'\nwhy='y'\nfound_by='*'\n"
    (root / plant_faults.FAULTS).write_text(f"[[fault]]\n{entry}")
    return root


def test_statements_become_branches_and_lines_keep_their_numbers() -> None:
    one, other = fault("wait();  // for all", ";", "one"), fault("g(n + 1,\n    n);", "g(n, n);")
    lines = plant_faults.plant(TEXT, [one, other]).split("\n")
    assert lines[1] == '#include "emulator/planted/planted.h"'
    assert lines[3] == f"  if (::fulmen::is_planted({one.number})) {{ ; }} else {{ wait();   }}"
    assert lines[4].endswith("{ g(n, n); } else { g(n + 1,")
    assert lines[6:] == TEXT.split("\n")[6:]


def test_an_expression_becomes_a_conditional() -> None:
    planted = fault("n < 3", "n <= 3")
    text = plant_faults.plant(TEXT, [planted])
    assert f"h((::fulmen::is_planted({planted.number}) ? (n <= 3) : (n < 3)));" in text


def test_two_faults_may_share_a_place() -> None:
    first, second = fault("n < 3", "n", "first"), fault("n < 3", "0", "second")
    assert first.number != second.number
    assert "? (n) : ::fulmen::is_planted(" in plant_faults.plant(TEXT, [first, second])


def test_an_old_text_must_be_there_once(tmp_path: Path) -> None:
    assert not plant_faults.check(tree(tmp_path / "once", "wait();"))
    for number, old in enumerate(["await();", "n"]):
        (finding,) = plant_faults.check(tree(tmp_path / str(number), old))
        assert "not in src/kernels/a/b.cuh exactly once" in str(finding)


def test_a_context_says_which_is_meant() -> None:
    assert fault("n", "0").place(TEXT) < 0
    assert TEXT[fault("n", "0", context="n < 3").place(TEXT) :].startswith("n < 3")


def test_a_declaration_and_half_a_statement_are_refused(tmp_path: Path) -> None:
    assert not fault("x[0] = f(a, b);", ";").shape_error()
    assert not fault("for (auto x : all) { f(x); }", ";").shape_error()
    for old in (
        "f(a); const int x = 3;",
        "const int x = 3;",
        "u8* const page = f(a);",
        "Row<3> row{1};",
    ):
        assert "declares a name" in fault(old, ";").shape_error()
    assert "neither" in fault("i = 0; i < n", "0").shape_error()
    assert "half" in fault("f(a, b));", "0);").shape_error()
    for half in ("a == 0 &&", "|| b", "return a", "if (a)", "x +", "- x", "a ? b :", "a : b", ""):
        assert "neither" in fault(half or "x;y", "0").shape_error()
        assert "neither" in fault("a", half).shape_error()
    for old in ("-a", "f<u8>", "!a", "*p", "&p", "++i", "a ? b : x::y"):
        assert not fault(old, "0").shape_error()
    (finding, _) = sorted(map(str, plant_faults.check(tree(tmp_path, "i = 0; i < n"))))
    assert "neither" in finding


def test_an_old_text_must_stand_where_a_branch_can() -> None:
    for before in (
        "a = 0;\n  ",
        "if (a) ",
        "else ",
        "for (;;) {  // b =\n",
        "a;\n#pragma unroll\n",
    ):
        assert not fault("x = f(a);", ";").place_error(before)
    assert "end of a statement" in fault("f(a) + 1;", "0;").place_error("const int x = 8 * n + ")
    assert "constant" in fault("a && b", "a").place_error("x;\nstatic constexpr bool kX = ")
    assert not fault("a && b", "a").place_error("if constexpr (kX) return ")


def test_the_list_fits_the_kernels() -> None:
    assert not plant_faults.check(ROOT)


def programs(folder: Path, said: str) -> Path:
    """Scripts in place of the tests' programs: $1 is the fault's name, $2 the filter."""
    for program, place in plant_faults.PROGRAMS.items():
        path = folder / place / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\nset -- "$FULMEN_PLANTED" "$1"\n{said}\n')
        path.chmod(0o755)
    return folder


def judged(
    folder: Path,
    names: list[str],
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
    record: Path | None = None,
) -> tuple[int, list[str]]:
    """The exit status over faults of these names, and the lines that are said."""
    faults = [fault("n", "0", name) for name in names]
    monkeypatch.setattr(plant_faults, "read_faults", lambda root: faults)
    lines: list[str] = []
    monkeypatch.setattr("builtins.print", lambda line, **_: lines.append(str(line)))
    with ThreadPoolExecutor(2) as pool:
        ends = time.monotonic() + seconds
        return plant_faults.run(
            plant_faults.Judge(folder, pool, 2, ends, folder), [], record
        ), lines


FINDS = 'case "$1" in here*) echo "[  FAILED  ] Some.Test (1 ms)"; exit 1;; esac'


def test_programs_of_any_folder_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = programs(tmp_path, FINDS)
    status, lines = judged(folder, ["here", "here_too"], 60, monkeypatch)
    assert status == 0
    assert lines[-1] == "2 faults planted, 2 found"
    assert all(line.endswith("found by Some.Test") for line in lines[:-1])
    record = tmp_path / "record.json"
    status, lines = judged(folder, ["here", "nowhere"], 60, monkeypatch, record)
    assert status == 1
    assert lines[1].startswith("nowhere")
    assert "PASSED EVERY TEST" in lines[1]
    assert lines[-2:] == ["passed: nowhere", "2 faults planted, 1 found"]
    outcome = json.loads(record.read_text(encoding="utf-8"))
    assert (outcome["planted"], outcome["found"], outcome["passed"]) == (2, 1, ["nowhere"])


def test_all_tests_are_asked_where_the_named_ones_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 'case "$1$2" in x*=\\**) echo "[  FAILED  ] Another.Test (1 ms)"; exit 1;; esac'
    status, lines = judged(programs(tmp_path, asked), ["x"], 60, monkeypatch)
    assert status == 0
    assert lines[0].endswith("found by Another.Test")


def test_tests_must_pass_with_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="fails with no fault planted"):
        judged(programs(tmp_path, "exit 3"), ["here"], 60, monkeypatch)
    with pytest.raises(SystemExit, match="no time"):
        judged(programs(tmp_path, ""), ["here"], -1, monkeypatch)


def test_programs_of_another_list_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = 'case "$1" in new) echo "$1: faults.toml has no such fault" >&2; exit 2;; esac'
    with pytest.raises(SystemExit, match="emulator_sm80_test was built without the fault new"):
        judged(programs(tmp_path, older), ["new"], 60, monkeypatch)


def test_what_there_is_no_time_for_is_unjudged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = f'case "$1" in slow) exec sleep 60;; esac\n{FINDS}'
    status, lines = judged(programs(tmp_path, slow), ["slow", "here"], 3, monkeypatch)
    assert status == 1
    assert lines[-1] == "2 faults planted, 1 found"
    assert any(line.startswith("slow") and line.endswith("UNJUDGED") for line in lines)
