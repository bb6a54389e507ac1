# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Words of words.txt in src: in identifiers (part by part), comments and strings alike.

private_words.py            each of them, with what is said instead

Two more words stand in names only, each in few meanings: names that have one are listed there.
"""

from __future__ import annotations

import re
from pathlib import Path

from product_code import IDENTIFIER, parts, product
from source_tree import ROOT, Finding, relative, report

LIST = ROOT / "tools" / "words.txt"
MEANINGS = {"turn": 1, "place": 2}  # at most so many


def banned(text: str) -> dict[str, str]:
    """word -> what is said instead."""
    words = {}
    for line in text.splitlines():
        if line and not line.startswith("#") and " = " not in line:
            forms, _, instead = line.partition(":")
            words.update(dict.fromkeys(forms.split(), instead.strip()))
    return words


def kept(text: str) -> dict[str, dict[str, set[str]]]:
    """word, in each of its forms -> its meanings -> the names that have them."""
    words: dict[str, dict[str, set[str]]] = {}
    for line in text.splitlines():
        forms, is_kept, rest = line.partition(" = ")
        if is_kept and not line.startswith("#"):
            meaning, _, names = rest.partition(":")
            for form in forms.split():
                words.setdefault(form, {}).setdefault(meaning, set()).update(names.split())
    return words


def _check_kept(root: Path, words: dict[str, dict[str, set[str]]]) -> list[Finding]:
    listed = relative(LIST, root) if LIST.is_relative_to(root) else LIST.name
    findings = [
        Finding(listed, 1, f"'{word}' has {len(meanings)} meanings; it may have {MEANINGS[word]}")
        for word, meanings in words.items() if len(meanings) > MEANINGS.get(word, len(meanings))
    ]  # fmt: skip
    for source in product(root, "src/"):
        for number, line in enumerate(source.code.splitlines(), start=1):
            for identifier in IDENTIFIER.findall(line):
                findings += [
                    Finding(source.name, number, f"'{word}' in {identifier}: not one of its names")
                    for word in parts(identifier)
                    if word in words and identifier not in set().union(*words[word].values())
                ]
    return findings


def check(root: Path) -> list[Finding]:
    text = LIST.read_text(encoding="utf-8")
    return _check_banned(root, banned(text)) + _check_kept(root, kept(text))


def _check_banned(root: Path, instead: dict[str, str]) -> list[Finding]:
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
