# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen.compat.sdpa against torch's function: torch's own samples, replacement, fallback."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from long_run import IS_FULL
from torch.nn import functional

import fulmen
from fulmen.compat import sdpa

OURS, THEIRS = sdpa.scaled_dot_product_attention, functional.scaled_dot_product_attention
OPERATORS = ("nn.functional.scaled_dot_product_attention",
             "nn.functional.multi_head_attention_forward")  # fmt: skip


def results_of(found: Any) -> list[torch.Tensor]:
    return [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]


def sample_results(operator: Any, sample: Any, dtype: Any) -> tuple[list[Any], list[Any]]:
    """Results and gradients of a sample, computed in dtype."""

    def cast(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        return x.detach().to(dtype).requires_grad_(x.requires_grad)

    args = [cast(x) for x in (sample.input, *sample.args)]
    kwargs = {name: cast(x) for name, x in sample.kwargs.items()}
    found = results_of(operator.op(*args, **kwargs))
    leaves = [x for x in (*args, *kwargs.values()) if getattr(x, "requires_grad", False)]
    loss = sum(x.to(dtype).sin().sum() for x in found)
    return found, list(torch.autograd.grad(loss, leaves, allow_unused=True))


def magnitude(sample: Any) -> float:
    """A bound for the terms of a gradient, which may cancel: |do| |v| |k|, |do| below 1."""
    sizes = (x.detach().abs().max() for x in sample.args[:2] if x.numel())
    return float(torch.stack([torch.tensor(1.0), *(x.float() for x in sizes)]).clamp(min=1).prod())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPERATORS)
def test_samples_of_torch(name: str, dtype: torch.dtype) -> None:
    methods = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    operator = next(op for op in methods.op_db if op.name == name)
    step = 1 if IS_FULL else 8 if "scaled" not in name else 1 if dtype == torch.float32 else 4
    samples = list(operator.sample_inputs("cpu", dtype, requires_grad=True))[::step]
    assert samples
    for sample in samples:
        with sdpa.replaced(strict=True):
            found = sample_results(operator, sample, dtype)
        theirs = sample_results(operator, sample, dtype)
        exact = sample_results(operator, sample, torch.float64)
        for ours, other, truth in zip(*(a + b for a, b in (found, theirs, exact))):
            assert (ours is None) == (other is None) or (ours if other is None else other).eq(
                0
            ).all()
            if ours is None or other is None:
                continue
            assert (ours.shape, ours.dtype) == (other.shape, other.dtype)
            if sample.kwargs.get("dropout_p", 0.0) > 0:
                continue  # another generator: test_dropout_has_the_right_mean
            if dtype == torch.float64 or truth.numel() == 0:
                torch.testing.assert_close(ours, other)
                continue
            error, allowed = (
                float((x.double() - truth).detach().abs().max()) for x in (ours, other)
            )
            assert error <= 2 * allowed + 4 * torch.finfo(dtype).eps * magnitude(sample)


def test_dropout_has_the_right_mean() -> None:
    x = torch.ones(4, 8, 64, 64)
    o = OURS(torch.zeros_like(x), x, x, dropout_p=0.25)
    assert 0.0 < o.std() < 0.2
    assert abs(float(o.mean()) - 1.0) < 0.01
    assert not torch.equal(o, OURS(torch.zeros_like(x), x, x, dropout_p=0.25))
    torch.manual_seed(5)
    one = OURS(x, x, x, dropout_p=0.5)
    torch.manual_seed(5)
    assert torch.equal(one, OURS(x, x, x, dropout_p=0.5))
    assert OURS(x, x, x, dropout_p=1.0).eq(0).all()


def test_rows_that_see_nothing_and_hidden_nan() -> None:
    q, k, v = (torch.randn(1, 2, 3, 8, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, False]])
    for given in (mask, torch.zeros(3, 3).masked_fill(~mask, -torch.inf)):
        found, expected = OURS(q, k, v, given), THEIRS(q, k, v, given)
        torch.testing.assert_close(found, expected)
        assert found[:, :, 1].eq(0).all()
        grads = torch.autograd.grad(found.sum(), (q, k, v))
        assert all(torch.isfinite(x).all() for x in grads)


def test_a_float_mask_of_the_lowest_number_hides_and_stays_finite() -> None:
    q, k, v = (torch.randn(1, 1, 3, 8) for _ in range(3))
    lowest = torch.finfo(torch.float32).min
    mask = torch.tensor([[0.0, lowest, 0.0], [lowest] * 3, [0.0, 0.0, lowest]])
    torch.testing.assert_close(OURS(q, k, v, mask), THEIRS(q, k, v, mask))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended, _ = self.attention(x, x, x, need_weights=False)
        return functional.scaled_dot_product_attention(attended, x, x, is_causal=True)


def reaches_fulmen(function: Any) -> bool:
    with torch.profiler.profile() as profile:
        function()
    return any(event.key.startswith("fulmen::attention") for event in profile.key_averages())


def test_a_whole_model_eager_and_compiled() -> None:
    model, x = Model(), torch.randn(2, 5, 16)
    expected = model(x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    assert not reaches_fulmen(lambda: compiled(x))
    with sdpa.replaced() as places:
        assert "torch.nn.functional.scaled_dot_product_attention" in places
        assert "test_sdpa.THEIRS" in places
        assert reaches_fulmen(lambda: model(x))
        torch.testing.assert_close(model(x), expected)
        torch.testing.assert_close(compiled(x), expected)
        assert reaches_fulmen(lambda: compiled(x))
        with sdpa.replaced(strict=True):
            pass
        assert sdpa.is_enabled()
    assert not sdpa.is_enabled()
    assert functional.scaled_dot_product_attention is THEIRS
    assert not reaches_fulmen(lambda: model(x))
    torch.testing.assert_close(compiled(x), expected)
    assert not reaches_fulmen(lambda: compiled(x))


def test_what_fulmen_cannot_do_goes_to_torch_with_one_warning() -> None:
    x = torch.randn(1, 1, 4, 600)
    sdpa._warned.clear()
    with sdpa.replaced():
        with pytest.warns(UserWarning, match="head dimensions are 600"):
            found = functional.scaled_dot_product_attention(x, x, x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            functional.scaled_dot_product_attention(x, x, x)
            compiled = torch.compile(
                lambda x: functional.scaled_dot_product_attention(x, x, x), fullgraph=True,
                backend="aot_eager",
            )  # fmt: skip
            torch.testing.assert_close(compiled(x), found)
    torch.testing.assert_close(found, THEIRS(x, x, x))
    with sdpa.replaced(strict=True), pytest.raises(fulmen.UnsupportedError, match="600"):
        functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("wrong", ["mixed dtypes", "shapes", "integers"])
def test_bad_calls_get_the_words_of_torch(wrong: str) -> None:
    x = torch.randn(1, 2, 3, 8)
    args: dict[str, Any] = {"query": x, "key": x, "value": x}
    if wrong == "mixed dtypes":
        args["key"] = x.double()
    elif wrong == "shapes":
        args["key"] = torch.randn(1, 2, 3, 7)
    else:
        args = {name: value.int() for name, value in args.items()}
    try:
        THEIRS(**args)
    except RuntimeError as error:
        theirs = error
    with pytest.raises(RuntimeError) as ours:
        OURS(**args)
    assert str(ours.value) == str(theirs)
