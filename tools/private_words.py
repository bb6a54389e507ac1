# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Words of words.txt in src: in identifiers (part by part), comments and strings alike.

private_words.py            each place, with what is said instead
"""

from __future__ import annotations

import re
from pathlib import Path

from product_code import IDENTIFIER, parts, product
from source_tree import ROOT, Finding, report

LIST = ROOT / "tools" / "words.txt"


def banned(text: str) -> dict[str, str]:
    """word -> what is said instead."""
    words = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            forms, _, instead = line.partition(":")
            words.update(dict.fromkeys(forms.split(), instead.strip()))
    return words


def check(root: Path) -> list[Finding]:
    instead = banned(LIST.read_text(encoding="utf-8"))
    likely = re.compile("|".join(word.rstrip("!") for word in instead), re.IGNORECASE)
    findings = []
    for source in product(root, "src/"):
        texts = zip(source.text.splitlines(), source.code.splitlines(), strict=True)
        for number, (line, code) in enumerate(texts, start=1):
            if likely.search(line):
                findings += [Finding(source.name, number, said) for said in _judge(line, instead)]
                in_code = {word.rstrip("!"): say for word, say in instead.items() if "!" in word}
                findings += [Finding(source.name, number, said) for said in _judge(code, in_code)]
    return findings


def _judge(line: str, instead: dict[str, str]) -> list[str]:
    return [
        f"'{word}' in {identifier}: say {instead[word]}"
        for identifier in IDENTIFIER.findall(line)
        for word in parts(identifier)
        if word in instead
    ]


if __name__ == "__main__":
    report(check, "Finds words that this project does not use.")
