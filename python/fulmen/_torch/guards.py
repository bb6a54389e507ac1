# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Whether a mode or a transform is in force for the call, in one place.

Some of the questions are asked of names that torch keeps to itself. Each is looked up once; where
one is missing, the fast path is closed and every call takes the operators: slower by microseconds,
never wrong.
"""

from __future__ import annotations

from typing import Any, Callable

import torch


def found(owner: Any, *path: str) -> Any:
    """A name of torch's; None where it is missing."""
    for name in path:
        owner = getattr(owner, name, None)
    return owner


_stack_depth = found(torch, "_C", "_len_torch_dispatch_stack")
_function_depth = found(torch, "_C", "_len_torch_function_stack")
_interpreter = found(torch, "_C", "_functorch", "peek_interpreter_stack")
_autograd = found(torch, "autograd")
_forward_ad = found(torch, "autograd", "forward_ad")
_legacy_batched = found(torch, "_C", "_functorch", "is_legacy_batchedtensor")
_is_tracing = found(torch, "_C", "_get_tracing_state")

# torch.are_deterministic_algorithms_enabled, for where no compiler traces.
is_deterministic: Callable[[], bool] = (
    found(torch, "_C", "_get_deterministic_algorithms")
    or torch.are_deterministic_algorithms_enabled
)

# Whether autocast is on for any kind of device; "always", where torch does not say.
is_autocast: Callable[[], bool] = found(torch, "_C", "_is_any_autocast_enabled") or (lambda: True)

is_compiling: Callable[[], bool] = torch.compiler.is_compiling
is_traced: Callable[[], bool] = torch.compiler.is_dynamo_compiling  # export has modes besides

_known = (
    all(map(callable, (_stack_depth, _function_depth, _interpreter, _is_tracing)))
    and hasattr(_autograd, "_profiler_enabled")
    and hasattr(_forward_ad, "_current_level")
)

PLAIN = {torch.Tensor, torch.nn.Parameter}

# What a subclass has as __torch_function__ that leaves all to __torch_dispatch__ or its memory.
no_torch_function = found(torch, "_C", "_disabled_torch_function_impl")


def needs_operators() -> bool:
    """True: a compiler, a mode, a functorch transform, forward AD, a tracer or the profiler."""
    return (
        not _known
        or is_compiling()
        or _stack_depth() > 0
        or _function_depth() > 0
        or _interpreter() is not None
        or _forward_ad._current_level >= 0
        or _autograd._profiler_enabled()
        or _is_tracing() is not None
    )


def is_jit_traced() -> bool:
    """Inside torch.jit.trace."""
    return _is_tracing is not None and not is_compiling() and _is_tracing() is not None


def are_plain(q: Any, k: Any, v: Any) -> bool:
    """Whether the three are tensors without a subclass of their own, q in memory that we reach."""
    return (
        type(q) in PLAIN
        and type(k) in PLAIN
        and type(v) in PLAIN
        and (q.is_cpu or q.is_cuda)
        and not (q.is_nested or k.is_nested or v.is_nested)
    )


def allows_fast_path(q: Any, k: Any, v: Any) -> bool:
    """are_plain, without autocast and needs_operators: one question where time counts."""
    return (
        _known
        and not is_traced()  # first: the compiler knows the answer and goes no further
        and type(q) in PLAIN
        and type(k) in PLAIN
        and type(v) in PLAIN
        and (q.is_cpu or q.is_cuda)
        and not is_autocast()
        and _stack_depth() == 0
        and _function_depth() == 0
        and _interpreter() is None
        and _forward_ad._current_level < 0
        and not _autograd._profiler_enabled()
        and _is_tracing() is None
    )


def is_transformed() -> bool:
    """Inside torch.func.grad, vmap, jvp and the like, or a dual level of forward AD."""
    if is_compiling():
        return False
    return bool(
        (_interpreter is not None and _interpreter() is not None)
        or getattr(_forward_ad, "_current_level", -1) >= 0
    )


def is_batched_gradient(do: Any, dlse: Any) -> bool:
    """Whether one of them comes from torch.autograd.grad(..., is_grads_batched=True)."""
    return _legacy_batched is not None and bool(
        (do is not None and _legacy_batched(do)) or (dlse is not None and _legacy_batched(dlse))
    )
