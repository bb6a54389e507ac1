# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The multiply-adds of float32 that a card does when nothing else stands in the way.

A kernel of eight independent chains a thread, in PTX, which the driver compiles for the card. It is
timed among the sides of a float32 cell, in the same random order: the rate that a kernel on the
ordinary arithmetic units is measured by.
"""

from __future__ import annotations

import ctypes
from typing import Any

from .driver import Kernel

CHAINS = 8
STEPS = 16  # of each chain in the body of the loop
ITERATIONS = 2000
THREADS = 256
BLOCKS_PER_MULTIPROCESSOR = 8


def source() -> str:
    """The kernel: x = x * a + b, over and over; the sum is stored so that it is not for nothing."""
    chains = [f"%x{i}" for i in range(CHAINS)]
    start = "".join(f"  add.f32 {x}, %a, 0f{0x3F800000 + i:08X};\n" for i, x in enumerate(chains))
    body = "".join(f"  fma.rn.f32 {x}, {x}, %a, %b;\n" for x in chains) * STEPS
    total = "".join(f"  add.f32 %x0, %x0, {x};\n" for x in chains[1:])
    return f"""\
.version 7.0
.target sm_75
.address_size 64
.visible .entry fma_peak(.param .u64 out, .param .f32 a, .param .f32 b)
{{
  .reg .f32 %a, %b, {", ".join(chains)};
  .reg .u64 %out, %at;
  .reg .u32 %block, %thread, %size, %left;
  .reg .pred %more;
  ld.param.u64 %out, [out];
  ld.param.f32 %a, [a];
  ld.param.f32 %b, [b];
  mov.u32 %left, {ITERATIONS};
{start}again:
{body}  sub.u32 %left, %left, 1;
  setp.ne.u32 %more, %left, 0;
  @%more bra again;
{total}  mov.u32 %block, %ctaid.x;
  mov.u32 %size, %ntid.x;
  mov.u32 %thread, %tid.x;
  mad.lo.u32 %thread, %block, %size, %thread;
  mul.wide.u32 %at, %thread, 4;
  add.u64 %out, %out, %at;
  st.global.f32 [%out], %x0;
  ret;
}}
"""


class FmaPeak:
    """A launch, and what it computes."""

    def __init__(self, torch: Any) -> None:
        """On torch's current device, whose context torch has made current.

        Raises:
            RuntimeError: the driver does not take the kernel.
        """
        self._kernel = Kernel(torch, source(), "fma_peak")
        blocks = BLOCKS_PER_MULTIPROCESSOR
        blocks *= torch.cuda.get_device_properties(None).multi_processor_count
        self._blocks = blocks
        self._out = torch.empty(blocks * THREADS, dtype=torch.float32, device="cuda")
        out = ctypes.c_uint64(self._out.data_ptr())
        self._values = (out, ctypes.c_float(0.999), ctypes.c_float(0.5))
        self.flops = 2.0 * blocks * THREADS * ITERATIONS * CHAINS * STEPS

    def launch(self) -> None:
        """Enqueues the kernel on torch's current stream."""
        self._kernel.launch(self._blocks, THREADS, self._values)


class MatrixProduct:
    """torch's own product of two matrices on the CPU: what a library of products reaches there."""

    SIZE = 1024

    def __init__(self, torch: Any, dtype: str) -> None:
        """Of SIZE by SIZE numbers of a dtype."""
        made = [torch.randn(self.SIZE, self.SIZE).to(getattr(torch, dtype)) for _ in range(2)]
        self.call = lambda: torch.matmul(*made)

    @property
    def flops(self) -> float:
        """Arithmetic of a call."""
        return 2.0 * self.SIZE**3
