# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""GPU calls without a GPU: the fake driver and compiler of tests/gpu, and a cupy that is none.

What the driver is asked to launch, on which device and stream, and what is refused before that. No
kernel runs, so no number is looked at. Each test is a process: a driver is found once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(not COMPILER, reason="no C++ compiler for the fake driver")

BEGIN = """
import json, sys
import numpy as np
import fake_cupy
cupy = fake_cupy.install()
import fulmen
Q = cupy.asarray(np.zeros((2, 4, 16, 64), np.float16))
K, V = (cupy.asarray(np.zeros((2, 2, 24, 64), np.float16)) for _ in range(2))
def said(call):
    try:
        call()
    except fulmen.Error as error:
        return type(error).__name__, str(error)
    return None
"""


@pytest.fixture(scope="session")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with libcuda.so.1 and an NVRTC, both fake."""
    folder = tmp_path_factory.mktemp("fakes")
    for source, library in (("fake_driver", "libcuda.so.1"), ("fake_nvrtc", "libnvrtc.so.13")):
        subprocess.run(
            [
                COMPILER, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{ROOT / 'src'}",
                f"-I{ROOT / 'include'}",
                str(ROOT / "tests" / "gpu" / f"{source}.cpp"), "-o", str(folder / library),
                f"-Wl,-soname,{library}",
            ],
            check=True,
        )  # fmt: skip
    return folder


@pytest.fixture
def python(fakes: Path, tmp_path: Path) -> Any:
    """Runs a script on the fakes; the object that it prints."""

    def run(script: str, **variables: str) -> Any:
        done = program(fakes, tmp_path, ["-c", BEGIN + script], variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def command(fakes: Path, tmp_path: Path) -> Any:
    """Runs the program fulmen on the fakes."""

    def run(*words: Any, code: int = 0, **variables: str) -> str:
        done = program(fakes, tmp_path, ["-m", "fulmen", *map(str, words)], variables)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stderr if code == 2 else done.stdout

    return run


def program(fakes: Path, folder: Path, words: list[str], variables: dict[str, str]) -> Any:
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join([str(fakes), os.environ.get("LD_LIBRARY_PATH", "")]),
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "FULMEN_NVRTC": str(fakes / "libnvrtc.so.13"),
        "FULMEN_CACHE_DIR": str(folder / "cache"),
        **variables,
    }
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=folder, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_results_are_where_the_arrays_are_and_of_their_kind(python: Any) -> None:
    found = python("""
with fake_cupy.Device(1):
    q, k, v = (cupy.asarray(np.zeros((1, 2, 8, 32), np.float32)) for _ in range(3))
forward = fulmen.attention_forward(q, k, v, causal=True)
back = fulmen.attention_backward(q, q, k, v, forward.o, forward.stats, causal=True)
made = [*forward, *back[:3]]
print(json.dumps([
    [type(x) is cupy.ndarray for x in made], [x.device.id for x in made],
    [list(x.shape) for x in forward], sorted({device for device, _ in fake_cupy.launches()}),
    [back.dbias, back.dsinks],
]))
""")
    assert found[0] == [True] * 6
    assert found[1] == [1] * 6
    assert found[2] == [[1, 2, 8, 32], [1, 2, 8], [1, 2, 8, 2]]
    assert found[3] == [1]
    assert found[4] == [None, None]


def test_the_stream_is_the_current_one_or_the_one_that_is_given(python: Any) -> None:
    found = python("""
class Other:
    def __cuda_stream__(self):
        return 0, 0x5555
class OfTorch:
    cuda_stream = 0x7777
fulmen.attention(Q, K, V)
with fake_cupy.Stream(0x1110):
    o = fulmen.attention(Q, K, V)
memory = o.made_on
fulmen.attention(Q, K, V, stream=0x2220)
fulmen.attention(Q, K, V, stream=Other())
made, lse = fulmen.attention(Q, K, V, stream=OfTorch(), return_lse=True)
plan = fulmen.plan(Q, K, V)
plan.forward(Q, K, V, stream=fake_cupy.Stream(0x3330))
streams = [stream for _, stream in fake_cupy.launches()]
print(json.dumps([
    sorted(set(streams), key=streams.index), memory, made.made_on, Q.streams[-1],
    said(lambda: fulmen.attention(Q, K, V, stream=-3)),
    said(lambda: fulmen.attention(Q, K, V, stream="main")),
]))
""")
    assert found[0] == [0, 0x1110, 0x2220, 0x5555, 0x7777, 0x3330]
    assert found[1:4] == [0x1110, 0x7777, 0x3330]  # memory, and inputs, ordered on that stream
    assert found[4][0] == "ArgumentError"
    assert "at least 0" in found[4][1]
    assert found[5][0] == "DTypeError"


def test_arrays_in_several_places_are_one_sentence(python: Any) -> None:
    found = python("""
with fake_cupy.Device(1):
    there = cupy.asarray(np.zeros((2, 2, 24, 64), np.float16))
host = np.zeros((2, 2, 24, 64), np.float16)
lengths = np.array([3, 4], np.int32)
print(json.dumps([
    said(lambda: fulmen.attention(Q, there, V)),
    said(lambda: fulmen.attention(Q, host, V)),
    said(lambda: fulmen.attention(Q, K, V, kv_lengths=lengths)),
    said(lambda: fulmen.attention(Q, K, V, backend="cpu")),
    said(lambda: fulmen.attention(Q, K, V, implementation="tiled")),
    said(lambda: fulmen.attention(Q, K, V, implementation="sm70")),
    said(lambda: fulmen.attention(host, host, host, backend="cuda")),
    fake_cupy.driver.fake_num_launches(),
]))
""")
    assert found[0][0] == "ArgumentError"
    assert found[0][1].startswith("k is on GPU 1 and q on GPU 0; all arrays of a call are in one")
    assert "k is in host memory and q on GPU 0" in found[1][1]
    assert "kv_lengths is in host memory" in found[2][1]
    for kind, sentence in found[3:7]:
        assert kind == "ArgumentError", sentence
        assert len(sentence.split()) > 4
    assert found[7] == 0


def test_lists_go_where_q_is_and_rng_may_be_there(python: Any) -> None:
    found = python("""
forward = fulmen.attention_forward(Q, K, V, kv_lengths=[3, 24], q_lengths=[16, 2])
packed = cupy.asarray(np.zeros((40, 4, 64), np.float16))
fulmen.attention_varlen(packed, packed, packed, [0, 10, 40], [0, 10, 40])
ids = fulmen.masks.documents([0] * 16, [1] * 24)
fulmen.attention(Q, K, V, mask=ids)
rng = cupy.asarray(np.array([7, 3]))
fulmen.attention(Q, K, V, dropout_p=0.5, rng=rng)
print(json.dumps([
    fake_cupy.driver.fake_num_launches() > 3, len(rng.streams), fulmen.device_faults(0),
    said(lambda: fulmen.attention(Q, K, V, dropout_p=0.5)),
]))
""")
    assert found[:3] == [True, 1, 0]
    assert "rng is missing" in found[3][1]


def test_dense_mask_reads_arrays_of_a_gpu_and_gives_a_matrix_of_numpy(python: Any) -> None:
    found = python("""
from fulmen import masks
rng = np.random.default_rng(0)
mask = rng.random((2, 3, 4, 5)) < 0.5
bias = np.where(rng.random((4, 5)) < 0.3, -np.inf, 0).astype(np.float32)
lengths, ids = np.array([5, 3]), np.array([0, 0, 1, 1])
def matrix(a):
    return fulmen.dense_mask(4, 5, causal=True, bias=a(bias), kv_lengths=a(lengths),
                             mask=(a(mask), masks.documents(a(ids), a(np.array([0, 0, 1, 1, 1])))))
there, here = matrix(cupy.asarray), matrix(np.asarray)
print(json.dumps([type(there) is np.ndarray, bool((there == here).all()), int(here.sum())]))
""")
    assert found[:2] == [True, True]
    assert found[2] > 0


def test_a_run_of_a_plan_takes_its_workspace_from_the_owner_of_q(python: Any) -> None:
    found = python("""
plan = fulmen.plan(Q, K, V, causal=True, implementation="simt")
forward = plan.forward(Q, K, V)
before = fake_cupy.driver.fake_num_calls(b"cuMemAllocFromPoolAsync")
for _ in range(3):
    gradients = plan.backward(Q, Q, K, V, forward.o, forward.stats)
compiled = fake_cupy.driver.fake_num_calls(b"cuModuleLoadData")
plan.forward(Q, K, V)
host = np.empty(plan.workspace_bytes + 1, np.uint8)
mine = cupy.empty(plan.workspace_bytes + 1, np.uint8)
plan.backward(Q, Q, K, V, forward.o, forward.stats, workspace=mine, stream=0x4440)
print(json.dumps([
    fake_cupy.driver.fake_num_calls(b"cuMemAllocFromPoolAsync") - before,
    fake_cupy.driver.fake_num_calls(b"cuModuleLoadData") - compiled,
    said(lambda: plan.backward(Q, Q, K, V, forward.o, forward.stats, workspace=host)),
    plan.explain("backward")["implementation"], gradients.dk.device.id, mine.streams,
]))
""")
    assert found[0] == 0
    assert found[1] == 0
    assert found[2][0] == "ArgumentError"
    assert "workspace" in found[2][1]
    assert found[3:] == ["simt", 0, [0x4440]]  # ordered on the stream of the run


def test_warmup_compiles_what_calls_then_find(python: Any) -> None:
    found = python("""
shape = (2, 4, 512, 64)
problems = [
    {"q": shape, "k": shape, "v": shape, "dtype": "float16", "need": ("q", "k", "v")},
    {"q": Q.shape, "k": K.shape, "v": V.shape, "dtype": "float16", "causal": True},
    {"q": Q, "k": K, "v": V},
]
told = []
fulmen.warmup(problems, progress=lambda done, total: told.append((done, total)))
loaded = fake_cupy.driver.fake_num_calls(b"cuModuleLoadData")
fulmen.attention(Q, K, V)
fulmen.attention(Q, K, V, causal=True)
info = fulmen.gpu_info()
fulmen.cache_clear()
print(json.dumps([
    told, loaded > 0, fake_cupy.driver.fake_num_calls(b"cuModuleLoadData") - loaded,
    fake_cupy.driver.fake_num_launches() > 0, info["cache"]["entries"] > 0,
    fulmen.gpu_info()["cache"]["entries"],
    said(lambda: fulmen.warmup([{"q": shape, "k": shape}])),
    said(lambda: fulmen.warmup([{**problems[0], "implementation": "tiled"}])),
]))
""")
    assert found[0] == [[1, 3], [2, 3], [3, 3]]
    assert found[1:6] == [True, 0, True, True, 0]
    assert "lacks v" in found[6][1]
    assert found[7][0] == "ArgumentError"


def test_explain_and_plan_for_gpus_that_are_and_are_not_here(python: Any) -> None:
    found = python("""
here = fulmen.explain(Q, K, V)
host = np.zeros((1, 2, 128, 64), np.float32)
named = fulmen.explain(host, host, host, device_name="a100", operation="backward")
plan = fulmen.plan(host, host, host, device_name="h100", need=())
print(json.dumps([
    here["device"]["index"], here["backend"], str(here), named["device"]["index"],
    named["device"]["arch"], fulmen.explain(host, host, host, device=1)["device"]["index"],
    said(lambda: plan.forward(Q, K, V)),
    said(lambda: fulmen.explain(host, host, host, device=7)),
    said(lambda: fulmen.explain(host, host, host, device=-1)),
    said(lambda: fulmen.explain(host, host, host, device="h100")),
    said(lambda: fulmen.explain(host, host, host, device_name="voodoo2")),
]))
""")
    assert found[:2] == [0, "cuda"]
    assert "kernel" in found[2]
    assert found[3] is None
    assert found[4].startswith("sm_80")
    assert found[5] == 1
    for kind, sentence in found[6:]:
        assert kind in {"ShapeError", "ArgumentError", "UnsupportedError", "DeviceError",
                        "DTypeError"}  # fmt: skip
        assert len(sentence.split()) > 4
    assert "voodoo2" in found[10][1]


def test_bundles(python: Any, tmp_path: Path) -> None:
    path = tmp_path / "kernels.bundle"
    found = python(
        f"""
path, shape = {str(path)!r}, (1, 2, 64, 64)
problem = {{"q": shape, "k": shape, "v": shape, "dtype": "float16", "need": ("q", "k", "v")}}
count = fulmen.compile_bundle([problem], path, archs=["sm_90a", "a100"])
fulmen.load_bundle(path)
print(json.dumps([
    count, fulmen.gpu_info()["bundle"]["path"] == path,
    said(lambda: fulmen.load_bundle(path + ".none")),
    said(lambda: fulmen.compile_bundle([problem], path, archs=[])),
    said(lambda: fulmen.compile_bundle([], path, archs=["a100"])),
]))
"""
    )
    assert found[:2] == [4, True]
    assert all(len(sentence.split()) > 3 for _, sentence in found[2:])
    assert path.stat().st_size > 0


def test_a_machine_without_a_compiler_or_a_device_says_so(python: Any) -> None:
    script = "print(json.dumps(said(lambda: fulmen.attention(Q, K, V))))"
    kind, sentence = python(script, FULMEN_NVRTC="/nowhere/libnvrtc.so")
    assert kind == "LibraryNotFound", sentence
    assert "NVRTC" in sentence
    kind, sentence = python(script, FAKE_NVRTC_FAIL="1")
    assert kind == "CompileError"
    assert "planted" in sentence
    kind, sentence = python(script, FAKE_CUDA_VERSION="11000")
    assert kind in {"DeviceError", "UnsupportedError", "LibraryNotFound"}, sentence


def test_doctor(command: Any) -> None:
    """Everything is there, and nothing computes: this GPU is none (test_emulator has one)."""
    text = command("doctor", code=1)
    for words in ("driver", "gpu 0", "gpu 1", "sm_90", "nvrtc", "cache", "problems: see above"):
        assert words in text
    data = json.loads(command("doctor", "--json", code=1))
    bad = [finding["what"] for finding in data["findings"] if finding["state"] == "problem"]
    assert bad == [f"gpu 0 {name}" for name in ("naive", "simt", "sm80", "sm90", "auto")]
    broken = command("doctor", code=1, FULMEN_NVRTC="/nowhere/libnvrtc.so")
    assert "1 problem: see above" in broken
    assert "everything works" not in broken


def test_run_means_the_gpu_where_one_is(command: Any) -> None:
    """This driver cannot copy, so the sentence shows where `run` wanted to go."""
    cannot = command("run", "--repeat", 1, code=1)
    assert cannot == ""
    said = command("run", "--backend", "cuda", code=2, FAKE_CUDA_DEVICES="0")
    assert "no GPU to run on" in said
    text = command("run", "--repeat", 1, FULMEN_NVRTC="/nowhere/libnvrtc.so")
    assert "on the CPU; GPU 0 is left out: " in text
    assert "forward: tiled on cpu" in text


def test_explain_command(command: Any) -> None:
    for words in (("--device", "h100"), ("--device", 1), ("--implementation", "simt")):
        text = command("explain", "2x8x1024x64", "--dtype", "bfloat16", *words)
        assert "kernel" in text
        assert "roofline" in text
    text = command("explain", "2x8x1024x64")  # the GPU that is here, and its fast kernels
    assert "2x8x1024x64 bfloat16, on Fake GPU 0 (sm_90a)" in text
    assert "forward: sm90 on cuda" in text
    assert "float32, on the CPU" in command("explain", "2x8x1024x64", "--backend", "cpu")
    data = json.loads(command("explain", "2x8x1024x64", "--device", "a100", "--json"))
    assert data["device"]["name"] == "a100"
    assert "voodoo2" in command("explain", "2x8x1024x64", "--device", "voodoo2", code=2)


def test_ablation_command(command: Any, tmp_path: Path) -> None:
    words = ("ablation", "1x2x256x64", "--device", "h100")
    rows = json.loads(command(*words, "--json"))
    whole = [row["implementation"] for row in rows if not row["without"]]
    assert whole == ["naive", "simt", "sm80", "sm90"]
    switches = {row["without"] for row in rows if row["implementation"] == "sm90"}
    assert {"", "ping_pong", "lazy_rescale", "full_blocks"} <= switches
    assert all(row["registers"] > 0 and row["tensor"] == 0 for row in rows)  # the fake's code
    text = command(*words, "--implementation", "sm90")
    assert "left out: of whole, p50 ms, TFLOP/s, error; the kernels of h100 are compiled" in text
    assert max(map(len, text.splitlines())) <= 110
    assert "--output" in command(*words, "-o", tmp_path, code=2)
    said = command("ablation", "1x2x256x64", "--device", "t4", "--implementation", "sm90", code=2)
    assert "none of sm90" in said


def test_compile_command(command: Any, tmp_path: Path) -> None:
    path = tmp_path / "out.bundle"
    words = ("--arch", "sm_90a", "--arch", "sm_80", "--dim", 64, "--dtype", "float16")
    text = command("compile", *words, "-o", path)
    assert "sm_90a, sm_80" in text
    data = json.loads(command("compile", *words, "--forward-only", "-o", path, "--json"))
    assert data["bytes"] == path.stat().st_size > 0
    assert data["plans"] == 8  # two masks, two lengths, two architectures
    paged = (*words, "--forward-only", "--mask", "full", "-o", path, "--json")
    asked = ("--page-size", 1, "--page-size", 16, "--kv-dtype", "float8_e4m3fn")
    with_pages = json.loads(command("compile", *paged, *asked))
    assert with_pages["plans"] == 20  # 2 architectures: 2 lengths, and over 2 sizes of 2 dtypes
    assert with_pages["bytes"] > data["bytes"]  # the kernels that append rows and merge
    assert "--dim is -1" in command("compile", "--arch", "a100", "--dim", -1, "-o", path, code=2)


def test_verify_needs_arrays_to_verify_with(command: Any) -> None:
    said = command("verify", "u19*", "--backend", "cuda", code=2, FAKE_CUDA_DEVICES="0")
    assert "no GPU" in said
    said = command("verify", "u19*", "--backend", "cuda", "--implementation", "tiled", code=2)
    assert "allowed there are naive" in said
