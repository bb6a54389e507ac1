# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Where a chapter's kernels run: the emulator, on any machine, or an NVIDIA GPU.

Both are a CUDA driver and NVRTC to this file: libfulmen_emulated_gpu.so has the same functions
(tests/emulator/gpu), so a kernel is compiled and launched by the same lines. What differs is what
can be known afterwards: the emulator checks and counts, a GPU takes time.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Array = Any  # of NumPy

ROOT = Path(__file__).resolve().parent.parent
EMULATOR = Path(
    os.environ.get("FULMEN_EMULATOR")
    or ROOT / "build" / "course" / "tests" / "emulator" / "gpu" / "libfulmen_emulated_gpu.so"
)
SOURCES = ROOT / "src" / "emulator"

# CUDA's numbers of attributes: of a device, and of a function.
MAJOR, MINOR = 75, 76
NUM_REGISTERS, MAX_SHARED_BYTES = 4, 8
TENSOR_MAP_BYTES, TYPE_FLOAT16, SWIZZLE_128B, PROMOTE_TO_128B = 128, 6, 3, 2

ERRORS = 3  # of a compiler, that are shown


class DeviceError(Exception):
    """A kernel that does not compile or run: what the compiler, the checker or the driver says."""


class Buffer:
    """An array in the memory of a device, and what it holds before a launch."""

    def __init__(self, device: Device, name: str, initial: Array) -> None:
        """A copy of `initial`; reports of the checker call it `name`."""
        self.name, self.initial = name, np.ascontiguousarray(initial)
        self.address = device.allocate(name, self.initial.nbytes)
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Holds again what it held at first."""
        self._device.call(
            "cuMemcpyHtoD_v2", ctypes.c_void_p(self.address), self.initial.ctypes.data_as(
                ctypes.c_void_p), ctypes.c_size_t(self.initial.nbytes)
        )  # fmt: skip

    def get(self) -> Array:
        """A copy for the host."""
        host = np.empty_like(self.initial)
        self._device.call("cuMemcpyDtoH_v2", host.ctypes.data_as(ctypes.c_void_p),
                          ctypes.c_void_p(self.address), ctypes.c_size_t(host.nbytes))  # fmt: skip
        return host


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p), ("num_attributes", ctypes.c_uint),
    )  # fmt: skip


class Kernel:
    """A compiled file; its entry is fulmen_kernel(Params)."""

    def __init__(self, device: Device, function: ctypes.c_void_p) -> None:
        """Of Device.compile."""
        self._device, self._function = device, function

    def registers(self) -> int:
        """Of a thread; the emulator says 0."""
        value = ctypes.c_int()
        self._device.call("cuFuncGetAttribute", ctypes.byref(value), NUM_REGISTERS, self._function)
        return value.value

    def blocks_per_multiprocessor(self, threads: int, shared_bytes: int) -> int:
        """How many blocks a multiprocessor has room for at once."""
        value = ctypes.c_int()
        self._device.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(value),
                          self._function, threads, ctypes.c_size_t(shared_bytes))  # fmt: skip
        return value.value

    def launch(self, blocks: int, threads: int, shared_bytes: int, *params: Any) -> None:
        """Runs it: `params` are the members of Params in their order.

        A Buffer is a pointer, an int an i32, a float a float; bytes are a member of 64 bytes'
        alignment, as they are.
        """
        packed = _packed(params)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(packed))
        config = _LaunchConfig(blocks, 1, 1, threads, 1, 1, shared_bytes)
        self._device.call("cuFuncSetAttribute", self._function, MAX_SHARED_BYTES, shared_bytes)
        self._device.call("cuLaunchKernelEx", ctypes.byref(config), self._function, arguments, None)


def _packed(params: tuple[Any, ...]) -> Any:
    """The struct of a kernel's parameters, laid out as C does."""
    data = bytearray()
    for x in params:
        if isinstance(x, bytes):
            piece, alignment = x, 64
        elif isinstance(x, Buffer):
            piece, alignment = x.address.to_bytes(8, "little"), 8
        else:
            kind = np.float32 if isinstance(x, float) else np.int32
            piece, alignment = kind(x).tobytes(), 4
        data += bytes(-len(data) % alignment) + piece
    data += bytes(-len(data) % 64)
    memory = (ctypes.c_byte * (len(data) + 64))()
    address = ctypes.addressof(memory)
    ctypes.memmove(address + -address % 64, bytes(data), len(data))
    view = (ctypes.c_byte * len(data)).from_buffer(memory, -address % 64)
    return view


class Device:
    """A driver, a compiler, and the first GPU of theirs."""

    name = "GPU"
    counts = False

    def __init__(self, driver: Any, nvrtc: Any) -> None:
        """Starts the driver, both given as loaded libraries."""
        self._driver, self._nvrtc = driver, nvrtc
        self.compiled: list[tuple[Path, dict[str, int | str]]] = []  # files and their constants
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxPushCurrent_v2", context)
        self.capability = 10 * self.attribute(MAJOR) + self.attribute(MINOR)

    def attribute(self, number: int) -> int:
        """Of the device, by CUDA's number."""
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), number, 0)
        return value.value

    def call(self, function: str, *arguments: Any) -> None:
        """Calls the driver.

        Raises:
            DeviceError: it refuses, or the checker has found something.
        """
        code = getattr(self._driver, function)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise DeviceError((text.value or b"unknown").decode())

    def allocate(self, name: str, num_bytes: int) -> int:
        """The address of new memory."""
        pointer = ctypes.c_void_p()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(num_bytes, 16)))
        return pointer.value or 0

    def array(self, name: str, host: Array) -> Buffer:
        """A copy of a NumPy array."""
        return Buffer(self, name, host)

    def empty(self, name: str, shape: Any, dtype: Any = np.float32) -> Buffer:
        """Memory full of NaN, so that what a kernel forgets to write is seen."""
        raw = np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xFF, np.uint8)
        return Buffer(self, name, raw.view(dtype).reshape(shape))

    def compile(self, path: Path, **constants: int | str) -> Kernel:
        """A kernel's file, with names that stand for numbers or for other names.

        Raises:
            DeviceError: with what the compiler says.
        """
        self.compiled.append((path, constants))
        image = compiled(self._nvrtc, path, constants, f"sm_{self.capability}")
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), image)
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"fulmen_kernel")
        return Kernel(self, function)

    def tensor_map(self, array: Buffer, box_rows: int) -> bytes:
        """How the copy engine finds boxes of rows of a (row, 64) array of float16, swizzled."""
        rows, dim = array.initial.shape
        extents = (ctypes.c_uint64 * 4)(dim, rows, 1, 1)
        strides = (ctypes.c_uint64 * 3)(2 * dim, 2 * dim * rows, 2 * dim * rows)
        box, steps = (ctypes.c_uint * 4)(dim, box_rows, 1, 1), (ctypes.c_uint * 4)(1, 1, 1, 1)
        memory = ctypes.create_string_buffer(2 * TENSOR_MAP_BYTES)  # the map lies on 64 bytes
        begin = -ctypes.addressof(memory) % 64
        self.call("cuTensorMapEncodeTiled", ctypes.byref(memory, begin), TYPE_FLOAT16, 4,
                  ctypes.c_void_p(array.address), extents, strides, box, steps, 0, SWIZZLE_128B,
                  PROMOTE_TO_128B, 0)  # fmt: skip
        return memory.raw[begin : begin + TENSOR_MAP_BYTES]

    def synchronize(self) -> None:
        """Waits until everything is done."""
        self.call("cuCtxSynchronize")

    def seconds(self, call: Callable[[], None], repeats: int = 20) -> float:
        """Of one call, the median, between two events of the GPU."""
        begin, end, found = ctypes.c_void_p(), ctypes.c_void_p(), []
        for event in (begin, end):
            self.call("cuEventCreate", ctypes.byref(event), 0)
        for _ in range(repeats):
            self.call("cuEventRecord", begin, None)
            call()
            self.call("cuEventRecord", end, None)
            self.call("cuEventSynchronize", end)
            milliseconds = ctypes.c_float()
            self.call("cuEventElapsedTime", ctypes.byref(milliseconds), begin, end)
            found.append(milliseconds.value / 1e3)
        return float(np.median(found))


class Emulator(Device):
    """The kernels' text on the CPU, under a checker and with counters."""

    name = "emulator"
    counts = True

    def __init__(self) -> None:
        """Loads what `make course` has built.

        Raises:
            DeviceError: it has not, or of other sources, whose kernels would not fit.
        """
        if not EMULATOR.is_file():
            raise DeviceError("the emulator is not built: run `make course` once")
        sources = (path for ending in ("h", "cpp") for path in SOURCES.glob(f"*.{ending}"))
        if max(path.stat().st_mtime for path in sources) > EMULATOR.stat().st_mtime:
            raise DeviceError("the emulator is older than its sources: run `make course` again")
        library = ctypes.CDLL(str(EMULATOR))
        library.fulmen_emulator_allocate.restype = ctypes.c_void_p
        library.fulmen_emulator_counted.restype = ctypes.c_char_p
        super().__init__(library, library)

    def allocate(self, name: str, num_bytes: int) -> int:
        """The address of new memory that reports call by its name."""
        address: int | None = self._driver.fulmen_emulator_allocate(
            name.encode(), ctypes.c_size_t(max(num_bytes, 16))
        )
        if address is None:
            raise DeviceError("there is no memory left")
        return address

    def counted(self, call: Callable[[], None]) -> dict[str, Any]:
        """What the kernels of a call do."""
        self._driver.fulmen_emulator_count(1)
        try:
            call()
            found: dict[str, Any] = json.loads(self._driver.fulmen_emulator_counted())
            return found
        finally:
            self._driver.fulmen_emulator_count(0)


def gpu() -> Device | None:
    """The GPU of this machine, or None."""
    import fulmen

    info = fulmen.gpu_info()
    if not info["devices"] or not info["nvrtc"]:
        return None
    return Device(ctypes.CDLL("libcuda.so.1"), nvrtc_at(info["nvrtc"]["path"]))


def nvrtc_at(path: str) -> Any:
    """NVRTC, with the library beside it that it looks for by name."""
    for part in sorted(Path(path).parent.glob("libnvrtc-builtins.so*")):
        ctypes.CDLL(str(part))
    return ctypes.CDLL(path)


def compiled(nvrtc: Any, path: Path, constants: dict[str, int | str], arch: str) -> bytes:
    """The machine code of a kernel's file, which may include headers of its folder.

    Raises:
        DeviceError: with what the compiler says.
    """
    defines = "".join(f"#define {name} {value}\n" for name, value in constants.items())
    text = f'// {path.stem}\n{defines}#include "{path.name}"\n'  # the emulator reads its name there
    program = ctypes.c_void_p()
    files = [path, *sorted(path.parent.glob("*.cuh"))]
    names = (ctypes.c_char_p * len(files))(*(file.name.encode() for file in files))
    headers = (ctypes.c_char_p * len(files))(*(file.read_bytes() for file in files))
    options = [f"-arch={arch}{'a' if arch == 'sm_90' else ''}", "-std=c++20", "-default-device",
               f"-I{ROOT / 'src'}"]  # fmt: skip
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"kernel.cu", len(files), headers, names
    )
    failed = nvrtc.nvrtcCompileProgram(program, len(options), words)
    said = _asked(nvrtc, "ProgramLog" if failed else "CUBIN", program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise DeviceError(f"it does not compile: {_errors(said.decode(errors='replace'), path)}")
    return said


def _errors(log: str, path: Path) -> str:
    """The first errors of a compiler's log, with places in the chapter's own file."""
    lines = [re.sub(rf"^.*?(?={re.escape(path.name)})", "", line) for line in log.splitlines()]
    return "; ".join([line for line in lines if "error" in line][:ERRORS] or lines[:ERRORS])


def _asked(nvrtc: Any, what: str, program: ctypes.c_void_p) -> bytes:
    """The log or the machine code of a program."""
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    held = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, held)
    return held.raw
