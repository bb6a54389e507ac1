# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Who may include whom, read from the real #includes and imports.

    kernels/{base.cuh, config.h, params.h, score_options.h, attention/*}
        <- core <- plan <- {cpu, gpu, emulator} <- api
    include/fulmen is a leaf that core, gpu, api and ffi see; ffi sees nothing else
    the rest of kernels/ is seen by gpu (which embeds it) and by the emulator
    only gpu names CU* and nvrtc*; plan is pure; the command line sees the public package alone, and
    it alone sees fulmen.lab

docs/en/contributing/architecture.md gives the reasons. Run by `make check`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from source_tree import Finding, files, relative, report

CPP_SUFFIXES = (".h", ".hpp", ".cuh", ".cpp", ".cu", ".c")

# Each layer and the layers whose files it may include, its own always among them.
MAY_INCLUDE = {
    "public": {"public"},
    "law": {"law"},
    "device": {"device", "law"},
    "core": {"core", "law", "public"},
    "plan": {"plan", "core", "law"},
    "cpu": {"cpu", "plan", "core", "law"},
    "gpu": {"gpu", "device", "plan", "core", "law", "public"},
    "emulator": {"emulator", "device", "plan", "core", "law"},
    "api": {"api", "public", "cpu", "gpu", "plan", "core", "law"},
    "ffi": {"ffi", "public"},
    "examples": {"examples", "public"},
}

# Headers of the C and C++ standard libraries have no folder and no suffix, or are these.
C_HEADERS = {"assert.h", "math.h", "stddef.h", "stdint.h", "stdio.h", "stdlib.h", "string.h"}
FORBIDDEN_HEADERS = {
    "core": {"iostream", "fstream", "cstdio", "filesystem", "thread"},
    "plan": {"iostream", "fstream", "cstdio", "filesystem", "thread", "mutex", "chrono", "ctime",
             "cstdlib", "atomic"},
}  # fmt: skip

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)
_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_CUDA_NAME = re.compile(r"\b(CU[a-z]\w*|CU_\w+|cu[A-Z]\w*|nvrtc\w*|NVRTC_\w+)\b")
_PRINT_OR_EXIT = re.compile(
    r"\bstd::(cout|cerr|clog)\b|\b(printf|fprintf|puts|putchar|exit|_Exit|abort)\s*\("
)


def layer_of(path: str) -> str | None:
    """The layer of a path from the project's root; None for files without a rule (tests, bench)."""
    parts = path.split("/")
    if path.startswith("include/fulmen/"):
        return "public"
    if parts[:2] == ["examples", "debug_kernel"]:  # built with the emulator, as a test
        return None
    if parts[0] == "examples":
        return "examples"
    if parts[0] != "src" or len(parts) < 3:
        return None
    if parts[1] != "kernels":
        return parts[1]
    is_law = parts[2] in ("base.cuh", "params.h", "score_options.h", "attention") or parts[
        -1
    ].endswith("config.h")
    return "law" if is_law else "device"


def check(root: Path) -> list[Finding]:
    findings: list[Finding] = []
    for path in files(root, CPP_SUFFIXES):
        name = relative(path, root)
        layer = layer_of(name)
        if layer is None:
            continue
        if layer not in MAY_INCLUDE:
            findings.append(Finding(name, 0, f"src/{layer} is not a layer of the architecture"))
            continue
        text = path.read_text(encoding="utf-8")
        findings += _check_includes(root, name, layer, text)
        findings += _check_names(name, layer, text)
    for path in files(root, (".py",)):
        name = relative(path, root)
        if name.startswith("python/fulmen/"):
            findings += _check_imports(name, path.read_text(encoding="utf-8"))
    return findings


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def _check_includes(root: Path, name: str, layer: str, text: str) -> list[Finding]:
    findings = []
    for match in _INCLUDE.finditer(text):
        quote, target = match.groups()
        sentence = _judge(root, name, layer, quote, target)
        if sentence:
            findings.append(Finding(name, _line(text, match.start()), sentence))
    return findings


def _judge(root: Path, name: str, layer: str, quote: str, target: str) -> str | None:
    """What is wrong with one #include, or None."""
    if quote == '"' or target.startswith("fulmen/"):
        found = next(
            (base for base in ("src", "include") if (root / base / target).is_file()), None
        )
        if found is None or ".." in target or "/" not in target:
            return (
                f'"{target}" is not a path from src/ or include/: write the include root-relative'
            )
        seen = layer_of(f"{found}/{target}")
        if name == "include/fulmen/fulmen.h":
            return f'fulmen.h includes "{target}": it may include nothing of the project'
        if seen not in MAY_INCLUDE[layer]:
            return f'{layer} includes "{target}" of {seen}: it may see {_list(MAY_INCLUDE[layer])}'
        return None
    if layer in ("law", "device"):
        return f"<{target}> in device text, which includes nothing but itself"
    if layer == "public" and not _is_standard(target):
        return f"<{target}> in a public header, which includes only the standard library"
    if target in FORBIDDEN_HEADERS.get(layer, ()):
        return f"<{target}> in {layer}, which has no input, output, clock, environment or thread"
    return None


def _is_standard(target: str) -> bool:
    return target in C_HEADERS or ("/" not in target and "." not in target)


def _list(layers: set[str]) -> str:
    return ", ".join(sorted(layers))


def _check_names(name: str, layer: str, text: str) -> list[Finding]:
    code = _COMMENT_OR_STRING.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
    findings = []
    if layer not in ("gpu", "device", "examples"):
        for match in _CUDA_NAME.finditer(code):
            sentence = f"{match.group()} outside src/gpu, which alone names the CUDA driver"
            findings.append(Finding(name, _line(code, match.start()), sentence))
    if layer not in ("public", "examples", "device"):
        for match in _PRINT_OR_EXIT.finditer(code):
            sentence = f"{match.group().strip('( ')} in the library, which never prints or exits"
            findings.append(Finding(name, _line(code, match.start()), sentence))
    return findings


def _check_imports(name: str, text: str) -> list[Finding]:
    """The command line sees only public modules; it alone sees the lab, and nothing sees it."""
    package = name.removeprefix("python/").removesuffix(".py").split("/")[:-1]
    is_cli = package[:2] == ["fulmen", "cli"]
    is_lab = package[:2] == ["fulmen", "lab"]
    findings = []
    for node in ast.walk(ast.parse(text)):
        for module in _imported(node, package):
            inside_cli = module[:2] == ["fulmen", "cli"]
            private = any(part.startswith("_") and part != "__future__" for part in module[1:])
            if is_cli and module[0] == "fulmen" and private and not inside_cli:
                sentence = f"the command line imports {'.'.join(module)}, which is not public"
            elif not is_cli and inside_cli and not name.endswith("__main__.py"):
                sentence = f"the package imports {'.'.join(module)}: the command line stands on top"
            elif not (is_cli or is_lab) and module[:2] == ["fulmen", "lab"]:
                sentence = f"{'.'.join(module)} is imported: only the command line sees the lab"
            else:
                continue
            findings.append(Finding(name, getattr(node, "lineno", 0), sentence))
    return findings


def _imported(node: ast.AST, package: list[str]) -> list[list[str]]:
    """Absolute dotted names that an import statement may bind, modules and attributes alike."""
    if isinstance(node, ast.Import):
        return [alias.name.split(".") for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        base = base + (node.module.split(".") if node.module else [])
        return [[*base, alias.name] for alias in node.names]
    return []


if __name__ == "__main__":
    report(check, "Checks who includes and imports whom.")
