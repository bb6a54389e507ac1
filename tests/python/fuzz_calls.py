# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""A fuzzer of the Python interface: good calls, of which a few arguments are made bad.

    python tests/python/fuzz_calls.py --seconds 600            # from a new seed, which it prints
    python tests/python/fuzz_calls.py --seed 7 --first 812 --calls 1   # one call again

Arguments become values of wrong kinds, other dtypes and shapes, strided, read-only, empty, byte
swapped or full of objects. A call may succeed or raise one of fulmen's own errors; it may write
nothing but `out`, and after a refusal not even that. Each call depends on its seed and number
alone. The last line before a process dies is the number of the call that did it.
"""

from __future__ import annotations

import argparse
import decimal
import fractions
import random
import sys
import time
import traceback
from functools import partial
from importlib.util import find_spec
from typing import Any, Callable

import numpy as np

import fulmen
from fulmen import masks
from fulmen.lab.cases.placement import root

HAS_TORCH = find_spec("torch") is not None
HUGE = 1 << 50  # no machine has memory for a result of as many rows
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8"),
    *("uint16", "uint32", "uint64", "bool", "complex64", "longdouble", "clongdouble"),
    *("datetime64[s]", "timedelta64[s]", "S3", "U2", "V5", "object", ">f4", ">i8", "f4,f4"),
)
Call = tuple[str, dict[str, Any]]


class Hostile:
    """Answers every question of an array wrongly."""

    shape = "ab"
    dtype = 3

    def __index__(self) -> int:
        raise RuntimeError("no index")

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def scalars(rng: random.Random) -> Any:
    """A value that is no array."""
    return rng.choice((
        None, True, False, 0, 1, -1, 2, 7, 2**31, 2**32, 2**63, -(2**63) - 1, 2**64, 2**70, 2**1100,
        10**5000, 0.0, -0.0, 0.5, 1e-320, 1e308, float("inf"), float("nan"), 1j, "", "bhsd", "q",
        "sm90", "\x1b[31m", "a\0b", "\ud800", "x" * 9999, b"q", bytearray(4), memoryview(b"abcd"),
        fractions.Fraction(10**400, 3), decimal.Decimal("1e99999"), np.float16(2), np.int8(-3),
        np.bool_(True), np.longdouble(1), np.str_("k"), np.datetime64("2000"), (), [], {}, set(),
        (1,), (1, 2), (2, -1), (-5, 3), (None, 4), (1, 2, 3), ["q", "v"], ("q", 3), [[]], [None],
        [[1], [2, 3]], {"q": 1}, range(3), iter((1, 2)), object(), type, int, len, Hostile(),
        Hostile, slice(3), Ellipsis, NotImplemented, masks.Prefix("x"), masks.Prefix(2),
        masks.Chunks(None), masks.Chunks(3), masks.Documents([0], object()),
        masks.Documents(np.zeros(3), None),
    ))  # fmt: skip


def dtype_named(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def array(rng: random.Random) -> Any:
    """An array of any dtype, shape and strides; small."""
    shape = tuple(rng.choice((0, 1, 1, 2, 3, 4, 6, 8)) for _ in range(rng.randrange(7)))
    made = np.zeros(shape, dtype_named(rng.choice(DTYPES)))
    return bent(rng, made)


def bent(rng: random.Random, x: Any) -> Any:
    """An array with the numbers of x, or fewer, that lies otherwise in memory."""
    axis = rng.randrange(x.ndim) if x.ndim else 0
    ways: list[Callable[[], Any]] = [
        lambda: x.T,
        lambda: np.broadcast_to(x, x.shape),
        lambda: x[..., ::-1] if x.ndim else x,
        lambda: np.repeat(x, 2, axis).take(range(0, 2 * x.shape[axis], 2), axis) if x.ndim else x,
        lambda: np.lib.stride_tricks.as_strided(x, x.shape, (0,) * x.ndim),
        lambda: x.swapaxes(0, axis) if x.ndim else x,
        lambda: x.reshape(x.shape[::-1]),
        lambda: x[None],
        lambda: x[0] if x.ndim and x.shape[0] else x,
        lambda: x.take(range(max(x.shape[axis] - 1, 0)), axis) if x.ndim else x,
        lambda: x.astype(x.dtype.newbyteorder()) if x.dtype.kind in "fiu" else x,
        lambda: unaligned(x),
        lambda: x.tolist() if x.size < 64 else x,
        lambda: x.astype(dtype_named(rng.choice(DTYPES[:13]))) if x.dtype.kind in "fiub" else x,
    ]
    return rng.choice(ways)()


def unaligned(x: Any) -> Any:
    if x.dtype.hasobject:
        return x
    memory = np.zeros(x.nbytes + 1, np.uint8)
    made = memory[1:].view(x.dtype).reshape(x.shape) if x.nbytes else x
    if x.nbytes:
        made[...] = x
    return made


def good(rng: random.Random) -> Call:
    """The name of a function and arguments that it takes: of NumPy or, where it is, of PyTorch."""
    kind, call = good_of_numpy(rng)
    if rng.random() < 0.25 and HAS_TORCH and kind not in ("dense_mask", "warmup", *SINGLE):
        call = {name: as_torch(x) for name, x in call.items()}
    return kind, call


def as_torch(x: Any) -> Any:
    """An array as a tensor, the arrays of a list of pairs too."""
    import torch

    if isinstance(x, list) and x and isinstance(x[0], tuple):
        return [tuple(as_torch(y) for y in part) for part in x]
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def good_of_numpy(rng: random.Random) -> Call:
    dtype = dtype_named(rng.choice(("float64", "float32", "float16", "bfloat16")))

    def drawn(*shape: int) -> Any:
        return np.full(shape, rng.random()).astype(dtype)

    q, k, v = drawn(2, 4, 6, 8), drawn(2, 2, 7, 8), drawn(2, 2, 7, 8)
    wide = np.float64 if dtype == np.float64 else np.float32
    options = {
        "scale": 0.3, "causal": True, "alignment": "top_left", "window": (3, 0), "softcap": 2.0,
        "bias": np.zeros((6, 7), wide), "mask": np.ones((6, 7), bool), "layout": "bhsd",
        "alibi_slopes": np.ones(4, wide), "sinks": np.ones(4, wide), "kv_lengths": [7, 3],
        "q_lengths": np.array([6, 2]), "dropout_p": 0.2, "rng": (1, 2), "implementation": "tiled",
        "backend": "cpu", "deterministic": True, "batch_invariant": False, "precision": "float32",
        "max_q": None, "max_kv": None, "stream": None, "cu_q": None, "cu_kv": None,
    }  # fmt: skip
    chosen = {name: options[name] for name in rng.sample(list(options), rng.randrange(5))}
    chosen.pop("dropout_p", None)
    call = {"q": q, "k": k, "v": v, **chosen}
    kind = rng.choice([name for name in FUNCTIONS if name not in SINGLE] + ["one argument"])
    if kind == "one argument":
        kind = rng.choice(list(SINGLE))
    if kind == "attention":
        call.update(out=np.zeros((2, 4, 6, 8), dtype), out_dtype=None, return_lse=True)
    if kind == "attention_varlen":
        packed = drawn(9, 2, 8)
        call = {"q": packed, "k": packed, "v": packed, "cu_q": [0, 4, 9], "cu_kv": [0, 4, 9],
                "max_q": 5, "max_kv": 5}  # fmt: skip
    if kind == "backward":
        call.update(do=q, need=("q", "k", "v"), dlse=None)
    if kind == "plan":
        call.update(need=("q",), device=None, device_name=None, without=(), tile="", out=None,
                    out_dtype=None)  # fmt: skip
    if kind == "explain":
        call.update(operation="forward", device=None, device_name=None, without=())
    if kind == "run of a plan":
        q, k, v, out = (x.astype(np.float32) for x in (q, k, v, q))
        call = {"q": q, "k": k, "v": v, "out": out, "workspace": None, "stream": None,
                "bias": None}  # fmt: skip
    if kind == "merge":
        o, lse = drawn(2, 4, 6, 8), np.zeros((2, 4, 6), wide)
        call = {"parts": [(o, lse), (o, lse)], "sinks": None, "layout": "bhsd", "out_dtype": None}
    if kind == "dense_mask":
        names = ("causal", "alignment", "window", "mask", "bias", "kv_lengths")
        call = {"sq": 6, "skv": 7, **{name: options[name] for name in rng.sample(names, 2)}}
    if kind == "warmup":
        call = {"q": q.shape, "k": k.shape, "v": v.shape, "dtype": "float32", "need": "q",
                "backend": "cpu", "threads": 1}  # fmt: skip
    if kind in SINGLE:
        call = {"value": SINGLE[kind]}
    return kind, call


def backward(q: Any, k: Any, v: Any, do: Any, need: Any, dlse: Any, **options: Any) -> Any:
    forward = fulmen.attention_forward(q, k, v, **options)
    return fulmen.attention_backward(do, q, k, v, *forward[::2], need=need, dlse=dlse, **options)


def run_of_a_plan(**arguments: Any) -> Any:
    x = np.zeros((2, 4, 6, 8), np.float32)
    y = np.zeros((2, 2, 7, 8), np.float32)
    return fulmen.plan(x, y, y, need=()).forward(**arguments)


def warmup(threads: Any, **problem: Any) -> None:
    fulmen.warmup([problem], threads=threads)


# A good argument of functions of one.
SINGLE: dict[str, Any] = {
    "prefix": 2, "chunks": 3, "documents": [0, 1], "load_bundle": "nowhere", "problems": [],
    "archs": ["sm_90a"], "device_faults": 0,
}  # fmt: skip


def _with_one(name: str, value: Any) -> Any:
    if name == "problems":
        return fulmen.warmup(value)
    if name == "archs":
        return fulmen.compile_bundle([], "nowhere/at/all", archs=value)
    return getattr(masks if hasattr(masks, name) else fulmen, name)(value)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "attention": fulmen.attention,
    "attention_forward": fulmen.attention_forward,
    "attention_varlen": fulmen.attention_varlen,
    "backward": backward,
    "plan": fulmen.plan,
    "run of a plan": run_of_a_plan,
    "explain": fulmen.explain,
    "merge": fulmen.merge,
    "dense_mask": fulmen.dense_mask,
    "warmup": warmup,
    **{name: partial(_with_one, name) for name in SINGLE},
}


def spoiled(rng: random.Random, call: dict[str, Any]) -> dict[str, Any]:
    """The arguments with a few of them bad."""
    call = dict(call)
    for name in rng.sample(list(call), min(rng.choice((1, 1, 1, 2, 3)), len(call))):
        call[name] = spoiled_value(rng, call[name])
    return call


def spoiled_value(rng: random.Random, value: Any) -> Any:
    draw = rng.random()
    if isinstance(value, list) and value and isinstance(value[0], tuple) and draw < 0.7:
        part = list(value[0])
        index = rng.randrange(len(part))
        part[index] = spoiled_value(rng, part[index])
        return [tuple(part), *value[1:]]
    if isinstance(value, np.ndarray):
        if draw < 0.5:
            return bent(rng, value)
        if draw < 0.53 and value.ndim == 4 and value.shape[-2] == 6:  # rows of q: o has no memory
            shape = (*value.shape[:2], HUGE, value.shape[-1])
            return np.broadcast_to(value[:, :, :1], shape)
    return array(rng) if draw < 0.75 else scalars(rng)


def memory_of(call: dict[str, Any]) -> list[tuple[str, Any, bytes]]:
    """The arrays of a call with the bytes of all that owns them."""
    found = []
    flat = list(call.items())
    for name, x in call.items():
        if isinstance(x, (list, tuple)):
            flat += [(name, y) for part in x if isinstance(part, tuple) for y in part]
    for name, x in flat:
        if isinstance(x, np.ndarray) and not x.dtype.hasobject:
            owner = root(x)
            if owner.nbytes < 1 << 20 and not (owner.size and 0 in owner.strides):
                found.append((name, owner, owner.tobytes()))
    return found


def fault(seed: int, number: int) -> str:
    """Makes one call; what is wrong with it, or ""."""
    rng = random.Random(f"{seed} {number}")
    kind, call = good(rng)
    if rng.random() > 0.02:
        call = spoiled(rng, call)
    before = memory_of(call)
    refused = True
    try:
        FUNCTIONS[kind](**call)
        refused = False
    except fulmen.Error as error:
        text = str(error)
        if not text or "\n" in text or len(text) > 11000 or not text.isprintable():
            return f"{kind}: the sentence is {text[:300]!r}"
    except Exception:
        return f"{kind}: {traceback.format_exc()}"
    for name, x, content in before:
        if x.tobytes() != content and (refused or name != "out"):
            return f"{kind}: {name} was written to{' by a refused call' if refused else ''}"
    return ""


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--first", type=int, default=0, help="the number of the first call")
    parser.add_argument("--calls", type=int, default=2**62, help="so many at most")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--keep-going", action="store_true", help="after a fault too")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    faults, number = 0, arguments.first
    while number < arguments.first + arguments.calls and time.monotonic() < end:
        say(f"\rseed {arguments.seed} call {number} ")
        said = fault(arguments.seed, number)
        if said:
            faults += 1
            say(f"\n{said}\n")
            if not arguments.keep_going:
                break
        number += 1
    say(f"\n{number - arguments.first} calls, {faults} faults\n")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
