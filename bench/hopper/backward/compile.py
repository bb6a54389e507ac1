# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the Hopper backward kernels with NVRTC, as the library does at run time.

    python compile.py OUT [NAME ...]   -> OUT/<name>.cubin, OUT/report.txt

Needs no GPU. Prints registers, spills and the compiler's complaints about serialised wgmma; exits
with 1 if there are any of the latter. NVRTC is found as ../compile.py says.
"""

import importlib.util
import itertools
import os
import re
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_SPEC = importlib.util.spec_from_file_location(
    "hopper_compile", os.path.join(_HERE, "../compile.py")
)
hopper_compile = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(hopper_compile)

MASKS = {"full": "MaskKind::kLength", "causal": "MaskKind::kUpper", "window": "MaskKind::kBoth"}
DQ_TILES = {64: 128, 128: 64, 192: 64, 256: 48}  # dims: keys of a block
WIDE = {
    "": {"register_dims": 128, "take_turns": "false"},
    "_dk": {"dv": "false"},
    "_dv": {"dk": "false"},
}


def configs():
    """{name: (function, kind of config and params, config fields)}: what plans choose in bf16."""
    found = {}
    options = {"": {}, "_stats": {"has_stats": "true"}, "_sequences": {"sequences": "true"}}
    wanted = {"": {}, "_dq": {"dk": "false", "dv": "false"}, "_dkdv": {"dq": "false"}}
    for dims in (64, 128):
        for suffix, option in options.items():
            fields = {"dims": dims, **option}
            found[f"prepare_d{dims}{suffix}"] = ("backward_prepare_sm90", "BackwardPrepare", fields)
            for mask, kind in MASKS.items():
                tile = {"q_rows": 128 if dims == 64 else 64, "mask": kind}
                for part, gradients in wanted.items():
                    name = f"backward_d{dims}_{mask}{suffix}{part}"
                    found[name] = ("backward_sm90", "Backward", {**fields, **tile, **gradients})
    for suffix, option in options.items():
        for mask, kind in MASKS.items():
            for dims, (part, wanted) in itertools.product((192, 256), WIDE.items()):
                fields = {"dims": dims, "mask": kind, "dq": "false", **wanted, **option}
                found[f"backward_d{dims}_{mask}{suffix}{part}"] = (
                    "backward_sm90", "Backward", fields
                )  # fmt: skip
    every = {"signed_scale": "true", "softcap": "true", "alibi": "true", "pair_mask": "true",
             "bias": "DType::kFloat32", "documents": "true", "dropout": "true"}  # fmt: skip
    for name, option in every.items():
        found[f"backward_d128_{name}"] = (
            "backward_sm90", "Backward", {"dq": "false", name: option}
        )  # fmt: skip
    return found


def dq_configs():
    """The same of backward_dq_sm90."""
    found = {}
    options = {"": {}, "_stats": {"stats": "true"}, "_sequences": {"sequences": "true"}}
    for dims, kv_rows in DQ_TILES.items():
        for suffix, option in options.items():
            for mask, kind in MASKS.items():
                fields = {"d_qk": dims, "d_v": dims, "kv_rows": kv_rows, "q_slots": 4,
                          "mask": kind, "shift_rule": "ShiftRule::kWhenGrown",
                          "stage_output": "false", "ping_pong": str(dims == 64).lower(),
                          **option}  # fmt: skip
                found[f"backward_dq_d{dims}_{mask}{suffix}"] = (
                    "backward_dq_sm90", "Attention", fields
                )  # fmt: skip
    return found


def entry(name, function, kind, fields):
    lines = "".join(f"  config.{key} = {value};\n" for key, value in fields.items())
    min_blocks = 4 if function == "backward_prepare_sm90" else 1
    params = ("BackwardDq" if function == "backward_dq_sm90" else kind) + "Params"
    return (
        f'#include "kernels/{function}.cuh"\n'
        "using namespace fulmen;\n"
        f"constexpr {kind}Config make() {{\n  {kind}Config config;\n{lines}  return config;\n}}\n"
        f"constexpr {kind}Config kConfig = make();\n"
        f'extern "C" __global__ void __launch_bounds__(kConfig.threads(), {min_blocks})\n'
        f"{name}(const __grid_constant__ {params} params) {{ {function}<kConfig>(params); }}\n"
    )


def main():
    out, *chosen = sys.argv[1:]
    os.makedirs(out, exist_ok=True)
    nvrtc, headers, bad = hopper_compile.load_nvrtc(), hopper_compile.read_sources(), False
    with open(os.path.join(out, "report.txt"), "w", encoding="utf-8") as report:
        for name, config in {**configs(), **dq_configs()}.items():
            if chosen and name not in chosen:
                continue
            cubin, log = hopper_compile.compile_cubin(nvrtc, name, entry(name, *config), headers)
            report.write(f"==== {name}\n{log}\n")
            serialised = sorted({m.group(0) for m in hopper_compile.SERIALISED.finditer(log)})
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
