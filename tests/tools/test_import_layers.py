# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""import_layers counts layers and circles as it says, and this project has few of one and none."""

import pytest
from small_tree import WriteTree

import import_layers

TREE = {
    "python/fulmen/__init__.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .calls import attention\n"
    ),
    "python/fulmen/errors.py": "",
    "python/fulmen/arrays.py": "from .errors import Error\n",
    "python/fulmen/calls.py": "def f():\n    from . import arrays\n",
    "python/fulmen/_torch/__init__.py": "",
    "python/fulmen/_torch/api.py": "from ..calls import f\nfrom .. import errors\n",
    "python/fulmen/lab/__init__.py": "",
    "python/fulmen/lab/cases.py": "import fulmen\nfrom fulmen.calls import f\n",
    "python/fulmen/cli/__init__.py": "",
    "python/fulmen/cli/main.py": "from fulmen.lab import cases\nfrom . import output\n",
    "python/fulmen/cli/output.py": "",
}


def test_layers_of_a_small_package(write_tree: WriteTree) -> None:
    root = write_tree(TREE)
    graph = import_layers.imports(root)
    assert import_layers.layers(import_layers.house(graph, None)) == [
        ["fulmen", "fulmen._torch", "fulmen.errors"],
        ["fulmen.arrays"],
        ["fulmen.calls"],
        ["fulmen._torch.api"],
    ]
    cli = import_layers.house(graph, "fulmen.cli")
    assert import_layers.layers(cli) == [["fulmen.cli", "fulmen.cli.output"], ["fulmen.cli.main"]]
    assert import_layers.circles(graph) == []
    assert import_layers.check(root) == []


def test_a_circle_is_found_inside_of_functions_too(write_tree: WriteTree) -> None:
    root = write_tree({**TREE, "python/fulmen/errors.py": "def g():\n    from .calls import f\n"})
    (finding,) = import_layers.check(root)
    assert finding == "import circle: fulmen.arrays, fulmen.calls, fulmen.errors"


def test_too_many_layers_are_found(write_tree: WriteTree) -> None:
    steps = {f"python/fulmen/s{i}.py": f"from .s{i - 1} import x\n" for i in range(1, 7)}
    root = write_tree({**TREE, "python/fulmen/s0.py": "", **steps})
    (finding,) = import_layers.check(root)
    assert finding == "fulmen has 7 import layers, 6 are allowed; on top: fulmen.s6"


def test_this_project_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert import_layers.main([]) == 0
    assert "0 circles" in capsys.readouterr().out
