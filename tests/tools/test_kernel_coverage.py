# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""kernel_coverage.py: which statements it finds in the text of a kernel."""

from __future__ import annotations

from kernel_coverage import check, read_exceptions, statements

TEXT = """\
struct Tile {
  u32 base;  // no code

  explicit Tile(u32 first) : base{first} {}
  u32 at(u32 row) const {
    if constexpr (kConfig.swizzle) return mixed(row);
    using Word = u32;
    float sums[4];
    return base +
           row;
  }
};
void run(const Tile& tile) {
  if constexpr (kConfig.dq) {
    add({1, 2}, tile);  // a call
  } else {
    for (int i = 0; i < 4; ++i) {
      each([&](u32 x) { store(x); });
    }
  }
}
"""


def test_statements_are_those_of_functions_with_code() -> None:
    found = {s.text: (s.first, s.last) for s in statements(TEXT)}
    assert found == {
        "return mixed(row)": (6, 6),
        "return base + row": (9, 10),
        "add({1, 2}, tile)": (15, 15),
        "for (int i = 0; i < 4; ++i)": (17, 17),
        "each([&](u32 x)": (18, 18),
        "store(x)": (18, 18),
    }


def test_a_statement_without_code_is_reached_with_its_block() -> None:
    text = "void f() {\n  int x = 0;\n  if (y) {\n    g();\n  }\n  h(x);\n}\n"
    blocks = {s.text: s.block for s in statements(text)}
    assert blocks["int x = 0"] == blocks["h(x)"] != blocks["g()"]


def test_what_the_compiler_computes_is_no_statement() -> None:
    text = (
        "struct A {\n  static constexpr Config kOther = [] {\n    Config c = kConfig;\n"
        "    return c;\n"
        "  }();\n  int f() { return [] { return 3; }(); }\n};\n"
    )
    assert [s.text for s in statements(text)] == ["return []", "return 3"]


def test_exceptions_are_statements_with_a_reason() -> None:
    assert check() == []
    assert all(why for why in read_exceptions().values())
