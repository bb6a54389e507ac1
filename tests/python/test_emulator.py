# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The emulator as a GPU, in processes of their own: it takes the driver's place for good.

FULMEN_EMULATOR names libfulmen_emulated_gpu.so (docs/en/contributing/emulator.md); skipped without.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

needs_emulator = pytest.mark.skipif(
    not os.path.isfile(os.environ.get("FULMEN_EMULATOR", "")), reason="FULMEN_EMULATOR names none"
)


def program(*arguments: str, **environment: str) -> Any:
    return subprocess.run(
        [sys.executable, "-m", "fulmen", *arguments],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@needs_emulator
def test_a_case_passes():
    verify = ("verify", "--backend", "emulator", "--implementation", "naive", "--jobs", "1")
    done = program(*verify, "u08_nan_past_the_lengths")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 0 failed, 0 skipped" in done.stdout


@needs_emulator
def test_a_server_s_caches():
    """The fuzzer of caches: writes, forks and reads of pages by the kernels' own text."""
    script = Path(__file__).with_name("fuzz_caches.py")
    words = ("--arrays", "emulated", "--implementation", "naive", "--seed", "3")
    steps = 500 if os.environ.get("FULMEN_TEST_FULL") else 10
    done = subprocess.run(
        [sys.executable, str(script), *words, "--steps", str(steps)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.endswith(f"{steps} steps, 0 faults\n"), done.stdout + done.stderr


@needs_emulator
def test_explain_counts():
    words = ("--implementation", "naive", "--dtype", "float32", "1x2x20x16", "--json")
    done = program("explain", "--count", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    arrays = found["counted"]["arrays"]
    assert arrays["q"]["loaded_bytes"] >= 2 * 20 * 16 * 4
    assert arrays["k"]["loaded_bytes"] >= 20 * 2 * 20 * 16 * 4  # one thread a row: no tiles
    assert arrays["q"]["stored_bytes"] == arrays["k"]["stored_bytes"] == 0
    assert found["model_bytes"]["naive"] == 4 * (4 * 2 * 20 * 16) + 16 * found["pairs"]


@pytest.fixture
def as_driver(tmp_path: Path) -> dict[str, str]:
    """What makes a process find the emulator where it looks for libcuda.so.1."""
    emulator = os.path.abspath(os.environ["FULMEN_EMULATOR"])
    (tmp_path / "libcuda.so.1").symlink_to(emulator)
    paths = [str(tmp_path), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(paths),
        "FULMEN_NVRTC": emulator,
        "FULMEN_CACHE_LIMIT": "0",
    }


@needs_emulator
def test_run_copies_a_file_to_the_gpu(as_driver: dict[str, str], tmp_path: Path):
    x = np.random.default_rng(0).standard_normal((4, 1, 2, 20, 16)).astype(np.float32)
    tensors = dict(zip(("q", "k", "v", "do"), x))
    np.savez(tmp_path / "x.npz", **tensors, bias=x[0, :, :, :20, :1] + x[1, :, :, :1, :1],
             lengths=np.array([17]), causal=True)  # fmt: skip
    words = ("run", str(tmp_path / "x.npz"), "--repeat", "1", "--implementation", "naive")
    done = program(*words, **as_driver)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "copied to GPU 0, emulated GPU (sm_90a)" in done.stdout
    assert "forward: naive on cuda" in done.stdout
    assert done.stdout.count("within rule") == 6


@needs_emulator
@pytest.mark.skipif(
    not os.environ.get("FULMEN_TEST_FULL"),
    reason="compiles every kernel; FULMEN_TEST_FULL=1 runs it",
)
def test_doctor_computes_on_the_gpu(as_driver: dict[str, str]):
    done = program("doctor", **as_driver)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everything works, on the CPU and on the GPU" in done.stdout
    assert re.search("^gpu 0 sm90 +ok ", done.stdout, re.MULTILINE)


CLUSTERS = """
import ctypes, os

class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("cluster", ctypes.c_uint * 16)]

class Config(ctypes.Structure):
    _fields_ = [("sizes", ctypes.c_uint * 7), ("stream", ctypes.c_void_p),
                ("attributes", ctypes.POINTER(Attribute)), ("num_attributes", ctypes.c_uint)]

driver = ctypes.CDLL(os.environ["FULMEN_EMULATOR"])
for cluster in ((2, 2, 1), (32, 1, 1)):
    attribute = Attribute(4, 0, cluster)
    config = Config((32, 1, 1, 32, 1, 1, 0), None, ctypes.pointer(attribute), 1)
    kernel = (ctypes.c_void_p * 8)(), (ctypes.c_void_p * 1)()
    result = driver.cuLaunchKernelEx(ctypes.byref(config), *kernel, None)
    said = ctypes.c_char_p()
    driver.cuGetErrorString(result, ctypes.byref(said))
    print(result, said.value.decode())
"""


@needs_emulator
def test_clusters_that_are_refused():
    done = subprocess.run(
        [sys.executable, "-c", CLUSTERS], capture_output=True, text=True, check=False
    )
    said = done.stdout.splitlines()
    assert said[0] == "719 a cluster has blocks in y or z", done.stderr
    assert said[1].startswith("719 emulator: 32 blocks in clusters of 32; 1 to 16"), done.stderr


def test_without_an_emulator():
    for words in (("verify", "--backend", "emulator"), ("explain", "--count", "1x2x20x16")):
        done = program(*words, FULMEN_EMULATOR="nowhere.so")
        assert done.returncode == 2
        assert "FULMEN_EMULATOR is 'nowhere.so', which is no file; build it with" in done.stderr
        assert not done.stdout


TILES = """
import numpy as np, ml_dtypes, fulmen
from fulmen.lab.cases import emulator
from fulmen.masks import documents, expression

emulator.start()
rng = np.random.default_rng(1)
shape = (3, 1, 2, 260, 128)
q, k, v = map(emulator.copied, rng.standard_normal(shape).astype(ml_dtypes.bfloat16))
ids = np.repeat(np.arange(4, dtype=np.int32), 65)

def o_of(mask, **options):
    made = fulmen.attention_forward(q, k, v, mask=mask, implementation="sm90", **options)
    return made.o.host.view(np.uint16).copy()

own = emulator.copied(ids)
for causal in (False, True):
    text = o_of(expression("doc[i] == doc[j]", doc=own), causal=causal)
    assert (text == o_of(documents(emulator.copied(ids[None])), causal=causal)).all(), causal
assert fulmen.device_faults() == 0
o_of(expression("j < 60 and doc[min(j, 100) + 200] >= 0", doc=own))  # beyond the last from 60 on
assert fulmen.device_faults() == 0
o_of(expression("doc[i + 1] >= 0", doc=own))
assert fulmen.device_faults() == 256
print("right")
"""


@needs_emulator
def test_a_mask_by_tiles() -> None:
    """The bits of documents as an option; an index out of range of a pair that is shown."""
    done = subprocess.run(
        [sys.executable, "-c", TILES], capture_output=True, text=True, check=False
    )
    assert done.stdout == "right\n", done.stdout + done.stderr


CHOSEN = """
import numpy as np, fulmen
from fulmen.lab.cases import emulator

emulator.start()
shapes = (1, 1, 2, 4), (1, 8, 1, 4), (1, 1, 2)
q, k, weights = (emulator.copied(np.ones(shape, np.float32)) for shape in shapes)
try:
    fulmen.mla_indexer(q, k, weights, 3176, layout="bshd")
except fulmen.UnsupportedError as error:
    print(error)
"""


@needs_emulator
def test_more_chosen_keys_than_shared_memory_holds() -> None:
    """Of a Turing, whose blocks have 64 KiB: refused before a kernel is compiled."""
    done = subprocess.run(
        [sys.executable, "-c", CHOSEN], env={**os.environ, "FULMEN_EMULATOR_CAPABILITY": "75"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "topk is 3176; on emulated GPU" in done.stdout, done.stdout + done.stderr
    assert "at most 3175 keys of a row are chosen, on the CPU any number" in done.stdout
