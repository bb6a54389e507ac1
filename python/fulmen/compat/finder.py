# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""An import hook that answers for flash_attn and flash_attn_interface, in this process only."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any

from ..errors import ArgumentError

HERE = "fulmen.compat"
# Names that are imported -> the module whose public names they show.
MODULES = {
    "flash_attn": f"{HERE}.flash_attn",
    "flash_attn.flash_attn_interface": f"{HERE}.flash_interface",
    "flash_attn.bert_padding": f"{HERE}.bert_padding",
    "flash_attn.layers": f"{HERE}.flash_layers",
    "flash_attn.layers.rotary": f"{HERE}.flash_rotary",
    "flash_attn.cute": f"{HERE}.flash_attn_4",
    "flash_attn.cute.interface": f"{HERE}.flash_attn_4",
    "flash_attn_interface": f"{HERE}.flash_attn_3",
    "flash_attn_3": f"{HERE}.flash_attn_3",  # diffusers looks for a package of this name
}
_PACKAGES = ("flash_attn", "flash_attn.cute", "flash_attn.layers")
DISTRIBUTIONS = {
    "flash-attn": ("flash_attn", None),
    "flash-attn-3": ("flash_attn_interface", "3.0.0"),
}


class _Loader(Loader):
    def __init__(self, version: str) -> None:
        self.version = version

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        source = importlib.import_module(MODULES[module.__name__])
        for name in source.__all__:
            if name not in ("install", "uninstall"):
                setattr(module, name, getattr(source, name))
        module.__doc__ = source.__doc__
        module.__version__ = self.version  # type: ignore[attr-defined]


class _Distribution(Distribution):
    """Package metadata without files."""

    def __init__(self, name: str, module: str, version: str) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "top_level.txt": f"{module}\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: fulmen answers for this package and has no files of it")


class _Finder(DistributionFinder, MetaPathFinder):
    def __init__(self, version: str) -> None:
        self.version = version

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if fullname in MODULES:
            return ModuleSpec(
                fullname, _Loader(self.version), origin=HERE, is_package=fullname in _PACKAGES
            )
        if fullname.startswith("flash_attn."):
            raise ModuleNotFoundError(
                f"{fullname} is not among what fulmen answers for: {', '.join(MODULES)}",
                name=fullname,
            )
        return None

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008
    ) -> Iterator[Distribution]:
        for name, (module, version) in DISTRIBUTIONS.items():
            if context.name is None or context.name.replace("_", "-").lower() == name:
                yield _Distribution(name, module, version or self.version)


_finder: _Finder | None = None


def install(version: str, override: bool) -> None:
    """See fulmen.compat.flash_attn.install."""
    global _finder  # noqa: PLW0603  one hook for the process
    uninstall()
    if not override and importlib.util.find_spec("flash_attn") is not None:
        raise ArgumentError(
            "flash_attn is installed; install(override=True) uses fulmen's functions all the same"
        )
    _forget()
    _finder = _Finder(version)
    sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """See fulmen.compat.flash_attn.uninstall."""
    global _finder  # noqa: PLW0603
    if _finder is not None:
        sys.meta_path.remove(_finder)
        _finder = None
        _forget()


def _forget() -> None:
    for name in MODULES:
        sys.modules.pop(name, None)
