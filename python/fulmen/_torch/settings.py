# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The arrays and options of a call, in the order in which the operators take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..choices import LAYOUTS
from ..errors import ArgumentError, DTypeError, UnsupportedError
from ..options import integers
from ..options import split_mask as split_any_mask
from ..settled import lots


class Arrays(NamedTuple):
    """Tensor arguments of an operator."""

    q: Any
    k: Any
    v: Any
    bias: Any = None
    mask: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None
    cu_q: Any = None
    cu_kv: Any = None
    q_ids: Any = None
    kv_ids: Any = None
    rng: Any = None


NUM_ARRAYS = len(Arrays._fields)
DIFFERENTIABLE = (0, 1, 2, 3, 6)  # q, k, v, bias, sinks


class Settings(NamedTuple):
    """Arguments of an operator that are no tensors, all hashable."""

    scale: float | None = None
    softcap: float = 0.0
    causal: bool = False
    alignment: str = "bottom_right"
    window_left: int = -1
    window_right: int = -1
    prefix: int = 0
    chunk: int = 0
    dropout_p: float = 0.0
    max_q: int = 0
    max_kv: int = 0
    layout: str = "bhsd"
    backend: str = "auto"
    implementation: str = "auto"
    deterministic: bool = False
    batch_invariant: bool = False
    out_dtype: Any = None
    precision: str = "float32"


ARRAYS_SCHEMA = "Tensor q, Tensor k, Tensor v, " + ", ".join(
    f"Tensor? {name}" for name in Arrays._fields[3:]
)
SETTINGS_SCHEMA = (
    "float? scale, float softcap, bool causal, str alignment, SymInt window_left, "
    "SymInt window_right, SymInt prefix, SymInt chunk, float dropout_p, SymInt max_q, "
    "SymInt max_kv, str layout, str backend, str implementation, bool deterministic, "
    "bool batch_invariant, ScalarType? out_dtype, str precision"
)


def settings_of(
    scale: Any,
    softcap: Any,
    causal: Any,
    alignment: Any,
    window: Any,
    prefix: int,
    chunk: int,
    dropout_p: Any,
    max_q: Any,
    max_kv: Any,
    layout: Any,
    backend: Any,
    implementation: Any,
    deterministic: Any,
    batch_invariant: Any,
    out_dtype: Any,
    precision: Any,
    packed: bool,
) -> Settings:
    """Settings from the keywords of the public calls; torch.compile traces it.

    The library checks the values when the operator runs; here they only take their one form.
    """
    if window is None:
        left, right = -1, -1
    elif isinstance(window, (tuple, list)):
        if len(window) != 2:
            raise ArgumentError(f"window has {len(window)} numbers; (left, right) has two")
        left, right = (-1 if side is None else side for side in window)
    elif isinstance(window, bool):
        raise DTypeError(f"window is {window}; None, an integer or (left, right) is expected")
    else:
        left, right = window, (0 if causal and window >= 0 else window)
    if packed and layout == "bhsd":
        layout = "shd"
    if layout not in LAYOUTS:
        allowed = ", ".join(map(repr, LAYOUTS))
        raise ArgumentError(f"layout is {layout!r}; allowed are {allowed}")
    return Settings(
        None if scale is None else float(scale),
        0.0 if softcap is None else float(softcap),
        bool(causal),
        alignment,
        left,
        right,
        prefix,
        chunk,
        0.0 if dropout_p is None else float(dropout_p),
        0 if max_q is None else max_q,
        0 if max_kv is None else max_kv,
        layout,
        backend,
        implementation,
        bool(deterministic),
        bool(batch_invariant),
        torch_dtype(out_dtype),
        precision,
    )


FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def checked(arrays: Sequence[Any]) -> None:
    """Refuses q, k and v that no operator takes, with the nearest call that works."""
    for x, name in zip(arrays[:3], "qkv"):
        _check_is_tensor(x, name)
        if x.is_nested:
            raise UnsupportedError(
                f"{name} is a nested tensor; fulmen.attention_varlen takes its values() and, as "
                "cu_q and cu_kv, its offsets()"
            )
        if x.dtype not in FLOATING:
            raise DTypeError(
                f"{name} has dtype {str(x.dtype)[6:]}; allowed are float64, float32, float16, "
                "bfloat16"
            )
        if x.layout != torch.strided:
            raise UnsupportedError(f"{name} has layout {x.layout}; {name}.to_dense() is strided")
        if x.device != arrays[0].device:
            raise ArgumentError(
                f"{name} is on {x.device} and q on {arrays[0].device}; {name}.to(q.device) is there"
            )


def check_addends(bias: Any, alibi_slopes: Any, sinks: Any) -> None:
    """Refuses what is no tensor, and slopes that wait for a gradient."""
    for x, name in ((bias, "bias"), (alibi_slopes, "alibi_slopes"), (sinks, "sinks")):
        if x is not None:
            _check_is_tensor(x, name)
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            "alibi_slopes requires grad and gets none; alibi_slopes.detach() is constant, and the "
            "same term as bias= has a gradient"
        )


def _check_is_tensor(x: Any, name: str) -> None:
    if not isinstance(x, Tensor):
        raise DTypeError(
            f"{name} is {type(x).__name__} and q is a tensor; torch.as_tensor({name}) is one"
        )


def torch_dtype(dtype: Any) -> Any:
    """A torch dtype from one of any kind."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    from ..arrays import dtype_name

    found = getattr(torch, dtype_name(dtype), None)
    if not isinstance(found, torch.dtype):
        raise DTypeError(f"out_dtype is {dtype!r}; None, the dtype of q or float32 is expected")
    return found


def split_mask(mask: Any, device: Any) -> tuple[int, int, Any, Any, Any]:
    """The parts of `mask=`: prefix, chunk, boolean tensor, q_ids, kv_ids."""
    if type(mask) is Tensor:
        return 0, 0, mask, None, None
    if type(mask).__name__ == "BlockMask":
        raise ArgumentError(
            "mask is a BlockMask of FlexAttention, which is not read yet: pass its mask as "
            "causal=, window= or fulmen.masks.documents, or create_mask(...) as a boolean tensor"
        )
    if callable(mask) and not isinstance(mask, Tensor):
        raise ArgumentError(
            "mask is a function (a mask_mod of FlexAttention), which is not read yet: pass its "
            "values as a boolean tensor, or as causal=, window= or fulmen.masks"
        )
    prefix, chunk, visible, q_ids, kv_ids = split_any_mask(mask)
    parts = (tensor_of(x, device) for x in (visible, q_ids, kv_ids))
    return (prefix, chunk, *parts)


def tensor_of(x: Any, device: Any) -> Any:
    """Integers or a mask as a tensor: lists and NumPy arrays go to `device`."""
    if x is None or isinstance(x, Tensor):
        return x
    if isinstance(x, (list, tuple, np.ndarray)):
        made = torch.as_tensor(integers(x))
        return made.to(device)
    return torch.from_dlpack(x)


def rng_of(rng: Any, dropout_p: float, device: Any) -> Any:
    """(seed, offset) as an int64[2] tensor; drawn from torch's generator where it is not given.

    A draw is an ordinary operation on the device: under torch.compile and in a CUDA graph each run
    draws anew.
    """
    if rng is None:
        if dropout_p <= 0.0:
            return None
        return torch.randint(0, 2**32, (2,), dtype=torch.int64, device=device)
    if isinstance(rng, Tensor):
        return rng
    return torch.tensor(lots(rng, dropout_p), dtype=torch.int64, device=device)
