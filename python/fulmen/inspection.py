# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What the library would do, and what it is: explanations, the build, the GPUs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ._library import BACKWARD_RESULTS, FORWARD_RESULTS, call, library, text_argument, text_of
from .errors import ArgumentError, DTypeError
from .kinds import HOST, Array, dtype_name, named_dtype
from .options import CallOptions, prepare

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Explanation(dict[str, Any]):
    """The implementation chosen, why, and why each other one was not; prints itself.

    Keys: operation, implementation, backend, reason, rejected (a list of implementation and
    reason), tile (rows, columns; or None), workspace_bytes, flops, bytes, intensity. On the CPU
    isa and threads; on a GPU device (name, arch, index, multiprocessors), kernels (a list of name,
    registers, spill_bytes, shared_bytes, threads, blocks, blocks_per_multiprocessor, waves,
    instructions in the machine code by class, origin of the machine code, findings of the
    compiler), roofline (peak_tflops, bandwidth_gbps, bound, time_us) and notes.
    """

    @classmethod
    def parse(cls, text: str) -> Explanation:
        """From the JSON object of fulmen_explain."""
        return cls(json.loads(text))

    def lines(self) -> list[tuple[str, str]]:
        """The explanation as pairs of a name and a text."""
        rows = [(f"not {other['implementation']}", other["reason"]) for other in self["rejected"]]
        if self["tile"]:
            tile = self["tile"]
            rows.append(("tile", f"{tile['rows']} rows x {tile['columns']} columns"))
        if self.get("device"):
            rows += self._gpu_lines()
        else:
            rows += [("instructions", self["isa"]), ("threads", str(self["threads"]))]
        return [
            *rows,
            ("workspace", f"{self['workspace_bytes']} bytes"),
            ("arithmetic", f"{self['flops']:.4g} flops"),
            ("arrays", f"{self['bytes']:.4g} bytes read or written"),
            ("intensity", f"{self['intensity']:.3g} flops a byte"),
        ]

    def _gpu_lines(self) -> list[tuple[str, str]]:
        device = self["device"]
        where = "not here" if device["index"] is None else f"GPU {device['index']}"
        rows = [
            (
                "device",
                f"{device['name']} ({device['arch']}, {device['multiprocessors']} "
                f"multiprocessors), {where}",
            )
        ]
        for kernel in self["kernels"]:
            rows.append(("kernel", _kernel_text(kernel)))
            rows += [("finding", finding) for finding in kernel["findings"]]
        roof = self["roofline"]
        rows.append(
            (
                "roofline",
                f"{roof['time_us']:.4g} us, {roof['bound']}-bound, at {roof['peak_tflops']:.4g} "
                f"TFLOP/s and {roof['bandwidth_gbps']:.4g} GB/s",
            )
        )
        return rows + [("note", note) for note in self["notes"]]

    def __str__(self) -> str:
        chosen = (
            f"{self['operation']}: {self['implementation']} on {self['backend']}: {self['reason']}"
        )
        return "\n".join([chosen, *(f"  {name:<13}{text}" for name, text in self.lines())])


def _kernel_text(kernel: dict[str, Any]) -> str:
    """One kernel of a GPU plan as a line."""
    text = (
        f"{kernel['name']}: {kernel['blocks']} blocks of {kernel['threads']} threads, "
        f"{kernel['shared_bytes']} bytes shared"
    )
    if kernel["registers"] is None:
        return f"{text}, not compiled"
    return (
        f"{text}, {kernel['registers']} registers, {kernel['spill_bytes']} bytes spilled, "
        f"{kernel['blocks_per_multiprocessor']} blocks a multiprocessor, {kernel['waves']:.3g} "
        f"waves, machine code: {kernel['origin']}"
    )


# fulmen_optimisation, in order of its bits.
OPTIMISATIONS = (
    "swizzle", "pipeline", "overlap", "ping_pong", "lazy_rescale", "warp_specialisation",
    "folded_scale", "block_order", "full_blocks", "tensor_cores",
)  # fmt: skip


def _bits(without: Sequence[str]) -> int:
    names = (without,) if isinstance(without, str) else tuple(without)
    for name in names:
        if name not in OPTIMISATIONS:
            allowed = ", ".join(OPTIMISATIONS)
            raise ArgumentError(f"without names {name!r}; allowed are {allowed}")
    return sum(1 << OPTIMISATIONS.index(name) for name in set(names))


def target_arguments(
    device: int | None, device_name: str | None, without: Sequence[str]
) -> tuple[int, Array, int]:
    """The GPU that a plan is made for and what its kernel leaves out, as the library reads it.

    Raises:
        ArgumentError: the device is negative, or there is no such optimisation.
        DTypeError: not an integer, or not a text.
    """
    bits = _bits(without)
    if device is None and device_name is None:
        return HOST, None, bits
    if device is not None and (isinstance(device, bool) or not isinstance(device, int)):
        raise DTypeError(
            f"device is {device!r}; CUDA's number of a GPU is expected, or device_name='h100' for "
            "one that need not be here"
        )
    if device is not None and device < 0:
        raise ArgumentError(f"device is {device}; at least 0 is allowed")
    if device_name is not None and not isinstance(device_name, str):
        raise DTypeError(f"device_name is {device_name!r}; a text such as 'h100' is expected")
    from ._nvrtc import announce

    announce()
    return HOST if device is None else device, text_argument(device_name or ""), bits


def phantom(shape: tuple[int, ...], dtype: Any) -> Array:
    """An array of any size that takes no memory: only for calls that read no array."""
    strides = [np.dtype(dtype).itemsize]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(extent, 1))
    return np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, strides[-len(shape) :])


def explain(
    q: Array,
    k: Array,
    v: Array,
    *,
    operation: str = "forward",
    device: int | None = None,
    device_name: str | None = None,
    without: Sequence[str] = (),
    **options: Unpack[CallOptions],
) -> Explanation:
    """Which implementation a call would use, why, and why each other one not. Runs nothing.

    Args:
        q, k, v: arrays as for `fulmen.attention`; only shapes, strides and dtypes matter.
        operation: "forward" or "backward" (for the gradients of q, k and v).
        device: CUDA's number of a GPU; None: where q is.
        device_name: a GPU that need not be here, such as "h100" or "sm_90a".
        without: optimisations that a GPU kernel leaves out, of "swizzle", "pipeline", "overlap",
            "ping_pong", "lazy_rescale", "warp_specialisation", "folded_scale", "block_order",
            "full_blocks", "tensor_cores"; an implementation that cannot says so.
        **options: those of `fulmen.attention_forward`.

    Raises:
        fulmen.Error: as the call would.

    >>> import numpy as np, fulmen
    >>> x = np.ones((1, 1, 256, 64), np.float32)
    >>> fulmen.explain(x, x, x)["implementation"] in ("tiled", "scalar")
    True
    """
    if operation not in ("forward", "backward"):
        raise ArgumentError(f"operation is {operation!r}; allowed are 'forward', 'backward'")
    numbers, layout, inputs, (_, kind) = prepare(q, k, v, **options)
    if device is None and device_name is None and kind.device(q) != HOST:
        device = kind.device(q)
    target = target_arguments(device, device_name, without)
    dtype = named_dtype(dtype_name(kind.dtype(q)))
    rows, sums = layout.lse_shape(tuple(q.shape)), np.float64 if dtype.char == "d" else np.float32
    o = phantom((*q.shape[:-1], v.shape[-1]), dtype)
    outputs: tuple[Array, ...] = (o, phantom(rows, sums), None)
    results = FORWARD_RESULTS
    if operation == "backward":
        gradients = (phantom(tuple(x.shape), dtype) for x in (q, k, v))
        outputs = (o, None, phantom((*rows, 2), sums), o, None, *gradients)
        results = BACKWARD_RESULTS

    def explained(text: Array) -> int:
        leading = (text, int(operation == "backward"), *target, *numbers)
        arrays = (*inputs, *outputs)
        return call(library().explain, leading, layout.rows_before_heads, arrays, results)

    return Explanation.parse(text_of(explained))


def build_info() -> dict[str, Any]:
    """What this libfulmen is: version, commit, compiler, build_type, isas, isa in use, threads.

    >>> import fulmen
    >>> sorted(fulmen.build_info())[:2]
    ['build_type', 'commit']
    """
    found: dict[str, Any] = json.loads(text_of(library().build_info))
    return {**found, "library": library().path}


def gpu_info() -> dict[str, Any]:
    """What this machine has for GPU calls; the absence of a driver or compiler is an answer.

    Returns:
        driver (version, path; or None) and driver_reason, devices (a list of index, name, arch,
        multiprocessors, memory_bytes, shared_bytes), nvrtc (version, path, archs; or None) and
        nvrtc_reason, cache (folder, bytes, entries, limit_bytes, note), bundle, device_names (those
        that `device_name=` knows).

    >>> import fulmen
    >>> isinstance(fulmen.gpu_info()["devices"], list)
    True
    """
    from ._nvrtc import announce

    announce()
    found: dict[str, Any] = json.loads(text_of(library().gpu_info))
    return found


def device_faults(device: int = 0) -> int:
    """The faults that runs on a GPU recorded since the last such call, which clears them, as bits.

    Kernels read lengths, offsets and a device rng themselves: an entry that is out of range counts
    as empty, and leaves a bit here: q offsets 1, kv offsets 2, q lengths 4, kv lengths 8, rng 16.
    Waits for nothing: synchronise the stream of the runs first.

    Raises:
        fulmen.DeviceError: there is no such GPU.
    """
    return library().device_faults(device)
