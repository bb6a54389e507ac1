# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""check_site.py sees a page that is too wide, and a picture that is not there."""

from pathlib import Path

import pytest

import check_site

GOOD = '<div style="overflow-x: auto"><p style="width: 3000px">scrolls within itself</p></div>'


@pytest.mark.skipif(check_site.browser() is None, reason="no browser")
def test_what_is_wrong_with_a_page_is_said(tmp_path: Path) -> None:
    program = check_site.browser()
    assert program is not None
    (tmp_path / "good.html").write_text(f"<!doctype html>{GOOD}")
    (tmp_path / "wide.html").write_text('<!doctype html><div style="width: 900px">x</div>')
    (tmp_path / "bare.html").write_text('<!doctype html><img src="nowhere.png">')
    found = check_site.looked_at(program, tmp_path, ["good.html", "wide.html", "bare.html"])
    wide = [sentence for sentence in found if sentence.startswith("wide.html is 9")]
    bare = [sentence for sentence in found if sentence.startswith("bare.html lacks ")]
    assert len(wide) == 1  # 900 and a margin in a window of 390; 1280 are enough
    assert len(bare) == 2
    assert len(found) == 3
