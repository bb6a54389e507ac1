# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What a record says of where it was made: card or processor, clock, versions."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import fulmen

PACKAGES = (
    *("torch", "triton", "flash-attn-3", "flash-attn-4", "flash-attn", "flashinfer-python"),
    *("xformers", "onnxruntime", "numpy"),
)


def processor() -> str:
    """The processor's name, as the operating system gives it; with family and model where it tells
    them, since virtual machines call very different processors alike.
    """
    info = Path("/proc/cpuinfo")
    if info.is_file():
        first = info.read_text(errors="replace").split("\n\n")[0]
        lines = (line.partition(":") for line in first.splitlines())
        told = {key.strip(): value.strip() for key, _, value in lines}
        if {"model name", "cpu family", "model"} <= told.keys():
            return "{model name} family {cpu family} model {model}".format_map(told)
    return platform.processor() or platform.machine()


def card() -> str:
    """The name of the GPU that torch uses."""
    import torch

    return str(torch.cuda.get_device_name())


def clock_mhz() -> int | None:
    """The clock of the first GPU's multiprocessors now, where nvidia-smi tells it."""
    found = _smi("clocks.sm")
    return int(found) if found and found.isdigit() else None


def versions(backend: str) -> dict[str, Any]:
    """Everything that a figure may depend on."""
    info = fulmen.build_info()
    found: dict[str, Any] = {"fulmen": info["version"]}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if backend == "cpu":
        return {**found, "isa": info["isa"], "threads": info["threads"]}
    torch: Any = import_module("torch")
    gpu = fulmen.gpu_info()
    found["cudnn"] = torch.backends.cudnn.version()
    found["driver"] = _smi("driver_version") or (gpu["driver"] or {}).get("version")
    found["nvrtc"] = (gpu["nvrtc"] or {}).get("version")
    return found


def _smi(field: str) -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, f"--query-gpu={field}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if lines else None
