# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Our declarations of XLA's foreign function interface agree with the header that jaxlib ships."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")
ROOT = Path(__file__).resolve().parents[2]

FIELDS = {
    "XlaExtension XLA_FFI_Extension_Base": "type next",
    "XlaMetadata XLA_FFI_Metadata": "version:api_version traits",
    "XlaMetadataExtension XLA_FFI_Metadata_Extension": "metadata",
    "XlaBuffer XLA_FFI_Buffer": "dtype data rank dims",
    "XlaBuffers XLA_FFI_Args": "size types items:args",
    "XlaBuffers XLA_FFI_Rets": "size types items:rets",
    "XlaText XLA_FFI_ByteSpan": "data:ptr size:len",
    "XlaArray XLA_FFI_Array": "dtype size data",
    "XlaAttributes XLA_FFI_Attrs": "size types names items:attrs",
    "XlaCallFrame XLA_FFI_CallFrame": "api context:ctx arguments:args results:rets "
    "attributes:attrs",
    "XlaErrorCreate XLA_FFI_Error_Create_Args": "message code:errc",
    "XlaStreamGet XLA_FFI_Stream_Get_Args": "context:ctx stream",
    "XlaDeviceOrdinalGet XLA_FFI_DeviceOrdinal_Get_Args": "context:ctx ordinal:device_ordinal",
    "XlaApi XLA_FFI_Api": "version:api_version error_create:XLA_FFI_Error_Create "
    "stream_get:XLA_FFI_Stream_Get device_ordinal_get:XLA_FFI_DeviceOrdinal_Get",
}
# jaxlib 0.11 calls it otherwise; XLA_FFI_Metadata_Extension, which begins with it, is looked at.
RENAMED = {"XLA_FFI_Extension_Base"}
NUMBERS = {
    "kXlaMetadata": "Extension_Metadata", "kXlaS64": "DataType_S64", "kXlaU32": "DataType_U32",
    "kXlaIsBuffer": "ArgType_BUFFER", "kXlaIsArray": "AttrType_ARRAY",
    "kXlaInvalidArgument": "Error_Code_INVALID_ARGUMENT",
    **{
        f"kDTypes[FULMEN_{ours} - 1].xla": f"DataType_{theirs}"
        for ours, theirs in (
            ("BOOL", "PRED"), ("INT32", "S32"), ("INT64", "S64"), ("FLOAT16", "F16"),
            ("FLOAT32", "F32"), ("FLOAT64", "F64"), ("BFLOAT16", "BF16"),
        )
    },
}  # fmt: skip


def test_declarations_agree_with_the_installed_header(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    lines = ['#include "xla/ffi/api/c_api.h"', '#include "ffi/arrays.h"',
             '#include "ffi/abi.h"', "namespace own = fulmen::ffi;"]  # fmt: skip
    header = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
    for kinds, fields in FIELDS.items():
        mine, theirs = kinds.split()
        if theirs in RENAMED and theirs not in header:
            continue
        for field in fields.split():
            name, _, other = field.partition(":")
            lines.append(
                f"static_assert(offsetof(own::{mine}, {name}) == "
                f"offsetof({theirs}, {other or name}));"
            )
    for mine, theirs in NUMBERS.items():
        lines.append(f"static_assert(int(own::{mine}) == int(XLA_FFI_{theirs}));")
    source = tmp_path / "abi.cpp"
    source.write_text("\n".join(lines) + "\n")
    folders = [f"-I{folder}" for folder in (jax.ffi.include_dir(), ROOT / "src", ROOT / "include")]
    command = [compiler, "-std=c++20", "-fsyntax-only", "-Wno-invalid-offsetof", *folders, source]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
