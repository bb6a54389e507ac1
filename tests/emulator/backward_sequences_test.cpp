// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// backward_sm90 where sequences differ: packed ones and padded ones with lengths, empty ones among
// them. Every sequence is a problem of its own, and its gradients obey the error rule as if it were
// alone, although everything between and behind the sequences is NaN; gradients there are 0.
#include "backward_sequences.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "backward_problem.h"
#include "emulator/global_memory.h"
#include "emulator/launch.h"

namespace fulmen::test {
namespace {

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
        kept(layout_of(of, kHeads, of.kernel->config.score.stats ? 2 : 1, &Lengths::q)) {
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
      const Matrix& rows = of.kernel->config.score.stats ? problem.stats : problem.lse;
      kept.each(s, rows.rows, [&](i32 h, i64 i, float& x) {
        x = static_cast<float>(rows.data[to_size(i64{h} * rows.rows * rows.dims + i)]);
      });
    }
  }

  AttentionParams attention(std::vector<i32>& q_index, std::vector<i32>& kv_index) {
    AttentionParams p{};
    p.o = o.layout.view(o.data.data(), DType::kBFloat16);
    p.dout = dout.layout.view(dout.data.data(), DType::kBFloat16);
    (chosen.kernel->config.score.stats ? p.stats : p.lse) =
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
    p.packed = {chosen.packed, chosen.packed};
    p.bottom_right = true;
    return p;
  }

  BackwardPreprocessParams prepare_params(const AttentionParams& attention_params,
                                          Workspace& workspace) const {
    const BackwardSm90Config& config = chosen.kernel->config;
    BackwardPreprocessParams p{};
    p.heads_q = kHeads;
    p.padded_q_rows = workspace.padded_rows_per_head;
    p.dim_v = v.layout.dims;
    p.num_rows = static_cast<i32>(workspace.num_rows);
    p.lse_log2 = workspace.rows.data();
    p.delta = workspace.delta.data();
    p.zeros = workspace.counters();
    p.num_zeros = workspace.num_counters / 4;
    p.sums = workspace.dq_accum();
    p.sum_dims = config.dims;
    p.bounds = {workspace.max_q, workspace.max_kv, 0};
    p.kv_rows = config.kv_rows();
    p.key_block_infos = workspace.key_block_infos.data();
    p.attention = attention_params;
    return p;
  }

  BackwardParams params(const AttentionParams& attention_params, Workspace& workspace) {
    const BackwardSm90Config& config = chosen.kernel->config;
    const BackwardSchedule schedule =
        backward_schedule(kKvHeads, workspace.kv_blocks, 2, 0, kBlocks);
    BackwardParams p{};
    p.maps = {q.map(config.q_rows),
              k.map(config.kv_rows()),
              v.map(config.kv_rows()),
              dout.map(config.q_rows),
              dk.map(64),
              dv.map(64)};
    p.batch = workspace.sequences;
    p.heads_q = kHeads;
    p.heads_kv = kKvHeads;
    p.group_size = kHeads / kKvHeads;
    p.shape = {workspace.max_q, workspace.max_kv, 0};
    p.mask = chosen.mask;
    p.scale = static_cast<float>(problems[0]->scale());
    p.scale_log2 = static_cast<float>(problems[0]->scale() * 1.4426950408889634);
    p.num_kv_blocks = workspace.kv_blocks;
    p.num_conversion_blocks = workspace.finish_blocks;
    p.heads_per_group = schedule.heads_per_group;
    p.lag = schedule.lag;
    p.dim_qk = p.dim_v = q.layout.dims;
    p.key_block_infos = workspace.key_block_infos.data();
    p.padded_rows_per_head = workspace.padded_rows_per_head;
    p.lse_log2 = workspace.rows.data();
    p.delta = workspace.delta.data();
    p.dq_accum = workspace.dq_accum();
    p.next_tile = workspace.counters();
    p.done = p.next_tile + 1;
    p.freed = p.done + workspace.lines;
    p.nonfinite = p.freed + workspace.lines;
    p.attention = attention_params;
    p.comes_first = true;
    return p;
  }

  void launch() {
    std::vector<i32> q_index, kv_index;
    const AttentionParams attention_params = attention(q_index, kv_index);
    Workspace workspace(chosen, q.layout.rows);
    // What one kernel writes and the other reads, while it may have begun before the first ended.
    emulator::GlobalMemory memory(
        {written("rows", workspace.rows), written("delta", workspace.delta),
         written("key_block_infos", workspace.key_block_infos), written("sums", workspace.sums),
         written("dq", dq.data), written("dk", dk.data), written("dv", dv.data)});
    const BackwardPreprocessParams first = prepare_params(attention_params, workspace);
    emulator::launch({.blocks = 2,
                      .threads = BackwardPreprocessConfig::kThreads,
                      .shared_bytes = 0,
                      .seed = 1,
                      .memory = &memory},
                     [&] { chosen.kernel->prepare(first); });
    const BackwardParams second = params(attention_params, workspace);
    const BackwardSm90Config& config = chosen.kernel->config;
    emulator::launch({.blocks = kBlocks,
                      .threads = config.threads(),
                      .shared_bytes = config.shared_bytes(),
                      .seed = 1,
                      .together = true,
                      .memory = &memory,
                      .overlaps = true},
                     [&] { chosen.kernel->run(second); });
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
