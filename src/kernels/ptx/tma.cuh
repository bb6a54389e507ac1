// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The tensor copy engine: one thread asks for a box of a 4-dimensional tensor, the engine moves,
// swizzles and zero-fills it. It works in the asynchronous proxy: ordinary writes that it shall
// read, and ordinary reads that it may overwrite, need fence_proxy_async first. PTX ISA 9.0,
// sections 9.7.9.25 and 9.7.13.4.
//
// And the barriers in shared memory that tell when a copy has landed: they count arrivals and
// bytes. A phase ends when all expected threads have arrived and all expected bytes have landed;
// the parity of the phase tells a waiter whether the one it means is over. A fresh barrier is in
// phase 0: waiting for parity 1 returns at once. PTX ISA 9.0, section 9.7.13.15.
//
// Both also between the blocks of a cluster (kernels/ptx/grid.cuh).
#pragma once

#include "kernels/params.h"
#include "kernels/ptx/memory.cuh"

namespace fulmen::ptx {

// mbarrier.init: `arrivals` make a phase.
inline void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// fence.mbarrier_init: makes fresh barriers known to the copy engine.
inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive
inline void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.arrive.expect_tx: arrives and adds `bytes` to what this phase waits for.
inline void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// mbarrier.try_wait in a loop: returns once the phase of this parity is over.
inline void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// mbarrier.test_wait: whether the phase of this parity is over. Who then reads what it tells of
// waits for it all the same.
inline bool mbarrier_test(u32 barrier, u32 parity) {
  u32 is_over;
  asm volatile(
      "{ .reg .pred over; mbarrier.test_wait.parity.shared::cta.b64 over, [%1], %2;"
      " selp.u32 %0, 1, 0, over; }"
      : "=r"(is_over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return is_over != 0;
}

// prefetch.tensormap
inline void prefetch_tensormap(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// cp.async.bulk.tensor.4d, global to shared: the box at (dim, row, head, batch) lands at `shared`,
// its bytes count towards `barrier`. Out-of-range elements become 0.
inline void tma_load(u32 shared, const TensorMap& map, u32 barrier, i32 dim, i32 row, i32 head,
                     i32 batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(dim), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// The same with advice for the L2: which lines it gives up first. The numbers are what
// createpolicy.fractional.L2::evict_first / evict_last return for the whole of an access.
inline constexpr u64 kEvictFirst = 0x12f0000000000000;
inline constexpr u64 kEvictLast = 0x14f0000000000000;
inline void tma_load(u32 shared, const TensorMap& map, u32 barrier, i32 dim, i32 row, i32 head,
                     i32 batch, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(dim), "r"(row), "r"(head), "r"(batch), "l"(policy)
      : "memory");
}

// cp.async.bulk.tensor.4d, shared to global: elements out of range are not written.
inline void tma_store(const TensorMap& map, u32 shared, i32 dim, i32 row, i32 head, i32 batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          &map),
      "r"(shared), "r"(dim), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// cp.async.bulk.commit_group: closes the group of this thread's stores so far.
inline void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group.read 0: the sources of all this thread's stores may be overwritten.
inline void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// cp.async.bulk.wait_group 0: all this thread's stores are complete.
inline void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// fence.proxy.async: ordinary accesses of shared memory by this thread, or ordered before it, come
// before later asynchronous ones that are ordered after it.
inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// cp.async.bulk, global to shared: `bytes` at `source` land at `shared` and count towards
// `barrier`. All three are multiples of 16.
inline void bulk_load(u32 shared, const void* source, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// cp.async.bulk.prefetch.tensor.4d: the box will be asked for soon.
inline void tma_prefetch(const TensorMap& map, i32 dim, i32 row, i32 head, i32 batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(&map),
               "r"(dim), "r"(row), "r"(head), "r"(batch)
               : "memory");
}

// mbarrier.arrive, mbarrier.arrive.expect_tx on a barrier of any block: what this thread has done
// comes before whoever waits for it with mbarrier_wait_cluster.
inline void mbarrier_arrive_cluster(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}
inline void mbarrier_arrive_expect_cluster(u32 barrier, u32 bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier),
      "r"(bytes)
      : "memory");
}

// The same without a scope, which a fence of all of the GPU's memory would be needed for: between
// copies of the engine alone. An arrival says that this thread has read what will be overwritten,
// and announced bytes come by a copy.
inline void mbarrier_arrive_read(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
inline void mbarrier_arrive_expect_copy(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

// As mbarrier_wait, on a barrier of this block at which other blocks arrive so, and to which their
// copies count.
inline void mbarrier_wait_copies(u32 barrier, u32 parity) { mbarrier_wait(barrier, parity); }

// mbarrier.try_wait.acquire.cluster in a loop, on a barrier of this block: as mbarrier_wait, and
// what other blocks did before they arrived or their copies landed is seen.
inline void mbarrier_wait_cluster(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// st.async: the store lands some time later, and its bytes count towards `barrier`, of the same
// block as the address.
inline void store_async(u32 address, u32 x, u32 barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
      "r"(x), "r"(barrier)
      : "memory");
}
inline void store_async_x4(u32 address, U32x4 x, u32 barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "r"(x.word[0]), "r"(x.word[1]), "r"(x.word[2]), "r"(x.word[3]), "r"(barrier)
      : "memory");
}

// cp.async.bulk, from this block's shared memory to that of another: `bytes` at `source` land at
// `address` and count towards `barrier`, of the same block as the address. All three are multiples
// of 16. The source may be written again once they have landed.
inline void bulk_store_cluster(u32 address, u32 source, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(address),
      "r"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// As tma_load, for several blocks: bit r of `ranks` is block r of the cluster, in which the box
// lands at the same place as `shared` here, and counts towards the barrier at the place of
// `barrier`.
inline void tma_load_multicast(u32 shared, const TensorMap& map, u32 barrier, i32 dim, i32 row,
                               i32 head, i32 batch, u32 ranks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(dim), "r"(row), "r"(head), "r"(batch),
      "h"(static_cast<u16>(ranks))
      : "memory");
}

}  // namespace fulmen::ptx
