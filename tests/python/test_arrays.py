# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Arrays that are not NumPy's: results of the caller's kind. PyTorch and JAX where installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fulmen

GENERATOR = np.random.default_rng(0)
Q = GENERATOR.standard_normal((2, 4, 7, 16)).astype(np.float32)
K, V = GENERATOR.standard_normal((2, 2, 2, 9, 16)).astype(np.float32)


class Foreign:
    """An array of the array API standard: DLPack and a namespace, and nothing else of NumPy."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        class Namespace:
            asarray = Foreign

        return Namespace

    @property
    def shape(self) -> Any:
        return self.x.shape

    @property
    def dtype(self) -> Any:
        return self.x.dtype


class Capsule:
    """Only DLPack: no results can be made like it."""

    def __init__(self, x: Any) -> None:
        self.x = x
        self.shape = x.shape

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


def test_results_of_a_foreign_kind() -> None:
    forward = fulmen.attention_forward(Foreign(Q), Foreign(K), Foreign(V), causal=True)
    assert {type(x) for x in forward} == {Foreign}
    want = fulmen.attention_forward(Q, K, V, causal=True)
    for x, y in zip(forward, want):
        np.testing.assert_array_equal(x.x, y)
    got = fulmen.attention_backward(
        Foreign(Q), Foreign(Q), Foreign(K), Foreign(V), forward.o, forward.stats, causal=True
    )
    assert {type(x) for x in got[:3]} == {Foreign}
    part = fulmen.attention(Foreign(Q), Foreign(K), Foreign(V), return_lse=True)
    assert {type(x) for x in fulmen.merge([part, part])} == {Foreign}


def test_kinds_mix_and_q_decides() -> None:
    mixed = fulmen.attention(Q, Foreign(K), V, bias=Foreign(np.zeros((7, 9), np.float32)))
    np.testing.assert_array_equal(mixed, fulmen.attention(Q, K, V))
    assert isinstance(fulmen.attention(Foreign(Q), K, V), Foreign)


def test_subclasses_of_numpy_give_arrays(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "q", np.float32, "w+", shape=Q.shape)
    mapped[...] = Q
    read_only = np.memmap(tmp_path / "q", np.float32, "r", shape=Q.shape)
    for q in (mapped, read_only):
        got = fulmen.attention(q, K, V)
        assert type(got) is np.ndarray
        np.testing.assert_array_equal(got, fulmen.attention(Q, K, V))


def test_arrays_that_results_cannot_be_like() -> None:
    with pytest.raises(fulmen.DTypeError, match="q is Capsule"):
        fulmen.attention(Capsule(Q), K, V)
    np.testing.assert_array_equal(fulmen.attention(Q, Capsule(K), V), fulmen.attention(Q, K, V))


def test_strides_that_are_no_multiple_of_an_item() -> None:
    records = np.zeros((7, 17), np.dtype([("x", np.float32), ("odd", np.uint8)]))
    with pytest.raises(fulmen.ArgumentError, match="multiples of its item"):
        fulmen.attention(records["x"][:, :16], K[0, 0], V[0, 0], layout="sd")


def test_jax_arrays() -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    jnp = jax.numpy
    for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
        q, k, v = (jnp.asarray(x, dtype) for x in (Q, K, V))
        got, lse = fulmen.attention(q, k, v, causal=True, return_lse=True)
        assert isinstance(got, jax.Array)
        assert got.dtype == dtype
        assert lse.dtype == jnp.float32
        want = fulmen.attention(*(np.asarray(x) for x in (q, k, v)), causal=True)
        np.testing.assert_array_equal(np.asarray(got), want)
    mask = jnp.ones((7, 9), bool)
    assert isinstance(fulmen.attention(q, k, v, mask=mask), jax.Array)
    forward = fulmen.attention_forward(q, k, v)
    back = fulmen.attention_backward(q, q, k, v, forward.o, forward.stats)
    assert back.dk.shape == k.shape
    with pytest.raises(fulmen.ArgumentError, match="JAX"):
        fulmen.attention(q, k, v, out=q)
    with pytest.raises(fulmen.DTypeError, match=r"fulmen\.jax\.attention"):
        jax.jit(fulmen.attention)(q, k, v)


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        q, k, v = (torch.from_numpy(x).to(dtype) for x in (Q, K, V))
        got, lse = fulmen.attention(q, k, v, causal=True, return_lse=True)
        assert got.dtype == dtype
        assert lse.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
        wide = torch.nn.functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), attn_mask=torch.ones(7, 9).tril(2).bool(),
            enable_gqa=True,
        )  # fmt: skip
        bound = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
        assert (got.double() - wide).abs().max() < bound
    out = torch.empty(2, 7, 4, 16, dtype=q.dtype).transpose(1, 2)
    assert fulmen.attention(q, k, v, causal=True, out=out) is out
    assert torch.equal(out, got)
    negative = torch.complex(torch.zeros(Q.shape), torch.from_numpy(Q)).conj().imag
    assert negative.is_neg()
    k32, v32 = torch.from_numpy(K), torch.from_numpy(V)
    want = fulmen.attention(torch.from_numpy(-Q), k32, v32)
    assert torch.equal(fulmen.attention(negative, k32, v32), want)


def test_torch_gradients_are_not_lost_in_silence() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in (Q, K, V))
    assert fulmen.attention(q, k, v).requires_grad
    with torch.no_grad():
        assert not fulmen.attention(q, k, v).requires_grad
        fulmen.attention(Q, k, V)
    with pytest.raises(fulmen.UnsupportedError, match=r"k\.detach\(\)"):
        fulmen.attention(Q, k, V)
    forward = fulmen.attention_forward(q, k, v)
    got = fulmen.attention_backward(forward.o, q, k, v, forward.o, forward.stats)
    full = (x.repeat_interleave(2, dim=1) for x in (k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, *full)
    o.backward(forward.o)
    for x, y in zip(got[:3], (q.grad, k.grad, v.grad)):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
