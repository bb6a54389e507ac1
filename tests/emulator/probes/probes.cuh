// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The probes' kernel: the same text on a GPU and in the emulator.
#pragma once

#include "kernels/ptx/cp_async.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/mma.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/ptx/tma.cuh"
#include "probes/probes.h"

namespace fulmen {

inline float as_float(u32 bits) { return __builtin_bit_cast(float, bits); }
inline u32 as_bits(float x) { return __builtin_bit_cast(u32, x); }

template <DType kDType>  // kFloat32: TF32
inline void probe_mma(const ProbeParams& p) {
  const u32 lane = ptx::thread_index();
  for (i32 i = 0; i < p.count; ++i) {
    const u32* const in = p.in + (i * 32 + lane) * 10;
    const u32 a[4] = {in[0], in[1], in[2], in[3]};
    float d[4] = {as_float(in[6]), as_float(in[7]), as_float(in[8]), as_float(in[9])};
    if constexpr (kDType == DType::kFloat32) {
      ptx::mma_m16n8k8_tf32(d, a, in[4], in[5]);
    } else {
      ptx::mma_m16n8k16<kDType>(d, a, in[4], in[5]);
    }
    for (u32 j = 0; j < 4; ++j) p.out[(i * 32 + lane) * 4 + j] = as_bits(d[j]);
  }
}

template <bool kTransposed>
inline void probe_ldmatrix(const ProbeParams& p) {
  const u32 lane = ptx::thread_index();
  const u32 shared = ptx::dynamic_shared();
  for (u32 word = lane; word < 512; word += 32) ptx::store_shared(shared + 4 * word, p.in[word]);
  ptx::warp_sync();
  const u32 row = shared + 16 * p.in[512 + lane];
  const ptx::U32x4 x = kTransposed ? ptx::ldmatrix_x4_trans(row) : ptx::ldmatrix_x4(row);
  for (u32 i = 0; i < 4; ++i) p.out[4 * lane + i] = x.word[i];
}

template <bool kTransposed>
inline void probe_stmatrix(const ProbeParams& p) {
  const u32 lane = ptx::thread_index();
  const u32 shared = ptx::dynamic_shared();
  for (u32 word = lane; word < 512; word += 32) ptx::store_shared(shared + 4 * word, 0);
  ptx::warp_sync();
  const u32* const in = p.in + 5 * lane;
  const ptx::U32x4 x{{in[0], in[1], in[2], in[3]}};
  const u32 row = shared + 16 * in[4];
  kTransposed ? ptx::stmatrix_x4_trans(row, x) : ptx::stmatrix_x4(row, x);
  ptx::warp_sync();
  for (u32 word = lane; word < 512; word += 32) p.out[word] = ptx::load_shared(shared + 4 * word);
}

inline void probe_shuffles(const ProbeParams& p) {
  const u32 lane = ptx::thread_index();
  const u32 x = p.in[2 * lane];
  u32* out = p.out + lane;
  const auto give = [&out](u32 word) {
    *out = word;
    out += 32;
  };
  for (u32 mask = 1; mask < 32; mask += 2) give(ptx::shuffle_xor(x, mask));
  for (u32 mask = 1; mask < 32; mask *= 2) give(as_bits(ptx::shuffle_xor(as_float(x), mask)));
  const u64 wide = u64{x} << 32 | lane;
  const u64 other = __builtin_bit_cast(u64, ptx::shuffle_xor(__builtin_bit_cast(double, wide), 5));
  give(u32(other));
  give(u32(other >> 32));
  give(u32(ptx::shuffle(i32(x), p.in[2 * lane + 1])));
  give(u32(ptx::broadcast(i32(x))));
  give(ptx::any(x == p.in[14]));
  give(ptx::any(false));
  const u32 votes = ptx::ballot(x % 3 == 0);
  give(votes);
  give(u32(ptx::count_ones(votes)));
}

inline void probe_numbers(const ProbeParams& p) {
  for (i32 i = i32(ptx::thread_index()); i < p.count; i += 32) {
    const float x = as_float(p.in[i]);
    u32& out = p.out[i];
    if (p.probe == Probe::kExp2) out = as_bits(ptx::exp2(x));
    if (p.probe == Probe::kLog2) out = as_bits(ptx::log2(x));
    if (p.probe == Probe::kReciprocal) out = as_bits(ptx::reciprocal(x));
    if (p.probe == Probe::kExp) out = as_bits(ptx::accurate_exp(x));
    if (p.probe == Probe::kLog) out = as_bits(ptx::accurate_log(x));
    if (p.probe == Probe::kTanh) out = as_bits(ptx::accurate_tanh(x));
  }
}

inline void probe_pack(const ProbeParams& p) {
  for (i32 i = i32(ptx::thread_index()); i < p.count; i += 32) {
    const float low = as_float(p.in[2 * i]), high = as_float(p.in[2 * i + 1]);
    p.out[2 * i] = ptx::pack<DType::kBFloat16>(low, high);
    p.out[2 * i + 1] = ptx::pack<DType::kFloat16>(low, high);
  }
}

inline void probe_pack_e4m3(const ProbeParams& p) {
  for (i32 i = i32(ptx::thread_index()); i < p.count; i += 32) {
    const u32* const in = p.in + 4 * i;
    const u32 bytes =
        ptx::pack_e4m3(as_float(in[0]), as_float(in[1]), as_float(in[2]), as_float(in[3]));
    const ptx::U32x2 pairs = ptx::widen_e4m3(bytes);
    p.out[3 * i] = bytes;
    p.out[3 * i + 1] = pairs.word[0];
    p.out[3 * i + 2] = pairs.word[1];
  }
}

inline void probe_exact(const ProbeParams& p) {
  for (i32 i = i32(ptx::thread_index()); i < p.count; i += 32) {
    const float a = as_float(p.in[3 * i]), b = as_float(p.in[3 * i + 1]),
                c = as_float(p.in[3 * i + 2]);
    p.out[4 * i] = as_bits(ptx::max(a, b));
    p.out[4 * i + 1] = as_bits(ptx::fma(a, b, c));
    p.out[4 * i + 2] = as_bits(ptx::mul(a, b));
    p.out[4 * i + 3] = as_bits(ptx::larger(b, c));
  }
}

inline void probe_sums(const ProbeParams& p) {
  const u32 lane = ptx::thread_index();
  const float x = as_float(p.in[lane]);
  float* const sums = reinterpret_cast<float*>(p.out);
  ptx::reduce_add_x4(sums, x, -x, 2 * x, x + 1);
  ptx::reduce_add(sums + 4, x);
  ptx::add_to(sums + 5, x);
  ptx::add_to(reinterpret_cast<double*>(p.out + 6), double(x) / 3);
  ptx::add_vector_to(sums + 8, {x, x, -x, 1.f});
  ptx::atomic_add(p.out + 12, lane);
  ptx::atomic_inc(p.out + 13, 9);
  ptx::set_bits(p.out + 14, 1u << (lane % 7));
  ptx::announce(p.out + 15);
  ptx::await(p.out + 15, 32);
}

inline void probe_cp_async(const ProbeParams& p) {
  const u32 lane = ptx::thread_index();
  const u32 shared = ptx::dynamic_shared();
  for (u32 i = 0; i < 4; ++i) {
    const u32 unit = 32 * i + lane;
    ptx::cp_async_16(shared + 16 * unit, reinterpret_cast<const u8*>(p.in) + 16 * unit,
                     unit % 3 != 0);
    ptx::cp_async_commit();
  }
  ptx::cp_async_wait<0>();
  ptx::warp_sync();
  for (u32 word = lane; word < 512; word += 32) p.out[word] = ptx::load_shared(shared + 4 * word);
}

inline void probe_warp(const ProbeParams& p) {
  switch (p.probe) {
    case Probe::kMmaBFloat16:
      return probe_mma<DType::kBFloat16>(p);
    case Probe::kMmaFloat16:
      return probe_mma<DType::kFloat16>(p);
    case Probe::kMmaTf32:
      return probe_mma<DType::kFloat32>(p);
    case Probe::kLdmatrix:
      return probe_ldmatrix<false>(p);
    case Probe::kLdmatrixTransposed:
      return probe_ldmatrix<true>(p);
    case Probe::kStmatrix:
      return probe_stmatrix<false>(p);
    case Probe::kStmatrixTransposed:
      return probe_stmatrix<true>(p);
    case Probe::kShuffles:
      return probe_shuffles(p);
    case Probe::kPack:
      return probe_pack(p);
    case Probe::kPackE4M3:
      return probe_pack_e4m3(p);
    case Probe::kExact:
      return probe_exact(p);
    case Probe::kSums:
      return probe_sums(p);
    case Probe::kCpAsync:
      return probe_cp_async(p);
    default:
      return probe_numbers(p);
  }
}

// Of a 128-byte swizzle: 16-byte units of a row, exchanged by the row's number.
inline u32 probe_swizzled(u32 address) { return address ^ (((address >> 7) & 7) << 4); }

constexpr i32 kProbeAWords = 2048;
constexpr i32 kProbeBWords = 8192;

template <DType kDType, bool kTransposed, i32 kFloats, bool kRegisters, bool kPlain>
inline void probe_wgmma(const ProbeParams& p) {
  constexpr u32 kUpper = kPlain ? ptx::plain_strides(256) : ptx::kSwizzledRows;
  const u32 thread = ptx::thread_index();
  const u32 shared = ptx::dynamic_shared();
  for (u32 word = thread; word < kProbeAWords + kProbeBWords; word += 128) {
    const u32 address = shared + 4 * word;
    ptx::store_shared(kPlain ? address : probe_swizzled(address), p.in[word]);
  }
  ptx::fence_proxy_async();
  ptx::block_sync();
  const u32* const in = p.in + kProbeAWords + kProbeBWords + thread * kFloats;
  for (i32 k = 0; k < p.count; ++k) {  // steps of 32 bytes along K
    float d[kFloats];
#pragma unroll
    for (i32 i = 0; i < kFloats; ++i) d[i] = as_float(in[i]);
    const u32 b = shared + 4 * kProbeAWords;
    // K runs along a row of 128 bytes; K x N: from row to row. Plain: two units of 8 columns.
    const u32 a_step = kPlain ? 4096u * k : 32u * k;
    const u32 b_step = kTransposed ? 2048u * k : a_step;
    const u32 leading = kTransposed ? 8192 : kPlain ? 128 : 0;
    const u32 right = ptx::wgmma_descriptor(b + b_step, leading);
    ptx::wgmma_fence();
    if constexpr (kRegisters) {
      const u32* const a = p.in + 4 * (thread + 128 * u32(k));
      ptx::wgmma_rs<kDType, kTransposed, kUpper>(d, a[0], a[1], a[2], a[3], right, true);
    } else {
      const u32 left = ptx::wgmma_descriptor(shared + a_step, leading);
      ptx::wgmma_ss<kDType, kTransposed, kUpper>(d, left, right, k != 1);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(d);
#pragma unroll
    for (i32 i = 0; i < kFloats; ++i) p.out[(128 * k + thread) * kFloats + i] = as_bits(d[i]);
  }
}

inline void probe_warpgroup(const ProbeParams& p) {
  switch (p.probe) {
    case Probe::kWgmmaRows64:
      return probe_wgmma<DType::kBFloat16, false, 32, false, false>(p);
    case Probe::kWgmmaRows256:
      return probe_wgmma<DType::kBFloat16, false, 128, false, false>(p);
    case Probe::kWgmmaColumns:
      return probe_wgmma<DType::kFloat16, true, 64, false, false>(p);
    case Probe::kWgmmaRegisters:
      return probe_wgmma<DType::kFloat16, true, 64, true, false>(p);
    case Probe::kWgmmaE4M3:
      return probe_wgmma<DType::kFloat8E4M3, false, 64, false, false>(p);
    case Probe::kWgmmaE4M3Registers:
      return probe_wgmma<DType::kFloat8E4M3, false, 64, true, false>(p);
    default:
      return probe_wgmma<DType::kBFloat16, false, 32, false, true>(p);
  }
}

// Waits for `bytes` that `copy` asks for on a fresh barrier.
template <class Copy>
inline void copy_and_wait(u32 barrier, u32 bytes, const Copy& copy) {
  if (ptx::thread_index() == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::block_sync();
  if (ptx::thread_index() == 0) {
    ptx::mbarrier_arrive_expect(barrier, bytes);
    copy();
  }
  ptx::mbarrier_wait(barrier, 0);
}

inline void probe_tensor_load(const ProbeParams& p, u32 bytes) {
  const u32 thread = ptx::thread_index();
  const u32 shared = ptx::dynamic_shared();
  for (i32 i = 0; i < p.count; ++i) {
    const u32* const at = p.in + 4 * i;
    const u32 barrier = shared + 32768 + 8 * i;
    copy_and_wait(barrier, bytes, [&] {
      ptx::tma_load(shared, p.map, barrier, i32(at[0]), i32(at[1]), i32(at[2]), i32(at[3]));
    });
    for (u32 word = thread; word < bytes / 4; word += 128) {
      p.out[i * bytes / 4 + word] = ptx::load_shared(shared + 4 * word);
    }
    ptx::block_sync();
  }
}

inline void probe_tensor_store(const ProbeParams& p) {
  const u32 shared = ptx::dynamic_shared();
  for (i32 i = 0; i < p.count; ++i) {
    const u32* const at = p.in + 4 * i;
    for (u32 word = ptx::thread_index(); word < 32 * kProbeBoxRows; word += 128) {
      ptx::store_shared(shared + 4 * word, p.in[4 * p.count + i * 32 * kProbeBoxRows + word]);
    }
    ptx::fence_proxy_async();
    ptx::block_sync();
    if (ptx::thread_index() == 0) {
      ptx::tma_store(p.map, shared, i32(at[0]), i32(at[1]), i32(at[2]), i32(at[3]));
      ptx::tma_store_commit();
      ptx::tma_store_wait();
    }
    ptx::block_sync();
  }
}

inline void probe_bulk_load(const ProbeParams& p) {
  const u32 shared = ptx::dynamic_shared();
  copy_and_wait(shared + 32768, 1024, [&] { ptx::bulk_load(shared, p.in, 1024, shared + 32768); });
  for (u32 word = ptx::thread_index(); word < 256; word += 128) {
    p.out[word] = ptx::load_shared(shared + 4 * word);
  }
}

inline void probe_copies(const ProbeParams& p) {
  switch (p.probe) {
    case Probe::kTensorLoad:
      return probe_tensor_load(p, 128 * kProbeBoxRows);
    case Probe::kTensorLoadPlain:
      return probe_tensor_load(p, 16 * kProbeBoxRows);
    case Probe::kTensorStore:
      return probe_tensor_store(p);
    default:
      return probe_bulk_load(p);
  }
}

constexpr u32 kProbeBlockWords = 512;

// A fresh barrier in every block, which the blocks of the cluster know of.
inline void start_cluster(u32 barrier, u32 arrivals, u32 bytes) {
  if (ptx::thread_index() == 0) {
    ptx::mbarrier_init(barrier, arrivals);
    ptx::fence_mbarrier_init();
    if (bytes > 0) ptx::mbarrier_arrive_expect(barrier, bytes);
  }
  ptx::fence_proxy_async();
  ptx::block_sync();
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
}

inline void probe_cluster_access(u32 own, u32* out) {
  const u32 thread = ptx::thread_index(), rank = ptx::cluster_rank(), size = ptx::cluster_size();
  ptx::cluster_sync();
  const u32 next = ptx::map_shared(own, (rank + 1) % size);
  const u32 after = ptx::map_shared(own, (rank + 2) % size);
  out[thread] = thread % 2 == 0 ? rank : size;
  out[128 + thread] = ptx::load_cluster(next + 4 * (127 - thread));
  if (thread < 32) {
    const ptx::U32x4 x = ptx::load_cluster_x4(after + 16 * thread);
    for (u32 i = 0; i < 4; ++i) out[256 + 4 * thread + i] = x.word[i];
  }
  out[384 + thread] = ptx::load_cluster(ptx::map_shared(own, rank) + 4 * thread);
  ptx::cluster_sync();
}

// Sends 128 words to the block before and 64 vectors to the one behind.
inline void probe_cluster_messages(const ProbeParams& p, u32 own, u32* out) {
  const bool counts_arrivals = p.probe == Probe::kClusterStore;
  const u32 thread = ptx::thread_index(), rank = ptx::cluster_rank(), size = ptx::cluster_size();
  const u32 barrier = own + 16384, inbox = own + 4096;
  start_cluster(barrier, counts_arrivals ? 256 : 1, counts_arrivals ? 0 : 1536);
  const u32 before = (rank + size - 1) % size, behind = (rank + 1) % size;
  const u32 words = ptx::map_shared(inbox + 4 * thread, before);
  const u32 vectors = ptx::map_shared(inbox + 512 + 16 * thread, behind);
  const u32 first = ptx::map_shared(barrier, before), second = ptx::map_shared(barrier, behind);
  const u32 x = ptx::load_shared(own + 4 * thread);
  const ptx::U32x4 x4 = ptx::load_shared_x4(own + 16 * (thread % 64));
  if (counts_arrivals) {
    ptx::store_cluster(words, x);
    ptx::mbarrier_arrive_cluster(first);
    if (thread < 64) ptx::store_cluster_x4(vectors, x4);
    ptx::mbarrier_arrive_cluster(second);
  } else if (p.probe == Probe::kClusterStoreAsync) {
    ptx::store_async(words, x, first);
    if (thread < 64) ptx::store_async_x4(vectors, x4, second);
  } else if (thread == 0) {
    ptx::bulk_store_cluster(words, own, 512, first);
    ptx::bulk_store_cluster(vectors, own, 1024, second);
  }
  ptx::mbarrier_wait_cluster(barrier, 0);
  for (u32 i = thread; i < 384; i += 128) out[i] = ptx::load_shared(inbox + 4 * i);
  ptx::cluster_sync();
}

inline void probe_cluster_multicast(const ProbeParams& p, u32 own, u32* out) {
  const u32 thread = ptx::thread_index(), rank = ptx::cluster_rank(), size = ptx::cluster_size();
  const u32 barrier = own + 16384, box = own + 4096, all = (1u << size) - 1;
  constexpr u32 kBytes = 128 * kProbeBoxRows;
  start_cluster(barrier, 1, rank % 2 == 0 ? 2 * kBytes : kBytes);
  if (thread == 0 && rank == 1) {
    ptx::tma_load_multicast(box, p.map, barrier, 0, 2, 1, 0, all & 0x5555);
    ptx::tma_load_multicast(box + kBytes, p.map, barrier, 16, 30, 2, 1, all);
  }
  ptx::mbarrier_wait_cluster(barrier, 0);
  for (u32 i = thread; i < kBytes / 4; i += 128) {  // the first into every second block alone
    out[i] = ptx::load_shared(box + kBytes + 4 * i) ^
             (rank % 2 == 0 ? 3 * ptx::load_shared(box + 4 * i) : 0);
  }
  ptx::cluster_sync();
}

inline void probe_cluster(const ProbeParams& p) {
  const u32 own = ptx::dynamic_shared();
  for (u32 word = ptx::thread_index(); word < 256; word += 128) {
    ptx::store_shared(own + 4 * word, p.in[16 * ptx::cluster_rank() + word]);
  }
  u32* const out = p.out + kProbeBlockWords * ptx::block_index();
  if (p.probe == Probe::kClusterAccess) return probe_cluster_access(own, out);
  if (p.probe == Probe::kClusterMulticast) return probe_cluster_multicast(p, own, out);
  probe_cluster_messages(p, own, out);
}

template <ProbeConfig kConfig>
void probe(const ProbeParams& params) {
  if constexpr (kConfig.family == ProbeFamily::kWarp) probe_warp(params);
  if constexpr (kConfig.family == ProbeFamily::kWarpgroup) probe_warpgroup(params);
  if constexpr (kConfig.family == ProbeFamily::kCopies) probe_copies(params);
  if constexpr (kConfig.family == ProbeFamily::kCluster) probe_cluster(params);
}

}  // namespace fulmen
