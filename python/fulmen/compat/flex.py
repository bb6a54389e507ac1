# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""FlexAttention (torch.nn.attention.flex_attention) on fulmen, with its arguments and returns.

A score_mod and the mask_mod of a BlockMask become texts (fulmen.score): they are called once, with
values that stand for one pair. Tensors that they read are captures, whose gradients arrive, on the
CPU too. What the language has not is refused by name, with the line that uses it. torch.compile
traces the call without a break, and a function that is known is not read again (flex_known.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

import fulmen

from .. import masks
from ..errors import ShapeError, UnsupportedError
from .flex_known import texts_of

__all__ = ["flex_attention"]

_BLOCK_UNIT = 64  # of lists of blocks


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """FlexAttention's call.

    Args:
        query: (batch, head, q_row, dim).
        key: (batch, kv_head, kv_row, dim); a batch of 1 serves all.
        value: likewise.
        score_mod: what a score becomes: score_mod(score, b, h, q_idx, kv_idx); None: as it is.
        block_mask: of torch's create_block_mask or BlockMask.from_kv_blocks; None: all is visible.
        scale: None: dim**-0.5.
        enable_gqa: whether query may have more heads than key.
        return_lse: whether lse is returned as well.
        kernel_options: tiles of torch's kernels: not read.
        return_aux: AuxRequest(lse=True); its max_scores is refused.

    Returns:
        o; with return_lse (o, lse), with return_aux (o, AuxOutput). Natural logarithms.

    Raises:
        UnsupportedError: a function uses what the language of scores and masks has not.
        fulmen.Error: as `fulmen.attention`.
    """
    del kernel_options
    _check_shapes(query, key, enable_gqa, block_mask)
    if return_aux is not None and getattr(return_aux, "max_scores", False):
        raise UnsupportedError("return_aux asks for max_scores, which fulmen does not return: lse")
    if key.shape[0] == 1 < query.shape[0]:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    blocks = _Blocks() if block_mask is None else _blocks_of(block_mask, key.shape[2])
    texts = texts_of(score_mod, blocks.mask_mod)
    captures = {**texts.captures, **blocks.captures}
    mask: Any = blocks.lists
    if texts.mask is not None or blocks.kind:
        mask = masks.expression(_visible(blocks.kind, texts.mask), **captures)
        captures = {}  # what both read is named once
    score = None
    if texts.score not in (None, "s"):
        score = fulmen.score(str(texts.score), **captures)
    wants_lse = return_lse or bool(getattr(return_aux, "lse", False))
    o, lse = fulmen.attention(
        query, key, value, score=score, mask=mask, scale=scale, return_lse=True
    )
    if return_aux is not None:
        return o, torch_flex.AuxOutput(lse=lse if wants_lse else None, max_scores=None)
    return (o, lse) if wants_lse else o


def _check_shapes(query: Tensor, key: Tensor, enable_gqa: bool, mask: BlockMask | None) -> None:
    for name, x in (("query", query), ("key", key)):
        if x.is_nested or x.ndim != 4:
            shape = "nested" if x.is_nested else f"of shape {tuple(x.shape)}"
            raise ShapeError(f"{name} is {shape}; (batch, head, row, dim) is expected")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ShapeError(
            f"query has {query.shape[1]} heads and key {key.shape[1]}; enable_gqa=True allows it"
        )
    if mask is None:
        return
    rows, keys = mask.seq_lengths
    if (query.shape[2], key.shape[2]) == (rows, keys):
        return
    raise ShapeError(
        f"block_mask is of {rows} rows and {keys} keys, query and key have {query.shape[2]} and "
        f"{key.shape[2]}; create_block_mask(mask_mod, ...) makes one for them"
    )


class _Blocks(NamedTuple):
    """What the lists of a BlockMask say."""

    mask_mod: Any = None  # what is left to be asked of pairs
    # "let kind = ...; ", of what it reads: 0 hidden, 1 what mask_mod says, 2 visible
    kind: str = ""
    captures: Mapping[str, Tensor] = MappingProxyType({})
    lists: Any = None  # masks.blocks, where they say all


# Of masks that live: their lists as they were, and what was made of them.
_made: WeakKeyDictionary[BlockMask, tuple[Any, _Blocks]] = WeakKeyDictionary()


def _blocks_of(mask: BlockMask, kv_rows: int) -> _Blocks:
    """As `_read`, once for each state of the lists of a mask.

    A program that is compiled and a CUDA graph that is captured read them in each run.
    """
    if torch.compiler.is_compiling():
        return _read(mask, kv_rows)
    if mask.kv_indices.is_cuda and torch.cuda.is_current_stream_capturing():
        return _read(mask, kv_rows)
    given = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    lists = [x for x in given if x is not None]
    if any(x.is_inference() for x in lists):  # without a count of changes
        return _read(mask, kv_rows)
    state = (kv_rows, mask.BLOCK_SIZE, mask.mask_mod, *((id(x), x._version) for x in lists))
    known = _made.get(mask)
    if known is None or known[0] != state:
        known = _made[mask] = state, _read(mask, kv_rows)
    return known[1]


def _read(mask: BlockMask, kv_rows: int) -> _Blocks:
    """Lists alone where a mask has no mask_mod of its own; else kinds of blocks.

    Torch looks at mask_mod in partial blocks alone: what is listed as full is visible whole.
    """
    rows, keys = mask.BLOCK_SIZE
    has_full = mask.full_kv_indices is not None
    is_free = mask.mask_mod is torch_flex.noop_mask
    if is_free and rows % _BLOCK_UNIT == 0 and keys % _BLOCK_UNIT == 0:
        lists = [_list_of(mask.kv_indices, mask.kv_num_blocks)]
        if has_full:
            lists.append(_list_of(mask.full_kv_indices, mask.full_kv_num_blocks))
        return _Blocks(lists=masks.blocks(torch.cat(lists, 3), (rows, keys)))
    kinds = _kinds(mask, -(-kv_rows // keys), has_full)
    b, h = ("b" if kinds.shape[0] > 1 else "0"), ("h" if kinds.shape[1] > 1 else "0")
    kind = f"let kind = kinds[{b}, {h}, i // {rows}, j // {keys}]; "
    return _Blocks(None if is_free else mask.mask_mod, kind, {"kinds": kinds})


def _visible(kind: str, said: str | None) -> str:
    """The text of a mask from that of mask_mod."""
    if said is None:
        return f"{kind}kind > 0"
    lets, _, last = said.rpartition("; ")
    return f"{kind}{lets + '; ' if lets else ''}kind == 2 or kind == 1 and ({last})"


def _list_of(indices: Any, counts: Any) -> Tensor:
    """The blocks of each row, -1 behind the last."""
    entry = torch.arange(indices.shape[3], device=indices.device)
    return torch.where(entry < counts.unsqueeze(3), indices, -1)


def _kinds(mask: BlockMask, num_blocks: int, has_full: bool) -> Tensor:
    """(batch or 1, head or 1, q_block, kv_block): 0 hidden, 1 what mask_mod says, 2 visible."""
    parts: list[tuple[Any, Any, int]] = [(mask.kv_indices, mask.kv_num_blocks, 1)]
    if has_full:
        parts.append((mask.full_kv_indices, mask.full_kv_num_blocks, 2))
    shape = (*mask.kv_indices.shape[:3], num_blocks + 1)
    kinds = torch.zeros(shape, dtype=torch.int32, device=mask.kv_indices.device)
    for indices, counts, kind in parts:
        listed = _list_of(indices, counts).to(torch.int64)
        at = torch.where((listed < 0) | (listed >= num_blocks), num_blocks, listed)
        kinds.scatter_(3, at, kind)
    return kinds[..., :num_blocks].contiguous()
