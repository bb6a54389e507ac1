# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Arrays of every kind: what makes a result of the caller's kind, and what the library can read.

NumPy and PyTorch are written to in place. Any other array (JAX) is read through DLPack; its results
are computed in NumPy and handed over to its array namespace.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._library import ARRAY_NAMES, import_tvm_ffi
from .errors import ArgumentError, DTypeError, UnsupportedError

Array = Any


class NumpyKind:
    """NumPy arrays, subclasses included."""

    @staticmethod
    def dtype(x: Array) -> Any:
        """The dtype of x, in its own kind."""
        return x.dtype

    @staticmethod
    def dtype_named(name: str) -> Any:
        """The dtype with a name such as "float32"."""
        return named_dtype(name)

    @staticmethod
    def accumulator(dtype: Any) -> Any:
        """The dtype of lse: float64 for float64, else float32."""
        return np.float64 if dtype.char == "d" else np.float32

    @staticmethod
    def empty(shape: Any, dtype: Any) -> Array:
        """Memory for a result."""
        return np.empty(shape, dtype)

    @staticmethod
    def result(x: Array, like: Array) -> Array:
        """A computed result, as the caller gets it."""
        return x


class TorchKind(NumpyKind):
    """PyTorch tensors."""

    @staticmethod
    def dtype_named(name: str) -> Any:
        return getattr(sys.modules["torch"], name, None)

    @staticmethod
    def accumulator(dtype: Any) -> Any:
        torch = sys.modules["torch"]
        return torch.float64 if dtype is torch.float64 else torch.float32

    @staticmethod
    def empty(shape: Any, dtype: Any) -> Array:
        return sys.modules["torch"].empty(shape, dtype=dtype)


class OtherKind(NumpyKind):
    """Arrays of the array API standard that have DLPack."""

    @staticmethod
    def dtype(x: Array) -> Any:
        return named_dtype(getattr(x.dtype, "name", str(x.dtype)))

    @staticmethod
    def result(x: Array, like: Array) -> Array:
        return like.__array_namespace__().asarray(x)


_KINDS: dict[type, type[NumpyKind]] = {np.ndarray: NumpyKind}


def kind_of(x: Array, name: str) -> type[NumpyKind]:
    """What x is.

    Raises:
        DTypeError: no array that results could be made like.
    """
    kind = _KINDS.get(type(x))
    if kind is not None:
        return kind
    if isinstance(x, np.ndarray):
        kind = NumpyKind
    elif is_torch(x):
        kind = TorchKind
    elif hasattr(x, "__dlpack__") and hasattr(x, "__array_namespace__"):
        kind = OtherKind
    else:
        raise DTypeError(
            f"{name} is {type(x).__name__}, not an array with DLPack (NumPy, PyTorch, JAX); "
            f"numpy.asarray({name}) makes one"
        )
    _KINDS[type(x)] = kind
    return kind


def named_dtype(name: str) -> Any:
    """The NumPy dtype with a name, bfloat16 included."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    try:
        return np.dtype(name)
    except TypeError:
        raise DTypeError(f"dtype {name} is not one that NumPy or fulmen knows") from None


def dtype_name(dtype: Any) -> str:
    """The name of a dtype of any kind: "float32" for np.float32, torch.float32 and itself."""
    if isinstance(dtype, str):
        return dtype
    if isinstance(dtype, type) or hasattr(dtype, "dtype"):
        return str(np.dtype(dtype).name)
    return str(getattr(dtype, "name", str(dtype))).rsplit(".", 1)[-1]


def is_torch(x: Any) -> bool:
    """Whether x is a PyTorch tensor; never imports torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def torch_checked(
    arrays: tuple[Array, ...], function: str, names: Sequence[str] = ARRAY_NAMES
) -> tuple[Array, ...]:
    """Arrays whose memory holds their numbers: DLPack does not tell of torch's negative bit.

    Call it only where torch has been imported.

    Args:
        arrays: inputs, tensors of torch among them or not.
        function: the public name of the call; tensors whose gradient would silently stop there are
            refused ("": the call gives gradients, nothing is refused).
        names: of the arrays.

    Raises:
        UnsupportedError: a tensor requires grad while gradients are recorded.
    """
    torch = sys.modules["torch"]
    for index, x in enumerate(arrays):
        if x is None or type(x) is np.ndarray or not isinstance(x, torch.Tensor):
            continue
        name = names[index]
        if function and x.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                f"{name} requires grad and fulmen.{function} does not record gradients yet: pass "
                f"{name}.detach() or use torch.no_grad(), or call fulmen.attention_forward and "
                "fulmen.attention_backward"
            )
        if x.is_neg():
            arrays = (*arrays[:index], x.resolve_neg(), *arrays[index + 1 :])
    return arrays


class _Writable:
    """The memory of a read-only array, which inputs may be: nothing writes through it."""

    def __init__(self, x: Array) -> None:
        interface = dict(x.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.owner = x


def exported(
    arrays: tuple[Array, ...], results: range, names: Sequence[str]
) -> tuple[int, list[Any]]:
    """Arrays as DLPack takes them; those at `results` are written.

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
            view = _dlpack_view(x, name)
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


def _dlpack_view(x: Array, name: str) -> Any:
    try:
        return import_tvm_ffi().from_dlpack(x)
    except Exception as error:
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise DTypeError(
            f"{name} ({type(x).__name__}) cannot be read through DLPack: {text[0]}"
        ) from error


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
