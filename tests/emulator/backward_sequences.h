// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What backward_sequences_test.cpp runs on: sequences of given lengths, packed or padded, in arrays
// that are NaN wherever no sequence is, and the workspace of the kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "backward_kernels.h"
#include "emulator/copies.h"

namespace fulmen::test {

constexpr i32 kHeads = 2, kKvHeads = 1;
constexpr i32 kBlocks = 2;  // of backward_sm90; they wait for each other's dQ

struct Lengths {
  i32 q;
  i32 kv;
};

struct SequencesCase {
  std::string name;
  const BackwardKernel* kernel;
  bool packed;
  std::vector<Lengths> lengths;
  IntervalMask mask;
};

inline void PrintTo(const SequencesCase& sequences, std::ostream* out) { *out << sequences.name; }

inline size_t to_size(i64 x) { return static_cast<size_t>(x); }

// The arrays of all sequences: (batch, heads, rows, dims), batch = 1 when packed.
struct Layout {
  bool packed;
  i32 batch, heads, rows, dims;
  std::vector<i32> begins;  // of each sequence, and the end of the last

  i64 line(size_t sequence, i32 head) const {
    return packed ? head : static_cast<i64>(sequence) * heads + head;
  }
  i64 first(size_t sequence, i32 head) const {
    return line(sequence, head) * rows + (packed ? begins[sequence] : 0);
  }
  i64 num_rows() const { return i64{batch} * heads * rows; }
  ArrayView view(void* data, DType dtype) const {
    return {static_cast<u8*>(data), {i64{heads} * rows * dims, i64{rows} * dims, dims, 1}, dtype};
  }
};

inline Layout layout_of(const SequencesCase& chosen, i32 heads, i32 dims, i32 Lengths::* length) {
  Layout layout{chosen.packed, 1, heads, 0, dims, {0}};
  i32 most = 0;
  for (const Lengths& of : chosen.lengths) {
    layout.begins.push_back(layout.begins.back() + of.*length);
    most = std::max(most, of.*length);
  }
  layout.batch = chosen.packed ? 1 : static_cast<i32>(chosen.lengths.size());
  layout.rows = (chosen.packed ? layout.begins.back() : most) + 5;  // rows of nobody
  return layout;
}

template <class T>
struct Array {
  Layout layout;
  std::vector<T> data;

  explicit Array(const Layout& of)
      : layout(of), data(to_size(of.num_rows() * of.dims), static_cast<T>(NAN)) {
    if constexpr (sizeof(T) == 2) std::fill(data.begin(), data.end(), T{0xffff});
  }
  // Writes or reads the rows of a sequence.
  template <class Move>
  void each(size_t sequence, i32 rows, Move move) {
    for (i32 h = 0; h < layout.heads; ++h) {
      for (i64 i = 0; i < i64{rows} * layout.dims; ++i) {
        move(h, i, data[to_size(layout.first(sequence, h) * layout.dims + i)]);
      }
    }
  }
  TensorMap map(i32 box_rows) {
    const ArrayView view = layout.view(data.data(), DType::kBFloat16);
    return emulator::encode({view.data,
                             {2, view.strides[2] * 2, view.strides[1] * 2, view.strides[0] * 2},
                             {layout.dims, layout.rows, layout.heads, layout.batch},
                             box_rows});
  }
};

// Memory that nobody but the kernels reads: whatever it holds at the start must not matter.
struct Workspace {
  i32 sequences, lines;
  i32 max_q = 1, max_kv = 1;
  i32 kv_blocks, finish_blocks, padded_rows_per_head;
  i64 num_rows, num_sums, num_counters;
  std::vector<float> rows, delta;
  std::vector<u32> sums;  // of dQ, and the counters behind them
  std::vector<KeyBlockInfo> key_block_infos;

  Workspace(const SequencesCase& chosen, i32 q_rows) {
    const BackwardSm90Config& config = chosen.kernel->config;
    sequences = static_cast<i32>(chosen.lengths.size());
    lines = sequences * kKvHeads;
    for (const Lengths& of : chosen.lengths) {
      max_q = std::max(max_q, of.q);
      max_kv = std::max(max_kv, of.kv);
    }
    kv_blocks = static_cast<i32>(ceil_div(max_kv, config.kv_rows()));
    finish_blocks = static_cast<i32>(ceil_div(max_q, config.kConversionRows));
    padded_rows_per_head =
        config.kConversionRows *
        (chosen.packed ? q_rows / config.kConversionRows + sequences + 1 : finish_blocks);
    num_rows = i64{kHeads} * padded_rows_per_head * (chosen.packed ? 1 : sequences);
    num_sums = num_rows * config.dims;
    num_counters = ceil_div(2 + 3 * lines, 4) * 4;
    rows.assign(to_size(num_rows * (config.score.stats ? 2 : 1) + 4), NAN);
    delta.assign(to_size(num_rows + 4), NAN);
    sums.assign(to_size(num_sums + num_counters + 4), ~0u);
    key_block_infos.resize(to_size(i64{sequences} * kv_blocks));
  }

  float* dq_accum() { return reinterpret_cast<float*>(sums.data()); }
  u32* counters() { return sums.data() + num_sums; }
};

}  // namespace fulmen::test
