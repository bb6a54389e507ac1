# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Examples in docstrings run, and what is written about a signature is the signature."""

from __future__ import annotations

import doctest
import importlib
import inspect
import typing
from typing import Any

import numpy as np
import pytest

import fulmen
from fulmen._library import schema
from fulmen.keywords import RESULT_KEYWORDS, Caches
from fulmen.masks import blocks, chunks, documents, prefix, tree

WITH_EXAMPLES = (
    "appending",
    "caches",
    "functional",
    "inspection",
    "masks",
    "merging",
    "planning",
    "visibility",
)
MODULES = (*WITH_EXAMPLES, "_calls", "options", "errors")
CALLS = (fulmen.attention, fulmen.attention_varlen, fulmen.attention_paged,
         fulmen.attention_forward, fulmen.attention_backward, fulmen.merge, fulmen.plan,
         fulmen.append_kv, fulmen.rotary, fulmen.rotary_tables,
         fulmen.explain, fulmen.block_map, fulmen.dense_mask)  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    found = doctest.testmod(importlib.import_module(f"fulmen.{name}"), optionflags=doctest.ELLIPSIS)
    assert found.failed == 0
    if name in WITH_EXAMPLES:
        assert found.attempted > 0


@pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__name__)
def test_docstrings_name_every_argument(function: Any) -> None:
    text = inspect.getdoc(function) or ""
    if "**options: those of" in text or "**options: the same" in text:
        text += inspect.getdoc(fulmen.attention) or ""
    for name in inspect.signature(function).parameters:
        assert f"{name}:" in text or f"{name}," in text, f"{name} is not described"
    assert ">>>" in text
    assert "Raises:" in text


def keywords(function: Any) -> dict[str, Any]:
    found = inspect.signature(function).parameters
    return {name: p.default for name, p in found.items() if p.kind is p.KEYWORD_ONLY}


def said_as() -> dict[str, str]:
    """The keyword that says each option and each input of the schema, where it is not its name."""
    values = (prefix(1), chunks(1), documents([1]), tree([1]), blocks([[0]]))
    return {
        **{name: "mask" for value in values for name in value.options},
        "window_left": "window",
        "window_right": "window",
        "rng_seed": "rng",
        "rng_offset": "rng",
        **{
            name: "score"
            for name in (*schema().options, *schema().inputs)
            if name.startswith(("expression", "scalar", "capture"))
        },
    }


def test_attention_has_the_options_and_arrays_of_the_library() -> None:
    beside = {"device", "device_name", "accumulate"}  # of `plan`, `explain`, `attention_forward`
    named = {*schema().options, *schema().inputs} - {"q", "k", "v"} - beside
    expected = {said_as().get(name, name) for name in named} | {"layout", "stream"}
    assert set(keywords(fulmen.attention)) == expected | set(RESULT_KEYWORDS)


def test_defaults_are_those_of_the_library() -> None:
    for name, default in keywords(fulmen.attention).items():
        row = schema().options.get(name)
        if row is None:
            assert default in (None, "bhsd", False)
        elif row["kind"] == "choice":
            assert default == row["choices"][row["default"]]
        elif default is not None:
            assert default == row["default"]
        else:
            assert row["default"] in (None, 0)


def test_the_other_calls_share_the_options_of_attention() -> None:
    options = {
        name: default
        for name, default in keywords(fulmen.attention).items()
        if name not in RESULT_KEYWORDS
    }
    for function in (fulmen.attention_forward, fulmen.attention_backward, fulmen.plan,
                     fulmen.explain):  # fmt: skip
        assert options.items() <= keywords(function).items()
    of_caches = dict.fromkeys(Caches.__annotations__)
    found = keywords(fulmen.attention_varlen)
    assert {**options, **found} == {**found, "cu_q": None, "cu_kv": None, **of_caches}
    found = keywords(fulmen.attention_paged)
    assert {**options, **found} == {
        **found, "cu_kv": None, "kv_lengths": None, "page_table": None, "page_indptr": None,
        "q_segments": None, "kv_segments": None,
    }  # fmt: skip
    assert not typing.get_type_hints(fulmen.errors.Error)


@pytest.mark.parametrize("name", ["flash", "window_left", "prefix", "q_ids", "device"])
def test_what_is_no_keyword_is_refused(name: str) -> None:
    x = np.ones((1, 1, 4, 8), np.float32)
    for function in (fulmen.attention, fulmen.attention_forward):
        with pytest.raises(TypeError, match=name):
            function(x, x, x, **{name: 1})
