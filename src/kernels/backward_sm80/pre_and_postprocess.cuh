// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The kernels around backward_sm80: backward_preprocess_sm80 before it, backward_postprocess_sm80
// after it, and backward_dbias_sm80 before or after.
#pragma once

#include "kernels/backward_sm80/config.h"
#include "kernels/backward_sm80/dq.cuh"
#include "kernels/common/array_access.cuh"
#include "kernels/common/documents_sm80.cuh"
#include "kernels/common/faults.cuh"
#include "kernels/common/head.cuh"
#include "kernels/common/tile_copy_sm80.cuh"
#include "kernels/common/tile_tasks.cuh"
#include "kernels/naive/naive.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"

namespace fulmen {

// ---- backward_preprocess_sm80 -------------------------------------------------------------------

// What backward_sm80 needs of every query row (RowStatsSm80), from the softmax that the forward
// pass kept, sinks, the gradient that arrives through lse, and D = dot(dO, O). Rows of a tile that
// are past the end of their sequence are filled up so that they count for nothing. Any dtype,
// stride and alignment. Launched with one block for each of num_q_tiles().

inline constexpr i32 kSm80PreprocessThreads = 256;
inline constexpr i32 kSm80ThreadsPerRow = 8;

template <BackwardSm80Config kConfig>
struct BackwardPreprocessSm80 {
  using HeadType = BackwardHeadOf<kConfig>;
  using Source = ElementRows<kConfig.element_bytes()>;
  static constexpr i32 kStep = kSm80PreprocessThreads / kSm80ThreadsPerRow;
  static constexpr i32 kRowsOfThread = (kConfig.q_rows + kStep - 1) / kStep;
  static constexpr i32 kVectors = max(4 / kRowsOfThread, 1);  // of a row, read at once by a thread
  static constexpr i32 kAcross = Source::kVectorElems * kSm80ThreadsPerRow;  // by all threads
  static_assert(kConfig.q_rows <= kSm80PreprocessThreads);

  const AttentionParams& p;
  const HeadType& head;
  Source o, dout;
  i32 lane = static_cast<i32>(ptx::thread_index()) % kSm80ThreadsPerRow;  // of the row

  BackwardPreprocessSm80(const AttentionParams& params, const HeadType& head_)
      : p(params),
        head(head_),
        o(p.o, head.q_row(p.o, 0), head.sequence.shape.q_len, p.dim_v),
        dout(p.dout, head.q_row(p.dout, 0), head.sequence.shape.q_len, p.dim_v) {}

  // Sum over the elements of two vectors of 16 bytes.
  static float vector_dot(const ptx::U32x4& a, const ptx::U32x4& b) {
    float sum = 0;
#pragma unroll
    for (i32 w = 0; w < 4; ++w) {
      if constexpr (kConfig.dtype == DType::kFloat32) {
        sum = ptx::fma(__builtin_bit_cast(float, a.word[w]), __builtin_bit_cast(float, b.word[w]),
                       sum);
      } else {
        const auto number = [](u32 bits) {
          return widen(typename HeadType::Element{static_cast<u16>(bits)});
        };
        sum = ptx::fma(number(a.word[w] & 0xffff), number(b.word[w] & 0xffff), sum);
        sum = ptx::fma(number(a.word[w] >> 16), number(b.word[w] >> 16), sum);
      }
    }
    return sum;
  }

  ptx::U32x4 vector(const Source& from, i64 i, i32 d) const {
    if (i >= from.num_rows || d >= from.dim) return {};
    const i64 offset = (i * from.row_stride + d) * kConfig.element_bytes();
    return ptx::load_global_x4(reinterpret_cast<const u16*>(from.data + offset));
  }

  // This thread's parts of dot(dO, O) of rows i, i + kStep, ..: all reads come before the sums.
  void parts_of_dots(i64 i, float (&D)[kRowsOfThread]) const {
#pragma unroll
    for (i32 r = 0; r < kRowsOfThread; ++r) D[r] = 0;
    if constexpr (!kConfig.aligned) {
#pragma unroll 1
      for (i32 r = 0; r < kRowsOfThread; ++r) {
        if (i + r * kStep < o.num_rows) D[r] = part_of_any_dot(i + r * kStep);
      }
    }
#pragma unroll 1
    for (i32 d = Source::kVectorElems * lane; kConfig.aligned && d < o.dim;
         d += kVectors * kAcross) {
      ptx::U32x4 x[kRowsOfThread][kVectors], y[kRowsOfThread][kVectors];
#pragma unroll
      for (i32 r = 0; r < kRowsOfThread; ++r) {
#pragma unroll
        for (i32 e = 0; e < kVectors; ++e) {
          x[r][e] = vector(o, i + r * kStep, d + e * kAcross);
          y[r][e] = vector(dout, i + r * kStep, d + e * kAcross);
        }
      }
#pragma unroll
      for (i32 r = 0; r < kRowsOfThread; ++r) {
#pragma unroll
        for (i32 e = 0; e < kVectors; ++e) D[r] += vector_dot(x[r][e], y[r][e]);
      }
    }
  }
  __attribute__((noinline)) float part_of_any_dot(i64 i) const {
    float sum = 0;
    const i64 o_row = head.q_row(p.o, i), dout_row = head.q_row(p.dout, i);
    for (i64 d = lane; d < p.dim_v; d += kSm80ThreadsPerRow) {
      sum += load_real_called<float>(p.o, o_row + d * p.o.strides[3]) *
             load_real_called<float>(p.dout, dout_row + d * p.dout.strides[3]);
    }
    return sum;
  }

  // All of a row but D.
  struct SavedRow {
    typename HeadType::State state{0, 0};
    float dL = 0;
  };
  SavedRow load_saved(i64 i) const {
    return {saved_state(head, i, load), lse_gradient(head, i, load)};
  }
  // A number of LSE, stats or dlse. Inlined: a call would wait for the load.
  static float load(const ArrayView& array, i64 offset) {
    if constexpr (!kConfig.aligned) return load_real_called<float>(array, offset);
    return reinterpret_cast<const float*>(array.data)[offset];
  }

  RowStatsSm80 row_of(const SavedRow& saved, float D) const {
    const auto& state = saved.state;
    RowStatsSm80 row{0, kInfinity<float>, 0, 1};
    if (state.row_sum == 0) return row;
    row.row_max = state.row_max;
    float sum = state.row_sum;
    if (p.sinks.present()) {
      const float top = ptx::max(row.row_max, head.sink);
      const float keys = sum * ptx::exp2((row.row_max - top) * kLog2E<float>);
      const float total = keys + ptx::exp2((head.sink - top) * kLog2E<float>);
      if constexpr (kConfig.split_sum) {
        row.share = keys / total;
      } else {
        row.row_max = top;
        sum = total;
      }
    }
    row.sum_log2 = ptx::log2(sum) - static_cast<float>(kConfig.p_shift());
    if (state.row_max != state.row_max) row.sum_log2 = state.row_max;
    row.offset = saved.dL - row.share * D;
    if (row.sum_log2 != row.sum_log2) row.offset = row.sum_log2;  // NaN reaches every pair
    return row;
  }

  // The keys that rows from `first` on may see, all threads together.
  KeyRangeSm80 key_bounds_of(i64 first) const {
    const i32 count = min(o.num_rows - static_cast<i32>(first), kConfig.q_rows);
    if (count <= 0) return {0, 0};
    const DocumentBoundsSm80<BackwardHeadOf<kConfig>, kSm80PreprocessThreads> documents{
        head, static_cast<i32>(first), count, ptx::dynamic_shared()};
    const Interval bounds =
        documents.find({head.columns(first).begin, head.columns(first + count - 1).end});
    return {static_cast<i32>(bounds.begin), static_cast<i32>(bounds.end)};
  }

  // The rows of the tile that begins at row `first`.
  void run(i64 first, u8* to, KeyRangeSm80* bounds_to) const {
    const i32 thread = static_cast<i32>(ptx::thread_index());
    const bool counts = thread < kConfig.q_rows && first + thread < o.num_rows;
    SavedRow saved;  // of row `thread`; its state is on the way while the sums are formed
    if (counts) saved = load_saved(first + thread);
    const u32 sums = ptx::dynamic_shared();
    KeyRangeSm80 bounds{};
    if constexpr (kConfig.score.documents) bounds = key_bounds_of(first);
    float D[kRowsOfThread];
    parts_of_dots(first + thread / kSm80ThreadsPerRow, D);
#pragma unroll
    for (i32 r = 0; r < kRowsOfThread; ++r) {
#pragma unroll
      for (u32 distance = 1; distance < kSm80ThreadsPerRow; distance *= 2) {
        D[r] += ptx::shuffle_xor(D[r], distance);
      }
      const i32 at = thread / kSm80ThreadsPerRow + r * kStep;
      if (lane == 0 && at < kConfig.q_rows)
        ptx::store_shared(sums + at * 4, __builtin_bit_cast(u32, D[r]));
    }
    ptx::block_sync();  // all warps -> D of every row
    if (thread >= kConfig.q_rows) return;
    const float sum = __builtin_bit_cast(float, ptx::load_shared(sums + thread * 4));
    const RowStatsSm80 row = row_of(saved, sum);
    reinterpret_cast<RowStatsSm80*>(to)[thread] = row;
    to += kConfig.q_rows * sizeof(RowStatsSm80);
    const Interval seen = counts ? head.columns(first + thread) : Interval{0, 0};
    reinterpret_cast<KeyRangeSm80*>(to)[thread] = {static_cast<i32>(seen.begin),
                                                   static_cast<i32>(seen.end)};
    if constexpr (kConfig.score.documents) {
      to += kConfig.q_rows * sizeof(KeyRangeSm80);
      reinterpret_cast<i64*>(to)[thread] = counts ? document_of_row(head, first + thread) : 0;
      if (thread == 0) *bounds_to = bounds;
    }
  }
};

template <BackwardSm80Config kConfig>
void backward_preprocess_sm80(const BackwardSm80Params& params) {
  const AttentionParams& p = params.attention;
  if constexpr (kConfig.hopper) ptx::grid_dependents_launch();
  record_faults(p, kSm80PreprocessThreads);
  const u32 tile = ptx::block_index();
  const u32 num_slots = static_cast<u32>(num_q_slots(p, kConfig.q_rows));
  const u32 batch_head = tile / num_slots, heads = static_cast<u32>(p.heads_q);
  const TileTask task{batch_head / heads, batch_head % heads, tile % num_slots};
  const TilePlace place = find_tile(p, p.cu_q, task, kConfig.q_rows);
  if (place.first_row < 0) return;  // offsets out of order
  const BackwardHeadOf<kConfig> head(p, place.index, task.head);
  if constexpr (kConfig.dq) {
    if (tile < params.groups.ahead * params.groups.m_blocks) {
      zero_dq_accum<kConfig, kSm80PreprocessThreads>(params, tile);
    }
  }
  u8* const saved = params.row_stats + i64{tile} * kConfig.row_bytes();
  BackwardPreprocessSm80<kConfig>(p, head).run(place.first_row, saved, params.key_bounds + tile);
}

// ---- backward_postprocess_sm80 ------------------------------------------------------------------

// The float32 sums of dQ become dq. And where backward_sm80 has marked a tile, rows of dq, dk or dv
// that are not finite are computed again by backward_naive, which reads visible pairs alone: NaN
// that only hidden pairs hold goes, NaN that belongs there comes back. Launched with
// sm80_postprocess_blocks().

inline constexpr i32 kSm80PostprocessThreads = 256;

template <BackwardSm80Config kConfig>
struct BackwardPostprocessSm80 {
  const BackwardSm80Params& params;
  const AttentionParams& p;

  explicit BackwardPostprocessSm80(const BackwardSm80Params& params_)
      : params(params_), p(params_.attention) {}

  static i32 thread() { return static_cast<i32>(ptx::thread_index()); }

  __attribute__((noinline)) static void recompute_dq(const AttentionParams& p,
                                                     const RowTask& task) {
    backward_naive_dq_row<BackwardHeadOf<kConfig>>(p, task);
  }
  __attribute__((noinline)) static void recompute_dkdv(const AttentionParams& p,
                                                       const RowTask& task) {
    backward_naive_dkdv_row<BackwardHeadOf<kConfig>>(p, task);
  }

  static bool all_finite(const ArrayView& array, const RowTask& task, i64 chunk, i64 dim) {
    const i64 first = chunk * kNaiveChunk;
    const i64 offset = array.offset(task.batch, task.head, task.row, first);
    float sum = 0;  // of x - x: 0, or NaN
    for (i64 d = 0; d < min(kNaiveChunk, dim - first); ++d) {
      const float x = load_real_called<float>(array, offset + d * array.strides[3]);
      sum += x - x;
    }
    return sum == 0;
  }

  void recompute_rows(const BackwardHeadOf<kConfig>& head, i64 first) const {
    const Sequence& sequence = head.sequence;
    const i64 chunks = num_chunks(p.dim_qk);
    const i64 count = clamp<i64>(sequence.shape.q_len - first, 0, kConfig.q_rows);
    for (i64 at = thread(); at < count * chunks; at += kSm80PostprocessThreads) {
      const RowTask task{sequence.batch, head.head, sequence.q_begin + first + at / chunks,
                         at % chunks};
      if (!all_finite(p.dq, task, task.chunk, p.dim_qk)) recompute_dq(p, task);
    }
  }

  void recompute_keys(const BackwardHeadOf<kConfig>& head, i64 first) const {
    const Sequence& sequence = head.sequence;
    const i64 chunks = dkdv_chunks(p);
    const i64 count = clamp<i64>(sequence.shape.kv_len - first, 0, kConfig.kv_rows);
    for (i64 at = thread(); at < count * chunks; at += kSm80PostprocessThreads) {
      const RowTask task{sequence.batch, head.kv_head, sequence.kv_begin + first + at / chunks,
                         at % chunks};
      const bool is_dk = task.chunk < dk_chunks(p);
      const bool finite = is_dk ? all_finite(p.dk, task, task.chunk, p.dim_qk)
                                : all_finite(p.dv, task, task.chunk - dk_chunks(p), p.dim_v);
      if (!finite) recompute_dkdv(p, task);
    }
  }

  // Tile `number` of queries.
  void finish_rows(i64 number) const {
    const i64 num_slots = num_q_slots(p, kConfig.q_rows);
    const i64 batch_head = number / num_slots;
    const TileTask task{batch_head / p.heads_q, batch_head % p.heads_q, number % num_slots};
    const TilePlace place = find_tile(p, p.cu_q, task, kConfig.q_rows);
    if (!p.dq.present() || place.first_row < 0) return;
    const BackwardHeadOf<kConfig> head(p, place.index, task.head);
    ConvertDqSm80<kConfig>{head, place.first_row, params.dq_accum + number * kConfig.dq_elems()}
        .run(kSm80PostprocessThreads / 32);
    if (params.nonfinite_m_blocks[number] == 0) return;
    ptx::block_sync();  // all warps -> dq of the tile
    recompute_rows(head, place.first_row);
  }

  // Tile `number` of keys.
  void finish_keys(i64 number) const {
    const i64 num_slots = num_kv_slots(p, kConfig.kv_rows);
    const i64 batch_head = number / num_slots;
    const TileTask task{batch_head / p.heads_kv, batch_head % p.heads_kv, number % num_slots};
    const TilePlace place = find_tile(p, p.cu_kv, task, kConfig.kv_rows);
    recompute_keys(BackwardHeadOf<kConfig>(p, place.index, task.head * p.group_size()),
                   place.first_row);
  }

  // Tiles of keys whose mark is set, of 32 from `first` on.
  void finish_marked_keys(i64 first) const {
    const i64 own = first + lane_index();
    const bool is_marked =
        own < num_kv_tiles(p, kConfig.kv_rows) && params.nonfinite_n_blocks[own] != 0;
    u32 marked = ptx::ballot(is_marked);
    for (i64 number = first; marked != 0; ++number, marked >>= 1) {
      if ((marked & 1) != 0) finish_keys(number);
    }
  }

  void run() const {
    const i64 block = ptx::block_index();
    const i64 row_tiles = num_q_tiles(p, kConfig.q_rows);
    if (block < row_tiles) {
      finish_rows(row_tiles - 1 - block);  // of the last heads the sums are in the L2 still
    } else {
      finish_marked_keys((block - row_tiles) * kSm80MarkedBlocks);
    }
  }
};

template <BackwardSm80Config kConfig>
void backward_postprocess_sm80(const BackwardSm80Params& params) {
  if constexpr (kConfig.hopper) ptx::grid_dependency_wait();
  BackwardPostprocessSm80<kConfig>(params).run();
}

// ---- backward_dbias_sm80 ------------------------------------------------------------------------

// Zeros to dbias before backward_sm80, for pairs that it never computes; or after it, with
// config.accumulates_dbias, its float32 sums. Any number of blocks.

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
