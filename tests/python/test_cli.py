# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it: exit codes, what is printed, files that are broken."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from command_line import program
from safetensors.numpy import load_file, save_file

import fulmen
from fulmen.cli.main import main
from fulmen.lab.cases.arrays import dtype_of

DATA = Path(__file__).resolve().parents[2] / "examples" / "data"
DECODER, ENCODER = DATA / "decoder.safetensors", DATA / "encoder.safetensors"


def random_file(path: Path, metadata: dict[str, str] | None = None, **changes: Any) -> Path:
    x = np.random.default_rng(0).standard_normal((1, 2, 8, 16)).astype(np.float32)
    tensors = {"q": x, "k": x, "v": x, **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, path, metadata)
    return path


def test_run_without_a_file_takes_the_example(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = command("run", "--repeat", 1)
    for words in ("decoder.safetensors", "200x4x64", "causal", "forward: tiled", "GFLOP/s", "text"):
        assert words in text
    rows = dict(re.findall(r"^(o|lse|dq|dk|dv) .*?(within rule|too far) +file", text, re.MULTILINE))
    assert rows == dict.fromkeys(("o", "lse", "dq", "dk", "dv"), "within rule")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("implementation", ["scalar", "tiled"])
def test_real_decoder_in_every_dtype(command: Any, dtype: str, implementation: str) -> None:
    named = ("--dtype", dtype, "--implementation", implementation)
    (problem,) = command("run", DECODER, "--json", "--repeat", 1, *named)["problems"]
    assert problem["dtype"] == dtype
    lines = problem["accuracy"]
    assert [line["result"] for line in lines] == ["o", "lse", "dq", "dk", "dv"]
    assert {line["reference"] for line in lines} == {"file"}
    assert all(line["passed"] for line in lines), lines
    for operation in problem["operations"].values():
        assert operation["explanation"]["implementation"] == implementation
        assert operation["memory_bytes"] < operation["naive_bytes"]
        assert operation["median_seconds"] > 0


@pytest.mark.skipif(not ENCODER.exists(), reason="an sdist leaves the large example out")
@pytest.mark.parametrize("prefix", ["layer0", "layer2", "layer5"])
def test_real_encoder(command: Any, prefix: str) -> None:
    found = command("run", ENCODER, "--json", "--repeat", 1, "--prefix", prefix)
    assert [problem["name"] for problem in found["problems"]] == [prefix]
    lines = found["problems"][0]["accuracy"]
    assert [(line["result"], line["reference"]) for line in lines] == [
        ("o", "file"),
        ("lse", "file"),
    ]
    assert all(line["passed"] for line in lines), lines
    pairs = 4 * (512**2 + 221**2 + 37**2)
    assert found["problems"][0]["operations"]["forward"]["flops"] == 4 * 32 * pairs


def test_memory_is_workspace_and_outputs(command: Any) -> None:
    found = command("run", DECODER, "--json", "--repeat", 1)["problems"][0]["operations"]
    outputs = 200 * 4 * (64 * 2 + 4 + 2 * 4)  # o, lse, stats
    forward = found["forward"]
    assert forward["memory_bytes"] == forward["workspace_bytes"] + outputs
    assert forward["naive_bytes"] == 2 * 4 * 4 * 200 * 200 + 200 * 4 * (64 * 2 + 4)
    assert forward["flops"] == 4 * 64 * 4 * (200 * 201 // 2)
    backward = found["backward"]
    gradients = 200 * 64 * 2 * (4 + 2 + 2)
    assert backward["memory_bytes"] == backward["workspace_bytes"] + gradients
    assert forward["naive_measured"]["peak_bytes"] > forward["naive_bytes"] / 2


def test_results_are_written_and_can_be_judged_again(command: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    command("run", DECODER, "-o", out, "--repeat", 1)
    results = load_file(out)
    inputs = load_file(DECODER)
    want = fulmen.attention_forward(
        *(inputs[n] for n in "qkv"), causal=True, scale=0.125, layout="shd"
    )
    np.testing.assert_array_equal(results["o"], want.o)
    np.testing.assert_array_equal(results["lse"], want.lse)
    assert results["dq"].shape == inputs["q"].shape
    many = tmp_path / "many.safetensors"
    x = np.ones((2, 3, 4), ml_dtypes.bfloat16)
    inputs = {f"{prefix}.{name}": x for prefix in ("a", "b.c") for name in "qkv"}
    save_file(inputs, tmp_path / "two.safetensors")
    command("run", tmp_path / "two.safetensors", "-o", many, "--repeat", 1)
    assert sorted(load_file(many)) == ["a.lse", "a.o", "b.c.lse", "b.c.o"]
    assert load_file(many)["b.c.o"].dtype == x.dtype


def test_flags_override_and_the_reference_follows(command: Any) -> None:
    found = command(
        "run", DECODER, "--json", "--repeat", 1, "--no-causal", "--window", "7,3", "--softcap", 5,
        "--scale", 0.2, "--alignment", "top_left",
    )  # fmt: skip
    problem = found["problems"][0]
    assert {line["reference"] for line in problem["accuracy"]} == {"computed"}
    assert all(line["passed"] for line in problem["accuracy"])
    for words in ("not causal", "window (7, 3)", "softcap 5.0", "scale 0.2", "top_left"):
        assert words in problem["options"]


def test_a_wrong_reference_fails(command: Any, tmp_path: Path) -> None:
    tensors = load_file(DECODER)
    tensors["dv"] = tensors["dv"] * 1.1
    file = tmp_path / "wrong.safetensors"
    save_file(tensors, file, {"layout": "shd", "causal": "true", "scale": "0.125"})
    text = command("run", file, "--repeat", 1, code=1)
    assert re.search(r"^dv .*too far", text, re.MULTILINE)
    assert re.search(r"^dq .*within rule", text, re.MULTILINE)


def test_every_tensor_that_a_file_may_hold(command: Any, tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((2, 2, 8, 16)).astype(np.float32)
    file = random_file(
        tmp_path / "all.safetensors", {"window": "3,0", "softcap": "4"}, q=x, k=x, v=x, do=x,
        bias=x[:1, :, :, :8].copy(), mask=np.tri(8, dtype=bool), sinks=x[0, 0, 0, :2].copy(),
        lengths=np.array([8, 5], np.int32),
    )  # fmt: skip
    problem = command("run", file, "--json", "--repeat", 1)["problems"][0]
    judged = {line["result"]: line["passed"] for line in problem["accuracy"]}
    assert judged == dict.fromkeys(("o", "lse", "dq", "dk", "dv", "dbias", "dsinks"), True)
    assert "lengths [8, 5]" in problem["options"]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("q_dtype", [np.float32, ml_dtypes.bfloat16])
def test_keys_and_values_of_8_bits(command: Any, tmp_path: Path, dtype: str, q_dtype: Any) -> None:
    rng = np.random.default_rng(2)
    q = rng.standard_normal((4, 5, 16)).astype(q_dtype)
    numbers = rng.standard_normal((2, 2, 9, 16)) * 40
    k, v = (np.rint(x).astype(dtype_of(dtype)) for x in numbers)
    scale = np.full((2, 1, 1), 0.02, np.float32)
    file = random_file(tmp_path / "8.safetensors", {}, q=q, k=k, v=v, k_scale=scale, v_scale=scale)
    (problem,) = command("run", file, "--json", "--repeat", 1)["problems"]
    assert (problem["dtype"], problem["kv_dtype"]) == (np.dtype(q_dtype).name, dtype)
    assert {x["result"]: x["passed"] for x in problem["accuracy"]} == {"o": True, "lse": True}
    assert f"k and v {dtype}" in command("run", file, "--repeat", 1)
    (wide,) = command("run", file, "--json", "--repeat", 1, "--dtype", "float32")["problems"]
    assert (wide["dtype"], wide["kv_dtype"]) == ("float32", dtype)
    random_file(tmp_path / "do.safetensors", {}, q=q, k=k, v=v, do=q)
    refused = command("run", tmp_path / "do.safetensors", code=2)
    assert f"k is {dtype}, of which there are no gradients" in " ".join(refused.split())
    command("run", tmp_path / "do.safetensors", "--no-backward", "--repeat", 1)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_queries_of_8_bits(command: Any, tmp_path: Path, dtype: str) -> None:
    numbers = np.random.default_rng(3).standard_normal((3, 2, 9, 16)) * 40
    q, k, v = (np.rint(x).astype(dtype_of(dtype)) for x in numbers)
    scales = {"q_scale": np.full(1, 0.02, np.float32), "k_scale": np.full(1, 0.02, np.float32),
              "v_scale": np.linspace(0.01, 0.03, 16, dtype=np.float32)}  # fmt: skip
    file = random_file(tmp_path / "8.safetensors", {}, q=q, k=k, v=v, **scales)
    (problem,) = command("run", file, "--json", "--repeat", 1)["problems"]
    assert (problem["dtype"], problem["kv_dtype"]) == (dtype, dtype)
    assert {x["result"]: x["passed"] for x in problem["accuracy"]} == {"o": True, "lse": True}


def test_broken_files(command: Any, tmp_path: Path) -> None:
    whole = DECODER.read_bytes()
    x = np.ones((1, 2, 8, 16), np.float32)
    broken = {
        "cut in the data": whole[:100_000],
        "cut in the header": whole[:100],
        "empty": b"",
        "not safetensors": b"PK\x03\x04" + bytes(1000),
        "a header of JSON that is none": (64).to_bytes(8, "little") + b"{" * 64,
    }
    for name, content in broken.items():
        file = tmp_path / f"{name}.safetensors"
        file.write_bytes(content)
        assert "is not a whole safetensors file" in command("run", file, code=2)
    assert "is not a file" in command("run", tmp_path / "absent.safetensors", code=2)
    assert "is not a file" in command("run", tmp_path, code=2)
    wrong: list[tuple[str, dict[str, Any], dict[str, str] | None]] = [
        ("no tensor q", {"q": None}, None),
        ("has q and no k", {"k": None}, None),
        ("dim_qk differs", {"k": x[..., :8].copy()}, None),
        ("allowed is float64", {"q": x.astype(np.int32)}, None),
        ("names 3", {}, {"layout": "shd"}),
        ("allowed are 'bhsd'", {}, {"layout": "x"}),
        ("'maybe'", {}, {"causal": "maybe"}),
        ("'big'", {}, {"scale": "big"}),
        ("window='1,2,3'", {}, {"window": "1,2,3"}),
        ("the reference o has shape", {"o": x[:, :, :4].copy()}, None),
        ("softcap is -1", {}, {"softcap": "-1"}),
        ("mask has shape", {"mask": np.ones((3, 3), bool)}, None),
        ("cu_q", {"cu_seqlens": np.array([0, 9], np.int32), "q": x[0], "k": x[0], "v": x[0]}, None),
    ]
    for words, changes, metadata in wrong:
        file = random_file(tmp_path / "wrong.safetensors", metadata, **changes)
        assert words in command("run", file, code=2)


def test_names_in_a_file_do_not_reach_the_terminal(command: Any, tmp_path: Path) -> None:
    x = np.ones((1, 2, 8, 16), np.float32)
    escape = "\x1b]0;owned\x07\x1b[31m\x9b2J\r\u202e"
    shown = r"\x1b]0;owned\x07\x1b[31m\x9b2J\r\u202e"
    file = tmp_path / "named.safetensors"
    save_file({f"{escape}.{name}": x for name in "qkv"}, file)
    assert shown in command("run", file, "--repeat", 1)
    save_file({f"{escape}.q": x, f"{escape}.k": x}, file)
    said = command("run", file, code=2)
    assert r"\x1b]0;owned" in said
    assert said[:-1].isprintable()
    save_file({"q": x, "k": x, "v": x}, file, {"causal": escape, "layout": "bhsd"})
    assert command("run", file, code=2)[:-1].isprintable()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("walk",), "walk"),
        (("run", "--window", "a"), "window='a'"),
        (("run", "--dtype", "int8"), "int8"),
        (("run", "--prefix", "layer9"), "layer9"),
        (("run", "--repeat", "-1"), "--repeat"),
        (("run", "--implementation", "sm90", "--backend", "cpu"), "allowed there are auto, scalar"),
        (
            ("run", "--implementation", "tiled", "--backend", "cuda"),
            "allowed there are auto, naive",
        ),
        (("run", "-o", "/nowhere/at/all"), "/nowhere/at is no folder"),
        (("run", "-o", "/"), "/ is a folder"),
        (("run", "--only", "q"), "fulmen run: unrecognized arguments: --only"),
        (("compile", "--arch", "sm_90a", "-o", "/nowhere/at/all"), "/nowhere/at is no folder"),
        (("ablation", "--rounds", "0"), "at least 1"),
        (("verify", "no_such_case"), "no_such_case"),
        (("verify", "--backend", "cpu", "--implementation", "simt"), "tiled"),
        (("verify", "--backend", "metal"), "metal"),
        (("explain", "8x8"), "BATCHxHEADSxROWSxDIM"),
        (("explain", f"1x1x{10**21}x64"), "BATCHxHEADSxROWSxDIM"),
        (("explain", "1x1x8x64", "--kv-rows", 10**21), "a 64-bit integer"),
        (("explain", f"1x1x{10**17}x1024"), "no memory has 2^62 bytes"),
        (("explain", "1x3x8x64", "--kv-heads", "2"), "multiple"),
        (("explain", "1x1x8x1000"), "576"),
        (("explain", "1x1x8x64", "--softcap", "-1"), "softcap"),
    ],
)
def test_bad_command_lines(command: Any, arguments: tuple[str, ...], words: str) -> None:
    assert words in command(*arguments, code=2)


def test_explain_a_shape(command: Any) -> None:
    text = command("explain", "2x8x1024x64", "--causal")
    assert "forward: tiled on cpu" in text
    assert "2.15 GFLOP" in text
    found = command(
        "explain",
        "64x64x131072x128",
        "--dtype",
        "bfloat16",
        "--backward",
        "--kv-heads",
        8,
        "--json",
    )
    assert found["operation"] == "backward"
    assert found["flops"] == pytest.approx(2.5 * 4 * 128 * 64 * 64 * 131072.0**2)


def test_explain_keys_in_pages(command: Any) -> None:
    for layout in ("bhsd", "bshd"):
        shape = ("4x32x1x128", "--kv-heads", 8, "--kv-rows", 1000, "--page-size", 16)
        found = command("explain", *shape, "--layout", layout, "--backend", "cpu", "--json")
        assert found["operation"] == "forward"
        assert found["bytes"] > 4 * 1008 * 8 * 128 * 2 * 4  # whole pages
    assert "--page-size" in command("explain", *shape, "--count", code=2)
    assert "'0'" in command("explain", "1x1x1x8", "--page-size", 0, code=2)


def test_verify_ends_with_the_counts(command: Any) -> None:
    text = command("verify", "decode_k3?", "--jobs", 2)
    last = text.strip().splitlines()[-1]
    match = re.fullmatch(r"(\d+) passed, 0 failed, (\d+) skipped", last)
    assert match, text
    assert int(match[1]) > 4
    found = command("verify", "decode_k3?", "--implementation", "scalar", "--jobs", 1, "--json")
    assert found["failed"] == 0
    assert {run["implementation"] for run in found["runs"]} == {"scalar"}
    assert len(found["runs"]) == found["passed"] == int(match[1]) // 2


def test_verify_groups_skips_and_ends_with_failures(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fulmen.cli import verify

    lines = [
        ("a", "tiled", "skipped", 0.0, "dim 300 is beyond 256"),
        ("b", "scalar", "skipped", 0.0, "dim 400 is beyond 256"),
        ("c", "scalar", "skipped", 0.0, "no masks"),
        ("d", "scalar", "failed", 2.5, "o: off"),
    ]
    monkeypatch.setattr(verify, "run_task", lambda task: lines)
    text = command("verify", "decode_k31", "--jobs", 1, code=1).strip().splitlines()
    assert "2 skipped (tiled, scalar): dim 300 is beyond 256" in text
    assert "1 skipped (scalar): no masks" in text
    failure = next(index for index, line in enumerate(text) if line.startswith("d "))
    assert failure > text.index("1 skipped (scalar): no masks")
    assert text[-1] == "0 passed, 1 failed, 3 skipped"


def test_verify_fails_where_a_case_does(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fulmen.cli import verify

    line = ("a_case", "tiled", "failed", 2.5, "o: error 5 of 2 allowed in row (0, 0, 1)")
    monkeypatch.setattr(verify, "run_task", lambda task: [line])
    text = command("verify", "decode_k3?", "--implementation", "tiled", "--jobs", 1, code=1)
    assert "error 5 of 2 allowed in row (0, 0, 1)" in text
    assert "failed, 0 skipped" in text.strip().splitlines()[-1]


def test_a_process_has_no_traceback_and_the_exit_code(tmp_path: Path) -> None:
    file = tmp_path / "cut.safetensors"
    file.write_bytes(DECODER.read_bytes()[:100])
    done = program("run", file)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "is not a whole safetensors file" in done.stderr
    assert program("explain", "1x1x8x8").returncode == 0


def test_a_closed_output_is_one_sentence() -> None:
    explain = f"{sys.executable} -m fulmen explain 1x1x8x8 >&-"
    done = subprocess.run(["bash", "-c", explain], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "fulmen: standard output is closed; send it somewhere, as to /dev/null\n"
    )


def test_a_terminal_without_the_letters(tmp_path: Path) -> None:
    file = random_file(tmp_path / "x.safetensors", {"model": "\u4eba"})
    done = program("run", file, "--repeat", 1, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "\\u4eba" in done.stdout


def test_version_and_help(command: Any) -> None:
    assert command("--version").strip() == f"fulmen {fulmen.__version__}"
    for words in ("run", "verify", "explain", "doctor"):
        assert words in command("--help")
        assert "usage: fulmen" in command(words, "--help")


def test_folders_of_the_package_for_c(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fulmen_devel", None)  # not installed
    with pytest.raises(SystemExit) as ended:
        main(["--cmake-dir"])
    assert ended.value.code == 2
    assert "pip install fulmen[devel]" in capsys.readouterr().err
    packaging = Path(__file__).resolve().parents[2] / "packaging" / "devel"
    monkeypatch.delitem(sys.modules, "fulmen_devel")
    monkeypatch.syspath_prepend(str(packaging))
    assert main(["--cmake-dir", "--include-dir"]) == 0
    folder = packaging / "fulmen_devel"
    printed = capsys.readouterr().out.splitlines()
    assert printed == [str(folder / "lib" / "cmake" / "fulmen"), str(folder / "include")]


def test_colour_only_on_a_terminal_that_wants_it() -> None:
    pty = pytest.importorskip("pty", reason="no pseudo terminals here")
    doctor = [sys.executable, "-m", "fulmen", "doctor"]
    coloured = {}
    for no_colour in ("", "1"):
        env = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": no_colour}
        parent, child = pty.openpty()
        with subprocess.Popen(doctor, env=env, stdout=child, stderr=child, stdin=child) as running:
            os.close(child)
            text = b""
            try:
                while chunk := os.read(parent, 4096):
                    text += chunk
            except OSError:  # the other end is closed
                pass
            assert running.wait() == 0
        os.close(parent)
        coloured[no_colour] = b"\x1b[32m" in text
    assert coloured == {"": True, "1": False}
