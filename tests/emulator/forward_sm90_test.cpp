// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The Hopper forward kernel, its text unchanged, on the host: ragged shapes in every mask, one and
// several stages, grouped heads, rows that see nothing, scores that force the second attempt, in
// more than one schedule. Every row of O and lse is compared with float64 (forward_problem.cpp
// states the bound), and inputs and output lie against memory that may not be touched.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <ostream>
#include <string>

#include "emulator/copies.h"
#include "emulator/launch.h"
#include "forward_configs.h"
#include "forward_problem.h"
#include "schedules.h"
#include "support/guarded_memory.h"

namespace fulmen::test {
namespace {

struct ForwardCase {
  std::string name;
  const ForwardKernel* kernel;
  ForwardShape shape;
  IntervalMask mask = {};
  float outlier = 0;
};

void PrintTo(const ForwardCase& forward_case, std::ostream* out) { *out << forward_case.name; }

constexpr IntervalMask kCausal{.causal = true};
constexpr IntervalMask kWindow{.causal = true, .window_left = 70};
constexpr IntervalMask kWideWindow{.causal = true, .window_left = 200};  // with full blocks
constexpr IntervalMask kTwoSided{.window_left = 40, .window_right = 90};
constexpr IntervalMask kPrefix{.causal = true, .prefix = 100};
constexpr IntervalMask kChunk{.causal = true, .chunk = 96};

// A copy of an array at the end of guarded memory.
class Guarded {
 public:
  explicit Guarded(const std::vector<u16>& array) : memory_(array.size() * sizeof(u16)) {
    std::copy(array.begin(), array.end(), data());
  }
  u16* data() { return reinterpret_cast<u16*>(memory_.data()); }

 private:
  GuardedMemory memory_;
};

TensorMap tensor_map(Guarded& array, i32 dims, i32 rows, i32 heads, i32 batch, i32 box_rows) {
  const i64 row_bytes = i64{dims} * 2;
  const i64 head_bytes = row_bytes * rows;
  return emulator::encode({reinterpret_cast<u8*>(array.data()),
                           {2, row_bytes, head_bytes, head_bytes * heads},
                           {dims, rows, heads, batch},
                           box_rows});
}

struct ForwardResult {
  std::vector<u16> o;
  std::vector<float> lse;
  u32 next_block = 0;
};

ForwardResult run(const ForwardKernel& kernel, const ForwardProblem& problem, u32 seed) {
  const ForwardSm90Config& config = kernel.config;
  const ForwardShape& shape = problem.shape();
  const i64 lines = i64{shape.batch} * shape.heads_q;
  const size_t num_rows = static_cast<size_t>(lines * shape.q_len);
  const size_t num_elements = num_rows * static_cast<size_t>(config.d_v);
  ForwardResult result{std::vector<u16>(num_elements, 0xffff), std::vector<float>(num_rows, NAN)};
  Guarded q(problem.q), k(problem.k), v(problem.v), o(result.o);
  ForwardArguments arguments{};
  arguments.maps = {
      tensor_map(q, config.d_qk, shape.q_len, shape.heads_q, shape.batch, 64),
      tensor_map(k, config.d_qk, shape.kv_len, shape.heads_kv, shape.batch, config.kv_rows),
      tensor_map(v, config.d_v, shape.kv_len, shape.heads_kv, shape.batch, config.kv_rows),
      tensor_map(o, config.d_v, shape.q_len, shape.heads_q, shape.batch, 64)};
  const i32 num_q_blocks = static_cast<i32>(ceil_div(shape.q_len, config.q_rows()));
  const auto view = [&](void* data, i64 dims) {
    const i64 head = shape.q_len * dims;
    return ArrayView{
        static_cast<u8*>(data), {head * shape.heads_q, head, dims, 1}, DType::kFloat32};
  };
  arguments.params = {.batch = shape.batch,
                      .heads_q = shape.heads_q,
                      .heads_kv = shape.heads_kv,
                      .shape = problem.sequence(),
                      .mask = problem.mask(),
                      .scale_log2 = static_cast<float>(problem.scale() * 1.4426950408889634),
                      .num_q_blocks = num_q_blocks,
                      .heads_per_group = 2,
                      .next_block = &result.next_block,
                      .scale = static_cast<float>(problem.scale())};
  arguments.params.attention.o = view(o.data(), config.d_v);
  arguments.params.attention.lse = view(result.lse.data(), 1);
  arguments.params.attention.dim_v = config.d_v;
  const i32 tasks = num_q_blocks * static_cast<i32>(lines);
  emulator::launch({.blocks = std::min(2, tasks),
                    .threads = config.threads(),
                    .shared_bytes = config.shared_bytes(),
                    .seed = seed,
                    .kernel = std::string(kernel.name),
                    .check = is_checked(seed)},
                   [&] { kernel.run(arguments); });
  std::copy(o.data(), o.data() + result.o.size(), result.o.begin());
  return result;
}

bool within(double got, const Bounded& expected) {
  return got == expected.value || std::abs(got - expected.value) <= expected.bound;
}

// The first differences of a row, none if it is right.
void expect_row(const ForwardProblem& problem, const ForwardResult& result, i32 batch, i32 head,
                i32 q_row) {
  const ReferenceRow reference = reference_row(problem, batch, head, q_row);
  const size_t row = static_cast<size_t>(problem.line(batch, head) * problem.shape().q_len + q_row);
  EXPECT_TRUE(within(result.lse[row], reference.lse))
      << "lse of batch " << batch << ", head " << head << ", row " << q_row << ": "
      << result.lse[row] << " for " << reference.lse.value << " +- " << reference.lse.bound;
  for (size_t d = 0; d < reference.o.size(); ++d) {
    const double got = problem.to_double(result.o[row * reference.o.size() + d]);
    ASSERT_TRUE(within(got, reference.o[d]))
        << "o of batch " << batch << ", head " << head << ", row " << q_row << ", dim " << d << ": "
        << got << " for " << reference.o[d].value << " +- " << reference.o[d].bound;
  }
}

class ForwardSm90 : public ::testing::TestWithParam<ForwardCase> {};

TEST_P(ForwardSm90, EqualsFloat64WithinRoundingInEverySchedule) {
  const ForwardCase& chosen = GetParam();
  const ForwardProblem problem(chosen.kernel->config, chosen.shape, chosen.mask, chosen.outlier);
  const ForwardResult result = run(*chosen.kernel, problem, 1);
  for (i32 batch = 0; batch < chosen.shape.batch; ++batch) {
    for (i32 head = 0; head < chosen.shape.heads_q; ++head) {
      for (i32 row = 0; row < chosen.shape.q_len; ++row) {
        expect_row(problem, result, batch, head, row);
        if (HasFatalFailure()) return;
      }
    }
  }
  EXPECT_EQ(result.next_block, 0u) << "the next launch would begin elsewhere";
  for (u32 seed = 2; seed <= num_schedules(); ++seed) {
    const ForwardResult other = run(*chosen.kernel, problem, seed);
    EXPECT_EQ(result.o, other.o) << "bits depend on the schedule";
    EXPECT_EQ(result.lse, other.lse) << "bits depend on the schedule";
  }
}

std::string name_of(const ::testing::TestParamInfo<ForwardCase>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(
    HeadDim64, ForwardSm90,
    ::testing::Values(ForwardCase{"Full", &kD64Full, {300, 300}},
                      ForwardCase{"FullOneRow", &kD64Full, {1, 129, 4, 2}},
                      ForwardCase{"FullGrouped", &kD64Full, {130, 257, 4, 2, 2}},
                      ForwardCase{"FullOneKey", &kD64Full, {65, 1}},
                      ForwardCase{"Full63", &kD64Full, {65, 63}},
                      ForwardCase{"Full127", &kD64Full, {63, 127}},
                      ForwardCase{"Full255", &kD64Full, {64, 255}},
                      ForwardCase{"Causal191", &kD64Prefix, {191, 191}, kCausal},
                      ForwardCase{"Window127", &kD64Window, {127, 127, 2, 1}, kWideWindow},
                      ForwardCase{"FullOutlier", &kD64Full, {300, 300}, {}, 100},
                      ForwardCase{"Causal", &kD64Causal, {385, 385}, kCausal},
                      ForwardCase{"CausalBlind", &kD64Causal, {385, 192, 3, 1}, kCausal},
                      ForwardCase{"CausalOutlier", &kD64Causal, {500, 500}, kCausal, 100},
                      ForwardCase{"Prefix", &kD64Prefix, {257, 320}, kPrefix},
                      ForwardCase{"Window", &kD64Window, {400, 450, 2, 1}, kWindow},
                      ForwardCase{"WideWindow", &kD64Window, {200, 450, 2, 1}, kWideWindow},
                      ForwardCase{"WideWindowSumGrew", &kD64Chunk, {130, 400}, kWideWindow, 5},
                      ForwardCase{"OneStage", &kD64OneStage, {320, 255}, kTwoSided},
                      ForwardCase{"Chunk", &kD64Chunk, {193, 257, 2, 1}, kChunk},
                      ForwardCase{"Half", &kD64Half, {191, 320}, kCausal}),
    name_of);

INSTANTIATE_TEST_SUITE_P(
    HeadDim128, ForwardSm90,
    ::testing::Values(ForwardCase{"Causal", &kD128Causal, {257, 320, 2, 1}, kCausal},
                      ForwardCase{"QInRegisters", &kD128QRegisters, {333, 333}, kCausal},
                      ForwardCase{"SumGrew", &kD128SumGrew, {300, 300}, kCausal, 5},
                      ForwardCase{"EveryBlock", &kD128EveryBlock, {200, 300}, kCausal}),
    name_of);

INSTANTIATE_TEST_SUITE_P(HeadDim256, ForwardSm90,
                         ::testing::Values(ForwardCase{
                             "Causal", &kD256Causal, {130, 193, 2, 1}, kCausal}),
                         name_of);

}  // namespace
}  // namespace fulmen::test
