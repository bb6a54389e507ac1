# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen in the place of torch's flash operators, through torch's own registry."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

import fulmen
from fulmen.compat import flash_impl

attention = torch.nn.attention
HAS_REGISTRY = hasattr(attention, "register_flash_attention_impl")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32

pytestmark = pytest.mark.skipif(not HAS_REGISTRY, reason="this torch has no registry")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """fulmen active; the names of its functions as they are called."""
    seen: list[str] = []
    for name in ("run_forward", "run_backward"):
        plain = getattr(flash_impl, name)
        monkeypatch.setattr(
            flash_impl, name, lambda *a, _f=plain, _n=name, **k: seen.append(_n) or _f(*a, **k)
        )
    flash_impl.register()
    assert "fulmen" in attention.list_flash_attention_impls()
    attention.activate_flash_attention_impl("fulmen")
    yield seen
    attention.restore_flash_attention_impl()


def leaves(rows: int = 7) -> list[torch.Tensor]:
    return [
        torch.randn(2, 3, rows, 16, device=DEVICE, dtype=DTYPE, requires_grad=True)
        for _ in range(3)
    ]


def flash(*args: torch.Tensor, **options: object) -> torch.Tensor:
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        return functional.scaled_dot_product_attention(*args, **options)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_torchs_own_call_comes_here(calls: list[str], causal: bool, compiled: bool) -> None:
    torch._dynamo.reset()
    arrays, do = leaves(), torch.randn(2, 3, 7, 16, device=DEVICE, dtype=DTYPE)
    attend = torch.compile(flash, backend="aot_eager") if compiled else flash
    o = attend(*arrays, is_causal=causal)
    found = torch.autograd.grad(o, arrays, do)
    assert calls == ["run_forward", "run_backward"]
    expected = fulmen.attention(*arrays, causal=causal)
    gradients = torch.autograd.grad(expected, arrays, do)
    tolerance = {"atol": 2e-2, "rtol": 2e-2} if DEVICE == "cuda" else {"atol": 1e-5, "rtol": 1e-5}
    for one, other in zip((o, *found), (expected, *gradients)):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's selector sends masks elsewhere")
def test_float_masks_on_the_cpu(calls: list[str]) -> None:
    arrays, mask = leaves(), torch.randn(7, 7)
    o = flash(*arrays, attn_mask=mask)
    assert calls == ["run_forward"]
    torch.testing.assert_close(o, fulmen.attention(*arrays, bias=mask), atol=1e-5, rtol=1e-5)


def test_restoring_gives_torchs_own_back(calls: list[str]) -> None:
    attention.restore_flash_attention_impl()
    flash(*leaves())
    assert calls == []


def test_packed_sequences_and_their_gradients() -> None:
    """The operators that nested tensors and varlen_attn use, without a dispatcher."""
    q, k, v = (torch.randn(9, 3, 16, device=DEVICE, dtype=DTYPE) for _ in range(3))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)
    o, lse, *_ = flash_impl._flash(q, k, v, cu, cu, 5, 5, 0.0, True, False, window_size_left=2)
    leaf = [x.clone().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = fulmen.attention_varlen(
        *leaf, cu, cu, causal=True, window=(2, 0), return_lse=True
    )
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(lse, expected_lse)
    out = torch.empty_like(q)
    torch.testing.assert_close(
        flash_impl._flash_into(out, q, k, v, cu, cu, 5, 5, 0.0, True, False, window_size_left=2),
        lse,
    )
    assert torch.equal(out, o)
    found = flash_impl._flash_backward(
        o, q, k, v, o, lse, cu, cu, 5, 5, 0.0, True, None, None, window_size_left=2
    )
    gradients = torch.autograd.grad(expected, leaf, o)
    for one, other in zip(found, gradients):
        torch.testing.assert_close(one, other, atol=1e-2 if DEVICE == "cuda" else 1e-5, rtol=1e-2)


def test_what_is_absent_is_refused_by_name() -> None:
    q, k, v = (x.detach() for x in leaves())
    with pytest.raises(fulmen.UnsupportedError, match=r"dropout_p=0\.5"):
        flash_impl._sdpa(q, k, v, 0.5)
    with pytest.raises(fulmen.UnsupportedError, match="block_table"):
        flash_impl._flash(q, k, v, None, None, 7, 7, 0.0, False, False, block_table=q)
