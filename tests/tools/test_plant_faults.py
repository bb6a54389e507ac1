# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""plant_faults.py: what it writes in a fault's place, and which lists it refuses."""

from __future__ import annotations

from pathlib import Path

import plant_faults
from plant_faults import Fault

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
    entry = f"name='x'\nfile='a/b.cuh'\nold='{old}'\nnew=';'\nwhy='y'\nfound_by='*'\n"
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
    for old in ("const int x = 3;", "u8* const page = f(a);", "Row<3> row{1};"):
        assert "declares a name" in fault(old, ";").shape_error()
    assert "neither" in fault("i = 0; i < n", "0").shape_error()
    (finding, _) = sorted(map(str, plant_faults.check(tree(tmp_path, "i = 0; i < n"))))
    assert "neither" in finding


def test_the_list_fits_the_kernels() -> None:
    assert not plant_faults.check(plant_faults.ROOT)
