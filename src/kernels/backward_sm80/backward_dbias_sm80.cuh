// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// dbias, which is dS: copied from its tiles in shared memory (config.tiled_dbias), or stored pair
// by pair, or added to float32 sums where several pairs share one element. backward_sm80 does that;
// the kernel backward_dbias_sm80 writes zeros before it, for pairs that it never computes, or
// rounds the sums after it (config.accumulates_dbias), with any number of blocks.
#pragma once

#include "kernels/backward_sm80/softmax.cuh"
#include "kernels/common/array_access.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/memory.cuh"

namespace fulmen {

template <BackwardSm80Config kConfig>
struct BackwardDbiasSm80 {
  using Step = BackwardStepSm80<kConfig>;
  using Part = BackwardPartSm80;

  const BackwardSm80Params& params;

  // The tile of dS of a step, by all threads of the block.
  void copy(const BackwardStorageSm80<kConfig>& storage, const Step& step) const {
    constexpr i32 kVectors = kConfig.kv_rows / 8;
    const ArrayView& dbias = params.attention.dbias;
    const SequenceShape& shape = step.head.sequence.shape;
    const auto tile = storage.ds_tile(step.pair_stage);
    u16* const to = reinterpret_cast<u16*>(dbias.data) +
                    dbias.offset(step.head.index, step.head.head, step.first_row, step.first_key);
#pragma unroll
    for (i32 i = 0; i < kConfig.q_rows * kVectors; i += kConfig.threads()) {
      const i32 at = i + static_cast<i32>(ptx::thread_index());
      const i32 row = at / kVectors, vector = at % kVectors;
      if (row < kConfig.q_rows && step.first_row + row < shape.q_len &&
          step.first_key + 8 * vector < shape.kv_len) {
        const u32 from = tile.address(static_cast<u32>(row), static_cast<u32>(vector));
        ptx::store_global_x4(to + row * dbias.strides[2] + 8 * vector, ptx::load_shared_x4(from));
      }
    }
  }

  // dS of hidden pairs becomes 0, whatever it was.
  static void hide(typename Step::Scores& dS, const typename Step::Scores& P) {
#pragma unroll
    for (i32 t = 0; t < Step::kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < Step::kFloats; ++i) dS[t][i] = is_hidden_weight(P[t][i]) ? 0.f : dS[t][i];
    }
  }

  // Pair by pair, after hide().
  void take(const typename Step::Scores& dS, const Step& step, const Part& part) const {
    const SequenceShape& shape = step.head.sequence.shape;
    const i64 key = step.first_key + part.column + Step::Fragments::column(0);
    const i32 num_keys = static_cast<i32>(shape.kv_len - key);
#pragma unroll
    for (i32 t = 0; t < Step::kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const i64 row = step.first_row + part.row + Step::Fragments::row(t, h);
        if (row < shape.q_len) take_row(dS[t], h, step, row, key, num_keys);
      }
    }
  }

 private:
  // Row h of the thread's two, of which `num_keys` count.
  void take_row(const float (&dS)[Step::kFloats], i32 h, const Step& step, i64 row, i64 key,
                i32 num_keys) const {
    const AttentionParams& p = params.attention;
    const i64 index = p.dbias_extents[0] == 1 ? 0 : step.head.index;
    const i64 head = p.dbias_extents[1] == 1 ? 0 : step.head.head;
    if constexpr (kConfig.accumulates_dbias) {
      float* const to =
          params.dbias_accum +
          ((index * p.dbias_extents[1] + head) * p.dbias_extents[2] + row) * p.dbias_extents[3] +
          key;
      each(dS, h, num_keys, [&](i32 at, float x) { ptx::reduce_add(to + at, x); });
    } else {
      const i64 to = p.dbias.offset(index, head, row, key);
      each(dS, h, num_keys,
           [&](i32 at, float x) { store_real_called(p.dbias, to + at * p.dbias.strides[3], x); });
    }
  }

  template <class Take>
  static void each(const float (&dS)[Step::kFloats], i32 h, i32 num_keys, const Take& take_one) {
#pragma unroll
    for (i32 f = 2 * h; f < Step::kFloats; f += 4) {
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        const i32 at = 8 * (f / 4) + e;
        if (at < num_keys) take_one(at, dS[f + e]);
      }
    }
  }
};

inline constexpr i32 kSm80DbiasThreads = 256;

template <BackwardSm80Config kConfig>
void backward_dbias_sm80(const BackwardSm80Params& params) {
  const AttentionParams& p = params.attention;
  const i64(&extents)[4] = p.dbias_extents;
  const i64 num_rows = extents[0] * extents[1] * extents[2];
  for (i64 row = ptx::block_index(); row < num_rows; row += ptx::num_blocks()) {
    const i64 batch_head = row / extents[2];
    const i64 to =
        p.dbias.offset(batch_head / extents[1], batch_head % extents[1], row % extents[2], 0);
    if constexpr (kConfig.tiled_dbias) {
      u16* const row_to = reinterpret_cast<u16*>(p.dbias.data) + to;
      for (i64 key = 8 * ptx::thread_index(); key < extents[3]; key += 8 * kSm80DbiasThreads) {
        ptx::store_global_x4(row_to + key, {});
      }
      continue;
    }
    for (i64 key = ptx::thread_index(); key < extents[3]; key += kSm80DbiasThreads) {
      const float x = kConfig.accumulates_dbias ? params.dbias_accum[row * extents[3] + key] : 0.f;
      store_real(p.dbias, to + key * p.dbias.strides[3], x);
    }
  }
}

}  // namespace fulmen
