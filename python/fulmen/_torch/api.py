# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The public calls on tensors: which way each goes.

The calls of fulmen pass their keywords on; what they mean is documented there. torch.compile traces
these functions down to the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import torch
from torch import Tensor

from .. import expressions, masks
from .._calls import OF_QUANTISED, check_out
from .._library import expression_number, schema
from ..array_types import TORCH_CALLS, dtype_name
from ..errors import (
    ArgumentError,
    DTypeError,
    Error,
    UnsupportedError,
    flag,
    refuse_masked,
    shown,
)
from ..keywords import KEYWORDS
from ..layouts import layout_of
from ..options import (
    check_keywords,
    integers,
    philox,
    settings_of,
    window_sides,
)
from . import appending, autograd, guards, indexing, ops, quantising, sharding, sparse, subclasses
from .arguments import scale_tensor
from .fast_path import fast_attention, fast_planned, which_of
from .ops import (
    DIFFERENTIABLE,
    FLOATING,
    O_ONLY,
    QUANTISED,
    WITH_LSE,
    WITH_STATS,
    Arrays,
    OpSettings,
    lse_like,
    op_settings,
    run_forward,
)

_ADDENDS = ("bias", "alibi_slopes", "sinks")
_OWN = {"return_lse", "out", "out_dtype", "stream", "rng", "mask", "score"}
_FORWARD_ONLY = schema().forward_only
_SCALES = schema().scales
_OF_QUANTISED = getattr(torch, OF_QUANTISED[0])  # o of quantised q where nothing else is said
_BEHIND_V = {*schema().optional_inputs} - _OWN
_CAPTURES = tuple(name for name in schema().optional_inputs if name.startswith("capture"))
_NUMBER_OR_TENSOR = ("mask", *schema().integer_inputs)  # what may be a list or of NumPy
# The word of each option that fills one: it may be symbolic.
_WORDS = {x["name"]: x["offset"] // 8 for x in schema().options.values() if x["type"] == "int64"}


def attention(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """o, or (o, lse): `fulmen.attention` and, with cu_q and cu_kv, `fulmen.attention_varlen`.

    Args:
        options: the keywords that are given.
    """
    is_plainly_eager = guards.allows_fast_path(q, k, v)  # then most questions below are answered
    if is_plainly_eager:
        o = fast_attention(q, k, v, options)
        if o is not None:
            return o
    inputs, values, own = _sorted(options, q, k)
    asked, out = own.get("return_lse"), own.get("out")
    return_lse = asked is not None and bool(flag("return_lse", asked))
    out_dtype = _torch_dtype(own.get("out_dtype"))
    if out_dtype is None and q.dtype in QUANTISED and own.get("out") is None:
        out_dtype = _OF_QUANTISED
    if own.get("stream") is not None:
        raise UnsupportedError(
            "stream is given with PyTorch tensors; their work goes to torch's current stream: use "
            "torch.cuda.stream(...) and leave stream=None"
        )
    if torch.are_deterministic_algorithms_enabled():
        values["deterministic"] = True
    dropout_p = _probability(values.get("dropout_p"))
    if own.get("rng") is not None or dropout_p > 0.0:
        inputs["rng"] = _rng_of(own.get("rng"), dropout_p, q.device)
    arrays: Any = (q, k, v)
    if inputs:
        arrays = _arrays(q, k, v, inputs)
    device = "cuda" if q.is_cuda else "cpu"
    by_subclass = [name for name, x in inputs.items() if subclasses.computes_itself(x, name)]
    if not is_plainly_eager and torch.is_autocast_enabled(device):
        arrays = _autocast(device, Arrays(*arrays))
    packed = "cu_q" in inputs
    forward_only = [name for name in _FORWARD_ONLY if name in inputs]
    if forward_only:
        _refuse_derivatives(arrays, f"{forward_only[0]} is given")
    elif isinstance(k, Tensor) and k.dtype in QUANTISED:
        _refuse_derivatives(arrays, f"k has dtype {str(k.dtype)[6:]}")
    has_modes = not is_plainly_eager and guards.needs_operators()
    by_operator = has_modes or by_subclass or out is not None or not guards.are_plain(q, k, v)
    if not is_plainly_eager and guards.is_compiling():
        traced = _traced_settings(values, packed, out_dtype)
        return _by_operator(Arrays(*arrays), traced, return_lse, out)
    settings = _settings(values, packed)
    if by_operator:
        return _by_operator(Arrays(*arrays), op_settings(settings, out_dtype), return_lse, out)
    try:
        if _records(arrays):
            return _apply_eagerly(settings, out_dtype, return_lse, *arrays)
        outputs = WITH_LSE if return_lse else O_ONLY
        o, lse, _ = run_forward(autograd.full(arrays), settings, out_dtype, outputs)
        return (o, lse) if return_lse else o
    except Error:
        checked(arrays)  # where it refuses too, its sentence says more
        raise


# Function.apply without its way into functorch, which the guards have ruled out: 4 us a call.
_apply_eagerly = super(torch.autograd.Function, autograd.EagerAttention).apply


def _sorted(
    options: dict[str, Any], q: Any, k: Any
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The keywords of a call: inputs that are there, options, and what is for this file alone."""
    inputs, values, own = {}, {}, {}
    for name, x in options.items():
        if name in _OWN:
            own[name] = x
        elif name in _BEHIND_V:
            if x is not None:
                inputs[name] = x
        elif name in KEYWORDS:
            values[name] = x
        else:
            check_keywords({name: x})
    parts = {} if own.get("mask") is None else _mask_parts(own["mask"])
    texts = own.get("score"), parts.pop("expressions", ())
    parts.update(expressions.resolved(*texts, _number_of))
    for name, x in parts.items():
        (inputs if name in _BEHIND_V or name == "mask" else values)[name] = x
    for name in ("mask", "bias"):
        alignment = subclasses.causal_alignment(inputs.get(name))
        if alignment is not None:
            x = inputs.pop(name)
            given = {**inputs, **values}
            values.update(subclasses.causal_options(x, name, alignment, q, k, given))
    for name, x in values.items():
        if isinstance(x, Tensor):
            _refuse_lost_gradient(name, x)
    return inputs, values, own


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _number_of(*texts: Any) -> int:
    """Of an expression; where a compiler traces, the library is asked once."""
    return expression_number(*texts)


def _probability(dropout_p: Any) -> Any:
    """dropout_p where it is a number; what is none is refused with the other options."""
    return dropout_p if isinstance(dropout_p, (int, float, np.floating)) else 0.0


def _arrays(q: Any, k: Any, v: Any, inputs: dict[str, Any]) -> Any:
    """The inputs as tensors, where there are others than q, k and v."""
    for name in _NUMBER_OR_TENSOR:
        if name in inputs:
            inputs[name] = _tensor_of(inputs[name], name, q.device)
    for name in _CAPTURES:
        if name in inputs:
            inputs[name] = _captured_tensor(name, inputs[name], q.device)
    for name in _SCALES:
        if name in inputs:
            inputs[name] = scale_tensor(name, inputs[name], q.device)
            _refuse_lost_gradient(name, inputs[name])
    _check_addends(inputs)
    return Arrays(q, k, v, **inputs)


def _captured_tensor(name: str, x: Any, device: Any) -> Any:
    """What an expression reads as a tensor; NumPy arrays and lists go to `device`."""
    if isinstance(x, np.ndarray):
        refuse_masked(name, x)
        x = torch.as_tensor(x).to(device)
    _check_is_tensor(x, name)
    return x.resolve_neg()


def _settings(options: dict[str, Any], packed: bool) -> Any:
    """Settings from the keywords of a call that are no arrays; the dropout's rng is a tensor."""
    if _probability(options.get("dropout_p")) > 0.0:
        options["rng"] = (0, 0)
    return settings_of(tuple(options.items()), packed)


def _traced_settings(options: dict[str, Any], packed: bool, out_dtype: Any) -> OpSettings:
    """The same where a compiler traces: sizes stay symbolic, the library checks them in the run."""
    if "window" in options:
        options.update(window_sides(options.pop("window"), options.get("causal", False)))
    constant = tuple((name, x) for name, x in options.items() if name not in _WORDS)
    words, layout = _constant_words(constant, packed)
    words = list(words)
    for name, index in _WORDS.items():
        if options.get(name) is not None:
            words[index] = options[name]
    return OpSettings(words, layout, out_dtype)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant_words(constant: tuple[tuple[str, Any], ...], packed: bool) -> Any:
    settings = _settings(dict(constant), packed)
    return settings.words, settings.layout.code


def merge(
    parts: Sequence[Any], *, sinks: Any = None, layout: str = "bhsd", out_dtype: Any = None
) -> tuple[Tensor, Tensor]:
    """`fulmen.merge`, differentiable in every o, every lse and the sinks."""
    pairs = [tuple(part)[:2] for part in parts]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ArgumentError("parts is a list of pairs (o, lse), at least one")
    os, lses = [o for o, _ in pairs], [lse for _, lse in pairs]
    for name, x in (*(("an lse", x) for x in lses), *(("an o", x) for x in os), ("sinks", sinks)):
        if x is not None or name != "sinks":
            _check_is_tensor(x, name)
    layout = layout_of(layout).name
    dtype = _torch_dtype(out_dtype)
    if guards.is_transformed():
        return autograd.Merge.apply(layout, dtype, sinks, *os, *lses)  # type: ignore[no-any-return]
    every = (*os, *lses) if sinks is None else (*os, *lses, sinks)
    are_plain = all(type(x) in guards.PLAIN for x in every)
    if are_plain and guards.allows_fast_path(*os[:1] * 3) and not autograd.records(every):
        return autograd.merge(os, lses, sinks, layout, dtype)  # without the operator's frames
    return ops.merge(os, lses, sinks, layout, dtype)  # type: ignore[no-any-return]


def _by_operator(arrays: Any, settings: OpSettings, return_lse: bool, out: Any) -> Any:
    checked(arrays)
    sharding.enter_rules()
    if out is not None:
        return _into(arrays, settings, return_lse, out)
    if guards.is_transformed():
        o, lse, _ = autograd.DualAttention.apply(settings, *arrays)
        return (o, lse) if return_lse else o
    outputs = WITH_STATS if _records(arrays) else WITH_LSE if return_lse else O_ONLY
    operator = ops.attention_traced if guards.is_jit_traced() else ops.attention
    o, lse, _ = operator(*arrays, *settings, outputs)
    return (o, lse) if return_lse else o


def _records(arrays: Any) -> bool:
    """Whether a gradient is recorded; arrays may end with v."""
    if not torch.is_grad_enabled():
        return False
    for index in DIFFERENTIABLE:
        if index < len(arrays) and arrays[index] is not None and arrays[index].requires_grad:
            return True
    return False


def _refuse_derivatives(arrays: Any, said: str) -> None:
    """Refuses derivatives of a call over caches or quantised keys, which has none."""
    for index in DIFFERENTIABLE if torch.is_grad_enabled() else ():
        if index < len(arrays) and arrays[index] is not None and arrays[index].requires_grad:
            name = schema().inputs[index]
            raise UnsupportedError(
                f"{name} requires grad and {said}: such calls have no backward pass; pass "
                f"{name}.detach(), or call under torch.no_grad()"
            )
    if guards.is_transformed():
        raise UnsupportedError(
            f"{said} inside a transform of torch.func or forward AD: such calls have no "
            "derivatives and no vmap; call outside of it"
        )


def _into(arrays: Any, settings: OpSettings, return_lse: bool, out: Any) -> Any:
    _check_is_tensor(out, "out")
    check_out(out, settings.out_dtype)
    lse = lse_like(arrays.q, settings.layout) if return_lse else None
    ops.attention_out(*arrays, *settings._replace(out_dtype=None), out=out, lse=lse)
    return (out, lse) if return_lse else out


def _autocast(device: str, arrays: Any) -> Any:
    """q, k and v in autocast's dtype, as torch's own attention has them; lse stays float32."""
    q, k, v, bias = arrays.q, arrays.k, arrays.v, arrays.bias
    checked(arrays)
    if torch.float64 in (q.dtype, k.dtype, v.dtype):
        return arrays
    dtype = torch.get_autocast_dtype(device)
    if bias is not None and bias.dtype not in (dtype, torch.float32):
        bias = bias.to(dtype)
    if k.dtype not in QUANTISED:
        k, v = k.to(dtype), v.to(dtype)
    if q.dtype not in QUANTISED:
        q = q.to(dtype)
    return arrays._replace(q=q, k=k, v=v, bias=bias)


def checked(arrays: Sequence[Any]) -> None:
    """Refuses q, k and v that no operator takes, with the nearest call that works."""
    for x, name in zip(arrays[:3], "qkv"):
        _check_is_tensor(x, name)
        if x.is_nested:
            raise UnsupportedError(
                f"{name} is a nested tensor; fulmen.attention_varlen takes its values() and, as "
                "cu_q and cu_kv, its offsets()"
            )
        if x.dtype not in FLOATING + QUANTISED:
            raise DTypeError(
                f"{name} has dtype {str(x.dtype)[6:]}; allowed are "
                + ", ".join(str(dtype)[6:] for dtype in FLOATING + QUANTISED)
            )
        if x.layout != torch.strided:
            raise UnsupportedError(f"{name} has layout {x.layout}; {name}.to_dense() is strided")
        if x.device != arrays[0].device:
            raise ArgumentError(
                f"{name} is on {x.device} and q on {arrays[0].device}; {name}.to(q.device) is there"
            )


def _check_addends(given: dict[str, Any]) -> None:
    """Refuses what is no tensor, and slopes that wait for a gradient."""
    for name in _ADDENDS:
        if name in given:
            _check_is_tensor(given[name], name)
    if "alibi_slopes" in given:
        _refuse_lost_gradient("alibi_slopes", given["alibi_slopes"])


_IN_ITS_PLACE = {
    "alibi_slopes": "alibi_slopes.detach() is constant, and the same term as bias= has a gradient",
    "scale": "float(scale) is constant, and q * scale with scale=1.0 has a gradient",
}


def _refuse_lost_gradient(name: str, x: Tensor) -> None:
    """Refuses what is constant for every call and waits for a gradient."""
    if x.requires_grad and torch.is_grad_enabled():
        instead = _IN_ITS_PLACE.get(name, f"float({name}) is constant")
        raise UnsupportedError(f"{name} requires grad and gets none; {instead}")


def _check_is_tensor(x: Any, name: str) -> None:
    if not isinstance(x, Tensor):
        raise DTypeError(
            f"{name} is {type(x).__name__} and q is a tensor; torch.as_tensor({name}) is one"
        )


def _torch_dtype(dtype: Any) -> Any:
    """A torch dtype from one of any package."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype_name(dtype), None)
    if not isinstance(found, torch.dtype):
        raise DTypeError(
            f"out_dtype is {shown(dtype)}; None, the dtype of q or float32 is expected"
        )
    return found


def _mask_parts(mask: Any) -> dict[str, Any]:
    """The options and arrays that `mask=` stands for, by name."""
    if type(mask) is Tensor:
        return {"mask": mask}
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
    return masks.split(mask)


def _tensor_of(x: Any, name: str, device: Any) -> Any:
    """Integers or a mask as a tensor: lists and NumPy arrays go to `device`."""
    if x is None or isinstance(x, Tensor):
        return x
    if isinstance(x, (list, tuple, np.ndarray)):
        refuse_masked(name, x)
        made = integers(x, name)
        try:
            return torch.as_tensor(made).to(device)
        except (TypeError, ValueError):
            raise DTypeError(f"{name} is {shown(x)}; no tensor is made of that") from None
    if not hasattr(x, "__dlpack__"):
        raise DTypeError(f"{name} is {shown(x)}; a tensor is expected, or a list of integers")
    try:
        return torch.from_dlpack(x)
    except Exception as error:  # every owner of an array has errors of its own
        raise DTypeError(f"{name} is {shown(x)}; DLPack does not lend it: {error}") from None


def _rng_of(rng: Any, dropout_p: float, device: Any) -> Any:
    """(seed, offset) as an int64[2] tensor; drawn from torch's generator where it is not given.

    A draw is an ordinary operation on the device: under torch.compile and in a CUDA graph each run
    draws anew.
    """
    if rng is None:
        return torch.randint(0, 2**32, (2,), dtype=torch.int64, device=device)
    if isinstance(rng, Tensor):
        return rng
    seed, offset = philox(rng, dropout_p)
    seed = seed if seed < 2**63 else seed - 2**64  # as int64 holds it
    return torch.tensor((seed, offset), dtype=torch.int64, device=device)


CALLS: dict[str, Callable[..., Any]] = {
    "attention": attention,
    "planned": fast_planned,
    "which_of": which_of,
    "merge": merge,
    "append_kv": appending.append_kv,
    "rotary": appending.rotary,
    "mla_indexer": indexing.mla_indexer,
    "quantise": quantising.quantise,
    "hadamard": quantising.hadamard,
    "needs_gradients": sparse.needs_gradients,
    "attention_over_slots": sparse.attention_over_slots,
    "computes_itself": subclasses.computes_itself,
}
TORCH_CALLS.update(CALLS)
