# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The keywords of the public calls: the one list of the options in Python, types and defaults.

Type checkers and editors read the classes as they stand at each call, `**options: Unpack[Options]`;
help() and inspect read the signatures that `takes` makes of them. What the keywords mean is said at
`fulmen.attention`.
"""

from __future__ import annotations

import ast
import difflib
import inspect
from typing import TYPE_CHECKING, Annotated, Any, Callable, TypedDict, TypeVar

if TYPE_CHECKING:
    from .array_types import Array

F = TypeVar("F", bound=Callable[..., Any])


class CommonOptions(TypedDict, total=False):
    """What every call takes: the type and the default of each."""

    scale: Annotated[float | None, None]
    causal: Annotated[bool, False]
    alignment: Annotated[str, "bottom_right"]
    window: Annotated[int | tuple[int | None, int | None] | None, None]
    mask: Annotated[Any, None]
    score: Annotated[Any, None]
    bias: Annotated[Array, None]
    alibi_slopes: Annotated[Array, None]
    softcap: Annotated[float, 0.0]
    sinks: Annotated[Array, None]
    q_lengths: Annotated[Array, None]
    max_q: Annotated[int | None, None]
    max_kv: Annotated[int | None, None]
    dropout_p: Annotated[float, 0.0]
    rng: Annotated[tuple[int, int] | Array | None, None]
    layout: Annotated[str, "bhsd"]
    implementation: Annotated[str, "auto"]
    deterministic: Annotated[bool, False]
    batch_invariant: Annotated[bool, False]
    precision: Annotated[str, "float32"]
    slots: Annotated[bool, False]
    q_scale: Annotated[float | Array | None, None]
    k_scale: Annotated[float | Array | None, None]
    v_scale: Annotated[float | Array | None, None]


class KvLengths(TypedDict, total=False):
    """The keys of each batch entry: an argument of its own in `fulmen.attention_paged`."""

    kv_lengths: Annotated[Array, None]


class Offsets(TypedDict, total=False):
    """Where packed sequences begin: arguments of their own in `fulmen.attention_varlen`."""

    cu_q: Annotated[Array, None]
    cu_kv: Annotated[Array, None]


class Caches(TypedDict, total=False):
    """Keys in pages, and where queries stand: arguments of `fulmen.attention_paged`."""

    page_table: Annotated[Array, None]
    page_indptr: Annotated[Array, None]
    kv_start: Annotated[Array, None]
    kv_shared: Annotated[Array, None]
    positions: Annotated[Array, None]


class Segments(TypedDict, total=False):
    """Where rows and keys stand in a longer sequence: not of caches."""

    q_segments: Annotated[Array, None]
    kv_segments: Annotated[Array, None]


class Placement(TypedDict, total=False):
    """Where a call runs, which XLA decides for `fulmen.jax.attention`."""

    backend: Annotated[str, "auto"]
    stream: Annotated[Any, None]


class Results(TypedDict, total=False):
    """How a call returns o and lse."""

    return_lse: Annotated[bool, False]
    out: Annotated[Array, None]
    out_dtype: Annotated[Any, None]


class JaxOptions(CommonOptions, KvLengths, Offsets, Caches, Segments, total=False):
    """Of `fulmen.jax.attention`."""


class VarlenOptions(CommonOptions, KvLengths, Segments, Placement, total=False):
    """Of `fulmen.attention_varlen`."""


class JaxPagedOptions(CommonOptions, total=False):
    """Of `fulmen.jax.attention_paged`."""


class PagedOptions(CommonOptions, Placement, total=False):
    """Of `fulmen.attention_paged`."""


# What asks for bits of a request that none of its neighbours changes.
INVARIANT = {"batch_invariant": True}


class Options(CommonOptions, KvLengths, Offsets, Caches, Segments, Placement, total=False):
    """Of the other calls."""


class AttentionKeywords(Options, Results, total=False):
    """Of `fulmen.attention`."""


KEYWORDS = frozenset(Options.__annotations__)
RESULT_KEYWORDS = tuple(Results.__annotations__)

# What other libraries call something that there is here too.
_ELSEWHERE = {
    "is_causal": "causal=True; torch's corner is alignment='top_left'",
    "attn_mask": "mask= a boolean array, or bias= an array that is added to the scores",
    "attention_mask": "mask= a boolean array, or bias= an array that is added to the scores",
    "key_padding_mask": "kv_lengths= the keys of each batch entry, or mask= a boolean array",
    "attn_bias": "bias=",
    "score_mod": "score= a text, in fulmen's own language",
    "mask_mod": "mask= a text, in fulmen's own language",
    "block_mask": "mask= a text, in fulmen's own language",
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "window_size": "window=(left, right)",
    "sliding_window": "window=(left, 0), the row itself not counted",
    "local_window_size": "window=(left, right)",
    "logits_soft_cap": "softcap=",
    "cu_seqlens_q": "cu_q=",
    "cu_seqlens_k": "cu_kv=",
    "block_table": "page_table=, in fulmen.attention_paged",
    "cache_seqlens": "kv_lengths=",
    "cache_batch_idx": "batch_index=, in fulmen.attention_paged",
    "cache_leftpad": "kv_start=",
    "q_offset": "positions=, where each query stands",
    "max_seqlen_q": "max_q=",
    "max_seqlen_k": "max_kv=",
    "query_seq_lengths": "q_lengths=",
    "key_value_seq_lengths": "kv_lengths=",
    "enable_gqa": "nothing: heads may be any multiple of the heads of k and v",
    "dropout": "dropout_p=, with rng=(seed, offset)",
    "q_descale": "q_scale=",
    "k_descale": "k_scale=",
    "v_descale": "v_scale=",
    "dtype": "out_dtype=, or q.astype(...)",
    "accumulate": "accumulate= of fulmen.attention_forward and fulmen.attention_backward, which "
    "merge parts in place; elsewhere fulmen.merge",
}


def hint(name: str) -> str:
    """What to write instead of a keyword that there is not."""
    known = _ELSEWHERE.get(name)
    close = difflib.get_close_matches(name, KEYWORDS.union(RESULT_KEYWORDS), 1)
    if known is None and close:
        known = f"{close[0]}="
    more = "help(fulmen.attention) lists them"
    return more if known is None else f"here it is {known}; {more}"


def takes(keywords: Any) -> Callable[[F], F]:
    """Shows the keywords of a class above where the signature of a function has `**options`."""

    def shown(function: F) -> F:
        own = inspect.signature(function)
        named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        listed = [_parameter(name, said) for name, said in keywords.__annotations__.items()]
        function.__signature__ = own.replace(parameters=[*named, *listed])  # type: ignore[attr-defined]
        return function

    return shown


def _parameter(name: str, said: Any) -> inspect.Parameter:
    """From a row of a class, "Annotated[TYPE, DEFAULT]": not evaluated, Python 3.9 has no X | Y."""
    row = ast.parse(said.__forward_arg__, mode="eval").body
    assert isinstance(row, ast.Subscript)
    assert isinstance(row.slice, ast.Tuple)
    kind, default = row.slice.elts
    value = ast.literal_eval(default)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=ast.unparse(kind)
    )
