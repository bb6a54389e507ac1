# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen doctor: what works here, and what to do about the rest."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fulmen.options import implementations

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
)

Finding = tuple[str, str, str]  # what, "ok" "problem" or "", text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no arguments of its own."""


def main(arguments: argparse.Namespace, output: Output) -> int:
    """The command."""
    findings = [*python_findings(), *library_findings(), *device_findings()]
    if all(state != "problem" for _, state, _ in findings):
        findings += [computed(name) for name in implementations("cpu")]
        if any(what == "gpu 0" for what, _, _ in findings):
            findings += gpu_computed(0)
    problems = [finding for finding in findings if finding[1] == "problem"]
    output.table(
        ("what", "state", "found"),
        findings,
        lambda row: {"problem": BAD, "ok": ACCEPTABLE}.get(row[1], ""),
    )
    output.line()
    output.line("everything works" if not problems else f"{len(problems)} problems: see above")
    if output.as_json:
        keys = ("what", "state", "found")
        output.json({
            "healthy": not problems,
            "findings": [dict(zip(keys, finding)) for finding in findings],
        })  # fmt: skip
    return int(bool(problems))


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
    import fulmen

    try:
        info = fulmen.build_info()
    except fulmen.Error as error:
        return [("libfulmen", "problem", str(error))]
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
    findings += [(n, "", os.environ[n]) for n in VARIABLES if n in os.environ]
    return findings


def device_findings() -> list[Finding]:
    """Driver, GPUs, the compiler of their kernels, and its cache. A machine without is healthy."""
    import fulmen

    try:
        info = fulmen.gpu_info()
    except fulmen.LibraryNotFound:  # said with the library
        return []
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
        text = f"{info['nvrtc']['version']} {info['nvrtc']['path']}, for sm_{archs[0]} to "
        findings.append(("nvrtc", "ok", f"{text}sm_{archs[-1]}" if archs else text))
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


def gpu_computed(index: int) -> list[Finding]:
    """The same check on a GPU, through the first arrays that work there."""
    from fulmen.lab.cases import Case, run_case
    from fulmen.lab.cases.gpu_arrays import available, owner

    findings: list[Finding] = []
    for arrays in available():
        try:
            owner(arrays)
        except Exception as error:  # a build without CUDA fails in its own way
            text = (str(error).strip().splitlines() or [type(error).__name__])[0]
            findings.append((f"gpu {index} {arrays}", "", f"cannot make arrays there: {text}"))
            continue
        case = Case("doctor", heads=2, q_rows=64, dim=64, causal=True, dtype="float16")
        for name in (*implementations("cuda"), "auto"):
            outcome = run_case(case, "cuda", name, arrays)
            state = {"passed": "ok", "failed": "problem"}.get(outcome.status, "")
            findings.append((f"gpu {index} {name}", state, f"{arrays}: {outcome.message}"))
        return findings
    return [*findings, (f"gpu {index}", "", "not tried: no torch, cupy or jax that works there")]


def computed(implementation: str) -> Finding:
    """A 64 x 64 forward and backward pass against float64."""
    import numpy as np

    import fulmen
    from fulmen.lab.cases.error_rule import consult, judge
    from fulmen.lab.cases.visible import Options, Problem

    rng = np.random.default_rng(0)
    q, k, v, do = rng.standard_normal((4, 1, 2, 64, 64), dtype=np.float32)
    options: Any = {"causal": True, "implementation": implementation}
    try:
        forward = fulmen.attention_forward(q, k, v, **options)
        back = fulmen.attention_backward(do, q, k, v, forward.o, forward.stats, **options)
    except fulmen.Error as error:
        return (implementation, "problem", f"{type(error).__name__}: {error}")
    oracle = consult(Problem(q, k, v, Options(causal=True), do=do), "float32")
    got = {"o": forward.o, "lse": forward.lse, "dq": back.dq, "dk": back.dk, "dv": back.dv}
    for name, x in got.items():
        verdict = judge(name, x, oracle)
        if not verdict.passed:
            advice = "please report it with the output of fulmen doctor --json"
            return (implementation, "problem", f"{name}: {verdict.message}; {advice}")
    largest = float(np.abs(forward.o - oracle.reference.o).max())
    return (implementation, "ok", f"64 x 64 forward and backward, error of o {largest:.1e}")
