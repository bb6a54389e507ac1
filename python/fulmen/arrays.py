# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What the library can read: arrays as DLPack takes them, and what is refused before.

Inputs may be of any kind beside each other; q decides what results are (kinds).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._library import ARRAY_NAMES, import_tvm_ffi
from .errors import ArgumentError, DTypeError, UnsupportedError
from .kinds import GPU_DEVICE_TYPES, NO_STREAM, Array, is_torch
from .kinds import dtype_name as dtype_name

LEGACY_DEFAULT_STREAM = 1  # DLPack's number for the stream whose address is 0


def torch_checked(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """Arrays whose memory holds their numbers: DLPack does not tell of torch's negative bit.

    Call it only where torch has been imported.

    Args:
        arrays: inputs, tensors of torch among them or not.
    """
    torch = sys.modules["torch"]
    for index, x in enumerate(arrays):
        if x is None or type(x) is np.ndarray or not isinstance(x, torch.Tensor):
            continue
        if x.is_neg():
            arrays = (*arrays[:index], x.resolve_neg(), *arrays[index + 1 :])
    return arrays


def refuse_gradients(function: str, arrays: tuple[Array, ...]) -> None:
    """Refuses tensors whose gradient would silently stop in a call on arrays of another kind.

    Raises:
        UnsupportedError: a tensor requires grad while gradients are recorded.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return
    for name, x in zip(ARRAY_NAMES, arrays):
        if is_torch(x) and x.requires_grad:
            raise UnsupportedError(
                f"{name} requires grad and q is no PyTorch tensor, so fulmen.{function} records no "
                f"gradient: pass {name}.detach(), or q as a tensor"
            )


class _Writable:
    """The memory of a read-only array, which inputs may be: nothing writes through it."""

    def __init__(self, x: Array) -> None:
        interface = dict(x.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.owner = x


def exported(
    arrays: tuple[Array, ...], results: range, names: Sequence[str], stream: int = NO_STREAM
) -> tuple[int, list[Any]]:
    """Arrays as DLPack takes them; those at `results` are written.

    Args:
        arrays: of any kind; None is absent.
        results: the places of those that are written.
        names: what errors call them.
        stream: the address of the stream that will read arrays of a GPU: it waits for them.

    Returns:
        The bits of `reinterpret` (src/ffi/arguments.h) and a view of each array.

    Raises:
        ArgumentError: a result is read-only.
        DTypeError: an array cannot be read.
    """
    bits = 0
    views: list[Any] = []
    for index, (x, name) in enumerate(zip(arrays, names)):
        view = x
        if isinstance(x, np.ndarray):
            view, reinterpreted = _numpy_view(x, name, index in results)
            bits |= reinterpreted << index
        elif x is not None:
            view = _dlpack_view(x, name, stream)
        views.append(view)
    return bits, views


def _numpy_view(x: Array, name: str, is_result: bool) -> tuple[Array, int]:
    bits = 0
    if x.dtype.name == "bfloat16":
        x, bits = x.view(np.uint16), 1
    elif x.dtype == np.bool_:
        x, bits = x.view(np.uint8), 1
    if not x.dtype.isnative:
        raise DTypeError(
            f"{name} has the byte order of another machine; {name}.astype({name}.dtype.newbyteorder"
            "('=')) has this one's"
        )
    if x.dtype.kind not in "fiub":
        raise DTypeError(
            f"{name} has dtype {x.dtype.name}; fulmen knows float64, float32, float16, bfloat16, "
            "bool, int32 and int64"
        )
    if any(stride % x.itemsize for stride in x.strides):
        raise ArgumentError(
            f"{name} has strides of {x.strides} bytes, not multiples of its item of {x.itemsize}; "
            f"{name}.copy() has them"
        )
    if not x.flags.writeable:
        if is_result:
            raise ArgumentError(f"{name} is to be written and is read-only; pass a writable array")
        x = np.asarray(_Writable(x))
    return x, bits


def _dlpack_view(x: Array, name: str, stream: int) -> Any:
    try:
        if not is_torch(x) and x.__dlpack_device__()[0] in GPU_DEVICE_TYPES:
            x = x.__dlpack__(stream=stream or LEGACY_DEFAULT_STREAM)
        return import_tvm_ffi().from_dlpack(x)
    except Exception as error:
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise DTypeError(
            f"{name} ({type(x).__name__}) cannot be read through DLPack: {text[0]}"
        ) from error


def exported_workspace(x: Any, stream: int) -> Any:
    """What comes before the arrays of a call: a workspace on a GPU as `exported`, else as is."""
    if isinstance(x, (int, float, np.ndarray)) or x is None:
        return x
    return _dlpack_view(x, "workspace", stream)


def check_out(out: Array, out_dtype: Any) -> None:
    """Refuses an `out` that cannot be written to, or is not of `out_dtype`."""
    if out_dtype is not None and dtype_name(out.dtype) != dtype_name(out_dtype):
        raise DTypeError(
            f"out has dtype {dtype_name(out.dtype)} and out_dtype is {dtype_name(out_dtype)}; give "
            "one of them"
        )
    if isinstance(out, np.ndarray):
        if not out.flags.writeable:
            raise ArgumentError("out is read-only; pass a writable array, or out=None")
    elif type(out).__module__.startswith(("jax", "jaxlib")):
        raise ArgumentError("out is a JAX array, which cannot be written to; pass out=None")
