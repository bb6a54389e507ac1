# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The table of environment variables names those that the sources read, no more and no fewer."""

import re

from markdown_pages import ROOT, pages

_READ = re.compile(r"""(?:getenv|environ\w*(?:\.get)?)[(\[]\s*["'](FULMEN_\w+)["']""")


def variables_read() -> set[str]:
    sources = [*(ROOT / "src").rglob("*.cpp"), *(ROOT / "python").rglob("*.py")]
    cmake = "".join(path.read_text() for path in [ROOT / "CMakeLists.txt", *ROOT.glob("cmake/*")])
    if not re.search(r"include\(\S*cuda\.cmake", cmake):  # written, but not a part of the library
        sources = [path for path in sources if "cuda" not in path.parts]
    return {name for path in sources for name in _READ.findall(path.read_text(encoding="utf-8"))}


def test_the_table_is_what_the_sources_read() -> None:
    assert variables_read() >= {"FULMEN_NUM_THREADS", "FULMEN_LIBRARY"}
    for language in ("en", "zh"):
        page = pages(language)["reference/environment.md"]
        rows = re.findall(r"^\| `(FULMEN_\w+)` \|", page, re.M)
        assert sorted(rows) == sorted(variables_read())
