# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Each measure counts what it says, in small trees: where one is kept and where one is broken."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_tree import ROOT, WriteTree

import code_blocks
import measures
import private_words
import product_code
from count_option import files_naming

ARRAYS = ", ".join(measures.INPUT_ARRAYS)


def test_every_measure_has_a_limit() -> None:
    assert set(measures.limits(ROOT)) == set(measures.MEASURES)
    for name, (before, limit, goal) in measures.limits(ROOT).items():
        assert before > goal or limit == goal, name
        assert limit >= goal, name


def test_a_measure_above_its_limit_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measures, "MEASURES", {"stones": lambda root: ["a", "b"]})
    monkeypatch.setattr(measures, "limits", lambda root: {"stones": (9, 2, 0)})
    monkeypatch.setattr("sys.argv", ["measures.py"])
    assert measures.main() == 0
    monkeypatch.setattr(measures, "limits", lambda root: {"stones": (9, 1, 0)})
    assert measures.main() == 1
    assert "too many" in capsys.readouterr().out


def test_comments_and_docstrings_are_not_code() -> None:
    cpp = 'int a; // softcap\n/* softcap\n softcap */ const char* b = "softcap // x";\n'
    assert product_code.cpp_code(cpp).count("softcap") == 1
    assert product_code.cpp_code(cpp).count("\n") == 3
    python = (
        '"""softcap"""\ndef f():\n    """softcap\n    softcap"""\n    g("softcap")  # softcap\n'
    )
    assert product_code.python_code(python).count("softcap") == 1
    assert product_code.python_code(python).count("\n") == 5


@pytest.mark.parametrize("line", ["softcap = 1", "int kSoftcapOut;", "FULMEN_SOFTCAP", '"softcap"'])
def test_an_option_is_found_by_its_words(write_tree: WriteTree, line: str) -> None:
    root = write_tree({"src/core/a.h": line + "\n", "src/core/b.h": "// softcap\nint softcaps;\n",
                       "tests/a.cpp": line})  # fmt: skip
    assert [source.name for source in files_naming(root, "softcap")] == ["src/core/a.h"]


def test_another_sense_of_a_name_is_left_out(write_tree: WriteTree) -> None:
    root = write_tree({"src/gpu/jit/a.cpp": "int prefix;\n", "src/core/a.h": "int prefix;\n"})
    assert len(files_naming(root, "prefix")) == 1


def test_lists_of_arrays_and_bare_indices(write_tree: WriteTree) -> None:
    root = write_tree({
        "python/fulmen/a.py": f"NAMES = [{ARRAYS}]\nx = arrays[9] + arrays[1]\ny = inputs[:7]\n",
        "python/fulmen/b.py": "q, k, v = arrays[:3]\nRESULTS = range(14, 17)\n",
        "python/fulmen/lab/c.py": f"NAMES = [{ARRAYS}]\nx = arrays[9]\n",
        "src/ffi/d.cpp": "constexpr size_t kSeed = 9;\n",
    })  # fmt: skip
    assert measures.array_files(root) == ["python/fulmen/a.py"]
    assert measures.array_literals(root) == [
        "python/fulmen/a.py:2", "python/fulmen/a.py:3", "python/fulmen/b.py:2", "src/ffi/d.cpp:1",
    ]  # fmt: skip


def test_implementations_and_dtypes(write_tree: WriteTree) -> None:
    root = write_tree({
        "src/gpu/a.cpp": "{kNaive, kSimt, kSm80}\n"
                         "{kFloat64, kFloat32, kFloat16, kBFloat16, kBool}\n",
        "src/gpu/b.cpp": "{kSm90, kSm80}\n{kFloat64, kFloat32, kBFloat16, kBool}\n",
    })  # fmt: skip
    assert measures.implementation_files(root) == ["src/gpu/a.cpp"]
    assert measures.dtype_tables(root) == ["src/gpu/a.cpp"]


def test_listings_of_options(write_tree: WriteTree) -> None:
    bare = ",\n".join(measures.OPTIONS)
    named = "\n".join(f"int {name} = 0;" for name in measures.OPTIONS)
    root = write_tree({"src/core/a.h": named, "python/fulmen/b.py": f"f({bare})\n",
                       "src/core/c.h": "f(scale, softcap, causal)\n"})  # fmt: skip
    assert sorted(measures.option_listings(root)) == [
        ("python/fulmen/b.py:1", True), ("src/core/a.h:1", False),
    ]  # fmt: skip


def test_headers_with_one_user(write_tree: WriteTree) -> None:
    root = write_tree({
        "src/core/a.h": "", "src/core/b.h": "",
        "src/core/a.cpp": '#include "core/a.h"\n#include "core/b.h"\n',
        "src/core/b.cpp": '#include "core/b.h"\n#include "core/a.h"\n',
        "src/core/c.cpp": '#include "core/b.h"\n',
    })  # fmt: skip
    assert measures.lonely_headers(root) == ["src/core/a.h"]


FUNCTION = """namespace n {
struct S {
  int x = [] { return 1; }();
  int f() const {
    for (int i = 0; i < 3; ++i) {
      g("}");
    }
    return 0;
  }
};
template <class T>
int g(T t,
      int u) {  // }
  return [&] { return t; }();
}
}  // namespace n
"""


def test_functions_and_loops_are_measured() -> None:
    blocks = code_blocks.blocks_of(product_code.Source("src/a.cpp", FUNCTION))
    assert [(b.first, b.lines, b.is_loop) for b in blocks] == [
        (5, 3, True), (4, 6, False), (11, 5, False),
    ]  # fmt: skip


def test_private_words(write_tree: WriteTree, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = (
        write_tree({"words.txt": "# a comment\nmail mails: work tile\nunits!: vectors\n"})
        / "words.txt"
    )
    monkeypatch.setattr(private_words, "LIST", listed)
    root = write_tree({"src/a.h": "int mail_bytes;\nint kMails;  // no email\n// Mail\nmailing\n"})
    findings = private_words.check(root)
    assert [finding.line for finding in findings] == [1, 2, 3]
    others = write_tree({"src/a.h": "int pair_units;  // units\n"})
    assert len(private_words.check(others)) == 1
    assert findings[0].sentence == "'mail' in mail_bytes: say work tile"


def test_words_of_few_meanings(write_tree: WriteTree, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "turn turned = transpose: turn_pairs\nplace = where: TilePlace\nplace = put: place_row\n"
    listed = write_tree({"words.txt": rows}) / "words.txt"
    monkeypatch.setattr(private_words, "LIST", listed)
    root = write_tree({"src/a.h": "void turn_pairs(TilePlace);\nint turned_x, turns;\n"})
    assert [str(finding.sentence) for finding in private_words.check(root)] == [
        "'turned' in turned_x: not one of its names",
    ]  # fmt: skip
    listed.write_text(rows + "turn = a round: take_turn\n", encoding="utf-8")
    assert "'turn' has 2 meanings; it may have 1" in [
        finding.sentence for finding in private_words.check(write_tree({"src/a.h": ""}))
    ]


def test_a_call_path_names_files_that_exist(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "call_path.txt").write_text("# all\nwarm,first a.h\nfirst b.h\n")
    (tmp_path / "a.h").touch()
    assert measures.call_files("warm")(tmp_path) == ["a.h"]
    with pytest.raises(SystemExit, match=r"names b\.h"):
        measures.call_files("first")(tmp_path)
