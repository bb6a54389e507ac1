# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the text of Hopper kernels with NVRTC, as the library does at run time.

Called by backward/compile.py. NVRTC is found in the nvidia-cuda-nvrtc wheel, or by NVRTC=.
"""

import ctypes
import glob
import os
import re
import sys

SOURCE_ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "src")
SERIALISED = re.compile(r"C75(08|1[0-57])")


def load_nvrtc():
    folders = [os.path.join(p, "nvidia", "*", "lib") for p in sys.path]
    candidates = [os.environ["NVRTC"]] if "NVRTC" in os.environ else []
    for folder in folders:
        candidates += glob.glob(os.path.join(folder, "libnvrtc.so.*"))
    for path in candidates:
        for builtins in glob.glob(os.path.join(os.path.dirname(path), "libnvrtc-builtins.so.*")):
            ctypes.CDLL(builtins)
        return ctypes.CDLL(path)
    raise SystemExit("no libnvrtc found: pip install nvidia-cuda-nvrtc, or set NVRTC")


def read_sources():
    """All device text by the name under which it includes itself."""
    sources = {}
    for folder, _, files in os.walk(os.path.join(SOURCE_ROOT, "kernels")):
        for file in files:
            path = os.path.join(folder, file)
            with open(path, encoding="utf-8") as text:
                sources[os.path.relpath(path, SOURCE_ROOT)] = text.read()
    return sources


def compile_cubin(nvrtc, name, source, headers):
    program = ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*[t.encode() for t in headers.values()])
    names = (ctypes.c_char_p * len(headers))(*[n.encode() for n in headers])
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names
    )
    options = [
        b"--gpu-architecture=sm_90a",
        b"--std=c++20",
        b"--device-as-default-execution-space",
        b"--ptxas-options=-v",
    ]
    result = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    log = log.value.decode()
    if result:
        return None, log
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    return cubin.raw, log
