# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The PyTorch layer on an NVIDIA GPU: compiler, CUDA graphs, streams, devices, modes of torch.

Skipped without one. Exactness of the kernels is the matter of fulmen verify and tests/gpu/device;
test_cuda_compat.py has the names of other packages.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from reference import op_settings, reference
from torch.utils.checkpoint import checkpoint

import fulmen
from fulmen._torch import ops
from fulmen._torch.ops import Arrays

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
THEIRS = torch.nn.functional.scaled_dot_product_attention
HALF = (torch.float16, torch.bfloat16)


def inputs(dtype: Any = torch.bfloat16, rows: int = 128, grad: bool = True) -> list[torch.Tensor]:
    return [
        torch.randn(2, 4, rows, 64, device="cuda", dtype=dtype, requires_grad=grad)
        for _ in range(3)
    ]


def close(found: Any, expected: Any, dtype: Any) -> None:
    for ours, other in zip(found, expected):
        scale = other.abs().max().clamp(min=1e-3)
        error = (ours.double() - other.double()).abs().max() / scale
        assert error < {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]


def gradients(o: torch.Tensor, leaves: list[torch.Tensor], do: torch.Tensor) -> Any:
    return torch.autograd.grad(o, leaves, do)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
@pytest.mark.parametrize("causal", [False, True])
def test_forward_and_backward_against_torch(dtype: Any, causal: bool) -> None:
    leaves = inputs(dtype)
    do = torch.randn_like(leaves[0])
    o = fulmen.attention(*leaves, causal=causal)
    assert (o.dtype, o.device, o.stride()) == (dtype, leaves[0].device, leaves[0].stride())
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = THEIRS(*wide, is_causal=causal)
    bound = torch.float32 if dtype is torch.float64 else dtype
    close([o], [expected], bound)
    close(gradients(o, leaves, do), gradients(expected, wide, do.double()), bound)


OPTIONS: dict[str, Any] = {
    "bias": lambda: {"bias": torch.randn(1, 4, 40, 56, device="cuda")},
    "mask": lambda: {"mask": torch.rand(40, 56, device="cuda") > 0.3},
    "slopes": lambda: {"alibi_slopes": torch.rand(4, device="cuda") * 0.1},
    "sinks": lambda: {"sinks": torch.randn(4, device="cuda")},
    "window": lambda: {"window": (9, 3), "softcap": 20.0},
    "lengths": lambda: {"kv_lengths": torch.tensor([50, 0], device="cuda"), "causal": True},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_options_and_their_gradients(name: str, dtype: Any) -> None:
    options = OPTIONS[name]()
    leaves = [torch.randn(2, h, s, 64, device="cuda", dtype=dtype, requires_grad=True)
              for h, s in ((4, 40), (2, 56), (2, 56))]  # fmt: skip
    extra = {x: options[x].requires_grad_() for x in ("bias", "sinks") if x in options}
    every = [*leaves, *extra.values()]
    o, lse = fulmen.attention(*leaves, return_lse=True, **options)
    wide = [x.detach().double().requires_grad_() for x in every]
    more = {**options, **dict(zip(extra, wide[3:]))}
    expected, expected_lse = reference(*wide[:3], **more)
    do = torch.randn_like(expected)
    close([o], [expected], dtype)
    seen = expected_lse.isfinite()
    assert torch.equal(seen, lse.isfinite())
    close([lse[seen]], [expected_lse[seen]], dtype)
    found = torch.autograd.grad(o, every, do.to(dtype))
    close(found, torch.autograd.grad(expected, wide, do.to(dtype).double()), dtype)


@pytest.mark.parametrize("name", ["plain", "causal", "bias", "sinks", "dropout", "lengths"])
def test_opcheck(name: str) -> None:
    q, k, v = (x[:, :, :24] for x in inputs(torch.float32))
    arrays: dict[str, Any] = {}
    settings: dict[str, Any] = {"causal": name in ("causal", "lengths")}
    if name == "bias":
        arrays["bias"] = torch.randn(1, 4, 24, 24, device="cuda", requires_grad=True)
    elif name == "sinks":
        arrays["sinks"] = torch.randn(4, device="cuda", requires_grad=True)
    elif name == "dropout":
        arrays["rng"], settings["dropout_p"] = torch.tensor([3, 4], device="cuda"), 0.3
    elif name == "lengths":
        arrays["kv_lengths"] = torch.tensor([3, 24], device="cuda")
    args = (*Arrays(q, k, v, **arrays), *op_settings(**settings))
    torch.library.opcheck(ops.attention, (*args, 3), atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        o, _, stats = ops.attention(*args, 3)
    need = [True, True, True, "bias" in arrays, "sinks" in arrays]
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    given = (torch.randn_like(o), None, o, stats, *args, need)
    torch.library.opcheck(ops.attention_backward, given, test_utils=checks)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_training_step(mode: str) -> None:
    """reduce-overhead: in CUDA graphs, none skipped, forward and backward."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    leaves = inputs()

    @torch.compile(fullgraph=True, mode=mode)
    def step(q: Any, k: Any, v: Any) -> Any:
        return fulmen.attention(q * 1.5, k, v, causal=True).float().square().mean()

    for _ in range(4):
        with torch.no_grad():
            for x in leaves:
                x.copy_(torch.randn_like(x))
        torch.compiler.cudagraph_mark_step_begin()
        found = [x.clone() for x in torch.autograd.grad(step(*leaves), leaves)]
        loss = fulmen.attention(leaves[0] * 1.5, *leaves[1:], causal=True).float().square().mean()
        close(found, torch.autograd.grad(loss, leaves), torch.bfloat16)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


def test_two_graphs_serve_every_length() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    step = torch.compile(
        lambda q, k, v: fulmen.attention(q, k, v, causal=True) * 2,
        fullgraph=True, backend=counter,
    )  # fmt: skip
    for rows in (65, 66, 17, 130, 300):
        leaves = inputs(rows=rows, grad=False)
        close([step(*leaves)], [fulmen.attention(*leaves, causal=True) * 2], torch.bfloat16)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_dropout_draws_anew(mode: str) -> None:
    torch._dynamo.reset()
    leaves = inputs(grad=False)
    step = torch.compile(
        lambda q, k, v: fulmen.attention(q, k, v, dropout_p=0.5), fullgraph=True, mode=mode
    )
    found = [step(*leaves).clone() for _ in range(5)]
    for index, one in enumerate(found):
        assert all(not torch.equal(one, other) for other in found[:index])


def test_exported_with_a_dynamic_length() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return fulmen.attention(q, k, v, causal=True)

    rows = torch.export.Dim("rows", min=2, max=4096)
    leaves = tuple(inputs(grad=False))
    exported = torch.export.export(Model(), leaves, dynamic_shapes=[{2: rows}] * 3)
    longer = inputs(rows=200, grad=False)
    assert torch.equal(exported.module()(*longer), fulmen.attention(*longer, causal=True))


def test_a_captured_training_step_follows_new_contents() -> None:
    leaves = inputs()
    do = torch.randn_like(leaves[0])
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            gradients(fulmen.attention(*leaves, causal=True), leaves, do)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        o = fulmen.attention(*leaves, causal=True)
        found = gradients(o, leaves, do)
    with torch.no_grad():
        for x in leaves:
            x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    again = fulmen.attention(*leaves, causal=True)
    close([o, *found], [again, *gradients(again, leaves, do)], torch.bfloat16)


def test_u114_a_captured_call_follows_longer_lengths() -> None:
    """flash-attention#1164: captured with few keys, replayed with many."""
    q, k, v = inputs(rows=512, grad=False)
    lengths = torch.full((q.shape[0],), 3, device="cuda", dtype=torch.int32)
    fulmen.attention(q, k, v, kv_lengths=lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = fulmen.attention(q, k, v, kv_lengths=lengths, return_lse=True)
    for length in (512, 100, 0, 385):
        lengths.fill_(length)
        graph.replay()
        expected = fulmen.attention(q, k, v, kv_lengths=lengths, return_lse=True)
        assert torch.equal(o, expected[0])
        assert torch.equal(lse, expected[1])


def test_a_captured_dropout_draws_anew_and_its_backward_has_the_same_lots() -> None:
    q, k, v = inputs(torch.float32)
    do = torch.randn_like(q)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        gradients(fulmen.attention(q, k, v, dropout_p=0.5), [v], do)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        o = fulmen.attention(q, k, v, dropout_p=0.5)
        (dv,) = gradients(o, [v], do)
    seen: list[torch.Tensor] = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert all(not torch.equal(o, other) for other in seen)
        seen.append(o.detach().clone())
        # o is linear in v: <do, o> = <dv, v> holds only with equal draws in both passes.
        left, right = (do * o).double().sum(), (dv * v).double().sum()
        assert abs(left - right) < 1e-3 * (do * o).double().abs().sum() ** 0.5
    torch.cuda.manual_seed(3)
    one = fulmen.attention(q, k, v, dropout_p=0.5)
    torch.cuda.manual_seed(3)
    assert torch.equal(one, fulmen.attention(q, k, v, dropout_p=0.5))


@pytest.mark.parametrize("dtype", HALF)
def test_autocast(dtype: Any) -> None:
    q, k, v = inputs(torch.float32)
    bias = torch.randn(4, 128, 128, device="cuda")
    with torch.autocast("cuda", dtype=dtype):
        o, lse = fulmen.attention(q, k.to(dtype), v, bias=bias, return_lse=True)
        wide = fulmen.attention(q.double(), k.double(), v.double())
    assert (o.dtype, lse.dtype, wide.dtype) == (dtype, torch.float32, torch.float64)
    o.float().sum().backward()
    assert q.grad.dtype == torch.float32
    assert torch.equal(o, fulmen.attention(q.to(dtype), k.to(dtype), v.to(dtype), bias=bias))


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_a_checkpoint_repeats_the_same_lots(dropout_p: float) -> None:
    leaves = inputs(torch.float32)

    def step(q: Any, k: Any, v: Any) -> Any:
        return fulmen.attention(q.sin(), k, v, dropout_p=dropout_p)

    found = []
    for run in (step, lambda *x: checkpoint(step, *x, use_reentrant=False)):
        torch.manual_seed(11)
        o = run(*leaves)
        torch.rand(3, device="cuda")  # others draw too, before the forward pass is repeated
        found.append([o, *torch.autograd.grad(o.square().sum(), leaves)])
    close(found[1], found[0], torch.float32)


def test_second_derivatives_and_forward_mode() -> None:
    q, k, v = (x[:1, :2, :9, :8].double().contiguous() for x in inputs(torch.float32, grad=False))

    def ours(q: Any, k: Any, v: Any) -> Any:
        return fulmen.attention(q, k, v, causal=True).square().sum()

    def plain(q: Any, k: Any, v: Any) -> Any:
        return reference(q, k, v, causal=True)[0].square().sum()

    for transform in (
        lambda f: torch.func.grad(f, argnums=(0, 1, 2)),
        lambda f: lambda *x: torch.func.jvp(f, x, x)[1],
        lambda f: torch.func.grad(lambda *x: torch.func.grad(f)(*x).square().sum(), argnums=2),
    ):
        torch.testing.assert_close(transform(ours)(q, k, v), transform(plain)(q, k, v))


def test_partial_results_merge_with_gradients() -> None:
    q, k, v = inputs(torch.float32)
    parts = [fulmen.attention(q, k[:, :, cut], v[:, :, cut], return_lse=True)
             for cut in (slice(0, 50), slice(50, 128))]  # fmt: skip
    o, lse = fulmen.merge(parts)
    whole, whole_lse = fulmen.attention(q, k, v, return_lse=True)
    close([o, lse], [whole, whole_lse], torch.float32)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    found = torch.autograd.grad((o, lse), (q, k, v), (do, dlse))
    expected = torch.autograd.grad((whole, whole_lse), (q, k, v), (do, dlse))
    close(found, expected, torch.float32)


def test_packed_sequences_of_lengths_on_the_device() -> None:
    q, k, v = (torch.randn(90, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
               for _ in range(3))  # fmt: skip
    cu = torch.tensor([0, 37, 37, 90], device="cuda", dtype=torch.int32)
    o = fulmen.attention_varlen(q, k, v, cu, cu, causal=True)
    alone = [fulmen.attention(q[a:b], k[a:b], v[a:b], layout="shd", causal=True)
             for a, b in ((0, 37), (37, 90))]  # fmt: skip
    expected = torch.cat(alone)
    close([o], [expected], torch.bfloat16)
    do = torch.randn_like(o)
    close(gradients(o, [q, k, v], do), gradients(expected, [q, k, v], do), torch.bfloat16)


def test_work_goes_to_the_current_stream() -> None:
    q, k, v = inputs(rows=1024, grad=False)
    fulmen.attention(q, k, v)  # compiled before the clock runs
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)
        q2 = q * 2
        o = fulmen.attention(q2, k, v)
    assert not stream.query()
    stream.synchronize()
    close([o], [fulmen.attention(q * 2, k, v)], torch.bfloat16)


def test_threads_at_once() -> None:
    leaves = inputs(grad=False)
    expected = fulmen.attention(*leaves)
    torch.cuda.synchronize()
    found: list[torch.Tensor] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            o = fulmen.attention(*leaves)
            torch.cuda.current_stream().synchronize()
            found.append(o)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    close(found, [expected] * 4, torch.bfloat16)


def test_deterministic_gradients_follow_torchs_switch() -> None:
    leaves = inputs(rows=700)
    do = torch.randn_like(leaves[0])
    torch.use_deterministic_algorithms(True)
    try:
        runs = [gradients(fulmen.attention(*leaves, causal=True), leaves, do) for _ in range(4)]
    finally:
        torch.use_deterministic_algorithms(False)
    for found in runs[1:]:
        assert all(map(torch.equal, found, runs[0]))


def test_arrays_in_two_places_are_refused_by_name() -> None:
    q, k, v = inputs(grad=False)
    with pytest.raises(fulmen.Error, match="k"):
        fulmen.attention(q, k.cpu(), v)
    with pytest.raises(fulmen.Error, match="kv_lengths"):
        fulmen.attention(q, k, v, kv_lengths=torch.tensor([1, 2]))
    o = fulmen.attention(q, k, v, kv_lengths=[64, 0])
    assert o[1].eq(0).all()
