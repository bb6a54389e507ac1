# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What only the long run does: FULMEN_TEST_FULL=1, every sample, every model, the inductor."""

import os

import pytest

IS_FULL = os.environ.get("FULMEN_TEST_FULL", "") not in ("", "0")
full = pytest.mark.skipif(not IS_FULL, reason="FULMEN_TEST_FULL=1 runs it")
