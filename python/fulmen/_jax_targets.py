# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The handlers of libfulmen (src/ffi/xla_handlers.cpp), told to XLA under names of their own.

And what callers pass them, as arrays of JAX.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable
from functools import lru_cache
from numbers import Real
from typing import Any

import jax.numpy as jnp

import jax

from ._library import announce_nvrtc, library, schema
from .errors import DTypeError, shown
from .page_tables import SCALES, AppendArrays

Array = Any

_VERBS = ("forward", "backward", "append_kv", "rotary", "quantise")


@lru_cache(maxsize=1)
def targets() -> dict[str, str]:
    """Tells XLA the handlers, once for the process; the names that it has for them.

    A name carries a digest of the options and arrays that the handler reads by position.
    """
    handlers = ctypes.CDLL(library().path)
    said = schema()
    read = repr([(x, row["offset"]) for x, row in said.options.items()])
    read += repr(said.array_names) + repr(AppendArrays._fields)
    digest = hashlib.sha256(read.encode()).hexdigest()[:8]
    names = {verb: f"fulmen_{verb}_{digest}" for verb in _VERBS}
    for verb, name in names.items():
        for platform, ending in (("cpu", "cpu"), ("CUDA", "cuda")):
            handler = getattr(handlers, f"fulmen_xla_{verb}_{ending}")
            capsule = jax.ffi.pycapsule(handler)
            jax.ffi.register_ffi_target(name, capsule, platform=platform)
    _allow_export(names.values())
    if any(device.platform == "gpu" for device in jax.devices()):
        announce_nvrtc()
    return names


def _allow_export(names: Iterable[str]) -> None:
    """Enters the targets where jax.export looks for those that may stand in a saved program.

    JAX has no public way to say so; a JAX that keeps the list elsewhere wants
    disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(...)], as before.
    """
    try:
        from jax._src.export import _export

        _export._CUSTOM_CALL_TARGETS_GUARANTEED_STABLE.update(names)
    except (ImportError, AttributeError):
        pass


def scale_array(x: Any) -> Array:
    """Scales as an array of an axis at least, from a number or an array."""
    made = jnp.asarray(x, jnp.float32 if isinstance(x, Real) else None)
    return made.reshape(1) if made.ndim == 0 else made


def numbers(name: str, x: Any) -> Array:
    """An array of JAX; scales from a number, too."""
    try:
        if name in SCALES:
            return scale_array(x)
        return jnp.asarray(x)
    except (TypeError, ValueError):
        raise DTypeError(f"{name} is {shown(x)}; an array of numbers is expected") from None
