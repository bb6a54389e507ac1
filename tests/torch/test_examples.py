# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The PyTorch examples run as a reader would run them, and the ladder's rungs agree."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from long_run import IS_FULL, full

import fulmen
from fulmen.cli.main import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = ["training/packing.py", "training/planned.py", "training/gpt.py",
           "huggingface/swap.py", "huggingface/latent.py"]  # fmt: skip


def loaded(script: str):
    """The example as a module: in this process, which has imported torch already."""
    path = EXAMPLES / script
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rung(name: str):
    return loaded(f"ladder/{name}.py")


@pytest.mark.parametrize("script", SCRIPTS)
def test_runs(script: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [script])
    assert loaded(script).main() == 0
    assert capsys.readouterr().out


def test_two_processes_attend_in_a_ring() -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / "distributed/ring_attention.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "process 1" in done.stdout


@full
def test_two_processes_train_on_one_sequence() -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / "distributed/context_parallel.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "process 1" in done.stdout


def test_a_language_model_learns_as_with_torchs_attention(tmp_path) -> None:
    curves = tmp_path / "curves.jsonl"
    assert loaded("train_lm/train.py").main(["--tiny", "-o", str(curves)]) == 0
    figure = tmp_path / "curves.svg"
    assert loaded("train_lm/plot.py").main([str(curves), str(figure)]) == 0
    assert figure.read_text().count("<polyline") == 4  # two curves in two panels


SERVED = {
    "room for all": [],
    "few pages": ["--pages", "24", "--page-size", "8", "--most-requests", "6"],
    "small steps": ["--most-tokens", "24", "--rate", "2000"],
}


@pytest.mark.parametrize("name", SERVED)
def test_a_server_gives_each_request_the_tokens_that_it_has_alone(name, capsys) -> None:
    asked = ["--check", "--steps", "6", "--requests", "10", "--new", "10", "--longest", "40"]
    assert loaded("serve/serve.py").main([*asked, *SERVED[name]]) == 0
    said = capsys.readouterr().out
    assert "0 of 10 requests differ" in said
    assert "tokens/s" in said
    assert "p99" in said
    if name == "few pages":
        assert "0 put back" not in said


@full
def test_replicas_give_each_request_the_tokens_that_it_has_alone() -> None:
    command = [sys.executable, str(EXAMPLES / "serve/serve.py"), "--replicas", "2", "--check"]
    command += ["--steps", "6", "--requests", "10", "--new", "10", "--longest", "40"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 10 requests differ" in done.stdout


@full
def test_two_ranks_train_on_a_long_sequence_as_one(tmp_path) -> None:
    lines = tmp_path / "lines.jsonl"
    command = [sys.executable, str(EXAMPLES / "train_lm/long.py"), "-o", str(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = json.loads(lines.read_text())["loss"]
    assert losses == sorted(losses, reverse=True)


def logits_by_request(model, prompts, invariant: bool, together: bool):
    """Bits of the logits of every new token of each request, of one server or of one each."""
    from server import Request, Server

    found = {tuple(prompt): [] for prompt in prompts}

    class Watched(Server):
        def _batch(self, chosen):
            self.chosen = [request for request, _ in chosen]
            return super()._batch(chosen)

    for group in [prompts] if together else [[prompt] for prompt in prompts]:
        server = Watched(model, 24, 16, 3, 64, torch.bfloat16, invariant)

        class Recorded:
            tokens = model.tokens

            def step(self, *asked, server=server):
                logits = model.step(*asked)
                for request, row in zip(server.chosen, logits):
                    found[tuple(request.prompt)].append(row.view(torch.int16).tolist())
                return logits

        server.model = Recorded()
        server.run([Request(prompt, 5) for prompt in group])
    return {prompt: rows[-5:] for prompt, rows in found.items()}  # those that became tokens


def test_a_server_in_16_bits_gives_each_request_the_bits_of_one_of_its_own() -> None:
    loaded("serve/serve.py")  # its folder is on the path from here on
    from model import Decoder

    torch.manual_seed(0)
    model = Decoder(40).bfloat16()
    for weight in model.parameters():  # scores and logits that vary
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.3)
    first = torch.randint(40, (150,)).tolist()  # two chunks that others share, and a part
    prompts = [first, [*first[:130], 1, 2, 3], [5, 6, 7], torch.randint(40, (70,)).tolist()]
    alone = logits_by_request(model, prompts, True, together=False)
    assert logits_by_request(model, prompts, True, together=True) == alone
    assert all(len(rows) == 5 for rows in alone.values())
    assert len({str(rows) for rows in alone.values()}) == len(prompts)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(5, 5), (64, 64), (65, 130), (200, 63)])
def test_the_rungs_agree(sizes: tuple[int, int], causal: bool) -> None:
    q_rows, kv_rows = sizes
    q, k, v = (torch.randn(2, 3, rows, 16) for rows in (q_rows, kv_rows, kv_rows))
    chunked = rung("chunked").attention(q, k, v, causal, block_m=48, block_n=32)
    torch.testing.assert_close(
        chunked, fulmen.attention(q, k, v, causal=causal), atol=1e-5, rtol=1e-5
    )
    if q_rows <= kv_rows or not causal:  # softmax of a row that sees nothing is NaN
        naive = rung("naive").attention(q, k, v, causal)
        torch.testing.assert_close(chunked, naive, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_chunks_of_padded_sequences_and_16_bits(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(3, 2, 70, 16).to(dtype) for _ in range(3))
    lengths = torch.tensor([70, 33, 0])
    k[1, :, 33:] = v[2] = 1e4  # padding that a mask must hide
    for causal in (False, True):
        got = rung("chunked").attention(q, k, v, causal, 32, 16, lengths)
        expected = fulmen.attention(q.double(), k.double(), v.double(), causal=causal,
                                    alignment="top_left", kv_lengths=lengths)  # fmt: skip
        assert got.dtype == dtype
        bound = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), expected, atol=bound, rtol=bound)


@pytest.fixture
def compare(tmp_path, capsys, monkeypatch):
    """Runs `fulmen learn compare` in the checkout; its code, its text and its records."""
    monkeypatch.chdir(EXAMPLES.parent)

    def run(*words: str):
        code = main(["learn", "compare", "--rounds", "1", *words, "-o", str(tmp_path)])
        found = capsys.readouterr()
        lines = [line for path in tmp_path.glob("*.jsonl") for line in path.open()]
        return code, found.out + found.err, [json.loads(line) for line in lines]

    return run


def test_the_rungs_stand_in_one_table(compare) -> None:
    code, text, records = compare("--shape", "40", "16", "2", "--shape", "24", "32", "3")
    assert code == 0
    asked = {(r["seqlen_q"], r["d_qk"], r["heads_q"], r["op"]) for r in records}
    assert asked == {(40, 16, 2, "forward"), (40, 16, 2, "backward"),
                     (24, 32, 3, "forward"), (24, 32, 3, "backward")}  # fmt: skip
    assert {r["who"] for r in records} >= {"fulmen", "naive", "chunked", "torch"}
    assert all(r["max_error"] < (1e-5 if r["dtype"] == "float32" else 0.05) for r in records)
    assert "an H200 needs" in text
    assert "x naive" in text
    if not torch.cuda.is_available():
        assert "triton is left out: it runs on a GPU" in text
        assert "chunked is left out of backward" in text


def test_a_table_of_one_mask_and_type_without_gradients(compare) -> None:
    words = "--shape", "40", "16", "2", "--causal", "--forward", "--dtype", "float16"
    code, _, records = compare(*words)
    assert code == 0
    assert {(r["op"], r["causal"], r["dtype"]) for r in records} == {("forward", True, "float16")}


def test_a_matrix_that_does_not_fit_is_one_line(compare, monkeypatch) -> None:
    monkeypatch.setattr(importlib.import_module("course.compare"), "_free_bytes", lambda on_gpu: 9)
    code, text, records = compare("--shape", "40", "16", "2", "--forward")
    assert code == 0
    assert "its score matrices would take" in text
    assert "naive" not in {r["who"] for r in records}


NO_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
SIZES = ("70,70", "1,33", "130,65", "33,1") if IS_FULL else ("70,70", "65,30")


@NO_TRITON
def test_the_triton_rungs_obey_the_error_rule() -> None:
    command = [sys.executable, str(Path(__file__).with_name("triton_rungs.py")), *SIZES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 16 * len(SIZES)  # o and gradients, two masks, two types
    assert not [x for x in found if not x["passed"]]


@NO_TRITON
@pytest.mark.parametrize("name", ["triton_forward", "triton_backward"])
def test_a_triton_rung_as_a_script(name: str) -> None:
    env = {**os.environ}
    if not torch.cuda.is_available():
        env["TRITON_INTERPRET"] = "1"
    command = [sys.executable, str(EXAMPLES / "ladder" / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "difference" in done.stdout
