# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Compiles configurations of the Hopper kernels with NVRTC, as the library does at run time.

    python compile.py forward_configs.json OUT [NAME ...]   -> OUT/<name>.cubin, OUT/report.txt

Needs no GPU. Prints registers, spills and the compiler's complaints about serialised wgmma; exits
with 1 if there are any of the latter. NVRTC is found in the nvidia-cuda-nvrtc wheel, or by NVRTC=.
"""

import ctypes
import glob
import json
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


def kernel_source(name, kernel, config):
    """The generated entry: the configuration by field name and an extern "C" wrapper."""
    fields = "".join(f"  config.{key} = {value};\n" for key, value in config.items())
    return (
        f'#include "kernels/{kernel}_sm90.cuh"\n'
        "using namespace fulmen;\n"
        f"constexpr AttentionConfig make() {{\n  AttentionConfig config;\n{fields}"
        "  return config;\n}\n"
        "constexpr AttentionConfig kConfig = make();\n"
        'extern "C" __global__ void __launch_bounds__(kConfig.threads(), 1)\n'
        f"{name}(const __grid_constant__ ForwardArguments arguments) {{\n"
        f"  {kernel}_sm90<kConfig>(arguments);\n"
        "}\n"
    )


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


def main():
    configs_file, out, *chosen = sys.argv[1:]
    os.makedirs(out, exist_ok=True)
    with open(configs_file, encoding="utf-8") as file:
        configs = json.load(file)
    nvrtc, headers, bad = load_nvrtc(), read_sources(), False
    with open(os.path.join(out, "report.txt"), "w", encoding="utf-8") as report:
        for name, config in configs.items():
            if chosen and name not in chosen:
                continue
            cubin, log = compile_cubin(nvrtc, name, kernel_source(name, "forward", config), headers)
            report.write(f"==== {name}\n{log}\n")
            serialised = sorted({m.group(0) for m in SERIALISED.finditer(log)})
            used = re.findall(r"Used (\d+) registers", log)
            spills = re.findall(r"(\d+) bytes spill stores", log)
            bad = bad or cubin is None or bool(serialised)
            if cubin is None:
                print(f"{name}: does not compile\n{log[:3000]}")
                continue
            print(f"{name}: registers {used}, spilled bytes {spills} {' '.join(serialised)}")
            with open(os.path.join(out, name + ".cubin"), "wb") as file:
                file.write(cubin)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
