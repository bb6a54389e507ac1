# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Counts the import layers and the import circles of python/fulmen; fails beyond what is allowed.

The package is three houses, one on the other: what users import, the lab that checks it
(fulmen/lab), the command line (fulmen/cli); check_layers sees to their order. Within each a module
is in layer 1 when it imports no other module of its house, else in the layer after the highest that
it imports. Imports inside of functions count; those for type checkers alone do not, and neither do
modules that are loaded by name: those of the table in fulmen/__init__ and the command line's, and
fulmen._torch.api, which enters its calls in a dictionary. Modules that import one another in a
circle share a layer; a circle may not be, within a house or across.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

MOST_LAYERS = 6
ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("python") / "fulmen"
HOUSES = ("fulmen.lab", "fulmen.cli")  # beside the rest

Graph = dict[str, set[str]]


def modules(root: Path) -> dict[str, Path]:
    """The modules of the package by dotted name, packages by that of their __init__."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root / "python").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(root: Path) -> Graph:
    """Each module with the modules of the package that it imports."""
    files = modules(root)
    graph: Graph = {}
    for name, path in files.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        graph[name] = set(_imported(tree, package, files)) - {name}
    return graph


def _imported(tree: ast.AST, package: str, files: Iterable[str]) -> Iterator[str]:
    for node in _executed(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                member = f"{base}.{alias.name}"
                if member in files:
                    yield member
                elif base in files:
                    yield base


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one, without the blocks `if TYPE_CHECKING`."""
    yield node
    for child in ast.iter_child_nodes(node):
        is_for_checkers = (
            isinstance(child, ast.If)
            and isinstance(child.test, ast.Name)
            and child.test.id == "TYPE_CHECKING"
        )
        if not is_for_checkers:
            yield from _executed(child)


def house(graph: Graph, name: str | None) -> Graph:
    """The part of a graph that is below a package; None: what is below none of the HOUSES."""

    def is_inside(module: str) -> bool:
        within = [x for x in HOUSES if module == x or module.startswith(f"{x}.")]
        return within == ([name] if name else [])

    inside = {module for module in graph if is_inside(module)}
    return {module: graph[module] & inside for module in inside}


def reachable(graph: Graph) -> Graph:
    """Each module with all that it imports, directly or not."""
    found: Graph = {}
    for start in graph:
        seen: set[str] = set()
        waiting = list(graph[start])
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += graph[name]
        found[start] = seen
    return found


def circles(graph: Graph) -> list[list[str]]:
    """Groups of modules that import one another, directly or not."""
    every = reachable(graph)
    groups = {
        tuple(sorted({name, *(other for other in every[name] if name in every[other])}))
        for name in graph
        if name in every[name]
    }
    return [list(group) for group in sorted(groups)]


def layers(graph: Graph) -> list[list[str]]:
    """The modules of each layer, the lowest first."""
    every = reachable(graph)
    level: dict[str, int] = {}

    def level_of(name: str) -> int:
        if name not in level:
            circle = {name} | {other for other in every[name] if name in every[other]}
            below = {other for member in circle for other in graph[member]} - circle
            level[name] = 1 + max((level_of(other) for other in below), default=0)
        return level[name]

    found: list[list[str]] = []
    for name in sorted(graph):
        while len(found) < level_of(name):
            found.append([])
        found[level_of(name) - 1].append(name)
    return found


def check(root: Path) -> list[str]:
    """What is beyond what is allowed, as sentences."""
    graph = imports(root)
    findings = [f"import circle: {', '.join(circle)}" for circle in circles(graph)]
    for name in (None, *HOUSES):
        found = layers(house(graph, name))
        if len(found) > MOST_LAYERS:
            findings.append(
                f"{name or 'fulmen'} has {len(found)} import layers, {MOST_LAYERS} are allowed; on "
                f"top: {', '.join(found[-1])}"
            )
    return findings


def main(arguments: list[str]) -> int:
    """Prints layers, circles and findings; 1 where there are findings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="the modules of each layer")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to check")
    chosen = parser.parse_args(arguments)
    graph = imports(chosen.root)
    counts = []
    for name in (None, *HOUSES):
        found = layers(house(graph, name))
        counts.append(f"{name or 'fulmen'} {len(found)}")
        if chosen.list:
            print(*(f"{number}: {' '.join(x)}" for number, x in enumerate(found, 1)), sep="\n")
    findings = check(chosen.root)
    for finding in findings:
        print(finding)
    print(f"import_layers: {', '.join(counts)}; {len(circles(graph))} circles")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
