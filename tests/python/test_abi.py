# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Our declarations of foreign ABIs agree with the headers of the package that is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
#include <cstddef>
#include "tvm/ffi/c_api.h"
#include "ffi/abi.h"

namespace own = fulmen::ffi;
static_assert(sizeof(own::TVMFFIAny) == sizeof(TVMFFIAny));
static_assert(offsetof(own::TVMFFIAny, v_int64) == offsetof(TVMFFIAny, v_int64));
static_assert(own::kTVMFFIObjectBytes == sizeof(TVMFFIObject));
static_assert(sizeof(own::TVMFFIByteArray) == sizeof(TVMFFIByteArray));
static_assert(offsetof(own::TVMFFIByteArray, data) == offsetof(TVMFFIByteArray, data));
static_assert(offsetof(own::TVMFFIByteArray, size) == offsetof(TVMFFIByteArray, size));
static_assert(own::kTVMFFINone == kTVMFFINone && own::kTVMFFIInt == kTVMFFIInt);
static_assert(own::kTVMFFIBool == kTVMFFIBool && own::kTVMFFIFloat == kTVMFFIFloat);
static_assert(own::kTVMFFIDLTensorPtr == kTVMFFIDLTensorPtr);
static_assert(own::kTVMFFITensor == kTVMFFITensor);

static_assert(sizeof(own::DLTensor) == sizeof(DLTensor));
static_assert(offsetof(own::DLTensor, device) == offsetof(DLTensor, device));
static_assert(offsetof(own::DLTensor, ndim) == offsetof(DLTensor, ndim));
static_assert(offsetof(own::DLTensor, dtype) == offsetof(DLTensor, dtype));
static_assert(offsetof(own::DLTensor, shape) == offsetof(DLTensor, shape));
static_assert(offsetof(own::DLTensor, strides) == offsetof(DLTensor, strides));
static_assert(offsetof(own::DLTensor, byte_offset) == offsetof(DLTensor, byte_offset));
static_assert(offsetof(own::DLDataType, bits) == offsetof(DLDataType, bits));
static_assert(offsetof(own::DLDataType, lanes) == offsetof(DLDataType, lanes));
static_assert(int(own::kDLCPU) == int(kDLCPU) && int(own::kDLCUDAHost) == int(kDLCUDAHost));
static_assert(int(own::kDLCUDA) == int(kDLCUDA));
static_assert(int(own::kDLCUDAManaged) == int(kDLCUDAManaged));
static_assert(int(own::kDLInt) == int(kDLInt) && int(own::kDLUInt) == int(kDLUInt));
static_assert(int(own::kDLFloat) == int(kDLFloat) && int(own::kDLBfloat) == int(kDLBfloat));
static_assert(int(own::kDLBool) == int(kDLBool));
"""


def compile_program(text: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    libinfo = pytest.importorskip("tvm_ffi.libinfo")
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "abi.cpp"
    source.write_text(text)
    folders = [libinfo.find_include_path(), libinfo.find_dlpack_include_path(), str(ROOT / "src")]
    command = [compiler, "-std=c++20", "-fsyntax-only", *(f"-I{x}" for x in folders), str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_declarations_agree_with_the_installed_headers(tmp_path: Path) -> None:
    done = compile_program(PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    wrong = PROGRAM + "static_assert(own::kTVMFFIInt == kTVMFFIBool);\n"
    assert compile_program(wrong, tmp_path).returncode != 0
