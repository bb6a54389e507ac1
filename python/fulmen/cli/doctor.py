# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen doctor: what works here, and what to do about the rest."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable

import fulmen
from fulmen.errors import Error
from fulmen.options import implementations

from .arguments import why_no_gpu
from .measure import Host
from .output import ACCEPTABLE, BAD, Output, bytes_text

DESCRIPTION = """\
Looks at the library, the packages that it needs, the processor, driver, GPUs, NVRTC and the cache
of kernels, computes a 64 x 64 forward and backward pass with each implementation, and says one line
of advice for each problem.
The exit code is 1 if something that should work does not.
"""
NEEDED = ("apache-tvm-ffi", "numpy", "ml_dtypes", "safetensors", "rich")
NEIGHBOURS = ("torch", "jax", "cupy", "transformers")
VARIABLES = (
    *("FULMEN_LIBRARY", "FULMEN_NUM_THREADS", "FULMEN_CPU_ISA"),
    *("FULMEN_NVRTC", "FULMEN_CACHE_DIR", "FULMEN_CACHE_LIMIT", "FULMEN_BUNDLE"),
    "FULMEN_LOG",
)

Finding = tuple[str, str, str]  # what, "ok" "problem" or "", text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no arguments of its own."""


def main(arguments: argparse.Namespace, output: Output) -> int:
    """The command."""
    library = outlived("libfulmen", library_findings)
    findings = [*outlived("python", python_findings), *library]
    findings += [(name, "", os.environ[name]) for name in VARIABLES if name in os.environ]
    gpu = "there is no libfulmen"
    if all(state != "problem" for what, state, _ in library if what == "libfulmen"):
        devices = outlived("gpu", device_findings)
        findings += devices
        for name in implementations("cpu"):
            findings += outlived(name, partial(computed, name, name, "float32", Host()))
        found, gpu = gpu_computed()
        findings += found
    problems = [finding for finding in findings if finding[1] == "problem"]
    styles = {"problem": BAD, "ok": ACCEPTABLE}
    widest = max(len(what) for what, _, _ in findings)
    for what, state, text in findings:
        output.wrapped(f"{what:<{widest}}  {state:<7}  ", text, styles.get(state, ""))
    output.line()
    output.wrapped("", _ending(len(problems), gpu))
    if output.as_json:
        keys = ("what", "state", "found")
        output.json({
            "healthy": not problems,
            "findings": [dict(zip(keys, finding)) for finding in findings],
        })  # fmt: skip
    return int(bool(problems))


def _ending(problems: int, gpu: str) -> str:
    if problems:
        return "1 problem: see above" if problems == 1 else f"{problems} problems: see above"
    if gpu:
        return f"everything works on the CPU; no GPU calls: {gpu}"
    return "everything works, on the CPU and on the GPU"


def outlived(what: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    """What is found; a setting that the library refuses is a finding too."""
    try:
        return look()
    except Exception as error:
        text = " ".join(str(error).split())
        named = text if isinstance(error, Error) else f"{type(error).__name__}: {text}"
        return [(what, "problem", named)]


def python_findings() -> list[Finding]:
    """The interpreter and the packages."""
    findings: list[Finding] = [("python", "ok", f"{platform.python_version()} {sys.executable}")]
    for name in NEEDED:
        try:
            findings.append((name, "ok", metadata.version(name)))
        except metadata.PackageNotFoundError:
            findings.append((name, "problem", f"missing: pip install {name}"))
    for name in NEIGHBOURS:
        if find_spec(name) is None:
            findings.append((name, "", "not installed; not needed"))
            continue
        try:
            findings.append((name, "ok", metadata.version(name)))
        except metadata.PackageNotFoundError:
            findings.append((name, "ok", "installed without a version"))
    return findings


def library_findings() -> list[Finding]:
    """The library and what it says of itself and the processor."""
    info = fulmen.build_info()
    size = Path(info["library"]).stat().st_size
    findings: list[Finding] = [
        ("libfulmen", "ok", f"{info['version']} {info['library']} ({size / 1e6:.2f} MB)"),
        ("build", "ok", f"{info['compiler']}, {info['build_type']}, commit {info['commit']}"),
        ("instructions", "ok", f"{info['isa']} of {', '.join(info['isas'])}"),
        ("threads", "ok", str(info["threads"])),
    ]
    if info["version"] != fulmen.__version__:
        findings[0] = (
            "libfulmen", "problem",
            f"{info['library']} is version {info['version']} and the package {fulmen.__version__}: "
            "pip install --force-reinstall fulmen, or unset FULMEN_LIBRARY",
        )  # fmt: skip
    return findings


def device_findings() -> list[Finding]:
    """Driver, GPUs, the compiler of their kernels, and its cache. A machine without is healthy."""
    info = fulmen.gpu_info()
    has_gpu = bool(info["devices"])
    findings: list[Finding] = []
    if info["driver"]:
        findings.append(("driver", "ok", f"{info['driver']['version']} {info['driver']['path']}"))
        if not has_gpu:
            findings.append(("gpu", "problem", info["driver_reason"] or "the driver sees no GPU"))
    else:
        seen = Path("/proc/driver/nvidia/version").is_file()
        findings.append(("driver", "problem" if seen else "", info["driver_reason"]))
    for gpu in info["devices"]:
        text = (
            f"{gpu['name']}, {gpu['arch']}, {gpu['multiprocessors']} multiprocessors, "
            f"{bytes_text(gpu['memory_bytes'])}"
        )
        findings.append((f"gpu {gpu['index']}", "ok", text))
    if info["nvrtc"]:
        archs = [number for number in info["nvrtc"]["archs"] if number >= 75]
        text = f"{info['nvrtc']['version']} {info['nvrtc']['path']}"
        text += f", for sm_{archs[0]} to sm_{archs[-1]}" if archs else ", for no GPU of today"
        findings.append(("nvrtc", "ok", text))
    else:
        needed = has_gpu and not info["bundle"]
        findings.append(("nvrtc", "problem" if needed else "", info["nvrtc_reason"]))
    return findings + _kernel_findings(info)


def _kernel_findings(info: dict[str, Any]) -> list[Finding]:
    """Where compiled kernels come from and go to."""
    cache = info["cache"]
    text = (
        f"{cache['folder']}: {cache['entries']} kernels, {bytes_text(cache['bytes'])} of "
        f"{bytes_text(cache['limit_bytes'])}"
    )
    note = f"; {cache['note']}" if cache["note"] else ""
    findings: list[Finding] = [("cache", "ok" if not note else "", text + note)]
    if info["bundle"]:
        bundle = info["bundle"]
        findings.append(("bundle", "ok", f"{bundle['path']}: {bundle['kernels']} kernels"))
    return findings


def gpu_computed() -> tuple[list[Finding], str]:
    """The same check on the first GPU, and why it was not made; "" where it was."""
    try:
        reason = why_no_gpu(fulmen.gpu_info())
        if reason:
            return [], reason
        from fulmen.lab.gpu_memory import memory

        place = memory()
    except Error as error:
        return [("gpu 0", "problem", f"{type(error).__name__}: {error}")], str(error)
    findings = []
    for name in (*implementations("cuda"), "auto"):
        what = f"gpu 0 {name}"
        findings += outlived(what, partial(computed, what, name, "float16", place))
    return findings, ""


def computed(what: str, implementation: str, dtype: str, place: Any) -> list[Finding]:
    """A 64 x 64 forward and backward pass at a place against float64."""
    import numpy as np

    from fulmen.lab.cases.error_rule import consult, judge
    from fulmen.lab.cases.visible import Options, Problem

    rng = np.random.default_rng(0)
    drawn = rng.standard_normal((4, 1, 2, 64, 64)).astype(dtype)
    options: Any = {"causal": True, "implementation": implementation}
    q, k, v, do = (place.put(x) for x in drawn)
    try:
        forward = fulmen.attention_forward(q, k, v, **options)
        back = fulmen.attention_backward(do, q, k, v, forward.o, forward.stats, **options)
    except fulmen.UnsupportedError as error:  # an implementation for another card
        return [(what, "", str(error))]
    oracle = consult(
        Problem(drawn[0], drawn[1], drawn[2], Options(causal=True), do=drawn[3]), dtype
    )
    arrays = {"o": forward.o, "lse": forward.lse, "dq": back.dq, "dk": back.dk, "dv": back.dv}
    got = {name: place.get(x) for name, x in arrays.items()}
    for name, x in got.items():
        verdict = judge(name, x, oracle)
        if not verdict.passed:
            advice = "please report it with the output of fulmen doctor --json"
            return [(what, "problem", f"{name}: {verdict.message}; {advice}")]
    largest = float(np.abs(got["o"] - oracle.reference.o).max())
    return [(what, "ok", f"64 x 64 forward and backward, error of o {largest:.1e}")]
