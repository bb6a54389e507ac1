# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The options of a call: from keywords to one value, the bytes of fulmen_problem.

keywords.py lists the keywords; the schema of the library (_library) lists the fields that they
become, with type, default and what is allowed. Here is only what differs between the two:
`window=` and `rng=` are two fields each, `mask=` stands for several, `layout=` names the axes of
arrays and is no field.
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Mapping
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from . import expressions, masks
from ._library import announce_nvrtc, expression_number, schema
from .array_types import (
    HOST,
    NO_STREAM,
    Array,
    NumpyType,
    array_type_of,
    dtype_name,
    in_memory,
    scales,
)
from .errors import (
    ArgumentError,
    DTypeError,
    Error,
    flag,
    kind_of,
    one_of,
    shown,
    whole,
)
from .keywords import KEYWORDS, hint
from .layouts import Layout, layout_of


def option_rows() -> dict[str, dict[str, Any]]:
    """What the library says of each of its options, by name."""
    return schema().options


def names_of(option: str) -> tuple[str, ...]:
    """What an option that is a choice may be, in the order of the numbers: of "backend", say."""
    return tuple(schema().options[option]["choices"])


def implementations(backend: str) -> tuple[str, ...]:
    """The implementations of "cpu" or of "cuda"."""
    return tuple(x["name"] for x in schema().implementations if x["backend"] == backend)


_C_TYPES: dict[str, Any] = {
    "float64": ctypes.c_double,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "text": ctypes.c_void_p,
}


@lru_cache(maxsize=1)
def problem_type() -> type[ctypes.Structure]:
    """fulmen_problem as a ctypes structure, by the schema."""

    class Problem(ctypes.Structure):
        _fields_ = [
            ("struct_size", ctypes.c_size_t),
            *((name, _C_TYPES[row["type"]]) for name, row in schema().options.items()),
        ]

    for name, row in schema().options.items():
        if getattr(Problem, name).offset != row["offset"]:
            raise AssertionError(f"fulmen_problem.{name} is not where the schema has it")
    return Problem


class Settings(NamedTuple):
    """The options of a call as one value, which is compared and memoized by its content."""

    problem: bytes  # of fulmen_problem
    layout: Layout

    @property
    def words(self) -> tuple[int, ...]:
        """The same bytes as 64-bit words, as the operators of PyTorch and JAX take them."""
        return tuple(np.frombuffer(self.problem, np.int64).tolist())

    def fields(self) -> Any:
        """A copy of fulmen_problem to read by name."""
        return problem_type().from_buffer_copy(self.problem)

    def replaced(self, **values: int) -> Settings:
        """The same with other numbers in some fields."""
        fields = self.fields()
        for name, value in values.items():
            setattr(fields, name, value)
        return Settings(bytes(fields), self.layout)


def settings_of(given: tuple[tuple[str, Any], ...] = (), packed: bool = False) -> Settings:
    """The settings that keywords mean, those that are missing by default.

    Args:
        given: (keyword, value) of those that are no arrays; what `mask=` stands for, by field.
        packed: whether the sequences are packed by cu_q and cu_kv.

    Raises:
        Error: an option is not one that is allowed.
    """
    try:
        return _settings_of(given, packed)
    except Error:
        raise
    except TypeError:  # a list among them cannot be memoized
        return _settings_of.__wrapped__(given, packed)


@lru_cache(maxsize=1024)
def _settings_of(given: tuple[tuple[str, Any], ...], packed: bool) -> Settings:
    values = dict(given)
    layout = layout_of(values.pop("layout", "bhsd"), packed)
    fields = problem_type().from_buffer_copy(schema().template)
    for name, value in _fields(values).items():
        row = schema().options[name]
        if value is not None or row["kind"] in ("flag", "choice"):
            setattr(fields, name, _CHECKS[row["kind"]](name, value, row))
    return Settings(bytes(fields), layout)


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    """By the names of the schema, from keywords."""
    if "window" in values:
        is_causal = flag("causal", values.get("causal", False))
        sides = window_sides(values.pop("window"), is_causal)
        rows = schema().options
        values.update({x: _integer("window", side, rows[x]) for x, side in sides.items()})
    rng, dropout_p = values.pop("rng", None), values.get("dropout_p")
    dropout_p = 0.0 if dropout_p is None else _real("dropout_p", dropout_p, {})
    if rng is not None or dropout_p:
        values["rng_seed"], values["rng_offset"] = philox(rng, dropout_p)
    return values


def window_sides(window: Any, causal: Any) -> dict[str, Any]:
    """window_left and window_right, -1 without limit; torch.compile traces it."""
    if window is None:
        left, right = -1, -1
    elif isinstance(window, (tuple, list)):
        if len(window) != 2:
            raise ArgumentError(f"window has {len(window)} numbers; (left, right) has two")
        left, right = (-1 if side is None else side for side in window)
    else:
        if not isinstance(window, int) or isinstance(window, bool):  # NumPy's, or wrong
            given = str(window) if isinstance(window, bool) else window
            expected = "None, an integer or (left, right) is expected"
            window = whole("window", given, expected=expected)
        left, right = window, (0 if causal and window >= 0 else window)
    return {"window_left": left, "window_right": right}


def philox(rng: Any, dropout_p: float) -> tuple[int, int]:
    """Seed and offset from what `rng=` says, as fulmen.h has them."""
    if rng is None:
        if dropout_p > 0:
            raise ArgumentError(
                f"dropout_p is {dropout_p} and rng is missing: rng=(seed, offset), two integers, "
                "says which entries are dropped"
            )
        return 0, 0
    try:
        seed, offset = (operator.index(number) for number in rng)
    except Exception:  # an iterator of the caller's may raise anything
        raise DTypeError(
            f"rng is {shown(rng)}; (seed, offset), two integers, is expected"
        ) from None
    if not 0 <= seed < 2**64 or not 0 <= offset < 2**32:
        raise ArgumentError(
            f"rng is {shown((seed, offset))}; seeds are 0 to 2**64 - 1, offsets 0 to 2**32 - 1"
        )
    return seed, offset


def _real(name: str, value: Any, row: dict[str, Any]) -> float:
    if not isinstance(value, Real):
        raise DTypeError(f"{name} is {kind_of(value)}; a number is expected: float({name})")
    try:
        number = float(value)
    except Exception:  # an integer or a fraction that is too large
        raise ArgumentError(f"{name} is {shown(value)}; a number of float64 is expected") from None
    if math.isnan(number) and row.get("default", 0.0) is None:
        raise ArgumentError(f"{name} is NaN; any number is allowed, and None for 1 / sqrt(dim)")
    return number


def _flag(name: str, value: Any, row: dict[str, Any]) -> int:
    corner = "; alignment='top_left' or 'bottom_right' says which corner"
    return flag(name, value, corner if name == "causal" else "")


def _integer(name: str, value: Any, row: dict[str, Any]) -> int:
    return whole(name, value, 0, 2**64) if row["type"] == "uint64" else whole(name, value)


def _choice(name: str, value: Any, row: dict[str, Any]) -> int:
    return int(row["choices"].index(one_of(name, value, row["choices"])))


_CHECKS: dict[str, Any] = {
    "real": _real,
    "flag": _flag,
    "choice": _choice,
    **dict.fromkeys(("limit", "count", "word", "index"), _integer),
}


def check_keywords(options: Mapping[str, Any]) -> None:
    """Refuses a keyword that no call has.

    Raises:
        TypeError: as Python has it.
    """
    for name in options:
        if name not in KEYWORDS:
            raise TypeError(f"{name!r} is no keyword here; {hint(name)}")


# A call, as the library reads it: options, inputs, and where it runs. Each call makes one.
Prepared = tuple[Settings, tuple[Array, ...], tuple[int, type[NumpyType]]]
_ON_CPU = (NO_STREAM, NumpyType)


class _Arrays(NamedTuple):
    """Where the arrays among the keywords go, by the schema."""

    absent: tuple[None, ...]  # of the inputs behind q, k and v
    at: dict[str, int]  # of each among the inputs; rng may be numbers and is not here
    are_integers: frozenset[str]
    scales: frozenset[str]  # what may be a number
    rng: int


@lru_cache(maxsize=1)
def _arrays() -> _Arrays:
    inputs = schema().inputs
    index = {name: i for i, name in enumerate(inputs) if i > 2}
    rng = index.pop("rng")
    said = schema()
    integers = frozenset(said.integer_inputs)
    return _Arrays((None,) * (len(inputs) - 3), index, integers, frozenset(said.scales), rng)


def prepare(q: Array, k: Array, v: Array, options: Mapping[str, Any]) -> Prepared:
    """From the keywords of a call to what the library reads.

    Args:
        q, k, v: arrays.
        options: those of `fulmen.attention` that are given, but return_lse, out and out_dtype.

    Raises:
        Error: an option is not one that is allowed.
    """
    where, on_gpu = _ON_CPU, False
    if type(q) is not np.ndarray or options.get("stream") is not None:
        where, on_gpu = _where(q, options.get("stream"))
    inputs: tuple[Array, ...] = (q, k, v, *_arrays().absent)
    if options:
        check_keywords(options)
        settings, inputs = _split(inputs, options, on_gpu)
    else:
        settings = settings_of()
    layout = settings.layout
    try:
        fits = len(q.shape) == len(k.shape) == len(v.shape) == layout.rank
    except (AttributeError, TypeError):
        fits = False
    if not fits:
        layout.check_all(q, k, v, options.get("page_table"))
    return settings, in_memory(inputs, schema().inputs), where


def _split(
    qkv: tuple[Array, ...], options: Mapping[str, Any], on_gpu: bool
) -> tuple[Settings, tuple[Array, ...]]:
    """Settings and inputs from the keywords of a call."""
    if options.get("mask") is not None:
        options = {**options, "mask": None, **masks.split(options["mask"])}
    if "score" in options or "expressions" in options:
        options = dict(options)
        texts = options.pop("score", None), options.pop("expressions", ())
        options.update(expressions.resolved(*texts, expression_number))
    arrays = _arrays()
    inputs, values = list(qkv), []
    for name, value in options.items():
        index = arrays.at.get(name)
        if index is not None:
            if value is not None and name in arrays.are_integers:
                inputs[index] = _beside(qkv[0], name, value, on_gpu)
            elif value is not None and name in arrays.scales:
                inputs[index] = scales(value, qkv[0])
            else:
                inputs[index] = value
        elif name == "rng" and value is not None and type(value) is not tuple:
            numbers, inputs[arrays.rng] = _rng_array(value, on_gpu)
            values.append((name, numbers))
        elif name != "stream":
            values.append((name, value))
    settings = settings_of(tuple(values), options.get("cu_q") is not None)
    return settings, tuple(inputs)


def _where(q: Array, stream: Any) -> tuple[tuple[int, type[NumpyType]], bool]:
    """Stream and type of q, and whether it is on a GPU: then NVRTC may be needed from now on."""
    if not hasattr(q, "shape"):
        return (NumpyType.stream(q, stream), NumpyType), False  # refused with the other arrays
    array_type = array_type_of(q, "q")
    on_gpu = array_type.device(q) != HOST
    if on_gpu:
        announce_nvrtc()
    return (array_type.stream(q, stream), array_type), on_gpu


def _beside(q: Array, name: str, x: Any, on_gpu: bool) -> Array:
    """Integers as an array; those of a list go where q is, an array of the caller stays."""
    made = integers(x, name)
    return made if made is x or not on_gpu else array_type_of(q, "q").moved(made, q)


def _rng_array(rng: Any, on_gpu: bool) -> tuple[Any, Array]:
    """What `rng=` says as two numbers, and the array that the library reads instead of them."""
    if getattr(rng, "shape", ()) != (2,) or not hasattr(rng, "__dlpack__"):
        return rng, None
    if on_gpu:
        return (0, 0), rng
    if dtype_name(rng.dtype) not in ("int64", "uint64", "int32", "uint32"):
        raise DTypeError(f"rng is {kind_of(rng)}; an int64 array of seed and offset is expected")
    seed, offset = (int(number) for number in rng)
    return (seed % 2**64, offset), None


def integers(x: Any, name: str = "an array") -> Array:
    """An array of integers from an array or a list of Python's integers."""
    if not isinstance(x, (list, tuple)):
        return x
    try:
        made = np.asarray(x)
    except Exception:  # lists of several lengths, tensors of a GPU
        raise DTypeError(f"{name} is {shown(x)}; a list of integers is expected") from None
    return made if made.size else made.astype(np.int64)
