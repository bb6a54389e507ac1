# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""C and C++ in the README compile, without a warning, against the installed library, and run.

Python blocks are run by pytest-markdown-docs (`make test`, step docs). Pages of the site quote
files and marked regions of them (tools/docs_tables.py), which are compiled as a whole.
"""

import subprocess
from pathlib import Path

import pytest
from markdown_pages import ROOT, Block, blocks, pages, without_generated

README = (ROOT / "README.md").read_text(encoding="utf-8")
STANDARD = {"c": ["gcc", "-x", "c", "-std=c11"], "cpp": ["g++", "-x", "c++", "-std=c++20"]}
WHOLE = [block for language in STANDARD for block in blocks(README, language)]


def test_the_readme_has_a_program_in_c_and_one_in_cpp() -> None:
    assert [block.language for block in WHOLE] == ["c", "cpp"]


@pytest.mark.parametrize("block", WHOLE, ids=[block.language for block in WHOLE])
def test_readme_programs_compile_and_run(block: Block, prefix: Path, tmp_path: Path) -> None:
    program = tmp_path / "program"
    flags = ["-Wall", "-Wextra", "-Wconversion", "-Werror", f"-I{prefix}/include"]
    libraries = [f"-L{prefix}/lib", f"-Wl,-rpath,{prefix}/lib", "-lfulmen", "-lm"]
    command = [*STANDARD[block.language], *flags, "-", "-x", "none", "-o", str(program), *libraries]
    subprocess.run(command, input=block.code, text=True, check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    assert done.stdout


def test_pages_quote_c_and_cpp_instead_of_copying_it() -> None:
    for page, whole in pages("en").items():
        text = without_generated(whole)
        for block in blocks(text, "c") + blocks(text, "cpp"):
            raise AssertionError(f"{page}: no test compiles this\n{block.code}")
