# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The checks of wheels and sdist refuse what they should."""

from pathlib import Path

import pytest

import wheel_steps
from step_runner import StepError

WHOLE = ["CMakeLists.txt", "include/fulmen/fulmen.h", "src/api/attention.cpp", "LICENSE",
         "examples/data/decoder.safetensors"]  # fmt: skip


@pytest.mark.parametrize(
    "tag", ["manylinux_2_34", "manylinux_2_17", "manylinux_2_39.manylinux_2_28"]
)
def test_a_wheel_for_the_floor_or_older_passes(tag: str) -> None:
    wheel_steps.check_floor(f"fulmen-0.1.0-py3-none-{tag}_x86_64.whl")


@pytest.mark.parametrize("tag", ["manylinux_2_35", "manylinux_3_1", "linux"])
def test_a_wheel_for_newer_ones_is_refused(tag: str) -> None:
    with pytest.raises(StepError, match=r"does not run on glibc 2\.34"):
        wheel_steps.check_floor(f"fulmen-0.1.0-py3-none-{tag}_x86_64.whl")


def test_a_large_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.whl"
    file.write_bytes(bytes(wheel_steps.LARGEST_BYTES - 1))
    wheel_steps.check_size(file)
    file.write_bytes(bytes(wheel_steps.LARGEST_BYTES))
    with pytest.raises(StepError, match="the limit is 6000000"):
        wheel_steps.check_size(file)


def test_an_sdist_is_whole_and_small() -> None:
    names = [f"fulmen-0.1.0/{name}" for name in WHOLE]
    wheel_steps.check_sdist(names)
    with pytest.raises(StepError, match="lacks src/api"):
        wheel_steps.check_sdist([name for name in names if "api" not in name])
    with pytest.raises(StepError, match="encoder"):
        wheel_steps.check_sdist([*names, "fulmen-0.1.0/examples/data/encoder.safetensors"])
