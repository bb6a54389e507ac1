# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Examples in docstrings run, and what is written about a signature is the signature."""

from __future__ import annotations

import doctest
import importlib
import inspect
import typing
from typing import Any

import pytest

import fulmen
from fulmen.options import CallOptions, Options, prepare

WITH_EXAMPLES = (
    "functional",
    "inspection",
    "mask_matrix",
    "masks",
    "merging",
    "passes",
    "planning",
)
MODULES = (*WITH_EXAMPLES, "arrays", "options", "errors")
CALLS = (fulmen.attention, fulmen.attention_varlen, fulmen.attention_forward,
         fulmen.attention_backward, fulmen.merge, fulmen.plan, fulmen.explain,
         fulmen.dense_mask)  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    found = doctest.testmod(importlib.import_module(f"fulmen.{name}"), optionflags=doctest.ELLIPSIS)
    assert found.failed == 0
    if name in WITH_EXAMPLES:
        assert found.attempted > 0


@pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__name__)
def test_docstrings_name_every_argument(function: Any) -> None:
    text = inspect.getdoc(function) or ""
    for name in inspect.signature(function).parameters:
        assert f"{name}:" in text or f"{name}," in text, f"{name} is not described"
    assert ">>>" in text
    assert "Raises:" in text


def defaults(function: Any, *without: str) -> dict[str, Any]:
    found = inspect.signature(function).parameters
    return {
        name: p.default
        for name, p in found.items()
        if p.kind is p.KEYWORD_ONLY and name not in without
    }


def test_attention_has_the_options_of_prepare() -> None:
    packed = ("cu_q", "cu_kv", "max_q", "max_kv")
    own = ("return_lse", "out", "out_dtype")
    assert defaults(fulmen.attention, *own) == defaults(prepare, *packed)


def test_typed_options_are_those_of_prepare() -> None:
    assert set(CallOptions.__annotations__) == set(defaults(prepare))
    assert set(Options.__annotations__) == set(defaults(prepare, "cu_q", "cu_kv"))
    assert not typing.get_type_hints(fulmen.errors.Error)
