# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Texts of FlexAttention's functions, each traced once.

A function is known again by all that it can read: its code, what its closure and the globals that
it names hold, and the same of functions among them. Numbers count by their value, tensors by dtype,
shape and by which of them are one. A function that reads what can change unseen, an attribute of an
object say, or what a tensor holds, is traced in every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .flex_tracing import Tracer

_MOST = 1024  # texts that are kept
_EXACT = {bool, int, str, type(None), torch.dtype, torch.device}
_TENSORS = {Tensor, torch.nn.Parameter}
_ROOTS = {"torch", "math", "builtins"}  # of modules whose contents stay


class _UnseenError(Exception):
    """What a function reads can change without a trace in its key."""


class _Reads:
    """The key of a function, and the tensors that it can read, each once."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._inside: list[FunctionType] = []

    def key(self, x: Any) -> Any:
        kind = type(x)
        if kind in _TENSORS:
            return (self._place(x), x.dtype, x.shape)
        if kind in _EXACT:
            return (kind, x)
        if kind is float:
            return (kind, x, math.copysign(1.0, x))
        if kind is FunctionType:
            return self._of_function(x)
        if kind is tuple:
            return tuple(map(self.key, x))
        if not _stays(x):
            raise _UnseenError
        return x

    def _place(self, tensor: Tensor) -> int:
        for place, known in enumerate(self.tensors):
            if known is tensor:
                return place
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _of_function(self, function: FunctionType) -> Any:
        if function in self._inside:
            return self._inside.index(function)
        self._inside.append(function)
        code, read = function.__code__, function.__globals__
        found: list[Any] = [code]
        for name in _names(code):
            if name in read:
                found += name, self.key(read[name])
        for cell in function.__closure__ or ():
            try:
                found.append(self.key(cell.cell_contents))
            except ValueError:  # empty
                raise _UnseenError from None
        if function.__kwdefaults__ or function.__dict__:
            raise _UnseenError
        found.append(self.key(function.__defaults__))
        return tuple(found)


def _stays(x: Any) -> bool:
    """Whether it is a part of Python or of PyTorch that nobody changes."""
    if isinstance(x, ModuleType):
        return x.__name__.split(".")[0] in _ROOTS
    if isinstance(x, BuiltinFunctionType):
        return x.__self__ is None or isinstance(x.__self__, (type, ModuleType))
    return isinstance(x, type) and x.__module__.split(".")[0] in _ROOTS


_names_of: dict[CodeType, tuple[str, ...]] = {}


def _names(code: CodeType) -> tuple[str, ...]:
    """The names that a code, and those inside, look up beyond its own variables."""
    found = _names_of.get(code)
    if found is None:
        inside = (_names(x) for x in code.co_consts if isinstance(x, CodeType))
        found = tuple(dict.fromkeys((*code.co_names, *(name for part in inside for name in part))))
        if len(_names_of) >= _MOST:
            _names_of.clear()
        _names_of[code] = found
    return found


class Texts(NamedTuple):
    """A score and a mask as texts, and the tensors that they read, by name."""

    score: str | None
    mask: str | None
    captures: dict[str, Tensor]


_known: dict[Any, tuple[str | None, str | None, tuple[int, ...]]] = {}


def texts_of(score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None) -> Texts:
    """The texts of score_mod and mask_mod; None for None.

    Raises:
        UnsupportedError: one of them uses what the language has not; with the line that does.
    """
    if torch.compiler.is_compiling():
        return _traced(score_mod, mask_mod, Tracer())
    reads = _Reads()
    try:
        key = reads.key(score_mod), reads.key(mask_mod)
    except _UnseenError:
        return _traced(score_mod, mask_mod, Tracer())
    known = _known.get(key)
    if known is not None:
        score, mask, places = known
        captures = {f"t{n}": reads.tensors[place] for n, place in enumerate(places)}
        return Texts(score, mask, captures)
    tracer = Tracer()
    texts = _traced(score_mod, mask_mod, tracer)
    places = tuple(
        next((place for place, x in enumerate(reads.tensors) if x is read), -1)
        for read in texts.captures.values()
    )
    if -1 not in places and not tracer.looks_inside:
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = texts.score, texts.mask, places
    return texts


def _traced(score_mod: Any, mask_mod: Any, tracer: Tracer) -> Texts:
    score = None if score_mod is None else tracer.text_of(score_mod, True)
    mask = None if mask_mod is None else tracer.text_of(mask_mod, False)
    return Texts(score, mask, tracer.captures)
