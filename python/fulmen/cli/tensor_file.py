# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Problems in a file of tensors, and results into one: safetensors, or NumPy's .npz and .npy.

Tensors [PREFIX.]q, k, v make one problem a prefix; k and v, or all three, may be of 8 bits
(F8_E4M3, F8_E5M2, I8), with q_scale, k_scale and v_scale. Beside them, with the same prefix or
shared by all: do, bias, mask, sinks, cu_seqlens or lengths; and references o, lse, dq, dk, dv,
dbias, dsinks.
Metadata: layout, and what `options_of_files` lists; in a .npz arrays without axes, such as
causal=True. A file [PREFIX.]q.npy stands for the files of that kind beside it. NumPy writes
bfloat16 as two bytes without a type, and so it is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from fulmen.array_types import named_dtype
from fulmen.keywords import KEYWORDS
from fulmen.options import option_rows

from .output import BadInputError

Array = npt.NDArray[Any]

SCALES = ("q_scale", "k_scale", "v_scale")
INPUTS = ("q", "k", "v", "do", "bias", "mask", "sinks", "cu_seqlens", "lengths", *SCALES)
# What safetensors has no type of NumPy for.
_EIGHT_BITS = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
REFERENCES = ("o", "lse", "dq", "dk", "dv", "dbias", "dsinks")


@dataclass
class FileProblem:
    """One problem of a file."""

    name: str  # its prefix; "" for a file without prefixes
    tensors: dict[str, Array]  # INPUTS
    references: dict[str, Array]  # REFERENCES that the file has
    options: dict[str, Any] = field(default_factory=dict)  # of the metadata, for fulmen.attention


@dataclass
class TensorFile:
    """What a file holds."""

    path: Path
    metadata: dict[str, str]
    problems: list[FileProblem]
    ignored: list[str]  # tensors that mean nothing here


def read(path: Path) -> TensorFile:
    """Reads a file.

    Raises:
        BadInputError: it is not there, not a whole file of its kind, or lacks a tensor.
    """
    tensors, metadata = _tensors_of(path)
    prefixes = sorted({name[:-1] for name in tensors if name == "q" or name.endswith(".q")})
    if not prefixes:
        raise BadInputError(
            f"{path} has no tensor q and none named PREFIX.q; it has {_some(tensors)}"
        )
    options = parse_metadata(metadata, path)
    used: set[str] = set()
    problems = []
    for prefix in prefixes:
        found: dict[str, Array] = {}
        for name in (*INPUTS, *REFERENCES):
            shared = name in ("mask", "sinks", "bias", "cu_seqlens", "lengths")
            for key in (prefix + name, name) if shared else (prefix + name,):
                if key in tensors:
                    found[name] = tensors[key]
                    used.add(key)
                    break
        for name in ("k", "v"):
            if name not in found:
                raise BadInputError(
                    f"{path} has {prefix}q and no {prefix}{name}; it has {_some(tensors)}"
                )
        problems.append(
            FileProblem(
                prefix.rstrip("."),
                {name: x for name, x in found.items() if name in INPUTS},
                {name: x for name, x in found.items() if name in REFERENCES},
                dict(options),
            )
        )
    return TensorFile(path, metadata, problems, sorted(set(tensors) - used))


def _tensors_of(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """Tensors and metadata by the kind of file that the name says."""
    from safetensors import SafetensorError

    if not path.is_file():
        raise BadInputError(f"{path} is not a file")
    kinds = {".npz": ("npz", _of_npz), ".npy": ("npy", _of_npy)}
    kind, reader = kinds.get(path.suffix.lower(), ("safetensors", _of_safetensors))
    try:
        return reader(path)
    except BadInputError:
        raise
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError, BadZipFile) as error:
        text = " ".join(str(error).split())
        raise BadInputError(f"{path} is not a whole {kind} file: {text}") from error


def _of_safetensors(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    from safetensors import deserialize, safe_open

    with safe_open(str(path), framework="numpy") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        found = {name: file.get_tensor(name) for name in dtypes if dtypes[name] not in _EIGHT_BITS}
        metadata = file.metadata() or {}
    if len(found) < len(dtypes):
        for name, x in deserialize(path.read_bytes()):
            if x["dtype"] in _EIGHT_BITS:
                dtype = named_dtype(_EIGHT_BITS[x["dtype"]])
                found[name] = np.frombuffer(x["data"], dtype).reshape(x["shape"])
    return found, metadata


def _of_npz(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: _typed(file[name]) for name in file.files}
    words = {name: str(x.item()) for name, x in arrays.items() if x.ndim == 0}
    return {name: x for name, x in arrays.items() if x.ndim}, words


def _of_npy(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    prefix, _, name = path.stem.rpartition(".")
    if name != "q":
        raise BadInputError(
            f"{path} is one array; a problem is q.npy with k.npy, v.npy and so on beside it, or "
            "one .npz file: name q.npy"
        )
    found = {}
    for name in (*INPUTS, *REFERENCES):
        whole_name = f"{prefix}.{name}" if prefix else name
        beside = path.with_name(f"{whole_name}.npy")
        if beside.is_file():
            found[whole_name] = _typed(np.load(beside, allow_pickle=False))
    return found, {}


def _typed(x: Array) -> Array:
    """Two bytes without a type are bfloat16."""
    return x.view(named_dtype("bfloat16")) if x.dtype == np.dtype("V2") else x


def _some(names: Any) -> str:
    names = sorted(names)
    shown = ", ".join(names[:8]) or "no tensor at all"
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown


def _numbers() -> list[str]:
    rows = option_rows().items()
    return [
        name
        for name, row in rows
        if row["kind"] == "real" and name in KEYWORDS and name != "dropout_p"
    ]


def options_of_files() -> tuple[str, ...]:
    """The options that a file may state beside its layout, and that flags override."""
    return ("causal", "alignment", "window", *_numbers())


def parse_metadata(metadata: dict[str, str], path: Path) -> dict[str, Any]:
    """The options that a file states."""
    options: dict[str, Any] = {}
    try:
        for name in _numbers():
            if name in metadata:
                options[name] = parse_number(metadata[name])
        if "causal" in metadata:
            options["causal"] = parse_flag(metadata["causal"])
        if "window" in metadata:
            options["window"] = parse_window(metadata["window"])
    except ValueError as error:
        raise BadInputError(f"the metadata of {path} says {error}") from error
    for name in ("layout", "alignment"):
        if name in metadata:
            options[name] = metadata[name]
    return options


def parse_number(text: str) -> float:
    """A number from metadata or a flag."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} where a number is expected") from None


def parse_flag(text: str) -> bool:
    """True or false from metadata."""
    if text.lower() not in ("true", "false"):
        raise ValueError(f"causal={text!r} where true or false is expected")
    return text.lower() == "true"


def parse_window(text: str) -> int | tuple[int, int] | None:
    """A window from metadata or a flag: "none", "128" or "128,0" with -1 for no limit."""
    if text.lower() in ("", "none"):
        return None
    try:
        sides = [int(part) for part in text.strip("()[] ").split(",")]
    except ValueError:
        sides = []
    if len(sides) == 1:
        return sides[0]
    if len(sides) == 2:
        return sides[0], sides[1]
    raise ValueError(f"window={text!r} where none, W or LEFT,RIGHT is expected")


def write(path: Path, tensors: dict[str, Array], metadata: dict[str, str]) -> None:
    """Writes results.

    Raises:
        BadInputError: the file cannot be written.
    """
    from safetensors.numpy import save_file

    try:
        if path.suffix.lower() == ".npz":
            np.savez(path, **tensors, **{k: np.array(x) for k, x in metadata.items()})  # type: ignore[arg-type]
        else:
            save_file({k: np.ascontiguousarray(x) for k, x in tensors.items()}, str(path), metadata)
    except Exception as error:
        raise BadInputError(f"{path} cannot be written: {' '.join(str(error).split())}") from error
