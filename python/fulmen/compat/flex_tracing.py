# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""From a score_mod or mask_mod of FlexAttention to a text of fulmen's own language.

The function is called once with values that stand for one pair; what it does with them becomes the
text, the tensors that it reads become captures. A tensor of the function's own stays a tensor: what
is computed from tensors alone is computed by torch, before the call.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable
from functools import partial
from numbers import Real
from pathlib import Path
from traceback import walk_stack
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.overrides import TorchFunctionMode

from ..errors import UnsupportedError

_DEEPEST = 16  # levels of a text without names for what is inside
_LN2 = math.log(2.0)
_OWN = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))


def _place() -> str:
    """The line of the user's function that is running, or that torch.compile reads."""
    context: Any = TracingContext.try_get()
    if context is not None:
        lines = [(x.filename, x.lineno) for x in TracingContext.extract_stack()]
    else:
        lines = [(x.f_code.co_filename, line) for x, line in walk_stack(None)][::-1]
    theirs = [x for x in lines if not x[0].startswith(_OWN)]
    if not theirs:
        return ""
    name, line = theirs[-1]
    return f", line {line} of {name}:\n  {linecache.getline(name, line).strip()}"


def refuse(what: str) -> NoReturn:
    """One sentence with the line that asks for it."""
    raise UnsupportedError(
        f"{what}, which is not in the language of scores and masks (fulmen.score){_place()}"
    )


torch.compiler.assume_constant_result(refuse)  # so that it is run where a compiler traces, too


class Value:
    """A number or a truth value of one pair, as the user's function has it."""

    __slots__ = ("args", "dtype", "kind", "least", "text")

    def __init__(
        self, kind: str, text: str, args: tuple[Value, ...] = (), least: float = -math.inf
    ) -> None:
        self.kind = kind  # "bool", "int" or "float"
        self.text = text  # with a place, {0} .., for each argument
        self.args = args
        self.least = least  # no value is below it
        self.dtype = {"bool": torch.bool, "int": torch.int32, "float": torch.float32}[kind]

    device = torch.device("cpu")
    shape = torch.Size(())
    ndim = 0

    def dim(self) -> int:
        """A number has no axes."""
        return 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        handler = _HANDLERS.get(name)
        if handler is None:
            if name.startswith("__"):
                raise AttributeError(name)
            refuse(f"Tensor.{name} of a value of the pair")
        return partial(handler, self)

    def __bool__(self) -> bool:  # noqa: PLE0304
        refuse("a choice of Python's (if, and, or, not) by a value of the pair: torch.where, &, |")

    def __index__(self) -> NoReturn:  # noqa: PLE0305
        refuse("a value of the pair as a number of Python")

    __int__ = __float__ = __len__ = __iter__ = __index__

    def __getitem__(self, index: Any) -> Any:
        refuse("an index into a value of the pair")

    def __hash__(self) -> int:
        return id(self)


def _operator(name: str, swapped: bool = False) -> Any:
    def apply(self: Value, *others: Any) -> Any:
        args = (others[0], self) if swapped else (self, *others)
        return _HANDLERS[name](*args)

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor",
              "lshift", "rshift"):  # fmt: skip
    setattr(Value, f"__{_name}__", _operator(_name))
    setattr(Value, f"__r{_name}__", _operator(_name, swapped=True))
for _name in ("neg", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _operator(_name))


def _refused(name: str) -> Any:
    def apply(self: Value, *_: Any, **__: Any) -> NoReturn:
        refuse(f"Tensor.{name} of a value of the pair")

    return apply


class _Element:
    """Some of the indices of a tensor; the rest come later."""

    def __init__(self, tensor: Tensor, index: tuple[Any, ...]) -> None:
        self.tensor, self.index = tensor, index

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse(f"torch.{getattr(func, '__name__', func)} of a row of a tensor")

    def __getitem__(self, index: Any) -> Any:
        return _element(self.tensor, (*self.index, *_indices(index)))

    def __getattr__(self, name: str) -> Any:
        refuse(f"Tensor.{name} of a row of a tensor; one number of it")


def _indices(index: Any) -> tuple[Any, ...]:
    return tuple(index) if isinstance(index, (tuple, list)) else (index,)


def _element(tensor: Tensor, index: tuple[Any, ...]) -> Any:
    """tensor[index], once there is an index for each axis."""
    for one in index:
        if one is None or one is Ellipsis or isinstance(one, (slice, bool)):
            refuse(f"the index {one} beside a value of the pair")
    if len(index) > tensor.ndim:
        refuse(f"{len(index)} indices into a tensor of shape {tuple(tensor.shape)}")
    if len(index) < tensor.ndim:
        return _Element(tensor, index)
    args = tuple(_wrapped(_value(one), n) for one, n in zip(index, tensor.shape))
    places = ", ".join(f"{{{n}}}" for n in range(len(args)))
    return Value(_kind_of(tensor), f"{_tracer().name_of(tensor)}[{places}]", args)


def _wrapped(index: Value, extent: int) -> Value:
    """An index as torch has it: below 0 from the end."""
    if index.kind != "int":
        refuse(f"an index that is {index.kind}")
    if index.least >= 0:
        return index
    return Value("int", f"select({{0}} < 0, {{0}} + {extent}, {{0}})", (index,))


def _kind_of(tensor: Tensor) -> str:
    if tensor.dtype == torch.bool:
        return "bool"
    return "float" if tensor.dtype.is_floating_point else "int"


def _value(x: Any) -> Value:
    """A value of the pair, a number, or a tensor of one number."""
    if isinstance(x, Value):
        return x
    if isinstance(x, bool):
        return Value("bool", "true" if x else "false")
    if isinstance(x, int):
        return Value("int", f"({x})" if x < 0 else str(x), (), x)
    if isinstance(x, Real):
        return Value("float", _float_text(float(x)), (), float(x))
    if isinstance(x, Tensor):
        if x.ndim:
            refuse(f"a tensor of shape {tuple(x.shape)} where the pair has one number")
        return Value(_kind_of(x), _tracer().name_of(x))
    refuse(f"{type(x).__name__} beside a value of the pair")


def _float_text(x: float) -> str:
    if math.isnan(x):
        return "(0.0 / 0.0)"
    if math.isinf(x):
        return "(1.0 / 0.0)" if x > 0 else "(-1.0 / 0.0)"
    text = repr(x)
    if "e" not in text and "." not in text:
        text += ".0"
    return f"({text})" if x < 0 else text


# ---- Operations --------------------------------------------------------------------------------


def _number(x: Any) -> Value:
    """As a number: true is 1."""
    x = _value(x)
    return Value("int", "select({0}, 1, 0)", (x,), 0) if x.kind == "bool" else x


def _real(x: Any) -> Value:
    x = _number(x)
    return Value("float", "(1.0 * {0})", (x,), x.least) if x.kind == "int" else x


def _truth(x: Any) -> Value:
    x = _value(x)
    return x if x.kind == "bool" else Value("bool", "({0} != 0)", (x,))


def _common(*given: Any) -> tuple[str, tuple[Value, ...]]:
    values = tuple(_number(x) for x in given)
    return ("float" if any(x.kind == "float" for x in values) else "int"), values


def _binary(text: str, least: Callable[[float, float], float]) -> Callable[..., Value]:
    def apply(a: Any, b: Any, *, alpha: Any = 1) -> Value:
        if alpha != 1:
            b = _HANDLERS["mul"](b, alpha)
        kind, (x, y) = _common(a, b)
        bound = least(x.least, y.least) if x.least > -math.inf < y.least else -math.inf
        return Value(kind, f"({{0}} {text} {{1}})", (x, y), bound)

    return apply


def _product_bound(a: float, b: float) -> float:
    return 0.0 if a >= 0 and b >= 0 else -math.inf


def _compared(text: str) -> Callable[..., Value]:
    def apply(a: Any, b: Any) -> Value:
        x, y = _value(a), _value(b)
        if x.kind == y.kind == "bool" and text in ("==", "!="):
            return Value("bool", f"({{0}} {text} {{1}})", (x, y))
        return Value("bool", f"({{0}} {text} {{1}})", _common(x, y)[1])

    return apply


def _function(name: str) -> Callable[..., Value]:
    def apply(x: Any) -> Value:
        return Value("float", f"{name}({{0}})", (_real(x),))

    return apply


def _divide(a: Any, b: Any, *, rounding_mode: Any = None) -> Value:
    if rounding_mode == "floor":
        return _floor_divide(a, b)
    if rounding_mode is not None:
        refuse(f"a division with rounding_mode={rounding_mode!r}")
    return Value("float", "({0} / {1})", (_real(a), _real(b)))


def _floor_divide(a: Any, b: Any) -> Value:
    kind, (x, y) = _common(a, b)
    if kind == "int":
        return Value("int", "({0} // {1})", (x, y), _product_bound(x.least, y.least))
    return _floor(_divide(x, y))


def _remainder(a: Any, b: Any) -> Value:
    kind, (x, y) = _common(a, b)
    if kind == "int":
        return Value("int", "({0} % {1})", (x, y), 0 if y.least > 0 else -math.inf)
    x, y = _real(x), _real(y)
    return Value("float", "({0} - floor({0} / {1}) * {1})", (x, y))


def _floor(x: Any) -> Value:
    x = _number(x)
    return x if x.kind == "int" else Value("float", "(1.0 * floor({0}))", (x,))


def _ceil(x: Any) -> Value:
    x = _number(x)
    return x if x.kind == "int" else Value("float", "(-1.0 * floor(-{0}))", (x,))


def _truncated(x: Any) -> Value:
    """To an integer, towards 0."""
    number = _number(x)
    if number.kind == "int":
        return number
    return Value("int", "select({0} < 0, -floor(-{0}), floor({0}))", (number,))


def _absolute(x: Any) -> Value:
    x = _number(x)
    return Value(x.kind, "abs({0})", (x,), 0)


def _negated(x: Any) -> Value:
    x = _number(x)
    return Value(x.kind, "(-{0})", (x,))


def _extreme(name: str) -> Callable[..., Value]:
    pick = max if name == "max" else min

    def apply(a: Any, b: Any = None) -> Value:
        if b is None:
            return _number(a)
        kind, (x, y) = _common(a, b)
        return Value(kind, f"{name}({{0}}, {{1}})", (x, y), pick(x.least, y.least))

    return apply


def _clamp(x: Any, min: Any = None, max: Any = None) -> Value:
    if min is not None:
        x = _extreme("max")(x, min)
    if max is not None:
        x = _extreme("min")(x, max)
    return _number(x)


def _power(a: Any, b: Any) -> Value:
    if isinstance(b, (int, float)) and b == 0.5:
        return _function("sqrt")(a)
    if not isinstance(b, int) or not 1 <= b <= 8:
        if isinstance(a, (int, float)) and not isinstance(a, bool) and a > 0:
            return _function("exp")(_HANDLERS["mul"](b, math.log(a)))
        refuse("a power other than 1 to 8, 0.5, and of a positive number")
    x = _number(a)
    return Value(x.kind, "(" + " * ".join(["{0}"] * b) + ")", (x,), 0 if b % 2 == 0 else x.least)


def _where(condition: Any, a: Any, b: Any) -> Value:
    x, y = _value(a), _value(b)
    kind = "bool"
    if not x.kind == y.kind == "bool":
        kind, (x, y) = _common(x, y)
    return Value(kind, "select({0}, {1}, {2})", (_truth(condition), x, y), min(x.least, y.least))


def _masked_fill(x: Any, mask: Any, value: Any) -> Value:
    return _where(mask, value, x)


def _bits(text: str, name: str) -> Callable[..., Value]:
    def apply(a: Any, b: Any) -> Value:
        x, y = _value(a), _value(b)
        if x.kind != "bool" or y.kind != "bool":
            refuse(f"{name} of the bits of numbers")
        return Value("bool", f"({{0}} {text} {{1}})", (x, y))

    return apply


def _logical(text: str) -> Callable[..., Value]:
    return lambda a, b: Value("bool", f"({{0}} {text} {{1}})", (_truth(a), _truth(b)))


def _inverted(x: Any) -> Value:
    x = _value(x)
    if x.kind != "bool":
        refuse("~ of the bits of a number")
    return Value("bool", "(not {0})", (x,))


def _shifted(text: str) -> Callable[..., Value]:
    def apply(a: Any, n: Any) -> Value:
        if not isinstance(n, int) or not 0 <= n < 63:
            refuse("a shift by what is no number of bits")
        return Value("int", f"({{0}} {text} {1 << n})", (_number(a),))

    return apply


def _converted(x: Any, *args: Any, dtype: Any = None, **_: Any) -> Value:
    """To a dtype: floats stay as sums have them, integers are cut."""
    for given in (*args, dtype):
        wanted = getattr(given, "dtype", given)
        if isinstance(wanted, torch.dtype):
            if wanted == torch.bool:
                return _truth(x)
            return _real(x) if wanted.is_floating_point else _truncated(x)
    return _value(x)


def _filled(value: Any) -> Callable[..., Value]:
    def apply(_: Any, *args: Any, dtype: Any = None, **more: Any) -> Value:
        return _converted(value if value is not None else args[-1], dtype=dtype)

    return apply


def _sigmoid(x: Any) -> Value:
    return Value("float", "(1.0 / (1.0 + exp(-{0})))", (_real(x),))


def _as_it_is(x: Any, *_: Any, **__: Any) -> Value:
    return _value(x)


# By the names of torch's functions and methods, without underscores.
_HANDLERS: dict[str, Callable[..., Any]] = {
    "add": _binary("+", lambda a, b: a + b),
    "sub": _binary("-", lambda a, b: -math.inf),
    "mul": _binary("*", _product_bound),
    "truediv": _divide, "div": _divide, "floordiv": _floor_divide,
    "floor_divide": _floor_divide, "mod": _remainder, "remainder": _remainder,
    "rsub": lambda a, b: _HANDLERS["sub"](b, a), "radd": lambda a, b: _HANDLERS["add"](b, a),
    "rmul": lambda a, b: _HANDLERS["mul"](b, a), "rdiv": lambda a, b: _divide(b, a),
    "rtruediv": lambda a, b: _divide(b, a), "rfloordiv": lambda a, b: _floor_divide(b, a),
    "rmod": lambda a, b: _remainder(b, a), "rpow": lambda a, b: _power(b, a), "pow": _power,
    "lt": _compared("<"), "le": _compared("<="), "gt": _compared(">"), "ge": _compared(">="),
    "eq": _compared("=="), "ne": _compared("!="),
    "less": _compared("<"), "less_equal": _compared("<="), "greater": _compared(">"),
    "greater_equal": _compared(">="), "not_equal": _compared("!="),
    "and": _bits("and", "&"), "or": _bits("or", "|"), "xor": _bits("!=", "^"),
    "rand": _bits("and", "&"), "ror": _bits("or", "|"), "rxor": _bits("!=", "^"),
    "bitwise_and": _bits("and", "&"), "bitwise_or": _bits("or", "|"),
    "bitwise_xor": _bits("!=", "^"), "bitwise_not": _inverted, "invert": _inverted,
    "logical_and": _logical("and"), "logical_or": _logical("or"), "logical_xor": _logical("!="),
    "logical_not": lambda x: _inverted(_truth(x)),
    "lshift": _shifted("*"), "rshift": _shifted("//"), "bitwise_left_shift": _shifted("*"),
    "bitwise_right_shift": _shifted("//"),
    "neg": _negated, "negative": _negated, "abs": _absolute, "absolute": _absolute,
    "exp": _function("exp"), "log": _function("log"), "tanh": _function("tanh"),
    "sqrt": _function("sqrt"), "sigmoid": _sigmoid, "square": lambda x: _power(x, 2),
    "exp2": lambda x: _function("exp")(_HANDLERS["mul"](x, _LN2)),
    "log2": lambda x: _HANDLERS["mul"](_function("log")(x), 1 / _LN2),
    "log10": lambda x: _HANDLERS["mul"](_function("log")(x), 1 / math.log(10)),
    "log1p": lambda x: _function("log")(_HANDLERS["add"](x, 1.0)),
    "expm1": lambda x: _HANDLERS["sub"](_function("exp")(x), 1.0),
    "rsqrt": lambda x: _divide(1.0, _function("sqrt")(x)),
    "reciprocal": lambda x: _divide(1.0, x), "relu": lambda x: _extreme("max")(x, 0),
    "floor": _floor, "ceil": _ceil, "trunc": lambda x: _real(_truncated(x)),
    "minimum": _extreme("min"), "maximum": _extreme("max"), "min": _extreme("min"),
    "max": _extreme("max"), "clamp": _clamp, "clip": _clamp,
    "clamp_min": lambda x, min: _clamp(x, min=min), "clamp_max": lambda x, max: _clamp(x, max=max),
    "where": _where, "masked_fill": _masked_fill,
    "to": _converted, "type": _converted, "type_as": _converted,
    "float": _real, "double": _real, "half": _real, "bfloat16": _real,
    "int": _truncated, "long": _truncated, "short": _truncated, "bool": _truth,
    "new_zeros": _filled(0), "new_ones": _filled(1), "new_full": _filled(None),
    "zeros_like": _filled(0), "ones_like": _filled(1), "full_like": _filled(None),
    "clone": _as_it_is, "contiguous": _as_it_is, "detach": _as_it_is,
}  # fmt: skip


# Methods by name, for torch.compile, which does not ask __getattr__ of them.
for _name in {x for x in dir(Tensor) if not x.startswith("_")} - {*_HANDLERS, *vars(Value)}:
    if callable(getattr(Tensor, _name)):
        setattr(Value, _name, _refused(_name))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _name_of(func: Any) -> str:
    return str(getattr(func, "__name__", func)).strip("_")


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    name = _name_of(func)
    if name == "getitem" and isinstance(args[0], Tensor):
        return _element(args[0], _indices(args[1]))
    handler = _HANDLERS.get(name)
    if handler is None:
        refuse(f"torch.{name} of a value of the pair")
    kwargs = {("x" if key == "input" else key): x for key, x in kwargs.items() if key != "out"}
    return handler(*args, **kwargs)


def _holds_value(x: Any) -> bool:
    if isinstance(x, (tuple, list)):
        return any(_holds_value(one) for one in x)
    return isinstance(x, (Value, _Element))


# What torch says of a tensor that its dtype and its shape tell.
_KIND: Any = Tensor
_OF_FORM = {_KIND.size, _KIND.dim, *(x.__get__ for x in (_KIND.shape, _KIND.dtype, _KIND.ndim))}


class _Mode(TorchFunctionMode):  # type: ignore[misc]
    """Sees torch's functions while a user's function runs."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not (_holds_value(args) or _holds_value(list(kwargs.values()))):
            if not torch.compiler.is_compiling():
                self.tracer.looks_inside |= func not in _OF_FORM
            return func(*args, **kwargs)
        return _call(func, args, kwargs)


_running: list[Tracer] = []


def _tracer() -> Tracer:
    return _running[-1]


class Tracer:
    """The texts of one call, and the tensors that they read, which have one name in both."""

    def __init__(self) -> None:
        self.captures: dict[str, Tensor] = {}
        self.looks_inside = False  # whether a function computed with tensors beside the pair

    def name_of(self, tensor: Tensor) -> str:
        """The name of a tensor in the texts."""
        for name, known in self.captures.items():
            if known is tensor:
                return name
        name = f"t{len(self.captures)}"
        self.captures[name] = tensor
        return name

    def text_of(self, function: Callable[..., Any], with_score: bool) -> str:
        """A function of the pair as a text.

        Args:
            function: score_mod(score, b, h, q_idx, kv_idx), or mask_mod(b, h, q_idx, kv_idx).
            with_score: which of them.

        Raises:
            UnsupportedError: it uses what the language has not; with the line that does.
        """
        pair = [Value("int", name, (), 0) for name in ("b", "h", "i", "j")]
        score = [Value("float", "s")] if with_score else []
        _running.append(self)
        try:
            with _Mode(self):
                found = function(*score, *pair)
            if isinstance(found, _Element):
                refuse("a row of a tensor as the result")
            value = _real(found) if with_score else _truth(found)
        finally:
            _running.pop()
        return _written(value)


def _written(value: Value) -> str:
    """The text of a value: what is used twice, or deep inside, gets a name."""
    order = _arguments_first(value)
    uses: dict[int, int] = {}
    for one in order:
        for n, x in enumerate(one.args):
            uses[id(x)] = uses.get(id(x), 0) + one.text.count(f"{{{n}}}")
    texts: dict[int, tuple[str, int]] = {}  # with their depth
    lets: list[str] = []
    for one in order:
        inside = [texts[id(x)] for x in one.args]
        text = one.text.format(*(text for text, _ in inside)) if one.args else one.text
        depth = 1 + max([0, *(depth for _, depth in inside)])
        if one.args and one is not value and (uses[id(one)] > 1 or depth >= _DEEPEST):
            name = f"v{len(lets)}"
            lets.append(f"let {name} = {text}; ")
            text, depth = name, 1
        texts[id(one)] = text, depth
    return "".join(lets) + texts[id(value)][0]


def _arguments_first(value: Value) -> list[Value]:
    """All that a value is made of, each once and behind its arguments."""
    order: list[Value] = []
    seen: set[int] = set()
    stack = [(value, False)]
    while stack:
        one, is_done = stack.pop()
        if is_done:
            order.append(one)
        elif id(one) not in seen:
            seen.add(id(one))
            stack.append((one, True))
            stack.extend((x, False) for x in reversed(one.args))
    return order
