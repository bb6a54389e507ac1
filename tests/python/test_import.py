# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What an import loads and takes, what a call costs, and a library that is not there.

Times are of the processor, so that a busy machine fails nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import timeit
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fulmen


def python(code: str, **environment: str) -> Any:
    """What a fresh interpreter prints, as JSON."""
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_import_is_lazy_and_quick() -> None:
    code = """
import json, sys, time
before = set(sys.modules)
start = time.process_time()
import fulmen
seconds = time.process_time() - start
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""
    runs = [python(code) for _ in range(5)]
    loaded = set(runs[0][1])
    assert not loaded & {"numpy", "tvm_ffi", "torch", "ml_dtypes", "rich", "safetensors"}
    assert not {name for name in loaded if name.startswith("fulmen.")}
    assert min(seconds for seconds, _ in runs) < 0.040


def test_first_call_is_quick_and_brings_no_torch(tmp_path: Path) -> None:
    # A torch that takes a second to import, and that the program does not use.
    (tmp_path / "torch.py").write_text("import time; time.sleep(1); raise SystemError('imported')")
    code = """
import json, sys, time
import numpy as np
import fulmen
x = np.ones((1, 1, 8, 8), np.float32)
start = time.process_time()
fulmen.attention(x, x, x)
seconds = time.process_time() - start
print(json.dumps([seconds, "torch" in sys.modules]))
"""
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    runs = [python(code, PYTHONPATH=path) for _ in range(5)]
    assert not any(imported for _, imported in runs)
    assert min(seconds for seconds, _ in runs) < 0.300


def test_a_call_costs_as_much_as_a_few_array_allocations() -> None:
    """About 8 microseconds where numpy.empty takes 0.3; a ratio, since machines are busy."""
    nothing = np.ones((1, 1, 0, 8), np.float32)  # everything but the kernel
    fulmen.attention(nothing, nothing, nothing)
    calls = {
        "attention": lambda: fulmen.attention(nothing, nothing, nothing),
        "empty": lambda: np.empty((1, 1, 8, 8), np.float32),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(40):
        for name, work in calls.items():
            times[name] += timeit.repeat(work, time.thread_time, number=300, repeat=1)
    assert min(times["attention"]) < 60 * min(times["empty"])


def test_every_public_name_is_there() -> None:
    assert fulmen.__all__ == sorted(fulmen.__all__)
    for name in fulmen.__all__:
        assert getattr(fulmen, name) is not None
        assert name in dir(fulmen)
    with pytest.raises(AttributeError, match="flash"):
        _ = fulmen.flash


WITHOUT_LIBRARY = """
import json, numpy as np, fulmen
x = np.ones((1, 1, 8, 8), np.float32)
try:
    fulmen.attention(x, x, x)
except fulmen.LibraryNotFound as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.parametrize("content", [None, b"not a library"])
def test_a_library_that_is_not_there(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "libfulmen.so"
    if content is not None:
        path.write_bytes(content)
    text = python(WITHOUT_LIBRARY, FULMEN_LIBRARY=str(path))
    assert str(path) in text
    assert "\n" not in text
    if content is None:
        assert "FULMEN_LIBRARY" in text


def test_without_tvm_ffi_the_sentence_names_it(tmp_path: Path) -> None:
    (tmp_path / "tvm_ffi.py").write_text("raise ImportError('no such thing')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    assert "pip install apache-tvm-ffi" in python(WITHOUT_LIBRARY, PYTHONPATH=path)
