# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen.attention on tensors: modes of torch, memory, random numbers, and bad input."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from reference import inputs, reference

import fulmen
from fulmen._library import library
from fulmen._torch import api, ops
from fulmen.options import problem_type


def test_importing_fulmen_does_not_import_torch() -> None:
    code = "import fulmen, sys; fulmen.attention; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_both_ways_give_the_same_bits() -> None:
    """Eager's short way and the operator: one under a mode that sees nothing."""

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    for options in ({}, {"causal": True, "return_lse": True}, {"window": [3, 0]}):
        leaves = inputs(dtype=torch.float32)
        found = fulmen.attention(*leaves, **options)
        with Mode():
            by_operator = fulmen.attention(*leaves, **options)
        for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, by_operator))):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()
            loss = one.sum(), other.sum()
            gradients = [torch.autograd.grad(x, leaves[0], retain_graph=True)[0] for x in loss]
            assert torch.equal(*gradients)


def test_results_lie_in_memory_as_what_they_belong_to() -> None:
    q, k, v = (torch.randn(2, 7, 4, 8).transpose(1, 2).requires_grad_() for _ in range(3))
    o = fulmen.attention(q, k, v)
    assert o.transpose(1, 2).is_contiguous()
    wide = fulmen.attention(q, k, torch.randn(2, 7, 4, 20).transpose(1, 2))
    assert wide.transpose(1, 2).is_contiguous()
    gradient = torch.autograd.grad(o.sum(), k)[0]
    assert gradient.stride() == k.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_what_torchs_own_attention_casts(dtype: Any) -> None:
    q, k, v = inputs(dtype=torch.float32)
    bias = torch.randn(4, 7, 9)
    with torch.autocast("cpu", dtype=dtype):
        o, lse = fulmen.attention(q, k.to(dtype), v, bias=bias, return_lse=True)
        wide = fulmen.attention(q.double(), k.double(), v.double())
    assert (o.dtype, lse.dtype, wide.dtype) == (dtype, torch.float32, torch.float64)
    o.float().sum().backward()
    assert q.grad.dtype == torch.float32
    expected = fulmen.attention(q.to(dtype), k.to(dtype), v.to(dtype), bias=bias)
    assert torch.equal(o, expected)
    compiled = torch.compile(fulmen.attention, fullgraph=True,
                             backend="aot_eager")  # fmt: skip
    with torch.autocast("cpu", dtype=dtype):
        assert compiled(q, k, v).dtype == dtype


def test_out_is_written_and_records_no_gradient() -> None:
    q, k, v = inputs(dtype=torch.float32, grad=False)
    out = torch.full((2, 4, 7, 8), torch.nan)
    result, lse = fulmen.attention(q, k, v, out=out, return_lse=True)
    assert result is out
    assert torch.equal(out, fulmen.attention(q, k, v))
    assert lse.shape == (2, 4, 7)
    half = torch.empty(2, 4, 7, 8)
    fulmen.attention(q.half(), k.half(), v.half(), out=half)
    assert half.isfinite().all()
    with pytest.raises(RuntimeError, match="out= records no gradient"):
        fulmen.attention(q.requires_grad_(), k, v, out=out)
    with torch.no_grad():
        fulmen.attention(q, k, v, out=out)


def test_dropout_follows_torchs_generator_and_backward_has_the_same_lots() -> None:
    q, k, v = inputs(dtype=torch.float64)
    torch.manual_seed(1)
    first = fulmen.attention(q, k, v, dropout_p=0.5)
    second = fulmen.attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    again = fulmen.attention(q, k, v, dropout_p=0.5)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    rng = (2**64 - 3, 2**32 - 1)
    by_numbers = fulmen.attention(q, k, v, dropout_p=0.5, rng=rng)
    numpy = fulmen.attention(*(x.detach().numpy() for x in (q, k, v)), dropout_p=0.5, rng=rng)
    assert torch.equal(by_numbers, torch.from_numpy(numpy))
    tensor = torch.tensor([-3, 2**32 - 1])
    assert torch.equal(fulmen.attention(q, k, v, dropout_p=0.5, rng=tensor), by_numbers)
    do = torch.randn_like(first)
    (dv,) = torch.autograd.grad(by_numbers, v, do)
    # o is linear in v: <do, o> = <dv, v> holds only with equal draws in both passes.
    torch.testing.assert_close((dv * v).sum(), (do * by_numbers).sum())


def test_compiled_dropout_draws_anew_in_every_call() -> None:
    q, k, v = inputs(grad=False)
    step = torch.compile(lambda q, k, v: fulmen.attention(q, k, v, dropout_p=0.5), fullgraph=True,
                         backend="aot_eager")  # fmt: skip
    assert not torch.equal(step(q, k, v), step(q, k, v))


def test_deterministic_follows_torchs_switch() -> None:
    seen = []
    q, k, v = inputs(grad=False)

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is ops.attention_kernel:
                names = [argument.name for argument in func._schema.arguments]
                words = np.array(args[names.index("options")], np.int64)
                fields = problem_type().from_buffer_copy(words.tobytes())
                seen.append(bool(fields.deterministic))
            return func(*args, **(kwargs or {}))

    with Spy():
        fulmen.attention(q, k, v)
        torch.use_deterministic_algorithms(True)
        try:
            fulmen.attention(q, k, v)
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen == [False, True]


def test_threads_of_data_parallel_at_once() -> None:
    leaves = inputs(4, 4, 4, 33, 33, 16, 16, dtype=torch.float32)
    expected = torch.autograd.grad(fulmen.attention(*leaves, causal=True).sum(), leaves)
    found: dict[int, Any] = {}

    def work(index: int) -> None:
        o = fulmen.attention(*leaves, causal=True)
        found[index] = torch.autograd.grad(o.sum(), leaves)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    for gradients in found.values():
        assert all(map(torch.equal, gradients, expected))


def test_views_with_torchs_negative_bit_and_strides_of_zero() -> None:
    z = torch.randn(1, 2, 5, 8, dtype=torch.complex64)
    q = z.conj().imag
    assert q.is_neg()
    k = torch.randn(1, 1, 5, 8).expand(1, 2, 5, 8)
    torch.testing.assert_close(fulmen.attention(q, k, k), fulmen.attention(q.clone(), k, k))
    row = torch.randn(1, 2, 1, 8, requires_grad=True)
    wide = row.expand(1, 2, 5, 8)
    (gradient,) = torch.autograd.grad(fulmen.attention(wide, k, k).sum(), row)
    (expected,) = torch.autograd.grad(reference(wide, k, k)[0].sum(), row)
    torch.testing.assert_close(gradient, expected)


def test_inference_mode_and_meta_tensors() -> None:
    q, k, v = inputs(dtype=torch.float32)
    with torch.inference_mode():
        o = fulmen.attention(q, k, v)
    assert o.is_inference()
    meta = [x.detach().to("meta") for x in (q, k, v)]
    assert fulmen.attention(*meta).shape == o.shape
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        fulmen.attention(o, k, v).sum().backward()


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "integers": (lambda q, k, v: fulmen.attention(q.int(), k.int(), v.int()), TypeError, "q"),
    "complex": (lambda q, k, v: fulmen.attention(q + 0j, k + 0j, v + 0j), TypeError, "q"),
    "mixed dtypes": (lambda q, k, v: fulmen.attention(q, k.half(), v), TypeError, "k"),
    "sparse": (lambda q, k, v: fulmen.attention(q.to_sparse(), k, v), fulmen.Error, "q"),
    "int16": (
        lambda *x: fulmen.attention(*(y.to(torch.int16) for y in x)),
        TypeError,
        "q has dtype int16; allowed",
    ),
    "numpy bias": (
        lambda q, k, v: fulmen.attention(q, k, v, bias=torch.zeros(7, 9).numpy()),
        TypeError,
        "bias is ndarray",
    ),
    "float mask": (
        lambda q, k, v: fulmen.attention(q, k, v, mask=torch.zeros(7, 9, requires_grad=True)),
        TypeError,
        "mask is float32; allowed is bool",
    ),
    "slopes with a gradient": (
        lambda q, k, v: fulmen.attention(q, k, v, alibi_slopes=torch.rand(4, requires_grad=True)),
        fulmen.UnsupportedError,
        "alibi_slopes requires grad and gets none",
    ),
    "meta k": (lambda q, k, v: fulmen.attention(q, k.to("meta"), v), ValueError, "k is on meta"),
    "meta k beside a bias": (
        lambda q, k, v: fulmen.attention(q, k.to("meta"), v, bias=torch.zeros(7, 9)),
        ValueError,
        "k is on meta",
    ),
    "numpy k": (lambda q, k, v: fulmen.attention(q, k.numpy(), v), TypeError, "k is ndarray"),
    "axes": (lambda q, k, v: fulmen.attention(q[0], k, v), fulmen.ShapeError, "layout='hsd'"),
    "layout": (lambda q, k, v: fulmen.attention(q, k, v, layout="dbhs"), ValueError, "dbhs"),
    "window": (lambda q, k, v: fulmen.attention(q, k, v, window=(1, 2, 3)), ValueError, "window"),
    "dropout": (lambda q, k, v: fulmen.attention(q, k, v, dropout_p=1.5), ValueError, "1.5"),
    "out_dtype": (lambda q, k, v: fulmen.attention(q, k, v, out_dtype="int8"), TypeError, "int8"),
    "stream": (lambda q, k, v: fulmen.attention(q, k, v, stream=1), fulmen.Error, "stream"),
    "mask_mod": (
        lambda q, k, v: fulmen.attention(q, k, v, mask=lambda b, h, i, j: i >= j),
        ValueError,
        "mask_mod",
    ),
    "offsets": (
        lambda q, k, v: fulmen.attention_varlen(q[0, 0], k[0, 0], v[0, 0], None, None),
        ValueError,
        "cu_q",
    ),
    "parts": (lambda q, k, v: fulmen.merge([(q,)]), ValueError, "no pair"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_bad_input_is_refused_in_one_sentence(name: str) -> None:
    call, kind, words = BAD[name]
    with pytest.raises(kind, match=words) as refused:
        call(*inputs(dtype=torch.float32, grad=False))
    assert "\n" not in str(refused.value)


def test_nested_tensors_and_block_masks_are_refused_by_name() -> None:
    for layout in (torch.jagged, torch.strided):
        nested = torch.nested.nested_tensor([torch.randn(2, 3, 8)], layout=layout)
        for options in ({}, {"return_lse": True}):
            with pytest.raises(fulmen.UnsupportedError, match="attention_varlen"):
                fulmen.attention(nested, nested, nested, **options)
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = inputs(dtype=torch.float32, grad=False)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
    with pytest.raises(fulmen.ArgumentError, match="BlockMask"):
        fulmen.attention(q, k, v, mask=mask)


def test_without_torch_the_library_adds_no_kernels() -> None:
    code = "from fulmen._library import library; assert library().add_torch_kernels() == 0"
    subprocess.run([sys.executable, "-c", code], check=True)


needs_kernels = pytest.mark.skipif(
    not ops.has_kernels(), reason="this PyTorch is older than 2.10: it takes no kernels"
)


@needs_kernels
def test_the_kernels_in_torchs_dispatcher_run_for_fulmen_alone() -> None:
    q, k, v = inputs(dtype=torch.float32)
    operator = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
    for number in (0.0, 0.5, 1.0, 1e6):
        with pytest.raises(RuntimeError, match=r"fulmen\.attention alone"):
            operator(q, k, v, None, number)
    with pytest.raises(RuntimeError, match=r"fulmen\.attention alone"):
        torch.ops.fulmen.plain(q, k, v, 0)


@needs_kernels
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "hsd", "shd"])
@pytest.mark.parametrize("needed", ["qkv", "q", "kv"])
def test_the_fast_path_and_the_general_one_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, layout: str, needed: str
) -> None:
    leaves = [x[0] if len(layout) == 3 else x for x in inputs(dtype=torch.float32)]
    leaves = [x if layout.endswith("hsd") else x.transpose(-3, -2) for x in leaves]
    leaves = [x.detach().requires_grad_(name in needed) for x, name in zip(leaves, "qkv")]
    wanted = [x for x in leaves if x.requires_grad]
    do = torch.randn_like(leaves[0])

    def both() -> list[torch.Tensor]:
        o = fulmen.attention(*leaves, causal=True, layout=layout)
        return [o.detach(), *torch.autograd.grad(o, wanted, do)]

    fast = both()
    monkeypatch.setattr(api, "fast_attention", lambda *_: None)
    assert all(torch.equal(a, b) for a, b in zip(fast, both()))


@needs_kernels
def test_negative_views_reach_the_fast_path_by_value() -> None:
    q, k, v = inputs(dtype=torch.float64)
    do = torch.randn_like(q)
    expected = torch.autograd.grad(fulmen.attention(q, k, v), (q, k, v), -do)
    o = fulmen.attention(q, k, v)
    found = torch.autograd.grad(o, (q, k, v), torch._neg_view(do), retain_graph=True)
    derivable = torch.autograd.grad(o, (q, k, v), -do, create_graph=True)
    for a, b, c in zip(expected, found, derivable):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c.detach())
        assert c.requires_grad
    negative, plain_q = torch._neg_view(q), -q
    one, other = (fulmen.attention(x, k, v) for x in (negative, plain_q))
    assert torch.equal(one, other)
    pairs = zip(torch.autograd.grad(one, (q, k, v), do), torch.autograd.grad(other, (q, k, v), do))
    assert all(torch.equal(a, b) for a, b in pairs)
    with torch.no_grad():
        assert torch.equal(fulmen.attention(negative, k, v), other)


@needs_kernels
def test_more_options_than_the_library_keeps_take_the_general_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = inputs(dtype=torch.float32)
    monkeypatch.setattr(library(), "keep_options", lambda *_: 0)
    o = fulmen.attention(q, k, v, scale=0.123456789)
    assert "EagerAttention" in type(o.grad_fn).__name__
