# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Which families of transformers call fulmen: the table of the pages, made from the installed ones.

`python tests/torch/test_hf_families.py` writes the table into both pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PAGES = {lang: ROOT / "docs" / lang / "pytorch.md" for lang in ("en", "zh")}
BEGIN, END = "<!-- begin families of transformers -->", "<!-- end families of transformers -->"
# A class of its own that computes attention, beside classes that inherit one.
ATTENTION = re.compile(r"^class \w*Attention\w*\(\w+(\.\w+)?\):", re.MULTILINE)
INTERFACE = "ALL_ATTENTION_FUNCTIONS.get_interface("
WORDS = {
    "en": (
        "transformers {version}: families whose attention",
        "is fulmen's when they are asked for it",
        "is made of other families' models, which decide, or is none",
        "keeps its own code, and says so once",
    ),
    "zh": (
        "transformers {version} 各模型族的注意力",
        "按要求由 fulmen 计算",
        "由其他模型族的模型组成并由其决定或没有注意力",
        "保留自己的代码并提示一次",
    ),
}


def families() -> tuple[list[str], list[str], list[str]]:
    """Those with the attention interface, without attention of their own, with own code."""
    found: tuple[list[str], list[str], list[str]] = ([], [], [])
    for folder in sorted((Path(transformers.__file__).parent / "models").iterdir()):
        text = "".join(x.read_text() for x in sorted(folder.glob("modeling_*.py")))
        if text:
            found[0 if INTERFACE in text else 2 if ATTENTION.search(text) else 1].append(
                folder.name
            )
    return found


def table(lang: str) -> str:
    """The block of a page."""
    title, *kinds = WORDS[lang]
    version = ".".join(transformers.__version__.split(".")[:2])
    lines = [BEGIN, "", f"| {title.format(version=version)} | |", "| --- | --- |"]
    for kind, names in zip(kinds, families()):
        lines.append(f"| {kind} ({len(names)}) | {', '.join(names)} |")
    return "\n".join([*lines, "", END])


@pytest.mark.parametrize("lang", PAGES)
def test_the_page_lists_the_families_of_the_pinned_version(lang: str) -> None:
    pinned = re.search(
        r"^transformers==(.*)$", (ROOT / "tools/requirements-torch.txt").read_text(), re.MULTILINE
    )
    assert pinned is not None
    if transformers.__version__ != pinned[1]:
        pytest.skip(f"the page is about transformers {pinned[1]}")
    assert table(lang) in PAGES[lang].read_text()


SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 97}
# One model of each kind that is quickly made, beside those that the other files compare.
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomConfig", {"n_layer": 1, "n_head": 4}),
    "falcon": ("FalconConfig", {}),
    "mpt": ("MptConfig", {"d_model": 32, "n_layers": 1, "n_heads": 4}),
    "gpt_neo": ("GPTNeoConfig", {"num_layers": 1, "num_heads": 4,
                                 "attention_types": [[["global"], 1]]}),
    "roformer": ("RoFormerConfig", {"intermediate_size": 32}),
    "gpt_neox": ("GPTNeoXConfig", {"intermediate_size": 32}),
    "roberta": ("RobertaConfig", {"intermediate_size": 32}),
    "olmo": ("OlmoConfig", {"intermediate_size": 32}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*has attention code of its own")
@pytest.mark.parametrize("family", MADE)
def test_the_table_says_what_a_forward_pass_calls(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a model with code of its own computes what it does by itself."""
    from fulmen.compat import hf

    calls: list[None] = []

    def counted(*args: Any, **words: Any) -> Any:
        calls.append(None)
        return hf.attention_hook(*args, **words)

    hf.register()
    interface = transformers.AttentionInterface
    monkeypatch.setitem(interface._global_mapping, "fulmen", counted)
    name, more = MADE[family]
    config = getattr(transformers, name)(**SIZES, **more)
    model = transformers.AutoModel.from_config(config, attn_implementation="fulmen").eval()
    ids = torch.randint(3, 97, (2, 7))
    o = model(input_ids=ids).last_hidden_state
    assert (family in families()[0]) == bool(calls)
    assert (family in families()[2]) == (not calls)
    assert (model.config._attn_implementation == "fulmen") == bool(calls)
    if not calls:
        plain = type(model)(getattr(transformers, name)(**SIZES, **more)).eval()
        plain.load_state_dict(model.state_dict())
        torch.testing.assert_close(o, plain(input_ids=ids).last_hidden_state)


if __name__ == "__main__":
    for lang, page in PAGES.items():
        text = page.read_text()
        start = text.index(BEGIN)
        page.write_text(text[:start] + table(lang) + text[text.index(END, start) + len(END) :])
