# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen: exact attention, forward and backward, without PyTorch inside.

    o = fulmen.attention(q, k, v, causal=True)

Arrays are NumPy's, or anything with DLPack (PyTorch, JAX, CuPy), in host memory or on an NVIDIA
GPU; results come back in the caller's kind, where its arrays are.
`import fulmen` loads nothing: each name below comes with its module at first use, NumPy and the
library with the first call. Every function may be called from any thread; the interpreter lock is
released while the library computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors, masks
    from .ahead import cache_clear, compile_bundle, load_bundle, warmup
    from .appending import append_kv, rotary, rotary_tables
    from .caches import attention_paged
    from .errors import (
        ArgumentError,
        CompileError,
        DeviceError,
        DTypeError,
        Error,
        LibraryNotFound,
        OutOfMemoryError,
        ShapeError,
        UnsupportedError,
    )
    from .expressions import Score, score
    from .functional import (
        Forward,
        Gradients,
        attention,
        attention_backward,
        attention_forward,
        attention_varlen,
    )
    from .indexing import mla_indexer
    from .inspection import Explanation, build_info, device_faults, explain, gpu_info
    from .latent import MlaForm, attention_mla, mla_form
    from .merging import merge
    from .planning import Plan, plan
    from .quantising import Quantised, hadamard, quantise
    from .visibility import BlockMap, block_map, dense_mask

    __version__: str

__all__ = [
    "ArgumentError",
    "BlockMap",
    "CompileError",
    "DTypeError",
    "DeviceError",
    "Error",
    "Explanation",
    "Forward",
    "Gradients",
    "LibraryNotFound",
    "MlaForm",
    "OutOfMemoryError",
    "Plan",
    "Quantised",
    "Score",
    "ShapeError",
    "UnsupportedError",
    "__version__",
    "append_kv",
    "attention",
    "attention_backward",
    "attention_forward",
    "attention_mla",
    "attention_paged",
    "attention_varlen",
    "block_map",
    "build_info",
    "cache_clear",
    "compile_bundle",
    "dense_mask",
    "device_faults",
    "errors",
    "explain",
    "gpu_info",
    "hadamard",
    "load_bundle",
    "masks",
    "merge",
    "mla_form",
    "mla_indexer",
    "plan",
    "quantise",
    "rotary",
    "rotary_tables",
    "score",
    "warmup",
]

_MODULES = {
    "appending": "append_kv rotary rotary_tables",
    "ahead": "cache_clear compile_bundle load_bundle warmup",
    "caches": "attention_paged",
    "errors": (
        "ArgumentError CompileError DTypeError DeviceError Error LibraryNotFound OutOfMemoryError "
        "ShapeError UnsupportedError"
    ),
    "expressions": "Score score",
    "functional": (
        "Forward Gradients attention attention_backward attention_forward attention_varlen"
    ),
    "indexing": "mla_indexer",
    "inspection": "Explanation build_info device_faults explain gpu_info",
    "latent": "MlaForm attention_mla mla_form",
    "merging": "merge",
    "planning": "Plan plan",
    "quantising": "Quantised hadamard quantise",
    "visibility": "BlockMap block_map dense_mask",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """A public name, from its module (PEP 562)."""
    import importlib

    if name in ("distributed", "errors", "masks"):
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    elif name == "__version__":
        from importlib import metadata

        try:
            value = metadata.version("fulmen")
        except metadata.PackageNotFoundError:  # a source tree on the path: what the library says
            value = __getattr__("build_info")()["version"]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
