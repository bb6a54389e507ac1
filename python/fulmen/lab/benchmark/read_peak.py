# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""How long a card takes to read so many bytes when nothing else stands in the way.

Two kernels in PTX, which the driver compiles: plain loads of 16 bytes, eight in flight a thread,
and on Hopper and later bulk copies into a ring in shared memory, which a thread a block issues. No
single one is the fastest at every size, so all are timed among the sides of a cell, in the same
random order, and the fastest is the ceiling: the least time in which a cache can be read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from .driver import Kernel

THREADS = 256
IN_FLIGHT = 8  # loads of a thread
VECTOR = 16  # bytes of a load
LOAD_BLOCKS = (2, 4, 8)  # a multiprocessor
CHUNK = 16384  # bytes of a bulk copy
COPIES = ((2, 6), (4, 3))  # blocks a multiprocessor, and stages of the ring of each


def loads() -> str:
    """The kernel of loads; what was read decides about a store, so that it is not for nothing."""
    values = [f"%v{i}" for i in range(4 * IN_FLIGHT)]
    zeros = "".join(f"  mov.u32 {x}, 0;\n" for x in values)
    body = "".join(
        f"""\
  setp.lt.u64 %in, %i, %end;
  @%in ld.global.nc.L1::no_allocate.v4.u32 {{{", ".join(values[4 * i : 4 * i + 4])}}}, [%at];
  add.u64 %at, %at, %step;
  add.u64 %i, %i, %stride;
"""
        for i in range(IN_FLIGHT)
    )
    body += "".join(f"  xor.b32 %sum, %sum, {x};\n" for x in values)
    return f"""\
.version 7.4
.target sm_75
.address_size 64
.visible .entry loads(.param .u64 from, .param .u64 vectors, .param .u64 out)
{{
  .reg .u32 %block, %thread, %size, %grid, %sum, {", ".join(values)};
  .reg .u64 %at, %out, %i, %end, %step, %stride;
  .reg .pred %in, %more, %odd;
  ld.param.u64 %at, [from];
  ld.param.u64 %end, [vectors];
  ld.param.u64 %out, [out];
  mov.u32 %block, %ctaid.x;
  mov.u32 %size, %ntid.x;
  mov.u32 %thread, %tid.x;
  mov.u32 %grid, %nctaid.x;
  mad.lo.u32 %thread, %block, %size, %thread;
  mul.wide.u32 %stride, %grid, %size;
  cvt.u64.u32 %i, %thread;
  mad.lo.u64 %at, %i, {VECTOR}, %at;
  mul.lo.u64 %step, %stride, {VECTOR};
  mov.u32 %sum, 0;
{zeros}again:
{body}  setp.lt.u64 %more, %i, %end;
  @%more bra again;
  setp.eq.u32 %odd, %sum, 305419896;
  @%odd st.global.u32 [%out], %sum;
  ret;
}}
"""


def copies(stages: int) -> str:
    """The kernel of bulk copies: one thread a block, which waits for a stage before it fills it
    anew. Chunks past the end count as arrived.
    """
    wait = """\
{0}:
  mbarrier.try_wait.parity.shared.b64 %there, [%full+{1}], %parity;
  @!%there bra {0};
"""
    init = "".join(f"  mbarrier.init.shared.b64 [%full+{8 * i}], 1;\n" for i in range(stages))
    into = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    body = "".join(
        wait.format(f"free{i}", 8 * i)
        + f"""\
  setp.lt.u64 %in, %c, %chunks;
  selp.u32 %bytes, {CHUNK}, 0, %in;
  mbarrier.arrive.expect_tx.shared.b64 _, [%full+{8 * i}], %bytes;
  @%in {into} [%ring+{CHUNK * i}], [%at], {CHUNK}, [%full+{8 * i}];
  add.u64 %c, %c, %grid;
  add.u64 %at, %at, %step;
"""
        for i in range(stages)
    )
    last = "".join(wait.format(f"last{i}", 8 * i) for i in range(stages))
    return f"""\
.version 8.0
.target sm_90
.address_size 64
.extern .shared .align 128 .b8 ring[];
.visible .entry copies(.param .u64 from, .param .u64 chunks)
{{
  .shared .align 8 .b64 full[{stages}];
  .reg .u32 %ring, %full, %parity, %bytes, %x;
  .reg .u64 %at, %c, %chunks, %grid, %step;
  .reg .pred %there, %in, %more;
  ld.param.u64 %at, [from];
  ld.param.u64 %chunks, [chunks];
  cvta.to.global.u64 %at, %at;
  mov.u32 %ring, ring;
  mov.u32 %full, full;
{init}  fence.mbarrier_init.release.cluster;
  mov.u32 %x, %ctaid.x;
  cvt.u64.u32 %c, %x;
  mov.u32 %x, %nctaid.x;
  cvt.u64.u32 %grid, %x;
  mad.lo.u64 %at, %c, {CHUNK}, %at;
  mul.lo.u64 %step, %grid, {CHUNK};
  mov.u32 %parity, 1;
again:
{body}  xor.b32 %parity, %parity, 1;
  setp.lt.u64 %more, %c, %chunks;
  @%more bra again;
{last}  ret;
}}
"""


class ReadPeak:
    """The kernels over one buffer; a call for each, by name."""

    def __init__(self, torch: Any) -> None:
        """On torch's current device, whose context torch has made current.

        Raises:
            RuntimeError: the driver does not take a kernel.
        """
        self._torch = torch
        self._multiprocessors = torch.cuda.get_device_properties(None).multi_processor_count
        self._loads = Kernel(torch, loads(), "loads")
        self._copies: dict[int, Kernel] = {}
        if torch.cuda.get_device_capability() >= (9, 0):
            for _, stages in COPIES:
                self._copies[stages] = Kernel(torch, copies(stages), "copies", stages * CHUNK)
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cuda")

    def calls(self, count: int) -> dict[str, Callable[[], None]]:
        """Launches that read count bytes, up to the next whole vector or chunk."""
        chunked = -(-count // CHUNK) * CHUNK
        if self._buffer.numel() < chunked:
            self._buffer = self._torch.empty(chunked // 8, dtype=self._torch.int64, device="cuda")
            self._buffer = self._buffer.random_().view(self._torch.uint8)
        at = ctypes.c_uint64(self._buffer.data_ptr())
        vectors = (at, ctypes.c_uint64(-(-count // VECTOR)), at)
        chunks = (at, ctypes.c_uint64(chunked // CHUNK))
        found: dict[str, Callable[[], None]] = {}
        for blocks in LOAD_BLOCKS:
            found[f"loads, {blocks} blocks a multiprocessor"] = self._launch(
                self._loads, blocks, THREADS, vectors
            )
        for blocks, stages in COPIES if self._copies else ():
            found[f"bulk copies, {blocks} blocks a multiprocessor"] = self._launch(
                self._copies[stages], blocks, 1, chunks
            )
        return found

    def _launch(
        self, kernel: Kernel, blocks: int, threads: int, values: tuple[Any, ...]
    ) -> Callable[[], None]:
        return lambda: kernel.launch(blocks * self._multiprocessors, threads, values)
