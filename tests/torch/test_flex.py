# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen.compat.flex against torch's own flex_attention, and its gradients against autograd."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    noop_mask,
    or_masks,
)

import fulmen
from fulmen.compat import flex_known
from fulmen.compat.flex import flex_attention
from fulmen.compat.flex_tracing import Tracer

# Torch's own answers straight from its formula, not by way of its compiler, which takes seconds.
torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True

BATCH, HEADS, ROWS, KEYS, DIM = 2, 4, 70, 90, 8
torch.manual_seed(3)
SLOPE = torch.rand(HEADS, dtype=torch.float64)
TABLE = torch.randn(HEADS, 2 * KEYS, dtype=torch.float64)
BIAS = torch.randn(BATCH, HEADS, ROWS, KEYS, dtype=torch.float64)
HEAT = torch.tensor(1.3, dtype=torch.float64)
DOC = torch.arange(KEYS) // 17
FLAGS = torch.rand(ROWS, KEYS) < 0.7
OFFSETS = torch.tensor([0, 20, 45, 90], dtype=torch.int32)


def tensors(dtype: torch.dtype = torch.float64, kv_heads: int = HEADS) -> list[Tensor]:
    torch.manual_seed(5)
    shapes = ((HEADS, ROWS), (kv_heads, KEYS), (kv_heads, KEYS))
    return [torch.randn(BATCH, *shape, DIM, dtype=dtype) for shape in shapes]


def bucket(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """T5's logarithmic buckets."""
    back = torch.clamp(i - j, min=0)
    far = 8 + (torch.log(back.clamp(min=1).float() / 8) / math.log(16) * 8).to(torch.int64)
    return s + TABLE[h, torch.where(back < 8, back, far.clamp(max=15))]


def strange(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    y = (s * HEAT).square() - 2 ** (-0.1 * (i - j).abs()) + torch.sigmoid(s) / 3
    y = y + torch.exp2(-s.abs()) - torch.rsqrt(s.abs() + 1) + (i % 3) * 0.1 + (j // 7) / 10
    return torch.where((i > j) ^ (h == 1), y, torch.minimum(s, -y).clamp(-3, 3)).to(s.dtype)


SCORES: dict[str, Callable[..., Any]] = {
    "identity": lambda s, b, h, i, j: s,
    "alibi": lambda s, b, h, i, j: s - SLOPE[h] * (i - j).abs(),
    "relative": lambda s, b, h, i, j: s + TABLE[h, i - j + KEYS],
    "from_the_end": lambda s, b, h, i, j: s + TABLE[h][i - j],
    "softcap": lambda s, b, h, i, j: 20 * torch.tanh(s / 20),
    "bias": lambda s, b, h, i, j: s + BIAS[b, h, i, j],
    "causal": lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")),
    "heat": lambda s, b, h, i, j: HEAT * s,
    "bucket": bucket,
    "strange": strange,
    "true_is_one": lambda s, b, h, i, j: s + (i > j) * 0.5 + torch.full_like(s, 2.0),
    "methods": lambda s, b, h, i, j: s.mul(2).sub(j.float().div(9)).masked_fill(i == j, 1.5),
}

MASKS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, i, j: i >= j,
    "documents": lambda b, h, i, j: (DOC[i] == DOC[j]) & (i >= j),
    "window": lambda b, h, i, j: (i - j).abs() <= 9,
    "prefix": or_masks(lambda b, h, i, j: i >= j, lambda b, h, i, j: j < 11),
    "both": and_masks(lambda b, h, i, j: i >= j, lambda b, h, i, j: i - j < 30),
    "dilated": lambda b, h, i, j: torch.logical_and(i >= j, torch.remainder(i - j, 3) == 0),
    "matrix": lambda b, h, i, j: FLAGS[i, j],
    "by_head": lambda b, h, i, j: ~((j % (h + 2) == 0) | (j > i + b)),
}


def dense(q: Tensor, k: Tensor, v: Tensor, score_mod: Any) -> Tensor:
    """The same by whole tensors, for autograd."""
    s = q @ k.transpose(-1, -2) / math.sqrt(DIM)
    axes = (torch.arange(n).view([-1 if x == y else 1 for y in range(4)]) for x, n in
            enumerate(s.shape))  # fmt: skip
    return torch.softmax(score_mod(s, *axes), -1) @ v


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    q, k, v = tensors()
    found = flex_attention(q, k, v, SCORES[name])
    torch.testing.assert_close(found, torch_flex.flex_attention(q, k, v, SCORES[name]))


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    q, k, v = tensors(kv_heads=2)
    mask = create_block_mask(MASKS[name], BATCH, HEADS, ROWS, KEYS, "cpu", BLOCK_SIZE=16)
    options = {"block_mask": mask, "enable_gqa": True, "scale": 0.7}
    aux = AuxRequest(lse=True)
    found, beside = flex_attention(q, k, v, SCORES["alibi"], return_aux=aux, **options)
    wanted, of_torch = torch_flex.flex_attention(
        q, k, v, SCORES["alibi"], return_aux=aux, **options
    )
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(beside.lse, of_torch.lse)


@pytest.mark.parametrize("mask_mod", [None, MASKS["causal"]], ids=["lists", "with_a_mask"])
@pytest.mark.parametrize("size", [64, 32])
def test_block_masks_of_lists(mask_mod: Any, size: int) -> None:
    """Full blocks are visible whole, whatever mask_mod says of them."""
    torch.manual_seed(8)
    q, k, v = torch.randn(3, 1, 2, 256, DIM, dtype=torch.float64)
    blocks = 256 // size
    kinds = torch.randint(0, 3, (1, 2, blocks, blocks))
    kinds[:, :, :, 0] = 2

    def ordered(kind: int) -> tuple[Tensor, Tensor]:
        seen = kinds == kind
        return seen.sum(-1).int(), torch.sort(~seen, dim=-1, stable=True)[1].int()

    mask = BlockMask.from_kv_blocks(*ordered(1), *ordered(2), BLOCK_SIZE=size, mask_mod=mask_mod)
    assert (mask.mask_mod is noop_mask) == (mask_mod is None)
    found = flex_attention(q, k, v, block_mask=mask)
    at = torch.arange(256)
    said = torch.ones(256, 256).bool() if mask_mod is None else at[:, None] >= at
    kind = kinds.repeat_interleave(size, 2).repeat_interleave(size, 3)
    visible = (kind == 2) | ((kind == 1) & said)
    torch.testing.assert_close(found, fulmen.attention(q, k, v, mask=visible))


def test_gradients_of_what_is_captured() -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    table = TABLE.clone().requires_grad_()
    heat = HEAT.clone().requires_grad_()
    bias = BIAS.clone().requires_grad_()

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return heat * s + table[h, (i - j).clamp(-20, 20) + KEYS] + 0.3 * bias[b, h, i, j]

    leaves = [q, k, v, table, heat, bias]
    seed = torch.randn(BATCH, HEADS, ROWS, DIM, dtype=torch.float64)
    found = torch.autograd.grad(flex_attention(q, k, v, score_mod), leaves, seed)
    wanted = torch.autograd.grad(dense(q, k, v, score_mod), leaves, seed)
    for x, y in zip(found, wanted):
        torch.testing.assert_close(x, y)


class Biased(torch.nn.Module):
    """A score_mod that reads parameters, and what the graph itself computes from them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(TABLE.clone())
        self.heat = torch.nn.Parameter(torch.rand(HEADS, dtype=torch.float64))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        bias = 2 * self.table

        def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s * self.heat[h] + torch.where(i < j, bias[h, (i - j) + KEYS], SLOPE[h])

        return 2 * flex_attention(q + 1, k, v, score_mod, block_mask=mask)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_without_a_break(backend: str) -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    model = Biased()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    leaves = [q, k, v, *model.parameters()]
    for mask in (None, create_block_mask(MASKS["documents"], None, None, ROWS, KEYS, "cpu")):
        found, wanted = compiled(q, k, v, mask), model(q, k, v, mask)
        torch.testing.assert_close(found, wanted)
        for x, y in zip(*(torch.autograd.grad(o.sum(), leaves) for o in (found, wanted))):
            torch.testing.assert_close(x, y)


def test_compiled_once_for_every_length() -> None:
    counted = torch._dynamo.testing.CompileCounter()
    call = torch.compile(
        lambda q, k: flex_attention(q, k, k, SCORES["alibi"]), backend=counted, fullgraph=True,
        dynamic=True,
    )  # fmt: skip
    for rows in (20, 30, 45):
        q, k, _ = (x[:, :, :rows] for x in tensors())
        torch.testing.assert_close(call(q, k), flex_attention(q, k, k, SCORES["alibi"]))
    assert counted.frame_count == 1


@pytest.mark.parametrize("name", ["a function", "a method", "a slice", "an if"])
def test_compiled_calls_name_what_the_language_has_not(name: str) -> None:
    score_mod, said = REFUSED[name]
    q, k, v = tensors()
    call = torch.compile(
        lambda q: flex_attention(q, k, v, score_mod), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match=said) as error:
        call(q)
    assert f"line {score_mod.__code__.co_firstlineno}" in str(error.value) or name == "a function"
    assert "test_flex.py" in str(error.value)


def times_traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that are read, as they are."""
    found: list[Any] = []
    text_of = Tracer.text_of

    def counted(self: Tracer, function: Any, with_score: bool) -> str:
        found.append(function)
        return text_of(self, function, with_score)

    monkeypatch.setattr(Tracer, "text_of", counted)
    monkeypatch.setattr(flex_known, "_known", {})
    return found


def test_a_known_function_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = times_traced(monkeypatch)
    q, k, v = tensors()
    mask = create_block_mask(MASKS["documents"], None, None, ROWS, KEYS, "cpu")

    def call(table: Tensor, factor: Any) -> None:
        def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return factor * s + table[h, i - j + KEYS]

        found = flex_attention(q, k, v, score_mod, block_mask=mask)
        hidden = ~MASKS["documents"](0, 0, torch.arange(ROWS)[:, None], torch.arange(KEYS)[None])
        wanted = dense(q, k, v, lambda *x: score_mod(*x).masked_fill(hidden, -math.inf))
        seen = ~hidden.all(1)
        torch.testing.assert_close(found[:, :, seen], wanted[:, :, seen])

    call(TABLE, 2)
    assert len(traced) == 2
    call(TABLE, 2)
    call(TABLE + 1, 2)  # another tensor of that shape is another capture, not another text
    assert len(traced) == 2
    call(TABLE, 3)
    call(TABLE, 3.0)
    call(TABLE, True)
    call(torch.cat((TABLE, TABLE), 1), 2)
    call(TABLE.float(), 2)
    assert len(traced) == 12
    call(TABLE, HEAT)
    call(TABLE, HEAT + 1)
    assert len(traced) == 14


def test_what_can_change_unseen_is_read_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = times_traced(monkeypatch)
    q, k, v = tensors()
    box = types.SimpleNamespace(factor=2.0)
    listed = [1.0]
    scale = torch.tensor(2.0, dtype=torch.float64)
    count = 0

    def of_an_object(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * box.factor

    def of_a_list(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * listed[0]

    def of_what_a_tensor_holds(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * float(scale)

    def of_a_sum(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * (scale + scale)

    def counting(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        nonlocal count
        count += 1
        return s * count

    for score_mod in (of_an_object, of_a_list, of_what_a_tensor_holds, of_a_sum, counting):
        before = len(traced)
        first = flex_attention(q, k, v, score_mod)
        box.factor += 1
        listed[0] += 1
        scale += 1
        assert not torch.equal(flex_attention(q, k, v, score_mod), first)
        assert len(traced) == before + 2


def test_lists_of_a_mask_that_change_are_read_again() -> None:
    q, k, v = torch.randn(3, 1, 1, 128, DIM, dtype=torch.float64)
    counts = torch.ones(1, 1, 2, dtype=torch.int32)
    indices = torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=64)
    half = flex_attention(q, k, v, block_mask=mask)
    torch.testing.assert_close(half, fulmen.attention(q, k[:, :, :64], v[:, :, :64]))
    assert torch.equal(flex_attention(q, k, v, block_mask=mask), half)
    mask.kv_num_blocks += 1
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), fulmen.attention(q, k, v))


def test_16_bits_and_a_batch_of_keys_for_all() -> None:
    q, k, v = tensors(torch.bfloat16)
    mask = create_block_mask(MASKS["causal"], BATCH, None, ROWS, KEYS, "cpu")
    found = flex_attention(q, k[:1], v[:1], SCORES["alibi"], mask)
    wanted = torch_flex.flex_attention(
        *(x.float() for x in (q, k[:1], v[:1])), SCORES["alibi"], mask
    )
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, atol=0.02, rtol=0.02)


def test_a_value_that_is_used_often_is_named_once() -> None:
    def score_mod(s: Any, *_: Any) -> Any:
        for _ in range(40):
            s = s + s * 0.1 - s * 0.1
        return s * 2.0**-40

    q, k, v = tensors()
    torch.testing.assert_close(
        flex_attention(q, k, v, score_mod), torch_flex.flex_attention(q, k, v, score_mod)
    )


def mean(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s + torch.sin(s)


REFUSED: dict[str, tuple[Any, str]] = {
    "a function": (mean, "torch.sin of a value of the pair.*\n  return s \\+ torch.sin\\(s\\)"),
    "a method": (lambda s, b, h, i, j: s.erf(), "Tensor.erf of a value of the pair"),
    "an if": (lambda s, b, h, i, j: s if i > j else -s, "a choice of Python's"),
    "a slice": (lambda s, b, h, i, j: s + TABLE[h, :3].sum(), "index slice"),
    "a row": (lambda s, b, h, i, j: s + TABLE[h], "Tensor|row of a tensor|_Element"),
    "a tensor of many": (lambda s, b, h, i, j: s + TABLE, "a tensor of shape"),
    "bits": (lambda s, b, h, i, j: s + (i & 7), "bits of numbers"),
    "an index that is a float": (lambda s, b, h, i, j: s + TABLE[h, s], "an index that is float"),
    "a power": (lambda s, b, h, i, j: s**2.5, "a power other"),
    "a number of Python": (lambda s, b, h, i, j: s * float(i), "number of Python"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_language_has_not(name: str) -> None:
    score_mod, said = REFUSED[name]
    q, k, v = tensors()
    with pytest.raises(fulmen.UnsupportedError, match=said) as error:
        flex_attention(q, k, v, score_mod)
    assert "test_flex.py" in str(error.value)


def test_refusals() -> None:
    q, k, v = tensors(kv_heads=2)
    with pytest.raises(fulmen.ShapeError, match="enable_gqa=True allows it"):
        flex_attention(q, k, v)
    with pytest.raises(fulmen.UnsupportedError, match="max_scores"):
        flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(max_scores=True))
    mask = create_block_mask(MASKS["causal"], None, None, ROWS, ROWS, "cpu")
    with pytest.raises(fulmen.ShapeError, match="block_mask is of 70 rows and 70 keys"):
        flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    with pytest.raises(fulmen.ShapeError, match="query is of shape"):
        flex_attention(q[0], k[0], v[0])
