# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Arguments whose memory is not their value: torch's CausalBias, other subclasses, numpy.ma; and
options that wait for a gradient."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

import fulmen
from fulmen.compat import sdpa

OURS = sdpa.scaled_dot_product_attention
MAKERS = {"top_left": causal_upper_left, "bottom_right": causal_lower_right}
# batch, heads, rows of q, rows of k, dim
SHAPES = [(2, 3, 16, 16, 8), (2, 3, 9, 21, 16), (1, 1, 23, 56, 15), (2, 2, 21, 9, 16)]


def qkv(shape: tuple[int, ...] = SHAPES[1]) -> list[torch.Tensor]:
    batch, heads, rows, keys, dim = shape
    return [torch.randn(batch, heads, n, dim, requires_grad=True) for n in (rows, keys, keys)]


def matrix(alignment: str, rows: int, keys: int) -> torch.Tensor:
    return torch.ones(rows, keys).bool().tril(0 if alignment == "top_left" else keys - rows)


def made(alignment: str, rows: int, keys: int) -> CausalBias:
    if alignment == "bottom_right" and rows > keys:
        with pytest.warns(UserWarning, match="Lower right"):  # torch speaks of its own NaN
            return MAKERS[alignment](rows, keys)
    return MAKERS[alignment](rows, keys)


CALLS: dict[str, Callable[..., Any]] = {
    "bias": lambda q, k, v, x: fulmen.attention(q, k, v, bias=x),
    "mask": lambda q, k, v, x: fulmen.attention(q, k, v, mask=x),
    "sdpa": OURS,
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("alignment", MAKERS)
@pytest.mark.parametrize("call", CALLS)
def test_a_causal_bias_is_the_matrix_that_it_means(
    call: str, alignment: str, shape: tuple[int, ...]
) -> None:
    arrays = qkv(shape)
    rows, keys = shape[2:4]
    o = CALLS[call](*arrays, made(alignment, rows, keys))
    expected = OURS(*arrays, matrix(alignment, rows, keys))
    do = torch.randn_like(o)
    torch.testing.assert_close(o, expected)
    found, wanted = (torch.autograd.grad(x, arrays, do) for x in (o, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("alignment", "call"),
    [("top_left", "bias"), ("bottom_right", "mask"), ("bottom_right", "sdpa")],
)
def test_it_compiles(alignment: str, call: str) -> None:
    torch._dynamo.reset()
    arrays, x = qkv(), made(alignment, 9, 21)
    compiled = torch.compile(CALLS[call], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arrays, x), CALLS[call](*arrays, x))


def test_upper_left_is_torchs_is_causal_with_leading_axes_of_any_number() -> None:
    for shape in ((21, 8), (3, 21, 8), (2, 2, 3, 21, 8)):
        q, k, v = (torch.randn(shape) for _ in range(3))
        q = q[..., :9, :]
        torch.testing.assert_close(
            OURS(q, k, v, causal_upper_left(9, 21)), OURS(q, k, v, is_causal=True)
        )


def test_a_model_that_is_taken_over_passes_it_on() -> None:
    q, k, v = qkv()
    with sdpa.replaced(strict=True):
        o = functional.scaled_dot_product_attention(q, k, v, causal_lower_right(9, 21))
    torch.testing.assert_close(o, fulmen.attention(q, k, v, causal=True))
    wide = [torch.randn(1, 1, n, 600) for n in (9, 21, 21)]  # which fulmen leaves to torch
    sdpa._warned.clear()
    sdpa.enable()
    with pytest.warns(UserWarning, match="head dimensions"):
        o = functional.scaled_dot_product_attention(*wide, causal_lower_right(9, 21))
    sdpa.disable()
    torch.testing.assert_close(
        o, functional.scaled_dot_product_attention(*wide, matrix("bottom_right", 9, 21))
    )


def test_what_does_not_go_with_a_causal_bias_is_said() -> None:
    q, k, v = qkv()
    x = causal_lower_right(9, 21)
    with pytest.raises(fulmen.ShapeError, match="CausalBias for 9 rows and 20 keys"):
        fulmen.attention(q, k, v, mask=causal_lower_right(9, 20))
    for other in ({"window": 3}, {"causal": True}, {"kv_lengths": [4, 4]}, {"bias": x}):
        with pytest.raises(fulmen.ArgumentError, match="is a CausalBias and"):
            fulmen.attention(q, k, v, mask=x, **other)
    with pytest.raises(ValueError, match="is_causal"):
        OURS(q, k, v, x, is_causal=True)
    with pytest.raises(fulmen.UnsupportedError, match="causal=True, alignment='bottom_right'"):
        fulmen.attention_forward(*(y.detach() for y in (q, k, v)), bias=x)


class OfMeaning(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Plain(torch.Tensor):
    pass


def test_other_subclasses_with_a_meaning_of_their_own_are_refused_by_name() -> None:
    q, k, v = (x.detach() for x in qkv())
    x = torch.randn(9, 21)
    plain = fulmen.attention(q, k, v, bias=x)
    assert torch.equal(fulmen.attention(q, k, v, bias=x.as_subclass(Plain)), plain)
    masked = torch.masked.masked_tensor(x, torch.ones(9, 21, dtype=torch.bool))
    for wrong in (x.as_subclass(OfMeaning), masked):
        name = type(wrong).__name__
        for call in (fulmen.attention, fulmen.attention_forward):
            with pytest.raises(fulmen.UnsupportedError, match=f"bias is {name}"):
                call(q, k, v, bias=wrong)
    with pytest.raises(fulmen.UnsupportedError, match="sinks is OfMeaning"):
        fulmen.attention(q, k, v, sinks=torch.zeros(3).as_subclass(OfMeaning))
    with pytest.raises(fulmen.UnsupportedError, match="bias is OfMeaning"):
        fulmen.attention(*(y.numpy() for y in (q, k, v)), bias=x.as_subclass(OfMeaning))


@pytest.mark.parametrize(
    ("name", "compiled"),
    [("scale", False), ("scale", True), ("softcap", False), ("dropout_p", False),
     ("alibi_slopes", False)],
)  # fmt: skip
def test_an_option_that_waits_for_a_gradient_is_refused(name: str, compiled: bool) -> None:
    torch._dynamo.reset()
    q, k, v = qkv()
    shape = (3,) if name == "alibi_slopes" else ()
    x = torch.nn.Parameter(torch.full(shape, 0.5))

    def call(q: torch.Tensor) -> Any:
        return fulmen.attention(q, k, v, **{name: x})

    attend = torch.compile(call, backend="eager") if compiled else call
    with pytest.raises(fulmen.UnsupportedError, match=f"{name} requires grad and gets none"):
        attend(q)
    if name != "alibi_slopes":
        with pytest.raises(fulmen.DTypeError, match=rf"float\({name}\)"):
            fulmen.attention(q, k, v, **{name: x.detach()})


def test_masked_arrays_of_numpy_are_refused_by_name() -> None:
    q, k, v = (x.detach().double().numpy() for x in qkv())
    hidden = np.eye(9, 21) > 0

    def masked(x: Any) -> Any:
        return np.ma.masked_array(x, mask=np.zeros(x.shape, bool))

    bias, mask = masked(np.zeros((9, 21))), np.ma.masked_array(np.ones((9, 21), bool), hidden)
    forward = fulmen.attention_forward(q, k, v)
    plan = fulmen.plan(q, k, v)
    calls: dict[str, Callable[[], Any]] = {
        "bias": lambda: fulmen.attention(q, k, v, bias=bias),
        "mask": lambda: fulmen.attention(q, k, v, mask=mask),
        "v": lambda: fulmen.attention(q, k, masked(v)),
        "q": lambda: plan.forward(masked(q), k, v),
        "out": lambda: fulmen.attention(q, k, v, out=masked(np.empty_like(q))),
        "kv_lengths": lambda: fulmen.attention(q, k, v, kv_lengths=masked(np.array([3, 4]))),
        "do": lambda: fulmen.attention_backward(masked(q), q, k, v, forward.o, forward.stats),
        "o of part 1": lambda: fulmen.merge([forward[:2], (masked(forward.o), forward.lse)]),
    }
    for name, call in calls.items():
        with pytest.raises(fulmen.UnsupportedError, match=f"^{name} is an array of numpy.ma"):
            call()
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    with pytest.raises(fulmen.UnsupportedError, match=r"^mask is an array of numpy\.ma"):
        fulmen.attention(*tensors, mask=mask)
    shown = fulmen.attention(q, k, v, mask=~np.ma.getmaskarray(mask))
    assert np.isfinite(shown).all()


def test_plans_read_lazily_negated_tensors() -> None:
    q, k, v = (x.detach() for x in qkv())
    negative = torch.complex(torch.zeros_like(q), q).conj().imag  # -q by a bit
    assert negative.is_neg()
    plan = fulmen.plan(q, k, v)
    torch.testing.assert_close(plan.forward(negative, k, v).o, fulmen.attention(-q, k, v))
