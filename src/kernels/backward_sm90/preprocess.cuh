// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The preprocess kernel of the Hopper backward. For every query row: delta = sum over dim of dO O,
// less dlse, and the row's softmax in base 2; rows up to the next multiple of kConversionRows get
// an lse of +inf, so that their P is 0. Also clears the sums of dQ and the counters, and writes the
// tables of sequence_schedule.cuh. Runs on any GPU; a row is read by threads_per_row() neighbouring
// threads, 16 bytes each.
#pragma once

#include "kernels/backward_sm90/config.h"
#include "kernels/backward_sm90/sequence_schedule.cuh"
#include "kernels/common/faults.cuh"
#include "kernels/common/sequences.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

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
    if (!p.packed) return batch;
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
      const float total = ptx::fma(is_large ? 0.f : row_max, kLog2E<float>, ptx::log2(row_sum));
      params.lse_log2[lse_index(index)] = sees_nothing ? kInfinity<float> : total;
      params.lse_log2[lse_index(index) + kLseBlock] = is_large ? row_max : 0.f;
    } else {
      float total = stats.top * kLog2E<float>;
      if constexpr (kConfig.score.sinks) {
        const float sink = sink_of(at.head) * kLog2E<float>;
        const float top = ptx::max(total, sink);
        total = top + ptx::log2(ptx::exp2(total - top) + ptx::exp2(sink - top));
      }
      params.lse_log2[index] = stats.top == -kInfinity<float> ? kInfinity<float> : total;
    }
  }

  float sink_of(u32 head) const {
    const ArrayView& sinks = params.attention.sinks;
    return load_real<float>(sinks, sinks.offset(0, head, 0, 0));
  }

  void sum(const Row (&rows)[kRowsInFlight]) const {
    ptx::U32x4 o[kRowsInFlight], dout[kRowsInFlight];
    RowStats stats[kRowsInFlight];
#pragma unroll
    for (i32 i = 0; i < kRowsInFlight; ++i) {
      o[i] = dout[i] = {};
      if constexpr (kReadsAhead) stats[i] = row_stats_of(rows[i]);
      if (!rows[i].inside || lane * 8 >= params.dim_v) continue;
      o[i] = ptx::load_global_x4(element<u16>(params.attention.o, rows[i], lane * 8));
      dout[i] = ptx::load_global_x4(element<u16>(params.attention.dout, rows[i], lane * 8));
    }
#pragma unroll
    for (i32 i = 0; i < kRowsInFlight; ++i) {
      float sum = dot(o[i], dout[i]);
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
        first = i32(padded - padded_row(params.attention.packed, owner, sequence.q_begin));
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
