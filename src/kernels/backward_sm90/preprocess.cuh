// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The preprocess kernel of the Hopper backward. For every query row: delta = sum over dim of dO O,
// less dlse, and the row's softmax in base 2; rows up to the next multiple of kConversionRows get
// an lse of +inf, so that their P is 0. Also clears the sums of dQ and the counters, and writes two
// tables: KeyBlockInfo and DocumentBlocks. Runs on any GPU; a row is read by threads_per_row()
// neighbouring threads, 16 bytes each.
#pragma once

#include "kernels/backward_sm90/config_beside.h"
#include "kernels/backward_sm90/scheduler.cuh"
#include "kernels/common/documents_sm90.cuh"
#include "kernels/common/faults.cuh"
#include "kernels/common/sequences.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// For sequences whose lengths only the device knows: the order of their blocks of keys, sequences
// with the most queries first (KeyBlockInfo); rows of the gradients that belong to no sequence
// become 0 here too.
struct SequenceScheduler {
  const BackwardPreprocessParams& params;
  i32 lane;

  // Lengths beyond the upper bounds, which a caller promised not to have, are cut off.
  Sequence sequence(i64 index) const {
    Sequence sequence = load_sequence(params.attention, index);
    sequence.shape.q_len = min(sequence.shape.q_len, params.bounds.q_len);
    sequence.shape.kv_len = min(sequence.shape.kv_len, params.bounds.kv_len);
    return sequence;
  }

  // One block for a sequence without keys, so that a work tile writes its dQ.
  i32 num_blocks(const SequenceShape& shape) const {
    return max(i32(ceil_div(shape.kv_len, params.kv_rows)), 1);
  }

  void place(i32 index) const {
    const Sequence own = sequence(index);
    const i32 blocks = num_blocks(own.shape);
    u32 before = 0, all = 0;
#pragma unroll 1
    for (i32 other = lane; other < i32(params.attention.num_sequences); other += 32) {
      const SequenceShape shape = sequence(other).shape;
      const bool is_longer = shape.q_len > own.shape.q_len;
      const u32 count = u32(num_blocks(shape));
      all += count;
      if (is_longer || (shape.q_len == own.shape.q_len && other < index)) before += count;
    }
#pragma unroll
    for (u32 distance = 16; distance >= 1; distance /= 2) {
      before += ptx::shuffle_xor(before, distance);
      all += ptx::shuffle_xor(all, distance);
    }
    const KeyBlockInfo place{
        index, i32(before), blocks, i32(all), i32(own.q_begin), i32(own.kv_begin), own.shape};
    for (i32 block = lane; block < blocks; block += 32)
      params.key_block_infos[i32(before) + block] = place;
  }

  // The last sequence for which `holds`, where it holds up to some sequence and for none after it;
  // sequence 0 if for none. All lanes of a warp, 32 sequences at once.
  template <class Holds>
  i64 last_of_sequences(const Holds& holds) const {
    i64 low = 0, high = params.attention.num_sequences - 1;
#pragma unroll 1
    while (low < high) {
      const i64 step = ceil_div(high - low, 32), index = low + step * (lane + 1);
      const i64 count = ptx::count_ones(ptx::ballot(index <= high && holds(index)));
      low += count * step;
      high = min(high, low + step - 1);
    }
    return low;
  }

  // Rows of the queries, or of the keys, that a sequence has.
  Interval rows_of(bool is_query, i64 index) const {
    const Sequence owner = sequence(index);
    const i64 begin = is_query ? owner.q_begin : owner.kv_begin;
    return {begin, begin + (is_query ? owner.shape.q_len : owner.shape.kv_len)};
  }

  // Whether rows [row, row + 32) are all of one sequence; all lanes of a warp.
  bool are_owned(bool is_query, i64 batch, i64 row) const {
    const AttentionParams& p = params.attention;
    const ArrayView& offsets = is_query ? p.cu_q : p.cu_kv;
    const auto begins = [&](i64 index) {
      return load_index(offsets, index * offsets.strides[3]) <= row;
    };
    const Interval rows = rows_of(is_query, p.packed.q ? last_of_sequences(begins) : batch);
    return rows.begin <= row && row + 32 <= rows.end;
  }

  // Whether a row of the queries, or of the keys, is a row of a sequence.
  bool is_owned(bool is_query, i64 batch, i64 row) const {
    const AttentionParams& p = params.attention;
    const ArrayView& offsets = is_query ? p.cu_q : p.cu_kv;
    return rows_of(is_query, p.packed.q ? find_sequence(p, offsets, row) : batch).contains(row);
  }

  void clear_row(const ArrayView& x, i64 batch, i64 heads, i64 row, i32 dims) const {
    if (!x.present()) return;
    for (i64 head = 0; head < heads; ++head) {
      for (i32 d = 8 * lane; d < dims; d += 256) {
        ptx::store_global_x4(reinterpret_cast<u16*>(x.data) + x.offset(batch, head, row, d), {});
      }
    }
  }

  // Rows of dq, or of dk and dv, that belong to no sequence become 0; backward_sm90 writes all
  // others. 32 rows a warp at a time.
  void clear(bool is_query, u32 warp, u32 warps) const {
    const AttentionParams& p = params.attention;
    const u32 rows = u32(is_query ? p.q_rows : p.kv_rows), all = u32(p.batch_extent()) * rows;
    for (u32 begin = 32 * warp; begin < all; begin += 32 * warps) {
      if (are_owned(is_query, begin / rows, begin % rows)) continue;
      const u32 mine = min(begin + u32(lane), all - 1);
      u32 unowned = ptx::ballot(!is_owned(is_query, mine / rows, mine % rows));
      for (u32 i = begin; unowned != 0 && i < all; ++i, unowned >>= 1) {
        if ((unowned & 1) == 0) continue;
        if (is_query) {
          clear_row(p.dq, i / rows, p.heads_q, i % rows, i32(p.dim_qk));
        } else {
          clear_row(p.dk, i / rows, p.heads_kv, i % rows, i32(p.dim_qk));
          clear_row(p.dv, i / rows, p.heads_kv, i % rows, i32(p.dim_v));
        }
      }
    }
  }

  // By all warps of the grid.
  void run(u32 warp, u32 warps) const {
    for (u32 i = warp; i < u32(params.attention.num_sequences); i += warps) place(i32(i));
    clear(true, warp, warps);
    clear(false, warp, warps);
  }
};

template <BackwardPreprocessConfig kConfig>
struct BackwardPreprocess {
  static constexpr i32 kRowsInFlight = kConfig.rows_in_flight();

  struct Row {
    u32 batch, head, row;
    u32 index;  // in lse_log2 and delta
    bool inside;
  };

  const BackwardPreprocessParams& params;
  i32 lane;  // of the row

  // Row `index` of lse_log2 and delta.
  Row row_at(u32 index) const {
    const u32 batch_kv_head = index / u32(params.padded_q_rows);
    const u32 row = index - batch_kv_head * params.padded_q_rows;
    const u32 batch = batch_kv_head / u32(params.heads_q);
    return {batch, batch_kv_head - batch * params.heads_q, row, index,
            index < u32(params.num_rows) && row < u32(params.q_len)};
  }

  // The last sequence whose padded rows begin at or before `padded`. All lanes.
  i64 sequence_of(u32 batch, i64 padded) const {
    const AttentionParams& p = params.attention;
    if (!p.packed.q) return batch;
    return SequenceScheduler{params, i32(ptx::thread_index()) % 32}.last_of_sequences(
        [&](i64 index) {
          return padded_row(true, index, load_index(p.cu_q, index * p.cu_q.strides[3])) <= padded;
        });
  }

  static float to_float(u32 bits) {
    if constexpr (kConfig.dtype == DType::kBFloat16) {
      return fulmen::to_float(bf16{u16(bits)});
    } else {
      return fulmen::to_float(f16{u16(bits)});
    }
  }

  // Sum over the eight elements of two 16-byte vectors.
  static float dot(const ptx::U32x4& a, const ptx::U32x4& b) {
    float sum = 0;
#pragma unroll
    for (i32 w = 0; w < 4; ++w) {
      sum = ptx::fma(to_float(a.word[w] & 0xffff), to_float(b.word[w] & 0xffff), sum);
      sum = ptx::fma(to_float(a.word[w] >> 16), to_float(b.word[w] >> 16), sum);
    }
    return sum;
  }

  template <class T>
  static const T* element(const ArrayView& x, const Row& at, i32 dim = 0) {
    return reinterpret_cast<const T*>(x.data) + x.offset(at.batch, at.head, at.row, dim);
  }

  // lse or stats, and dlse, of a row, in the row's first lane. Read together with O and dO; with
  // sequences after them: the registers would be spilled, and that is slower.
  static constexpr bool kReadsAhead = !kConfig.score.varlen;
  struct RowStats {
    float top;  // row_max, or lse where there are no stats
    float row_sum;
    float dlse;
  };
  RowStats row_stats_of(const Row& at) const {
    RowStats stats{kConfig.score.stats ? 0.f : -kInfinity<float>, 0, 0};
    if (lane != 0 || !at.inside) return stats;
    const AttentionParams& arrays = params.attention;
    const float* from = element<float>(kConfig.score.stats ? arrays.stats : arrays.lse, at);
    stats.top = from[0];
    if constexpr (kConfig.score.stats) stats.row_sum = from[arrays.stats.strides[3]];
    if (arrays.dlse.present()) stats.dlse = *element<float>(arrays.dlse, at);
    return stats;
  }

  void write(const Row& at, const RowStats& stats, float delta) const {
    constexpr float kShift = static_cast<float>(weight_shift(kConfig.dtype));
    const u32 index = at.index;
    params.delta[index] = at.inside ? delta - stats.dlse : 0.f;
    if constexpr (kConfig.score.stats) {
      float row_max = stats.top, row_sum = stats.row_sum;
      const bool sees_nothing = row_sum == 0;
      if constexpr (kConfig.score.sinks) {
        const float sink = sink_of(at.head);
        const float top = ptx::max(row_max, sink);
        row_sum = row_sum * ptx::exp2((row_max - top) * kLog2E<float>) +
                  ptx::exp2((sink - top) * kLog2E<float>);
        row_max = top;
      }
      const bool is_large = !sees_nothing && !(-kLargeScore <= row_max && row_max <= kLargeScore);
      const float total =
          ptx::fma(is_large ? 0.f : row_max, kLog2E<float>, ptx::log2(row_sum) - kShift);
      params.lse_log2[lse_index(index)] = sees_nothing ? kInfinity<float> : total;
      params.lse_log2[lse_index(index) + kLseBlock] = is_large ? row_max : 0.f;
    } else {
      float total = stats.top * kLog2E<float>;
      if constexpr (kConfig.score.sinks) {
        const float sink = sink_of(at.head) * kLog2E<float>;
        const float top = ptx::max(total, sink);
        total = top + ptx::log2(ptx::exp2(total - top) + ptx::exp2(sink - top));
      }
      params.lse_log2[index] = stats.top == -kInfinity<float> ? kInfinity<float> : total - kShift;
    }
  }

  float sink_of(u32 head) const {
    const ArrayView& sinks = params.attention.sinks;
    return load_real<float>(sinks, sinks.offset(0, head, 0, 0));
  }

  void sum(const Row (&rows)[kRowsInFlight]) const {
    constexpr i32 kVectors = kConfig.vectors();
    ptx::U32x4 o[kRowsInFlight][kVectors], dout[kRowsInFlight][kVectors];
    RowStats stats[kRowsInFlight];
#pragma unroll
    for (i32 i = 0; i < kRowsInFlight; ++i) {
      if constexpr (kReadsAhead) stats[i] = row_stats_of(rows[i]);
#pragma unroll
      for (i32 n = 0; n < kVectors; ++n) {
        const i32 dim = (lane + n * kConfig.threads_per_row()) * 8;
        o[i][n] = dout[i][n] = {};
        if (!rows[i].inside || dim >= params.dim_v) continue;
        o[i][n] = ptx::load_global_x4(element<u16>(params.attention.o, rows[i], dim));
        dout[i][n] = ptx::load_global_x4(element<u16>(params.attention.dout, rows[i], dim));
      }
    }
#pragma unroll
    for (i32 i = 0; i < kRowsInFlight; ++i) {
      float sum = dot(o[i][0], dout[i][0]);
#pragma unroll
      for (i32 n = 1; n < kVectors; ++n) sum += dot(o[i][n], dout[i][n]);
#pragma unroll
      for (i32 distance = 1; distance < kConfig.threads_per_row(); distance *= 2) {
        sum += ptx::shuffle_xor(sum, distance);
      }
      if (lane != 0 || rows[i].index >= u32(params.num_rows)) continue;
      write(rows[i], kReadsAhead ? stats[i] : row_stats_of(rows[i]), sum);
    }
  }

  void run() const {
    const i64 id = i64(ptx::block_index()) * kConfig.kThreads + ptx::thread_index();
    const i64 all = i64(ptx::num_blocks()) * kConfig.kThreads;
    for (i64 i = id; i < params.num_zeros; i += all)
      ptx::store_global_x4(reinterpret_cast<u16*>(params.zeros + 4 * i), {});
    // Neighbours go to different blocks, so that long sequences are spread over all.
    const u32 warp = ptx::thread_index() / 32 * ptx::num_blocks() + ptx::block_index();
    if constexpr (kConfig.score.documents) {
      FindDocumentBlocks{params, u32(id) % 32}.run(warp, u32(all) / 32, [&](i64 index) {
        return kConfig.score.varlen ? SequenceScheduler{params, 0}.sequence(index)
                                    : dense_sequence(params.attention, index);
      });
    }
    if constexpr (kConfig.score.varlen) {
      SequenceScheduler{params, i32(id % 32)}.run(warp, u32(all) / 32);
      sum_chunks(ptx::block_index(), ptx::num_blocks());
    } else {
      const u32 step = u32(all) / kConfig.threads_per_row();
      for (u32 begin = u32(id) / kConfig.threads_per_row(); begin < u32(params.num_rows);
           begin += step * kRowsInFlight) {
        Row rows[kRowsInFlight];
#pragma unroll
        for (i32 i = 0; i < kRowsInFlight; ++i) rows[i] = row_at(begin + i * step);
        sum(rows);
      }
    }
  }

  // With sequences: kConversionRows rows of a head, all of one sequence.
  struct Chunk {
    u32 begin;  // in lse_log2 and delta
    i32 first;  // row of the sequence
    u32 head;
  };

  // The share of a thread block: chunks of all heads one after the other, so that a sequence is
  // looked up once for many.
  void sum_chunks(u32 block, u32 blocks) const {
    constexpr u32 kLse = BackwardSm90Config::kConversionRows;
    const u32 heads = u32(params.heads_q), of_head = u32(params.padded_q_rows) / kLse;
    const u64 chunks = u32(params.num_rows) / kLse;
    const u32 end = u32(chunks * (block + 1) / blocks);
    u32 known = ~0u;  // number of the chunk among those of a head, of all batch entries
    Sequence sequence{};
    i32 first = 0;
#pragma unroll 1
    for (u32 i = u32(chunks * block / blocks); i < end; ++i) {
      const u32 number = i / heads, batch = number / of_head;
      const u32 padded = (number - batch * of_head) * kLse;
      if (number != known) {
        const i64 owner = sequence_of(batch, padded);
        sequence = SequenceScheduler{params, 0}.sequence(owner);
        first = i32(padded - padded_row(params.attention.packed.q, owner, sequence.q_begin));
        known = number;
      }
      if (first >= sequence.shape.q_len) continue;  // no kernel reads them
      const u32 head = i - number * heads;
      const u32 begin = (batch * heads + head) * u32(params.padded_q_rows) + padded;
      clear_sums(begin / kLse);
      sum_chunk({begin, first, head}, sequence);
    }
  }

  // Sums of dQ of chunk `number`.
  void clear_sums(u32 number) const {
    const i64 floats = i64{BackwardSm90Config::kConversionRows} * params.sum_dims;
    u16* const sums = reinterpret_cast<u16*>(params.sums + number * floats);
    for (i64 i = ptx::thread_index(); i < floats / 4; i += kConfig.kThreads) {
      ptx::store_global_x4(sums + 8 * i, {});
    }
  }

  void sum_chunk(const Chunk& chunk, const Sequence& sequence) const {
    constexpr u32 kStep = kConfig.kThreads / kConfig.threads_per_row();
#pragma unroll 1
    for (u32 at = ptx::thread_index() / kConfig.threads_per_row();
         at < u32(BackwardSm90Config::kConversionRows); at += kRowsInFlight * kStep) {
      Row rows[kRowsInFlight];
#pragma unroll
      for (i32 i = 0; i < kRowsInFlight; ++i) {
        const i32 row = chunk.first + i32(at + i * kStep);
        rows[i] = {u32(sequence.batch), chunk.head, u32(i32(sequence.q_begin) + row),
                   chunk.begin + at + i * kStep, 0 <= row && row < sequence.shape.q_len};
      }
      sum(rows);
    }
  }
};

// Launched with threads() threads a block, any number of blocks. The loop's trip count is the same
// for all threads of a row but not of a warp, so num_rows is a multiple of 32.
template <BackwardPreprocessConfig kConfig>
inline void backward_preprocess_sm90(const BackwardPreprocessParams& params) {
  ptx::grid_dependents_launch();
  if constexpr (kConfig.score.varlen) record_faults(params.attention, kConfig.threads());
  BackwardPreprocess<kConfig>{params, i32(ptx::thread_index()) % kConfig.threads_per_row()}.run();
}

}  // namespace fulmen
