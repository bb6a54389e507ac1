# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""check_headers refuses a header that leans on its includer, warns, or lacks a guard."""

import pytest
from small_tree import WriteTree

import check_headers

GOOD = "#pragma once\n#include <vector>\nstruct Rows { std::vector<int> begin; };\n"
BAD = {
    "leans on its includer": "#pragma once\nstruct Rows { std::vector<int> begin; };\n",
    "has no guard": "struct Rows {};\n",
    "warns": "#pragma once\ninline float half(double x) { return x / 2; }\n",
    "is not C++": "#pragma once\nstruct {\n",
}


def test_a_complete_header_passes(write_tree: WriteTree) -> None:
    assert check_headers.check(write_tree({"src/core/rows.h": GOOD})) == []


@pytest.mark.parametrize("name", BAD)
def test_each_fault_is_seen(name: str, write_tree: WriteTree) -> None:
    found = check_headers.check(write_tree({"src/core/rows.h": BAD[name]}))
    assert [finding.path for finding in found] == ["src/core/rows.h"]
    assert "does not compile alone as c++20" in found[0].sentence


def test_the_c_header_must_be_c11_as_well(write_tree: WriteTree) -> None:
    text = "#ifndef F\n#define F\nenum class Status { kOk };\n#endif\n"
    found = check_headers.check(write_tree({"include/fulmen/fulmen.h": text}))
    assert len(found) == 1
    assert "as c11" in found[0].sentence


def test_a_header_that_a_source_includes_first_is_left_to_the_build(write_tree):
    tree = {"src/core/rows.h": BAD["leans on its includer"]}
    for before, number in (("", 0), ("#include <vector>\n", 1)):
        tree["src/core/rows.cpp"] = before + '#include "core/rows.h"\n'
        assert len(check_headers.check(write_tree(tree))) == number
