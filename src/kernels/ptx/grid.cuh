// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What blocks of a grid, and neighbouring grids of a stream, do with each other: sums in global
// memory, counters that announce them, the hand-over between two kernels. Accesses go to the L2,
// which all multiprocessors share. PTX ISA 9.0, sections 9.7.9, 9.7.13.
//
// And clusters, from Hopper on: blocks that run at the same time on neighbouring multiprocessors
// and reach each other's shared memory. map_shared() makes an address of another block's; one of a
// block's own is good for the same functions. A block may be reached once it is known to have begun
// (a barrier of the cluster, even a relaxed one, says so) and until it ends: who reaches there must
// be waited for. PTX ISA 9.0, sections 9.7.9.22, 9.7.13.4.
#pragma once

#include "kernels/ptx/memory.cuh"

namespace fulmen::ptx {

struct F32x4 {
  float word[4];
};

// red.global.add.v4: adds to 16 bytes, each word by itself; nothing comes back.
inline void reduce_add_x4(float* pointer, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "f"(a), "f"(b),
               "f"(c), "f"(d)
               : "memory");
}

// red.global.add: the same for one number, before Hopper too.
inline void reduce_add(float* pointer, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(pointer), "f"(x) : "memory");
}

// ld.global.cg / st.global.cg: past the L1.
inline void prefetch_l2(const float* pointer) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
}
inline F32x4 load_l2_x4(const float* pointer) {
  F32x4 x;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.word[0]), "=f"(x.word[1]), "=f"(x.word[2]), "=f"(x.word[3])
               : "l"(pointer)
               : "memory");
  return x;
}
inline F32x2 load_l2_x2(const float* pointer) {
  F32x2 x;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.word[0]), "=f"(x.word[1])
               : "l"(pointer)
               : "memory");
  return x;
}
inline float load_l2(const float* pointer) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(pointer) : "memory");
  return x;
}
inline void store_l2_x2(float* pointer, F32x2 x) {
  asm volatile("st.global.cg.v2.f32 [%0], {%1, %2};" ::"l"(pointer), "f"(x.word[0]), "f"(x.word[1])
               : "memory");
}
inline void store_l2_x4(float* pointer, F32x4 x) {
  asm volatile("st.global.cg.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "f"(x.word[0]),
               "f"(x.word[1]), "f"(x.word[2]), "f"(x.word[3])
               : "memory");
}

// atom.add: returns the old value.
inline u32 atomic_add(u32* pointer, u32 x) {
  u32 old;
  asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(pointer), "r"(x) : "memory");
  return old;
}

// fence.acq_rel.gpu, then red.release.gpu.add: what this thread has done and seen done comes before
// the counter grows.
inline void announce(u32* counter) {
  asm volatile("fence.acq_rel.gpu;\nred.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter)
               : "memory");
}

// A counter in memory that may hold anything: a stamp of 48 bits, and below it how often threads
// have arrived there. Whoever shall arrive first makes sure that it bears the launch's own stamp
// (its lower 16 bits are 0): with another one it counts from 0. The last to arrive leaves it at 0.
inline void start_counter(u64* counter, u64 stamp) {
  u64 found;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(counter) : "memory");
  if ((found ^ stamp) >> 16 == 0) return;
  asm volatile(
      "{ .reg .b64 old; atom.relaxed.gpu.global.cas.b64 old, [%0], %1, %2; }" ::"l"(counter),
      "l"(found), "l"(stamp)
      : "memory");
}

// atom.acq_rel.gpu.add: announces `count`, and hears of all that was announced there. Returns how
// many were there before.
inline u32 arrive(u64* counter, u32 count) {
  u64 before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(counter), "l"(u64{count})
               : "memory");
  return static_cast<u32>(before & 0xffff);
}

// ld.acquire.gpu in a loop: returns once the counter has reached `count`.
inline void await(const u32* counter, u32 count) {
  u32 x;
  for (;;) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
    if (x >= count) return;
    asm volatile("nanosleep.u32 64;");
  }
}

// griddepcontrol.wait: the kernels before this one are complete and their writes visible.
inline void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// griddepcontrol.launch_dependents: the next kernel may start, up to its grid_dependency_wait.
inline void grid_dependents_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// red.global.add: sums to which many blocks add, in whatever order they come; nothing comes back.
inline void add_to(float* sum, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(sum), "f"(x) : "memory");
}
inline void add_to(double* sum, double x) {
  asm volatile("red.global.add.f64 [%0], %1;" ::"l"(sum), "d"(x) : "memory");
}

// Neighbours from a multiple of 16 bytes on, each by itself; floats in one instruction from Hopper
// on.
inline void add_vector_to(float* sums, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sums), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
#else
  for (i32 i = 0; i < 4; ++i) add_to(sums + i, x[i]);
#endif
}
inline void add_vector_to(double* sums, const double (&x)[2]) {
  for (i32 i = 0; i < 2; ++i) add_to(sums + i, x[i]);
}

// red.relaxed.gpu.global.or: bits that stay set in a word.
inline void set_bits(u32* word, u32 bits) {
  asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(word), "r"(bits) : "memory");
}

// red.relaxed.gpu.global.max of what is not negative: such floats are in the order of their bits.
inline void raise_to(float* number, float x) {
  asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(number),
               "r"(__builtin_bit_cast(u32, x))
               : "memory");
}

// st.relaxed.sys.global: 1 in a byte of pinned memory, for the host to read.
inline void set_flag(u8* flag) {
  asm volatile("st.relaxed.sys.global.u8 [%0], %1;" ::"l"(flag), "r"(1) : "memory");
}

// %cluster_ctarank, %cluster_nctarank: which block of its cluster, of how many.
inline u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
inline u32 cluster_size() {
  u32 size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// mapa: where an address of this block's shared memory lies in that of block `rank`.
inline u32 map_shared(u32 address, u32 rank) {
  u32 mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// barrier.cluster.arrive, .wait: all threads of all blocks that have not ended, whole warps. What
// was done before an arrival comes before what is done after the wait; relaxed: that a block has
// begun, and mbarriers before fence_mbarrier_init, alone.
inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
inline void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// ld.shared::cluster / st.shared::cluster
inline u32 load_cluster(u32 address) {
  u32 x;
  asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
inline U32x4 load_cluster_x4(u32 address) {
  U32x4 x;
  asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
               : "r"(address)
               : "memory");
  return x;
}
inline void store_cluster(u32 address, u32 x) {
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
inline void store_cluster_x4(u32 address, U32x4 x) {
  asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.word[0]),
               "r"(x.word[1]), "r"(x.word[2]), "r"(x.word[3])
               : "memory");
}

}  // namespace fulmen::ptx
