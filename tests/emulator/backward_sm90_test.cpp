// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The Hopper backward kernels, their text unchanged, on the host: ragged shapes in every mask,
// grouped heads, narrow heads, rows that see nothing and keys that nobody sees, sums of dQ that are
// used over and over. Every row of dQ, dK and dV obeys the error rule against
// float64 (backward_problem.cpp); results, sums and counters begin as NaN, and arrays lie against
// memory that may not be touched.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <ostream>
#include <string>

#include "backward_kernels.h"
#include "backward_problem.h"
#include "emulator/copies.h"
#include "emulator/global_memory.h"
#include "emulator/launch.h"
#include "kernels/backward_sm90/scheduler.cuh"
#include "schedules.h"
#include "support/guarded_memory.h"

namespace fulmen::test {
namespace {

struct BackwardCase {
  std::string name;
  const BackwardKernel* kernel;
  BackwardShape shape;
  IntervalMask mask = {};
  i32 num_accum_slots = 0;  // 0: as many as lines
  i32 num_split = 0;        // of the last blocks of keys, in kParts each
};

void PrintTo(const BackwardCase& backward_case, std::ostream* out) { *out << backward_case.name; }

constexpr i32 kParts = 3;

constexpr IntervalMask kCausal{.causal = true};
constexpr IntervalMask kWindow{.causal = true, .window_left = 70};
constexpr IntervalMask kTwoSided{.window_left = 40, .window_right = 90};
constexpr IntervalMask kPrefix{.causal = true, .prefix = 100};
constexpr IntervalMask kChunk{.causal = true, .chunk = 96};

// An array at the end of guarded memory, all bits set where nothing else is said.
template <class T>
class Guarded {
 public:
  explicit Guarded(size_t size) : memory_(size * sizeof(T)), size_(size) {
    std::fill(memory_.data(), memory_.data() + size * sizeof(T), '\xff');
  }
  T* data() { return reinterpret_cast<T*>(memory_.data()); }
  size_t size() const { return size_; }

 private:
  GuardedMemory memory_;
  size_t size_;
};

// 16-bit contiguous rows of a matrix, and their tensor map.
struct Rows {
  const BackwardProblem& problem;
  const Matrix& matrix;
  Guarded<u16> bits;

  Rows(const BackwardProblem& of, const Matrix& shape, bool filled)
      : problem(of), matrix(shape), bits(shape.data.size()) {
    for (size_t i = 0; filled && i < bits.size(); ++i) bits.data()[i] = of.round(shape.data[i]);
  }
  ArrayView view() {
    return {reinterpret_cast<u8*>(bits.data()),
            {batch_stride(), head_stride(), matrix.dims, 1},
            DType::kBFloat16};
  }
  i64 head_stride() const { return i64{matrix.rows} * matrix.dims; }
  i64 batch_stride() const { return head_stride() * matrix.heads; }
  TensorMap map(i32 box_rows) {
    return emulator::encode({reinterpret_cast<u8*>(bits.data()),
                             {2, i64{matrix.dims} * 2, head_stride() * 2, batch_stride() * 2},
                             {matrix.dims, matrix.rows, matrix.heads, matrix.batch},
                             box_rows});
  }
  Matrix values() {
    Matrix result = matrix;
    for (size_t i = 0; i < bits.size(); ++i) result.data[i] = problem.value(bits.data()[i]);
    return result;
  }
};

struct Floats {
  const Matrix& matrix;
  Guarded<float> values;
  explicit Floats(const Matrix& of) : matrix(of), values(of.data.size()) {
    for (size_t i = 0; i < values.size(); ++i) {
      values.data()[i] = static_cast<float>(matrix.data[i]);
    }
  }
  ArrayView view() {
    const i64 head = i64{matrix.rows} * matrix.dims;
    return {reinterpret_cast<u8*>(values.data()),
            {head * matrix.heads, head, matrix.dims, 1},
            DType::kFloat32};
  }
};

size_t to_size(i64 x) { return static_cast<size_t>(x); }

// One run of both kernels on arrays and a workspace of its own.
struct BackwardRun {
  const BackwardCase& chosen;
  const BackwardProblem& problem;
  u32 seed;
  i32 blocks;  // of backward_sm90; several run at the same time
  const BackwardSm90Config& config = chosen.kernel->config;
  const BackwardShape& shape = chosen.shape;
  Rows q{problem, problem.q, true}, k{problem, problem.k, true}, v{problem, problem.v, true};
  Rows o{problem, problem.o, true}, dout{problem, problem.dout, true};
  Rows dq{problem, problem.q, false}, dk{problem, problem.k, false}, dv{problem, problem.v, false};
  Floats kept{config.score.stats ? problem.stats : problem.lse}, dlse{problem.dlse};
  std::vector<float> sinks;

  const i32 parts = config.score.stats ? 2 : 1;  // of what is kept of a row
  const i32 num_batch_kv_heads = shape.batch * shape.heads_kv;
  const i32 num_kv_blocks = static_cast<i32>(ceil_div(shape.kv_len, config.kv_rows()));
  const i32 num_conversion_blocks = static_cast<i32>(ceil_div(shape.q_len, config.kConversionRows));
  const BackwardSchedule schedule = schedule_of_case();
  const i32 padded = num_conversion_blocks * config.kConversionRows;
  const i64 num_rows = i64{shape.batch} * shape.heads_q * padded;
  const i64 num_sums =
      i64{schedule.num_accum_slots} * (shape.heads_q / shape.heads_kv) * padded * config.dims;
  const i64 num_semaphores = config.deterministic ? num_rows / config.q_rows : 0;
  const i64 num_counters =
      ceil_div(2 + 3 * num_batch_kv_heads + 2 * chosen.num_split + num_semaphores, 4) * 4;
  const i64 part_floats = i64{2} * config.kv_rows() * config.dims;
  Guarded<float> rows{to_size(num_rows * parts)}, delta{to_size(num_rows)};
  Guarded<float> part_sums{to_size(chosen.num_split * (kParts - 1) * part_floats)};
  Guarded<u32> sums{to_size(num_sums + num_counters)};  // counters after the sums
  u32* const counters = sums.data() + num_sums;
  // What blocks write for each other. Sums of dQ begin as zeros of the kernel before.
  emulator::GlobalMemory memory{
      {written("dq_accum", sums.data(), num_sums, config.deterministic),
       written("part_sums", part_sums.data(), static_cast<i64>(part_sums.size()), false)}};

  template <class T>
  static emulator::GlobalArray written(const char* name, const T* data, i64 count, bool ordered) {
    return {.name = name,
            .data = data,
            .element_bytes = sizeof(T),
            .extents = {count, 1, 1, 1},
            .strides = {1, 1, 1, 1},
            .writable = true,
            .initialised = false,
            .ordered = ordered};
  }

  BackwardRun(const BackwardCase& chosen_, const BackwardProblem& problem_, u32 seed_, i32 blocks_)
      : chosen(chosen_), problem(problem_), seed(seed_), blocks(blocks_) {
    for (i32 h = 0; h < shape.heads_q; ++h) sinks.push_back(BackwardProblem::sink(h));
  }

  BackwardSchedule schedule_of_case() const {
    const i64 heads_per_group = chosen.num_split > 0 ? 1 : 2;
    const bool are_alike =
        chosen.num_split > 0 || chosen.num_accum_slots != 0 || config.deterministic;
    const i64 last_heads = are_alike ? 0 : 3;
    BackwardSchedule made =
        backward_schedule(num_batch_kv_heads, num_kv_blocks, heads_per_group, last_heads, 1);
    if (chosen.num_accum_slots != 0) made.num_accum_slots = chosen.num_accum_slots;
    return made;
  }

  AttentionParams arrays() {
    AttentionParams attention{};
    attention.o = o.view();
    attention.dout = dout.view();
    (config.score.stats ? attention.stats : attention.lse) = kept.view();
    if (shape.dlse) attention.dlse = dlse.view();
    attention.dq = dq.view();
    attention.sinks = {reinterpret_cast<u8*>(sinks.data()), {0, 1, 0, 0}, DType::kFloat32};
    return attention;
  }

  BackwardPreprocessParams prepare_params() {
    return {.heads_q = shape.heads_q,
            .q_len = shape.q_len,
            .padded_q_rows = padded,
            .dim_v = problem.v.dims,
            .num_rows = static_cast<i32>(num_rows),
            .lse_log2 = rows.data(),
            .delta = delta.data(),
            .zeros = sums.data(),
            .num_zeros = (num_sums + num_counters) / 4,
            .attention = arrays()};
  }

  BackwardParams params() {
    return {.maps = {q.map(config.q_rows), k.map(config.kv_rows()), v.map(config.kv_rows()),
                     dout.map(config.q_rows), dk.map(64), dv.map(64)},
            .batch = shape.batch,
            .heads_q = shape.heads_q,
            .heads_kv = shape.heads_kv,
            .group_size = shape.heads_q / shape.heads_kv,
            .shape = problem.sequence(),
            .mask = problem.mask(),
            .scale = static_cast<float>(problem.scale()),
            .scale_log2 = static_cast<float>(problem.scale() * 1.4426950408889634),
            .num_kv_blocks = num_kv_blocks,
            .num_conversion_blocks = num_conversion_blocks,
            .heads_per_group = schedule.heads_per_group,
            .last_heads = schedule.last_heads,
            .num_accum_slots = schedule.num_accum_slots,
            .lag = schedule.lag,
            .num_split = chosen.num_split,
            .num_parts = kParts,
            .dim_qk = problem.q.dims,
            .padded_rows_per_head = padded,
            .lse_log2 = rows.data(),
            .delta = delta.data(),
            .dq_accum = reinterpret_cast<float*>(sums.data()),
            .next_tile = counters,
            .done = counters + 1,
            .freed = counters + 1 + num_batch_kv_heads,
            .part_sums = part_sums.data(),
            .parts_done = counters + 2 + 3 * num_batch_kv_heads,
            .dq_semaphore = counters + 2 + 3 * num_batch_kv_heads + 2 * chosen.num_split,
            .nonfinite = counters + 1 + 2 * num_batch_kv_heads,
            .attention = arrays(),
            .comes_first = true};
  }

  emulator::Grid grid(i64 num_blocks, i32 threads, i32 shared_bytes) {
    return {.blocks = num_blocks,
            .threads = threads,
            .shared_bytes = shared_bytes,
            .seed = seed,
            .kernel = chosen.name,
            .check = is_checked(seed),
            .memory = &memory};
  }

  // Of all lines, before they were rounded.
  std::vector<u32> dq_accum() { return {sums.data(), sums.data() + num_sums}; }

  // The gradient, or where it is not asked for that nothing was written.
  static Matrix result(bool is_wanted, Rows& rows) {
    if (is_wanted) return rows.values();
    for (size_t i = 0; i < rows.bits.size(); ++i) EXPECT_EQ(rows.bits.data()[i], 0xffff);
    return Matrix{0, 0, 0, 0};
  }

  Gradients run() {
    const BackwardPreprocessParams prepare = prepare_params();
    emulator::launch(grid(2, BackwardPreprocessConfig::kThreads, 0), [&] {
      shape.sinks ? chosen.kernel->prepare_with_sinks(prepare) : chosen.kernel->prepare(prepare);
    });
    const BackwardParams main = params();
    emulator::Grid all = grid(blocks, config.threads(), config.shared_bytes());
    all.together = blocks > 1;
    emulator::launch(all, [&] { chosen.kernel->run(main); });
    return {result(config.dq, dq), result(config.dk, dk), result(config.dv, dv)};
  }
};

Gradients run(const BackwardCase& chosen, const BackwardProblem& problem, u32 seed) {
  return BackwardRun(chosen, problem, seed, 1).run();
}

class BackwardSm90 : public ::testing::TestWithParam<BackwardCase> {};

TEST_P(BackwardSm90, ObeysTheErrorRuleInEverySchedule) {
  const BackwardCase& chosen = GetParam();
  const BackwardProblem problem(chosen.kernel->config, chosen.shape, chosen.mask);
  for (u32 seed = 1; seed <= num_schedules(); ++seed) {
    EXPECT_EQ(problem.difference(run(chosen, problem, seed)), "") << "seed " << seed;
  }
}

const BackwardCase kCases[] = {
    {"full", &kBackwardD64Full, {.q_len = 256, .kv_len = 256}},
    {"full_ragged", &kBackwardD64Full, {.q_len = 201, .kv_len = 77, .dlse = true}},
    {"full_slots",
     &kBackwardD64Full,
     {.q_len = 130, .kv_len = 130, .heads_q = 6, .heads_kv = 6, .batch = 2},
     {},
     5},
    {"full_parts",
     &kBackwardD64Full,
     {.q_len = 390, .kv_len = 140, .heads_q = 4, .heads_kv = 2},
     {},
     0,
     3},
    {"causal", &kBackwardD64Causal, {.q_len = 300, .kv_len = 300}, kCausal},
    {"causal_more_keys", &kBackwardD64Causal, {.q_len = 150, .kv_len = 290}, kCausal},
    {"causal_more_queries", &kBackwardD64Causal, {.q_len = 290, .kv_len = 150}, kCausal},
    {"causal_top_left",
     &kBackwardD64Causal,
     {.q_len = 150, .kv_len = 290, .top_left = true},
     kCausal},
    {"prefix", &kBackwardD64Causal, {.q_len = 290, .kv_len = 290}, kPrefix},
    {"window", &kBackwardD64Window, {.q_len = 300, .kv_len = 280}, kWindow},
    {"two_sided", &kBackwardD64Window, {.q_len = 290, .kv_len = 310}, kTwoSided},
    {"chunk", &kBackwardD64Window, {.q_len = 290, .kv_len = 290}, kChunk},
    {"half", &kBackwardD64Half, {.q_len = 200, .kv_len = 200}, kCausal},
    {"narrow",
     &kBackwardD64Half,
     {.q_len = 140, .kv_len = 140, .dim_qk = 40, .dim_v = 24},
     kCausal},
    {"one_row", &kBackwardD64Full, {.q_len = 1, .kv_len = 1}},
    {"grouped",
     &kBackwardD64Causal,
     {.q_len = 140, .kv_len = 140, .heads_q = 6, .heads_kv = 2, .batch = 2},
     kCausal},
    {"wide_full", &kBackwardD128Full, {.q_len = 200, .kv_len = 200}},
    {"wide_parts", &kBackwardD128Full, {.q_len = 200, .kv_len = 200}, {}, 0, 1},
    {"wide_no_turns", &kBackwardD128NoTurns, {.q_len = 200, .kv_len = 200}},
    {"wide_causal", &kBackwardD128Causal, {.q_len = 300, .kv_len = 300}, kCausal},
    {"wide_grouped",
     &kBackwardD128Causal,
     {.q_len = 170, .kv_len = 210, .heads_q = 4, .heads_kv = 1},
     kCausal},
    {"wide_window", &kBackwardD128Window, {.q_len = 300, .kv_len = 280}, kWindow},
    {"wide_mixed",
     &kBackwardD128Causal,
     {.q_len = 140, .kv_len = 140, .dim_qk = 128, .dim_v = 96},
     kCausal},
    {"dq_only", &kBackwardD64DqOnly, {.q_len = 140, .kv_len = 140}, kCausal},
    {"no_dq", &kBackwardD128NoDq, {.q_len = 140, .kv_len = 140}, kCausal},
    {"sinks", &kBackwardD64Window, {.q_len = 150, .kv_len = 150, .sinks = true}, kWindow},
    {"stats_sinks", &kBackwardD128Stats, {.q_len = 150, .kv_len = 150, .sinks = true}, kCausal},
    {"stats", &kBackwardD128Stats, {.q_len = 200, .kv_len = 200, .dlse = true}, kCausal},
    {"stats_huge",
     &kBackwardD128Stats,
     {.q_len = 130, .kv_len = 130, .dim_qk = 64, .huge = true},
     kCausal},
    // A key past the end with a score of 0 would outweigh every real one.
    {"low_63", &kBackwardD64Full, {.q_len = 130, .kv_len = 63, .low = true}},
    {"low_64", &kBackwardD64Full, {.q_len = 65, .kv_len = 64, .low = true}},
    {"low_65", &kBackwardD64Full, {.q_len = 63, .kv_len = 65, .low = true}},
    {"low_127", &kBackwardD64Full, {.q_len = 64, .kv_len = 127, .low = true}},
    {"low_191", &kBackwardD64Causal, {.q_len = 191, .kv_len = 191, .low = true}, kCausal},
    {"low_255", &kBackwardD128Full, {.q_len = 65, .kv_len = 255, .low = true}},
};

// Three multiprocessors take blocks of keys at the same time, in 20 schedules. In deterministic
// mode they add to dQ in one order, whoever is first. A slot of sums is used again when its dQ has
// been converted; and the last part of a split block of keys adds the sums of the others in their
// order. So all bits of dK and dV are the same in every schedule, and those of dQ in deterministic
// mode.
class BackwardSm90Together : public ::testing::TestWithParam<BackwardCase> {};

void expect_equal_bits(const Matrix& found, const Matrix& first, const char* name) {
  for (size_t i = 0; i < found.data.size(); ++i) {
    const size_t row = i / static_cast<size_t>(found.dims);
    ASSERT_EQ(found.data[i], first.data[i])
        << name << ", row " << row << " of all, column " << i % static_cast<size_t>(found.dims);
  }
}

TEST_P(BackwardSm90Together, BitsAreTheSameInEverySchedule) {
  const BackwardCase& chosen = GetParam();
  const BackwardProblem problem(chosen.kernel->config, chosen.shape, chosen.mask);
  BackwardRun first(chosen, problem, 1, 3);
  const Gradients expected = first.run();
  ASSERT_EQ(problem.difference(expected), "");
  for (u32 seed = 2; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    BackwardRun other(chosen, problem, seed, 3);
    const Gradients found = other.run();
    expect_equal_bits(found.dk, expected.dk, "dk");
    expect_equal_bits(found.dv, expected.dv, "dv");
    if (chosen.kernel->config.deterministic) {
      EXPECT_EQ(first.dq_accum(), other.dq_accum()) << "sums of dQ";
    } else {
      EXPECT_EQ(problem.difference(found), "");
    }
    if (HasFailure()) return;
  }
}

const BackwardCase kTogether[] = {
    {"deterministic",
     &kBackwardD64Ordered,
     {.q_len = 70, .kv_len = 511, .heads_q = 1, .heads_kv = 1},
     kCausal},
    {"ordered_grouped",
     &kBackwardD64Ordered,
     {.q_len = 70, .kv_len = 300, .heads_q = 2, .heads_kv = 1},
     kPrefix},
    {"ordered_wide",
     &kBackwardD128Ordered,
     {.q_len = 60, .kv_len = 400, .heads_q = 1, .heads_kv = 1}},
    {"slots", &kBackwardD64Full, {.q_len = 70, .kv_len = 100, .heads_q = 6, .heads_kv = 6}, {}, 4},
    {"parts",
     &kBackwardD64Full,
     {.q_len = 200, .kv_len = 100, .heads_q = 2, .heads_kv = 1},
     {},
     0,
     1},
    {"wide_parts",
     &kBackwardD128Full,
     {.q_len = 200, .kv_len = 100, .heads_q = 1, .heads_kv = 1},
     {},
     0,
     1},
};

INSTANTIATE_TEST_SUITE_P(Cases, BackwardSm90Together, ::testing::ValuesIn(kTogether),
                         [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(Cases, BackwardSm90, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fulmen::test
