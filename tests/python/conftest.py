# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The command line for tests, in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fulmen.cli.main import main


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the program in this process; what it printed, or with code 2 its one sentence."""

    def run(*arguments: Any, code: int = 0) -> Any:
        try:
            returned = main([str(word) for word in arguments])
        except SystemExit as ended:  # argparse
            returned = int(ended.code or 0)
        out, err = capsys.readouterr()
        assert returned == code, out + err
        if code == 2:
            assert out == ""
            assert err.startswith("fulmen")
            assert err.count("\n") == 1, err
            return err
        assert "\x1b" not in out
        return json.loads(out) if "--json" in arguments else out

    return run
