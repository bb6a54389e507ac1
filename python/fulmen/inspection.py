# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What the library would do, and what it is: explanations, build, GPUs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ._calls import call, merging, result_dtype
from ._library import announce_nvrtc, library, schema, text_of
from .array_types import HOST, Array, dtype_name, named_dtype
from .errors import ArgumentError, flag, one_of, shown, text, whole, words
from .keywords import Options, takes
from .layouts import phantom
from .options import Settings, prepare

if TYPE_CHECKING:
    from typing_extensions import Unpack


OPERATIONS = ("forward", "backward")


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


def optimisations() -> tuple[str, ...]:
    """What `without=` may name, in the order in which the library numbers them."""
    return schema().optimisations


class Target(NamedTuple):
    """The GPU that a plan is made for, and what its kernels leave out."""

    device: int | None
    device_name: str | None
    without: int  # bits, of the schema's optimisations

    def settings(self, settings: Settings) -> Settings:
        """Settings with the GPU among them, where it is named by its number."""
        return settings if self.device is None else settings.replaced(device=self.device)


def target_of(device: int | None, device_name: str | None, without: Sequence[str]) -> Target:
    """A target from the keywords of `plan` and `explain`.

    Raises:
        ArgumentError: the device is negative, or there is no such optimisation.
        DTypeError: not an integer, or not a text.
    """
    names = optimisations()
    chosen = set(words("without", without, "('swizzle', 'pipeline')"))
    for name in chosen:
        if name not in names:
            raise ArgumentError(f"without names {shown(name)}; allowed are {', '.join(names)}")
    bits = sum(1 << names.index(name) for name in chosen)
    if device is not None:
        expected = (
            "CUDA's number of a GPU is expected, or device_name='h100' for one that is not here"
        )
        device = whole(
            "device", str(device) if isinstance(device, bool) else device, 0, 2**31, expected
        )
    if device_name is not None:
        text("device_name", device_name, "h100")
    if device is not None or device_name is not None:
        announce_nvrtc()
    return Target(device, device_name, bits)


@takes(Options)
def explain(
    q: Array,
    k: Array,
    v: Array,
    *,
    operation: str = "forward",
    device: int | None = None,
    device_name: str | None = None,
    without: Sequence[str] = (),
    accumulate: bool = False,
    **options: Unpack[Options],
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
        accumulate: whether the call is given one.
        **options: those of `fulmen.attention_forward`.

    Raises:
        fulmen.Error: as the call would.

    >>> import numpy as np, fulmen
    >>> x = np.ones((1, 1, 256, 64), np.float32)
    >>> fulmen.explain(x, x, x)["implementation"] in ("tiled", "scalar")
    True
    """
    operation = one_of("operation", operation, OPERATIONS)
    prepared, own = prepare(q, k, v, options), None
    if flag("accumulate", accumulate):
        prepared, own = merging(prepared)
    settings, inputs, (_, array_type) = prepared
    if device is None and device_name is None and array_type.device(q) != HOST:
        device = array_type.device(q)
    target = target_of(device, device_name, without)
    layout = settings.layout
    dtype = named_dtype(dtype_name(array_type.dtype(q)))
    rows, sums = layout.lse_shape(tuple(q.shape)), np.float64 if dtype.char == "d" else np.float32
    if operation == "backward":
        own = None  # o is read as tensor cores read it
    o_dtype = result_dtype(array_type, array_type.dtype(q), own)
    o = phantom((*q.shape[:-1], v.shape[-1]), named_dtype(dtype_name(o_dtype)))
    stats = phantom((*rows, 2), sums) if accumulate else None
    arrays = (*inputs, o, phantom(rows, sums), stats)
    if operation == "backward":
        made = dtype
        if accumulate:
            made = named_dtype(dtype_name(array_type.accumulator(array_type.dtype(q))))
        gradients = (phantom(tuple(x.shape), made) for x in (q, k, v))
        arrays = (*inputs, o, None, phantom((*rows, 2), sums), o, None, *gradients)
    options_of_call = target.settings(settings).problem

    def explained(text: Array) -> int:
        leading = (text, int(operation == "backward"), options_of_call, *target[1:], None)
        return call(library().explain, leading, layout.code, arrays, range(0))

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
    announce_nvrtc()
    found: dict[str, Any] = json.loads(text_of(library().gpu_info))
    return found


def device_faults(device: int = 0) -> int:
    """The faults that runs on a GPU recorded since the last such call, which clears them, as bits.

    Kernels read lengths, offsets, pages and a device rng themselves: an entry that is out of range
    counts as empty, and leaves a bit here: q offsets 1, kv offsets 2, q lengths 4, kv lengths 8,
    rng 16, pages 32, lists of blocks 512; of appends slots 64 and positions 128; indices of a score
    or mask that is a text 256: the nearest inside is read.
    Waits for nothing: synchronise the stream of the runs first.

    Raises:
        fulmen.DeviceError: there is no such GPU.
    """
    return library().device_faults(whole("device", device, 0, 2**31))
