# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Calls of the library: arrays as DLPack takes them, memory for results, and the call itself.

Inputs may be of any type beside each other; q decides what results are (array_types). Arrays of
JAX on a GPU are written while JAX lends a stream: see `_launch`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ._library import Function, captures_of, import_tvm_ffi, raised_by, schema
from .array_types import (
    GPU_DEVICE_TYPES,
    NO_STREAM,
    Array,
    NumpyType,
    array_type_of,
    dtype_name,
    in_memory,
    is_torch,
)
from .errors import (
    ArgumentError,
    DTypeError,
    Error,
    ShapeError,
    printable,
    refuse_masked,
    refuse_tracer,
    shown,
    words,
)

if TYPE_CHECKING:
    from .layouts import Layout
    from .options import Prepared

Where = tuple[int, type[NumpyType]]  # the stream and the type of q: what a call runs on

SUMMED = ("q", "k", "v")  # whose gradients a call may add to what is there
LEGACY_DEFAULT_STREAM = 1  # DLPack's number for the stream whose address is 0


class _Writable:
    """The memory of a read-only array, which inputs may be: nothing writes through it."""

    def __init__(self, x: Array) -> None:
        interface = dict(x.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.owner = x


def _exported(
    arrays: tuple[Array, ...], results: range, names: Sequence[str], stream: int
) -> tuple[bytes | int, list[Any]]:
    """Arrays as DLPack takes them; those at `results` are written.

    Args:
        arrays: of any type; None is absent.
        results: the indices of those that are written.
        names: what errors call them.
        stream: the address of the stream that will read arrays of a GPU: it waits for them.

    Returns:
        Dtypes that the views do not have (src/ffi/export.h), or 0, and a view of each array.

    Raises:
        ArgumentError: a result is read-only.
        DTypeError: an array cannot be read.
    """
    own = bytearray(len(arrays))
    views: list[Any] = []
    for index, (x, name) in enumerate(zip(arrays, names)):
        view = x
        if isinstance(x, np.ndarray):
            view, own[index] = _numpy_view(x, name, index in results)
        elif x is not None:
            view = _dlpack_view(x, name, stream)
        views.append(view)
    return bytes(own) if any(own) else 0, views


def _numpy_view(x: Array, name: str, is_result: bool) -> tuple[Array, int]:
    own = _own_dtypes().get(x.dtype.name, 0)
    if own:
        x = x.view(np.uint8 if x.itemsize == 1 else np.uint16)
    if not x.dtype.isnative:
        raise DTypeError(
            f"{name} has the byte order of another machine; {name}.astype({name}.dtype.newbyteorder"
            "('=')) has this one's"
        )
    if x.dtype.kind not in "fiub" or x.dtype.itemsize > 8:
        raise DTypeError(
            f"{name} has dtype {x.dtype.name}; fulmen knows "
            + ", ".join(row["name"] for row in schema().dtypes)
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
    return x, own


@lru_cache(maxsize=1)
def _own_dtypes() -> dict[str, int]:
    """The numbers of the dtypes that NumPy's DLPack has no code for: those that are not its own."""
    return {x["name"]: x["number"] for x in schema().dtypes if x["name"] not in _OF_DLPACK}


_OF_DLPACK = {"float64", "float32", "float16", "int64", "int32", "int8"}


def _dlpack_view(x: Array, name: str, stream: int) -> Any:
    try:
        if not is_torch(x) and x.__dlpack_device__()[0] in GPU_DEVICE_TYPES:
            x = x.__dlpack__(stream=stream or LEGACY_DEFAULT_STREAM)
        return import_tvm_ffi().from_dlpack(x)
    except Exception as error:
        refuse_tracer(x, name)
        if not hasattr(x, "__dlpack__"):
            raise DTypeError(f"{name} is {shown(x)}; an array with DLPack is expected") from None
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise DTypeError(
            f"{name} ({type(x).__name__}) cannot be read through DLPack: {text[0]}"
        ) from error


def _exported_workspace(x: Any, stream: int) -> Any:
    """What comes before the arrays of a call: a workspace on a GPU as DLPack has it, else as is."""
    if isinstance(x, (int, float, str, bytes)) or x is None:
        return x
    if isinstance(x, np.ndarray):
        return _numpy_view(x, "workspace", True)[0]
    return _dlpack_view(x, "workspace", stream)


def call(
    function: Function,
    leading: tuple[Any, ...],
    layout: int,
    arrays: tuple[Any, ...],
    results: range,
    names: Sequence[str] | None = None,
) -> int:
    """Calls a function whose arguments end with arrays, and which enqueues nothing.

    Args:
        function: of `library()`.
        leading: what comes before the arrays.
        layout: the code of the layout.
        arrays: in the order of `names`.
        results: which of them are written.
        names: what errors call them; None: the arrays of a call.

    Raises:
        Error: as the library says, without the frames in between.
    """
    try:
        return function(*leading, 0, layout, *arrays)
    except Error as error:
        raise raised_by(error) from None
    except Exception:
        pass  # an array that DLPack does not take as it is: read-only, bfloat16, or refused
    return call_exported(function, leading, layout, arrays, results, names, NO_STREAM)


def call_exported(
    function: Function,
    leading: tuple[Any, ...],
    layout: int,
    arrays: tuple[Any, ...],
    results: range,
    names: Sequence[str] | None,
    stream: int,
) -> int:
    """As `call`, with views of the arrays that `stream` may read when it comes to them."""
    own, views = _exported(arrays, results, names or schema().array_names, stream)
    leading = tuple(_exported_workspace(x, stream) for x in leading)
    try:
        return function(*leading, own, layout, *views)
    except Error as error:
        raise raised_by(error) from None


def run(
    function: Function,
    leading: tuple[Any, ...],
    where: Where,
    layout: int,
    arrays: tuple[Any, ...],
    results: range,
    names: Sequence[str] | None = None,
) -> tuple[Any, ...]:
    """Calls a function that computes: its arguments are `leading`, the stream and the arrays.

    Args:
        function: of `library()`.
        leading: what comes before the stream.
        where: of `prepare`: the stream, and the type of q.
        layout, arrays, results, names: as in `call`.

    Returns:
        The arrays at `results`: those that were given, or those that JAX made of them.

    Raises:
        Error: as the library says.
    """
    stream, array_type = where
    if array_type.through_dlpack:
        if array_type.launches:
            return _launch(function, leading, layout, arrays, results, names)
        call_exported(function, (*leading, stream), layout, arrays, results, names, stream)
        return arrays[results.start : results.stop]
    try:
        function(*leading, stream, 0, layout, *arrays)
        return arrays[results.start : results.stop]
    except Error as error:
        raise raised_by(error) from None
    except Exception:
        pass  # as in `call`
    stream = array_type.address(stream, arrays)
    call_exported(function, (*leading, stream), layout, arrays, results, names, stream)
    return arrays[results.start : results.stop]


class _JaxResult:
    """One result on its way into JAX; `enqueue` is told the stream that JAX lends for it."""

    def __init__(self, memory: Array, enqueue: Any) -> None:
        self.memory = memory
        self.enqueue = enqueue

    def __dlpack_device__(self) -> Any:
        return self.memory.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        stream = LEGACY_DEFAULT_STREAM if stream is None else stream
        self.enqueue(stream)
        return self.memory.__dlpack__(stream=stream, **options)


def _launch(
    function: Function,
    leading: tuple[Any, ...],
    layout: int,
    arrays: tuple[Array, ...],
    results: range,
    names: Sequence[str] | None,
) -> tuple[Array, ...]:
    """As `run`, for arrays of JAX on a GPU, without waiting for the work.

    JAX has no current stream to ask for. But an importer of an array into JAX is told a stream, and
    JAX takes what is enqueued there as the work that makes the array ready. So the results are
    memory that JAX allocates, and the call is made while JAX imports the first of them: its
    __dlpack__ lets JAX order the inputs before the lent stream, runs the library on it, and hands
    the memory over. Each further result orders its own lent stream behind the first.

    Raises:
        Error: as the library says.
    """
    made: dict[int, Array] = {}

    def first(stream: int) -> None:
        call_exported(function, (*leading, stream), layout, arrays, results, names, stream)

    def behind_first(stream: int) -> None:
        next(iter(made.values())).__dlpack__(stream=stream)

    from_dlpack = sys.modules["jax"].dlpack.from_dlpack
    asked = arrays[results.start : results.stop]  # trailing ones may be left out
    for index, memory in enumerate(asked):
        if memory is not None:
            enqueue = behind_first if made else first
            made[index] = from_dlpack(_JaxResult(memory, enqueue))
    return tuple(made.get(index) for index in range(len(asked)))


# What o may be where q is quantised; the first one where nothing is said.
OF_QUANTISED = ("bfloat16", "float16", "float32")


def check_out(out: Array, out_dtype: Any, name: str = "out") -> None:
    """Refuses an array that cannot be written to, or an `out` that is not of `out_dtype`."""
    if out_dtype is not None and dtype_name(out.dtype) != dtype_name(out_dtype):
        raise DTypeError(
            f"out has dtype {dtype_name(out.dtype)} and out_dtype is {shown(out_dtype)}; give one "
            "of them"
        )
    if isinstance(out, np.ndarray):
        refuse_masked(name, out)
        if not out.flags.writeable:
            advice = ", or out=None" if name == "out" else ""
            raise ArgumentError(f"{name} is read-only; pass a writable array{advice}")
    elif type(out).__module__.startswith(("jax", "jaxlib")):
        raise ArgumentError(f"{name} is a JAX array, which cannot be written to; pass {name}=None")


def forward_results(
    prepared: Prepared, with_lse: bool, with_stats: bool, out: Array, out_dtype: Any
) -> tuple[Array, Array, Array]:
    """Memory for o, lse and stats, of the type of q and where it is."""
    settings, inputs, (stream, array_type) = prepared
    q, v = inputs[0], inputs[2]
    if stream > 0:  # named by the caller: its allocator must know
        with array_type.on(stream, q):
            return _made(settings.layout, array_type, q, v, with_lse, with_stats, out, out_dtype)
    return _made(settings.layout, array_type, q, v, with_lse, with_stats, out, out_dtype)


def new_sums(prepared: Prepared, need: Sequence[str]) -> Any:
    """Like the Gradients that a plan's runs add to: memory for those that `need` names."""
    owners = owners_of(prepared)
    sums: list[Array] = [None] * 6
    for index, name in enumerate(SUMMED):
        if name in need:
            own = array_type_of(owners[name], name)
            x = owners[name]
            sums[index] = own.empty(x.shape, own.accumulator(own.dtype(x)), x)
    return tuple(sums)


def merging(prepared: Prepared) -> tuple[Prepared, str]:
    """A call that merges its result with a part, and the dtype of their o."""
    settings, (q, *_), (_, array_type) = prepared
    sums = dtype_name(array_type.accumulator(array_type.dtype(q)))
    return (settings.replaced(accumulate=1), *prepared[1:]), sums


def part_arrays(prepared: Prepared, part: Any) -> tuple[Array, ...]:
    """o, lse and stats of a part of the rows, which a call merges its result into."""
    if not isinstance(part, tuple) or len(part) != 3:
        raise DTypeError(
            f"accumulate is {shown(part)}; the fulmen.Forward of other keys is expected, with o in "
            "float32: attention_forward(..., out_dtype='float32')"
        )
    o, lse, stats = in_memory(part, ("o", "lse", "stats"))
    for name, x in zip(("o", "lse", "stats"), (o, lse, stats)):
        if x is not None:
            check_out(x, None, name)
    if o is not None:
        prepared[0].layout.check(o, "o")
    return o, lse, stats


def _made(
    layout: Layout,
    array_type: type[NumpyType],
    q: Array,
    v: Array,
    with_lse: bool,
    with_stats: bool,
    out: Array,
    out_dtype: Any,
) -> tuple[Array, Array, Array]:
    dtype = array_type.dtype(q)
    if out is not None:
        layout.check(out, "out")
        check_out(out, out_dtype)
        o = out
    else:
        own = result_dtype(array_type, dtype, out_dtype)
        o = array_type.empty((*q.shape[:-1], v.shape[-1]), own, q)
    if not with_lse:
        return o, None, None
    rows = layout.lse_shape(q.shape)
    sums = array_type.accumulator(dtype)
    lse = array_type.empty(rows, sums, q)
    return o, lse, array_type.empty((*rows, 2), sums, q) if with_stats else None


def result_dtype(array_type: type[NumpyType], dtype: Any, asked: Any) -> Any:
    """The dtype of o by its name or None: that of q, or float32; OF_QUANTISED of quantised q."""
    own = dtype_name(dtype)
    choices = OF_QUANTISED if own in schema().quantised else tuple(dict.fromkeys((own, "float32")))
    if asked is None and choices[0] == own:
        return dtype
    name = choices[0] if asked is None else dtype_name(asked)
    if name not in choices:
        allowed = " and ".join((", ".join(choices[:-1]), choices[-1])[len(choices) == 1 :])
        raise DTypeError(f"out_dtype is {printable(name)} where q is {own}; allowed is {allowed}")
    return array_type.dtype_named(name)


def backward_arrays(
    prepared: Prepared,
    do: Array,
    o: Array,
    stats_or_lse: Array,
    dlse: Array,
    need: Sequence[str],
    sums: Any = None,
) -> tuple[Array, ...]:
    """The arrays of a backward call behind the inputs: what it reads, and memory for gradients.

    sums: the Gradients whose dq, dk and dv the call adds to; they are that memory.
    """
    settings, inputs, (stream, q_type) = prepared
    layout = settings.layout
    do, o, stats_or_lse, dlse = in_memory(
        (do, o, stats_or_lse, dlse), ("do", "o", "stats_or_lse", "dlse")
    )
    layout.check(do, "do")
    layout.check(o, "o")
    owners = owners_of(prepared)
    names = words("need", need, "('q', 'k', 'v')")
    allowed = ", ".join(map(repr, owners))
    if not names:
        raise ArgumentError(f"need names no gradient; at least one of {allowed} is expected")
    for name in names:
        if name not in owners:
            raise ArgumentError(f"need names {shown(name)}; allowed are {allowed}")
        if owners[name] is None:
            raise ArgumentError(f"need names {name!r} and {name} is not given")
    shape = getattr(stats_or_lse, "shape", None)
    if not isinstance(shape, tuple):
        raise DTypeError(f"stats_or_lse is {shown(stats_or_lse)}; stats or lse is expected")
    rank = len(shape)
    if rank not in (layout.rank - 1, layout.rank):
        raise ShapeError(
            f"stats_or_lse has {rank} axes; lse has {layout.rank - 1} and stats {layout.rank} with "
            f"layout={layout.name!r}"
        )
    lse, stats = (None, stats_or_lse) if rank == layout.rank else (stats_or_lse, None)
    gradients: list[Array] = []
    with q_type.on(stream, inputs[0]):
        for name, owner in owners.items():
            own = array_type_of(owner, name) if name in names else None
            if own and sums is not None and name in SUMMED:
                gradients.append(_sums_of(sums, name, layout))
            else:
                gradients.append(own and own.empty(owner.shape, own.dtype(owner), owner))
    return (o, lse, stats, do, dlse, *gradients)


def _sums_of(sums: Any, name: str, layout: Layout) -> Array:
    """Gradient `name` of those that a call adds to."""
    if not isinstance(sums, tuple) or len(sums) != 6:
        raise DTypeError(
            f"accumulate is {shown(sums)}; the fulmen.Gradients of other parts is expected, with "
            "dq, dk and dv in float32"
        )
    word = f"d{name}"
    (x,) = in_memory((sums[SUMMED.index(name)],), (word,))
    if x is None:
        raise ArgumentError(
            f"need names {name!r} and accumulate has no {word}; give it, or leave it out of need"
        )
    check_out(x, None, word)
    layout.check(x, word)
    return x


def owners_of(prepared: Prepared) -> dict[str, Array]:
    """What each gradient of a call is the gradient of, by name, in the order of the gradients."""
    settings, inputs, _ = prepared
    own, first = _differentiable()
    owners = {name: inputs[index] for name, index in own}
    if inputs[first] is not None:
        owners.update(zip(captures_of(settings.fields().expression), inputs[first:]))
    return owners


@lru_cache(maxsize=1)
def _differentiable() -> tuple[tuple[tuple[str, int], ...], int]:
    """Name and index of each input that has a gradient, and where those of expressions begin."""
    every = zip(schema().differentiable_inputs, schema().differentiable)
    own = tuple((name, index) for name, index in every if not name.startswith("capture"))
    return own, schema().inputs.index("capture0")
