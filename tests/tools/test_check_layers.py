# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""check_layers sees each kind of violation, at its line, and accepts what is allowed."""

import pytest
from small_tree import ROOT, WriteTree

import check_layers

# One file of every layer, each including what it may.
ALLOWED = {
    "include/fulmen/fulmen.h": "#include <stddef.h>\n#include <stdint.h>\n",
    "include/fulmen/fulmen.hpp": "#include <span>\n#include <fulmen/fulmen.h>\n",
    "src/kernels/base.cuh": "#pragma once\n",
    "src/kernels/forward_sm90/config.h": '#include "kernels/base.cuh"\n',
    "src/kernels/attention/mask.cuh": '#include "kernels/base.cuh"\n',
    "src/kernels/ptx/mma.cuh": '#include "kernels/base.cuh"\n',
    "src/kernels/forward.cuh": '#include "kernels/ptx/mma.cuh"\n',
    "src/core/problem.h": '#include <vector>\n#include "kernels/attention/mask.cuh"\n',
    "src/plan/plan.h": '#include "core/problem.h"\n',
    "src/cpu/tiled.cpp": (
        '#include <thread>\n#include "plan/plan.h"\n#include "kernels/forward_sm90/config.h"\n'
    ),
    "src/gpu/driver/driver.h": "#include <dlfcn.h>\nCUresult cuInit(unsigned flags);\n",
    "src/gpu/jit/source.cpp": '#include "kernels/forward.cuh"\n#include "gpu/driver/driver.h"\n',
    "src/emulator/ptx.h": '#include "kernels/forward.cuh"\n',
    "src/api/api.cpp": '#include "cpu/tiled.cpp"\n#include "fulmen/fulmen.h"\n',
    "src/ffi/export.cpp": '#include "fulmen/fulmen.h"\n// cuInit, printf("x"), exit(1): words\n',
    "examples/first.c": '#include <stdio.h>\n#include <fulmen/fulmen.h>\nint x = printf("");\n',
    "python/fulmen/__init__.py": "from . import _library\n",
    "python/fulmen/_library.py": "import ctypes\n",
    "python/fulmen/__main__.py": "from fulmen.cli import main\n",
    "python/fulmen/cli/__init__.py": "import fulmen\nfrom fulmen import lab, masks\n",
    "python/fulmen/lab/cases/run.py": "import fulmen\nfrom fulmen.lab import naive\n",
    "python/fulmen/cli/run.py": "from __future__ import annotations\nfrom . import _table\n",
}


def test_what_the_architecture_allows_passes(write_tree: WriteTree) -> None:
    assert check_layers.check(write_tree(ALLOWED)) == []


def test_this_project_passes() -> None:
    assert [str(finding) for finding in check_layers.check(ROOT)] == []


VIOLATIONS = {
    "law sees core": (
        "src/kernels/forward_sm90/config.h",
        '#include "core/problem.h"',
        "law includes",
    ),
    "law sees device": (
        "src/kernels/attention/mask.cuh",
        '#include "kernels/forward.cuh"',
        "law includes",
    ),
    "law sees the standard library": ("src/kernels/base.cuh", "#include <cstdint>", "device text"),
    "device sees core": ("src/kernels/forward.cuh", '#include "core/problem.h"', "device includes"),
    "core sees plan": ("src/core/problem.h", '#include "plan/plan.h"', "core includes"),
    "core does input and output": ("src/core/problem.h", "#include <fstream>", "no input"),
    "plan sees cpu": ("src/plan/plan.h", '#include "cpu/tiled.cpp"', "plan includes"),
    "plan sees a clock": ("src/plan/plan.h", "#include <chrono>", "no input"),
    "plan sees the environment": ("src/plan/plan.h", "#include <cstdlib>", "no input"),
    "cpu sees device": ("src/cpu/tiled.cpp", '#include "kernels/forward.cuh"', "cpu includes"),
    "cpu sees gpu": ("src/cpu/tiled.cpp", '#include "gpu/driver/driver.h"', "cpu includes"),
    "cpu sees api": ("src/cpu/tiled.cpp", '#include "api/api.cpp"', "cpu includes"),
    "cpu sees the C header": ("src/cpu/tiled.cpp", '#include "fulmen/fulmen.h"', "cpu includes"),
    "api sees device": ("src/api/api.cpp", '#include "kernels/forward.cuh"', "api includes"),
    "ffi sees core": ("src/ffi/export.cpp", '#include "core/problem.h"', "ffi includes"),
    "example sees core": ("examples/first.c", '#include "core/problem.h"', "examples includes"),
    "C header sees the veneer": (
        "include/fulmen/fulmen.h",
        '#include "fulmen/fulmen.hpp"',
        "nothing of the project",
    ),
    "public header sees the system": (
        "include/fulmen/fulmen.hpp",
        "#include <dlfcn.h>",
        "only the standard library",
    ),
    "public header sees core": (
        "include/fulmen/fulmen.hpp",
        '#include "core/problem.h"',
        "public includes",
    ),
    "relative include": ("src/cpu/tiled.cpp", '#include "../core/problem.h"', "root-relative"),
    "include by bare name": ("src/core/problem.h", '#include "problem.h"', "root-relative"),
    "include of nothing": ("src/core/problem.h", '#include "core/absent.h"', "root-relative"),
    "indented include": ("src/core/problem.h", '  #  include "plan/plan.h"', "core includes"),
    "cpu names the driver": ("src/cpu/tiled.cpp", "CUresult r = cuInit(0);", "CUresult outside"),
    "api names NVRTC": ("src/api/api.cpp", "nvrtcProgram p;", "nvrtcProgram outside"),
    "core prints": ("src/core/problem.h", 'std::cout << "x";', "never prints"),
    "cpu prints": ("src/cpu/tiled.cpp", 'printf("x");', "never prints"),
    "cpu exits": ("src/cpu/tiled.cpp", "std::exit(1);", "never prints or exits"),
    "unknown layer": ("src/common/helpers.h", "", "not a layer"),
    "command line sees a private module": (
        "python/fulmen/cli/run.py",
        "from fulmen import _library",
        "not public",
    ),
    "command line sees it relatively": (
        "python/fulmen/cli/run.py",
        "from .. import _library",
        "not public",
    ),
    "command line imports it by name": (
        "python/fulmen/cli/run.py",
        "import fulmen._library",
        "not public",
    ),
    "package sees the command line": (
        "python/fulmen/masks.py",
        "from .cli import run",
        "stands on top",
    ),
    "lab sees the command line": (
        "python/fulmen/lab/cases/run.py",
        "from ...cli import run",
        "stands on top",
    ),
    "package sees the lab": (
        "python/fulmen/masks.py",
        "from .lab.cases import oracle",
        "only the command line sees the lab",
    ),
    "package sees the lab by name": (
        "python/fulmen/masks.py",
        "import fulmen.lab",
        "only the command line sees the lab",
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_each_violation_is_seen(name: str, write_tree: WriteTree) -> None:
    path, line, said = VIOLATIONS[name]
    before = ALLOWED.get(path, "")
    found = check_layers.check(write_tree({**ALLOWED, path: before + line + "\n"}))
    assert found, f"{line} in {path} passed"
    assert {finding.path for finding in found} == {path}
    assert said in found[0].sentence
    assert found[0].line in (0, before.count("\n") + 1)
