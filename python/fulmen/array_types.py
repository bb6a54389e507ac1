# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The types of arrays that callers bring: how a result of the same type is made, and where.

NumPy, PyTorch and CuPy arrays are written to in place, in host memory or on a GPU. JAX arrays on a
GPU are made while JAX lends a stream (_calls). Any other array in host memory is read through
DLPack; its results are computed in NumPy and handed over to its array namespace. None of these
packages is imported here: an array of one proves that its owner has been.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from numbers import Real
from typing import Any, Callable

import numpy as np

from . import errors
from .errors import DTypeError, OutOfMemoryError, UnsupportedError, refuse_tracer, shown, whole

Array = Any

HOST = -1  # where an array is: this, or CUDA's number of a GPU
NO_STREAM = 0  # the CPU has none; on a GPU: the legacy default stream
CURRENT_STREAM = -1  # the one that PyTorch tells tvm-ffi by the tensors of a call: src/ffi


class NumpyType:
    """NumPy arrays, subclasses included."""

    through_dlpack = False  # whether each array is handed over by its __dlpack__(stream=)
    launches = False  # whether the results are made while JAX lends a stream

    @staticmethod
    def device(x: Array) -> int:
        """Where x is: HOST, or CUDA's number of a GPU."""
        return HOST

    @staticmethod
    def stream(x: Array, asked: Any) -> int:
        """What the library is told as the stream of a call on x."""
        if asked is not None:
            raise UnsupportedError("stream is given; the CPU has none: leave stream=None")
        return NO_STREAM

    @staticmethod
    def address(stream: int, arrays: tuple[Array, ...]) -> int:
        """The address of a stream that `stream` gave, for a call on these arrays."""
        return stream

    @staticmethod
    def dtype(x: Array) -> Any:
        """The dtype of x, in its own type."""
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
    def empty(shape: Any, dtype: Any, like: Array) -> Array:
        """Memory for a result, where `like` is."""
        try:
            return np.empty(shape, dtype)
        except (MemoryError, ValueError):  # as large as no memory, or as no array of NumPy
            raise OutOfMemoryError(f"a result of shape {tuple(shape)} has no memory") from None

    @staticmethod
    def scratch(num_bytes: int, like: Array) -> Array:
        """A vector of bytes for one run, where `like` is, from its owner's allocator."""
        return np.empty(num_bytes, np.uint8)

    @staticmethod
    def moved(x: Any, like: Array) -> Array:
        """A NumPy array of numbers from a list of the caller, moved to where `like` is."""
        return x

    @staticmethod
    def on_host(x: Array) -> Array:
        """The array, or where it is on a GPU a copy of it in host memory."""
        return x

    @staticmethod
    def result(x: Array, like: Array) -> Array:
        """A computed result, as the caller gets it."""
        return x

    @staticmethod
    def on(stream: int, like: Array) -> Any:
        """A context in which `empty` makes memory that is safe on this stream."""
        return nullcontext()


class TorchType(NumpyType):
    """PyTorch tensors, in host memory or on an NVIDIA GPU."""

    @staticmethod
    def device(x: Array) -> int:
        if not x.is_cuda:
            return HOST
        index: int = x.get_device()
        return index

    @staticmethod
    def stream(x: Array, asked: Any) -> int:
        if not x.is_cuda:
            return NumpyType.stream(x, asked)
        return CURRENT_STREAM if asked is None else stream_address(asked)

    @staticmethod
    def address(stream: int, arrays: tuple[Array, ...]) -> int:
        if stream != CURRENT_STREAM:
            return stream
        for x in arrays:
            if is_torch(x) and x.is_cuda:
                return int(sys.modules["torch"].cuda.current_stream(x.device).cuda_stream)
        return NO_STREAM

    @staticmethod
    def dtype_named(name: str) -> Any:
        return getattr(sys.modules["torch"], name, None)

    @staticmethod
    def accumulator(dtype: Any) -> Any:
        torch = sys.modules["torch"]
        return torch.float64 if dtype is torch.float64 else torch.float32

    @staticmethod
    def empty(shape: Any, dtype: Any, like: Array) -> Array:
        return sys.modules["torch"].empty(shape, dtype=dtype, device=like.device)

    @staticmethod
    def scratch(num_bytes: int, like: Array) -> Array:
        torch = sys.modules["torch"]
        return torch.empty(num_bytes, dtype=torch.uint8, device=like.device)

    @staticmethod
    def moved(x: Any, like: Array) -> Array:
        return sys.modules["torch"].from_numpy(x).to(like.device)

    @staticmethod
    def on_host(x: Array) -> Array:
        return x.cpu()

    @staticmethod
    def on(stream: int, like: Array) -> Any:
        if stream == CURRENT_STREAM or not like.is_cuda:
            return nullcontext()
        cuda = sys.modules["torch"].cuda
        return cuda.stream(cuda.ExternalStream(stream, device=like.device))


class CupyType(NumpyType):
    """CuPy arrays."""

    through_dlpack = True

    @staticmethod
    def device(x: Array) -> int:
        return int(x.device.id)

    @staticmethod
    def stream(x: Array, asked: Any) -> int:
        if asked is not None:
            return stream_address(asked)
        return int(sys.modules["cupy"].cuda.get_current_stream(x.device.id).ptr)

    @staticmethod
    def empty(shape: Any, dtype: Any, like: Array) -> Array:
        with like.device:
            return sys.modules["cupy"].empty(shape, dtype)

    @staticmethod
    def scratch(num_bytes: int, like: Array) -> Array:
        return CupyType.empty(num_bytes, np.uint8, like)

    @staticmethod
    def moved(x: Any, like: Array) -> Array:
        with like.device:
            return sys.modules["cupy"].asarray(x)

    @staticmethod
    def on_host(x: Array) -> Array:
        return x.get()

    @staticmethod
    def on(stream: int, like: Array) -> Any:
        return sys.modules["cupy"].cuda.ExternalStream(stream, like.device.id)


class OtherType(NumpyType):
    """Arrays of the array API standard that have DLPack, in host memory."""

    @staticmethod
    def dtype(x: Array) -> Any:
        return named_dtype(getattr(x.dtype, "name", str(x.dtype)))

    @staticmethod
    def result(x: Array, like: Array) -> Array:
        return like.__array_namespace__().asarray(x)


class JaxType(NumpyType):
    """JAX arrays on an NVIDIA GPU: JAX says itself on which stream a call runs."""

    through_dlpack = True
    launches = True

    @staticmethod
    def device(x: Array) -> int:
        return int(x.__dlpack_device__()[1])

    @staticmethod
    def stream(x: Array, asked: Any) -> int:
        if asked is not None:
            raise UnsupportedError(
                "stream is given and q is a JAX array; JAX orders the work itself: leave "
                "stream=None"
            )
        return NO_STREAM

    @staticmethod
    def dtype(x: Array) -> Any:
        return named_dtype(x.dtype.name)

    @staticmethod
    def empty(shape: Any, dtype: Any, like: Array) -> Array:
        (device,) = like.devices()
        return like.__array_namespace__().empty(shape, dtype, device=device)

    @staticmethod
    def scratch(num_bytes: int, like: Array) -> Array:
        return JaxType.empty(num_bytes, np.uint8, like)

    @staticmethod
    def moved(x: Any, like: Array) -> Array:
        (device,) = like.devices()
        return like.__array_namespace__().asarray(x, device=device)

    @staticmethod
    def on_host(x: Array) -> Array:
        return np.asarray(x)


_TYPES: dict[type, type[NumpyType]] = {np.ndarray: NumpyType}
GPU_DEVICE_TYPES = (2, 13)  # DLPack: kDLCUDA, kDLCUDAManaged


def array_type_of(x: Array, name: str) -> type[NumpyType]:
    """What x is.

    Raises:
        DTypeError: no array that results could be made like.
    """
    known = _TYPES.get(type(x))
    if known is not None:
        return known
    refuse_tracer(x, name)
    if isinstance(x, np.ndarray):
        found: type[NumpyType] = NumpyType
    elif is_torch(x):
        found = TorchType
    elif "cupy" in sys.modules and isinstance(x, sys.modules["cupy"].ndarray):
        found = CupyType
    elif hasattr(x, "__dlpack__") and hasattr(x, "__array_namespace__"):
        return _standard_type(x, name)
    else:
        raise DTypeError(
            f"{name} is {type(x).__name__}, not an array with DLPack (NumPy, PyTorch, JAX, CuPy); "
            f"numpy.asarray({name}) makes one"
        )
    _TYPES[type(x)] = found
    return found


def _standard_type(x: Array, name: str) -> type[NumpyType]:
    """The type of an array that is of one class wherever it is."""
    try:
        device_type = x.__dlpack_device__()[0]
    except Exception as error:  # JAX's tracers, arrays over several devices
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DTypeError(
            f"{name} ({type(x).__name__}) cannot be read through DLPack: {text}"
        ) from error
    if device_type not in GPU_DEVICE_TYPES:
        return OtherType
    if type(x).__module__.startswith(("jax", "jaxlib")):
        return JaxType
    raise UnsupportedError(
        f"{name} is {type(x).__name__} on a GPU; results are made for PyTorch, CuPy and JAX arrays "
        "there: convert it to one of these through DLPack"
    )


def stream_address(stream: Any) -> int:
    """The address of a CUstream from what callers have.

    Args:
        stream: an integer, a stream of PyTorch or CuPy, or anything with __cuda_stream__.

    Raises:
        DTypeError: it is none of these.
        ArgumentError: a negative integer.
    """
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        stream = protocol()[1]
    for attribute in ("cuda_stream", "ptr"):
        stream = getattr(stream, attribute, stream)
    if isinstance(stream, bool) or not hasattr(stream, "__index__"):
        raise DTypeError(
            f"stream is {shown(stream)}; allowed are None, the address of a CUstream as an "
            "integer, and a stream of PyTorch or CuPy"
        )
    return whole("stream", stream, 0)


def named_dtype(name: str) -> Any:
    """The NumPy dtype with a name, those of ml_dtypes included."""
    if name.startswith(("bfloat16", "float8_")):
        import ml_dtypes

        if hasattr(ml_dtypes, name):
            return np.dtype(getattr(ml_dtypes, name))
    try:
        return np.dtype(name)
    except Exception:  # each text that is none has an error of its own
        raise DTypeError(f"dtype {shown(name)} is not one that NumPy or fulmen knows") from None


def dtype_name(dtype: Any) -> str:
    """The name of any dtype: "float32" for np.float32, torch.float32 and itself."""
    if isinstance(dtype, str):
        return dtype
    if isinstance(dtype, type) or hasattr(dtype, "dtype"):
        try:
            return str(np.dtype(dtype).name)
        except Exception:  # an array, or a type of no numbers
            return shown(dtype)
    name = getattr(dtype, "name", None)  # of NumPy; torch has its in its text
    return name if isinstance(name, str) else shown(dtype).rsplit(".", 1)[-1]


def scales(x: Any, like: Array) -> Array:
    """Scales as an array of an axis at least: from a number where `like` is, or an array."""
    if isinstance(x, Real):
        return array_type_of(like, "q").moved(np.full(1, x, np.float32), like)
    return x.reshape(1) if getattr(x, "shape", None) == () else x


def is_torch(x: Any) -> bool:
    """Whether x is a PyTorch tensor; never imports torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


# The calls that PyTorch tensors go through instead, by name: operators that record gradients and
# compile. fulmen._torch.api enters them, and is loaded with the first tensor.
TORCH_CALLS: dict[str, Callable[..., Any]] = {}


def torch_call(name: str) -> Callable[..., Any]:
    """The call of that name on PyTorch tensors."""
    # An import statement costs a microsecond; a compiler traces it, and would guard the dictionary.
    is_traced = sys.modules["torch"].compiler.is_dynamo_compiling()
    found = None if is_traced else TORCH_CALLS.get(name)
    if found is None:
        from . import _torch

        found = _torch.CALLS[name]
    return found


def in_memory(arrays: tuple[Array, ...], names: Sequence[str]) -> tuple[Array, ...]:
    """Arrays whose memory holds their numbers; DLPack does not tell of torch's negative bit.

    Raises:
        UnsupportedError: a numpy.ma array or a tensor subclass with a meaning of its own.
    """
    for index, (x, name) in enumerate(zip(arrays, names)):
        if x is None or type(x) is np.ndarray:
            continue
        errors.refuse_masked(name, x)
        if is_torch(x):
            torch_call("computes_itself")(x, name)
            if x.is_neg():
                arrays = (*arrays[:index], x.resolve_neg(), *arrays[index + 1 :])
    return arrays
