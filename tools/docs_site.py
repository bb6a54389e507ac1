# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What the site does beyond its plugins (a hook of mkdocs, see mkdocs.yml).

* A picture of tools/pictures becomes a part of its page, so that it follows the reader's choice of
  light or dark, and the italic paragraph below it becomes its caption. Where the same Markdown is
  shown as it is, the file follows the reader's system.
* Decisions and design pages come last in a search: they name everything, and explain least.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

_FIGURE = re.compile(
    r'<p><img alt="(?P<alt>[^"]*)" src="[^"]*/pictures/(?P<name>\w+)\.svg" ?/?></p>\s*'
    r"<p><em>(?P<caption>.*?)</em></p>",
    re.DOTALL,
)
# A word in a title counts a thousand times as much as one in the text: these take that away.
_BOOSTS = {"decisions": 0.001, "design": 0.01}


def on_startup(**_: Any) -> None:
    """Keeps the word list of the Chinese search from reporting that it was read."""
    logging.getLogger("jieba").setLevel(logging.WARNING)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Sets what a search thinks of the page."""
    boost = _BOOSTS.get(_folder(page, config))
    if boost is not None:
        page.meta.setdefault("search", {})["boost"] = boost
    return markdown


def on_page_content(html: str, *, page: Any, config: Any, **_: Any) -> str:
    """Puts the pictures into the page."""
    pictures = Path(config["docs_dir"]) / _folder(page, config) / "pictures"
    return with_figures(html, pictures)


def with_figures(html: str, pictures: Path) -> str:
    """The page with every picture that has a caption as a figure; `pictures` holds the files."""

    def figure(found: re.Match[str]) -> str:
        svg = (pictures / f"{found['name']}.svg").read_text(encoding="utf-8")
        described = f'role="img" data-search-exclude="true" aria-label="{found["alt"]}"'
        svg = svg.replace('role="img"', described, 1)
        # The theme's switch instead of the system's.
        svg = svg.replace("@media (prefers-color-scheme:dark)", '[data-md-color-scheme="slate"]')
        return f"<figure>\n{svg}<figcaption>{found['caption']}</figcaption>\n</figure>"

    return _FIGURE.sub(figure, html)


def _folder(page: Any, config: Any) -> str:
    """The folder of docs/ that the page is in: a language, `design` or `decisions`."""
    return Path(page.file.abs_src_path).relative_to(config["docs_dir"]).parts[0]
