# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The recipe of getting-started for a program in C++: a project that finds the package builds."""

import subprocess
from pathlib import Path

import pytest
from markdown_pages import blocks, pages

HEAD = """cmake_minimum_required(VERSION 3.24)
project(consumer LANGUAGES {languages})
add_executable(your_program {source})
"""
PAGE = pages("en")["getting-started.md"]


@pytest.mark.parametrize(("language", "languages"), [("cpp", "CXX"), ("cpp", "C CXX"), ("c", "C")])
def test_a_program_finds_the_package(
    language: str, languages: str, prefix: Path, tmp_path: Path
) -> None:
    source = tmp_path / f"program.{language}"
    source.write_text(blocks(PAGE, language)[0].code, encoding="utf-8")
    recipe = blocks(PAGE, "cmake")[0]
    lists = HEAD.format(languages=languages, source=source.name) + recipe.code
    (tmp_path / "CMakeLists.txt").write_text(lists, encoding="utf-8")
    build = tmp_path / "build"
    subprocess.run(
        ["cmake", "-S", tmp_path, "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}"], check=True
    )
    subprocess.run(["cmake", "--build", build], check=True)
    done = subprocess.run([build / "your_program"], capture_output=True, text=True, check=True)
    assert "o[0][0][0]" in done.stdout
