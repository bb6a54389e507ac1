# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Type checkers see the keywords of every public call: a misspelt one is an error."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

api = pytest.importorskip("mypy.api")

ROOT = Path(__file__).resolve().parents[2]
CALLS = {  # arguments beside the keywords
    "fulmen.attention": "x, x, x",
    "fulmen.attention_varlen": "x, x, x, x, x",
    "fulmen.attention_forward": "x, x, x",
    "fulmen.attention_backward": "x, x, x, x, x, x",
    "fulmen.plan": "x, x, x",
    "fulmen.explain": "x, x, x",
    "fulmen.jax.attention": "x, x, x",
}
REFUSED = {  # keyword -> what a checker says of it
    "softcapp=1.0": 'Unexpected keyword argument "softcapp"',
    "causal='yes'": 'Argument "causal" to "{name}" has incompatible type "str"; expected "bool"',
}


def test_misspelt_and_mistyped_keywords_are_errors(tmp_path: Path) -> None:
    lines = ["from typing import Any", "import fulmen, fulmen.jax", "x: Any = None"]
    expected = {}
    for call, arguments in CALLS.items():
        lines.append(
            f"{call}({arguments}, softcap=1.0, causal=True, window=(8, None), layout='sd')"
        )
        for keyword, said in REFUSED.items():
            lines.append(f"{call}({arguments}, {keyword})")
            expected[len(lines)] = said.format(name=call.rpartition(".")[2])
    lines.append("fulmen.attention(q=x, k=x, v=x, return_lse=True, out=x, out_dtype=None)")
    for call, keyword in (("attention_varlen", "cu_kv"), ("jax.attention", "stream")):
        lines.append(f"fulmen.{call}({CALLS[f'fulmen.{call}']}, {keyword}=x)")
        expected[len(lines)] = keyword
    program = tmp_path / "calls.py"
    program.write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ["--config-file", str(ROOT / "mypy.ini"), "--cache-dir", str(tmp_path / "cache")]
    text, errors, _ = api.run([*options, "--python-executable", sys.executable, str(program)])
    assert not errors
    found = dict(re.findall(r"calls\.py:(\d+): error: (.*)", text))
    assert {int(line) for line in found} == set(expected), text
    for line, said in expected.items():
        assert said in found[str(line)]
