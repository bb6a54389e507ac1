// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// backward_sm90 where sequences differ: packed ones and padded ones with lengths, empty ones among
// them. Every sequence is a problem of its own, and its gradients obey the error rule as if it were
// alone, although everything between and behind the sequences is NaN; gradients there are 0.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "backward_kernels.h"
#include "backward_problem.h"
#include "emulator/global_memory.h"
#include "emulator/launch.h"
#include "emulator/tensor_copies.h"

namespace fulmen::test {
namespace {

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

void PrintTo(const SequencesCase& sequences, std::ostream* out) { *out << sequences.name; }

size_t to_size(i64 x) { return static_cast<size_t>(x); }

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

Layout layout_of(const SequencesCase& chosen, i32 heads, i32 dims, i32 Lengths::* length) {
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

template <class T>
emulator::GlobalArray written(const char* name, const std::vector<T>& data) {
  return {.name = name,
          .data = data.data(),
          .element_bytes = sizeof(T),
          .extents = {static_cast<i64>(data.size()), 1, 1, 1},
          .strides = {1, 1, 1, 1},
          .writable = true,
          .initialised = false};
}

struct Together {
  const SequencesCase& chosen;
  std::vector<std::unique_ptr<BackwardProblem>> problems;
  Array<u16> q, k, v, o, dout, dq, dk, dv;
  Array<float> kept;

  explicit Together(const SequencesCase& of)
      : chosen(of),
        q(layout_of(of, kHeads, of.kernel->config.dims, &Lengths::q)),
        k(layout_of(of, kKvHeads, of.kernel->config.dims, &Lengths::kv)),
        v(k),
        o(q),
        dout(q),
        dq(q),
        dk(k),
        dv(k),
        kept(layout_of(of, kHeads, of.kernel->config.has_stats ? 2 : 1, &Lengths::q)) {
    for (size_t s = 0; s < of.lengths.size(); ++s) {
      const Lengths& length = of.lengths[s];
      problems.push_back(std::make_unique<BackwardProblem>(
          of.kernel->config,
          BackwardShape{
              .q_len = length.q, .kv_len = length.kv, .heads_q = kHeads, .heads_kv = kKvHeads},
          of.mask));
      const BackwardProblem& problem = *problems.back();
      const auto fill = [&](Array<u16>& to, const Matrix& from) {
        to.each(s, from.rows, [&](i32 h, i64 i, u16& x) {
          x = problem.round(from.data[to_size(i64{h} * from.rows * from.dims + i)]);
        });
      };
      fill(q, problem.q);
      fill(k, problem.k);
      fill(v, problem.v);
      fill(o, problem.o);
      fill(dout, problem.dout);
      const Matrix& rows = of.kernel->config.has_stats ? problem.stats : problem.lse;
      kept.each(s, rows.rows, [&](i32 h, i64 i, float& x) {
        x = static_cast<float>(rows.data[to_size(i64{h} * rows.rows * rows.dims + i)]);
      });
    }
  }

  AttentionParams attention(std::vector<i32>& q_index, std::vector<i32>& kv_index) {
    AttentionParams p{};
    p.o = o.layout.view(o.data.data(), DType::kBFloat16);
    p.dout = dout.layout.view(dout.data.data(), DType::kBFloat16);
    (chosen.kernel->config.has_stats ? p.stats : p.lse) =
        kept.layout.view(kept.data.data(), DType::kFloat32);
    p.dq = dq.layout.view(dq.data.data(), DType::kBFloat16);
    p.dk = dk.layout.view(dk.data.data(), DType::kBFloat16);
    p.dv = dv.layout.view(dv.data.data(), DType::kBFloat16);
    for (size_t s = 0; s < chosen.lengths.size() && !chosen.packed; ++s) {
      q_index.push_back(chosen.lengths[s].q);
      kv_index.push_back(chosen.lengths[s].kv);
    }
    if (chosen.packed) {
      q_index = q.layout.begins;
      kv_index = k.layout.begins;
    }
    const auto index = [](std::vector<i32>& x) {
      return ArrayView{reinterpret_cast<u8*>(x.data()), {0, 0, 0, 1}, DType::kInt32};
    };
    (chosen.packed ? p.cu_q : p.q_lengths) = index(q_index);
    (chosen.packed ? p.cu_kv : p.kv_lengths) = index(kv_index);
    p.num_sequences = static_cast<i64>(chosen.lengths.size());
    p.heads_q = kHeads;
    p.heads_kv = kKvHeads;
    p.q_rows = q.layout.rows;
    p.kv_rows = k.layout.rows;
    p.dim_qk = p.dim_v = q.layout.dims;
    p.packed = chosen.packed;
    p.bottom_right = true;
    return p;
  }

  void launch() {
    const BackwardConfig& config = chosen.kernel->config;
    std::vector<i32> q_index, kv_index;
    const AttentionParams attention_params = attention(q_index, kv_index);
    const i32 sequences = static_cast<i32>(chosen.lengths.size());
    i32 max_q = 1, max_kv = 1;
    for (const Lengths& of : chosen.lengths) {
      max_q = std::max(max_q, of.q);
      max_kv = std::max(max_kv, of.kv);
    }
    const i32 lines = sequences * kKvHeads;
    const i32 kv_blocks = static_cast<i32>(ceil_div(max_kv, config.kv_rows()));
    const i32 finish_blocks = static_cast<i32>(ceil_div(max_q, config.kFinishRows));
    const BackwardSchedule schedule = backward_schedule(kKvHeads, kv_blocks, 2, kBlocks);
    const i32 rows_of_head =
        config.kFinishRows *
        (chosen.packed ? q.layout.rows / config.kFinishRows + sequences + 1 : finish_blocks);
    const i64 num_rows = i64{kHeads} * rows_of_head * (chosen.packed ? 1 : sequences);
    const i64 num_sums = num_rows * config.dims;
    const i64 num_counters = ceil_div(2 + 3 * lines, 4) * 4;
    std::vector<float> rows(to_size(num_rows * (config.has_stats ? 2 : 1) + 4), NAN);
    std::vector<float> delta(to_size(num_rows + 4), NAN);
    std::vector<u32> sums(to_size(num_sums + num_counters + 4), ~0u);
    u32* const counters = sums.data() + num_sums;
    std::vector<BackwardPlace> places(to_size(i64{sequences} * kv_blocks));

    BackwardPrepareParams prepare{};
    prepare.heads_q = kHeads;
    prepare.padded_q_rows = rows_of_head;
    prepare.dim_v = v.layout.dims;
    prepare.num_rows = static_cast<i32>(num_rows);
    prepare.rows = rows.data();
    prepare.delta = delta.data();
    prepare.zeros = counters;
    prepare.num_zeros = num_counters / 4;
    prepare.sums = reinterpret_cast<float*>(sums.data());
    prepare.sum_dims = config.dims;
    prepare.bounds = {max_q, max_kv, 0};
    prepare.kv_rows = config.kv_rows();
    prepare.places = places.data();
    prepare.attention = attention_params;
    // What one kernel writes and the other reads, while it may have begun before the first ended.
    emulator::GlobalMemory memory({written("rows", rows), written("delta", delta),
                                   written("places", places), written("sums", sums),
                                   written("dq", dq.data), written("dk", dk.data),
                                   written("dv", dv.data)});
    emulator::launch({.blocks = 2,
                      .threads = BackwardPrepareConfig::kThreads,
                      .shared_bytes = 0,
                      .seed = 1,
                      .memory = &memory},
                     [&] { chosen.kernel->prepare(prepare); });

    BackwardParams params{};
    params.maps = {q.map(config.q_rows),
                   k.map(config.kv_rows()),
                   v.map(config.kv_rows()),
                   dout.map(config.q_rows),
                   dk.map(64),
                   dv.map(64)};
    params.batch = sequences;
    params.heads_q = kHeads;
    params.heads_kv = kKvHeads;
    params.group_size = kHeads / kKvHeads;
    params.shape = {max_q, max_kv, 0};
    params.mask = chosen.mask;
    params.scale = static_cast<float>(problems[0]->scale());
    params.scale_log2 = static_cast<float>(problems[0]->scale() * 1.4426950408889634);
    params.num_kv_blocks = kv_blocks;
    params.num_finish_blocks = finish_blocks;
    params.lines_per_group = schedule.lines_per_group;
    params.lag = schedule.lag;
    params.dim_qk = params.dim_v = q.layout.dims;
    params.places = places.data();
    params.rows_of_head = rows_of_head;
    params.rows = rows.data();
    params.delta = delta.data();
    params.dq_sums = reinterpret_cast<float*>(sums.data());
    params.next_item = counters;
    params.done = counters + 1;
    params.freed = params.done + lines;
    params.spoiled = params.freed + lines;
    params.attention = attention_params;
    params.comes_first = true;
    emulator::launch({.blocks = kBlocks,
                      .threads = config.threads(),
                      .shared_bytes = config.shared_bytes(),
                      .seed = 1,
                      .together = true,
                      .memory = &memory,
                      .overlaps = true},
                     [&] { chosen.kernel->run(params); });
  }

  // Takes the rows of a sequence out of a gradient; they are 0 afterwards.
  Matrix take(Array<u16>& from, size_t sequence, const Matrix& shape) {
    Matrix found = shape;
    from.each(sequence, shape.rows, [&](i32 h, i64 i, u16& x) {
      found.data[to_size(i64{h} * shape.rows * shape.dims + i)] = problems[sequence]->value(x);
      x = 0;
    });
    return found;
  }
};

class BackwardSequences : public ::testing::TestWithParam<SequencesCase> {};

TEST_P(BackwardSequences, EveryOneIsAsIfAlone) {
  Together run(GetParam());
  run.launch();
  for (size_t s = 0; s < run.problems.size(); ++s) {
    const BackwardProblem& problem = *run.problems[s];
    const Gradients found{run.take(run.dq, s, problem.q), run.take(run.dk, s, problem.k),
                          run.take(run.dv, s, problem.v)};
    EXPECT_EQ(problem.difference(found), "") << "of sequence " << s;
  }
  for (const Array<u16>* rest : {&run.dq, &run.dk, &run.dv}) {
    EXPECT_TRUE(std::all_of(rest->data.begin(), rest->data.end(), [](u16 x) { return x == 0; }));
  }
}

const std::vector<Lengths> kMixed = {{130, 130}, {0, 0}, {1, 200}, {77, 20}, {200, 140}};

// Ends of sequences on, before and behind the ends of blocks, of swizzled rows and of 16 bytes.
const std::vector<Lengths> kResidues = {{64, 64},   {63, 65},   {65, 63}, {127, 129}, {128, 128},
                                        {129, 127}, {8, 9},     {1, 1},   {0, 1},     {1, 0},
                                        {33, 7},    {100, 192}, {2, 2}};
const std::vector<Lengths> kNoKeys = {{5, 0}, {0, 0}, {130, 0}};

const SequencesCase kCases[] = {
    {"packed", &kBackwardD64Sequences, true, kMixed, {.causal = true}},
    {"padded", &kBackwardD64Sequences, false, kMixed, {.causal = true}},
    {"packed_wide", &kBackwardD128Sequences, true, kMixed, {.causal = true, .window_left = 50}},
    {"padded_wide", &kBackwardD128Sequences, false, kMixed, {}},
    {"packed_residues", &kBackwardD64Sequences, true, kResidues, {}},
    {"packed_wide_residues", &kBackwardD128Sequences, true, kResidues, {.causal = true}},
    {"packed_without_keys", &kBackwardD64Sequences, true, kNoKeys, {.causal = true}},
    {"padded_without_keys", &kBackwardD128Sequences, false, kNoKeys, {}},
    {"padded_by_one_key", &kBackwardD64Sequences, false, {{1, 1}, {1, 1}, {130, 1}}, {}},
};

INSTANTIATE_TEST_SUITE_P(Cases, BackwardSequences, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fulmen::test
