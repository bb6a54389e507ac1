// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// forward_sm80 over caches: drawn ones, and pages of several sizes with rows that are vectors.
#include <gtest/gtest.h>

#include <numeric>

#include "core/error.h"
#include "cpu/backend.h"
#include "cpu/random_problem.h"
#include "cpu/tiled_support.h"
#include "emulator/sm80/launch_forward.h"
#include "gpu/params.h"

namespace fulmen::test {
namespace {

template <bool kAligned>
constexpr ForwardSm80Config config_over_caches() {
  ForwardSm80Config config;
  config.caches = true;
  config.aligned = kAligned;
  config.d_qk = config.d_v = 48;
  config.warps = 2;
  config.row_tiles = 1;
  config.kv_rows = 32;
  config.score.stats = true;
  config.score.negative_scale = true;
  config.score.alibi = config.score.dropout = !kAligned;
  return config;
}

// K and V in a single buffer, every copy predicated; warps that share their rows.
constexpr ForwardSm80Config config_of_one_buffer() {
  ForwardSm80Config config = config_over_caches<true>();
  config.d_v = 64;
  config.warps_n = 2;
  config.stages = 1;
  config.single_buffer = config.predicates_copies = true;
  return config;
}

// Blocks of their own for the first 32 dims of V and for those behind.
constexpr ForwardSm80Config config_of_parts() {
  ForwardSm80Config config = config_over_caches<true>();
  config.d_v = 32;
  return config;
}

void expect_agreement(const Request& actual, const Request& expected, const std::string& what) {
  const Difference o = compare(actual.arrays[Array::kO], expected.arrays[Array::kO]);
  EXPECT_LE(o.largest, 2 * tolerance(DType::kBFloat16, DType::kBFloat16) * max(o.magnitude, 1.0))
      << what << ", o" << o.place;
  const Difference lse = compare(actual.arrays[Array::kLse], expected.arrays[Array::kLse]);
  EXPECT_LE(lse.largest, 1e-5 * max(lse.magnitude, 1.0)) << what << ", lse" << lse.place;
}

template <ForwardSm80Config kConfig>
void expect_agreement(RandomProblem& random, const Request& expected, unsigned seed,
                      const std::string& what) {
  const Request actual = with_fresh_outputs(random, expected);
  const Problem problem = validate(expected, Pointers::kChecked);
  check_lengths(problem);
  check_pages(problem);
  cpu::scalar_forward(problem);
  launch<kConfig>(gpu::attention_params(validate(actual, Pointers::kChecked)), seed);
  expect_agreement(actual, expected, what);
}

TEST(ForwardSm80OverCaches, DrawnOnesAgreeWithTheOracle) {
  for (unsigned seed = 1; seed <= num_drawn(120); ++seed) {
    RandomProblem random(seed);
    Request request = random.draw_cache();
    if (request.arrays[Array::kQ].dtype != DType::kBFloat16) continue;
    for (const Array array : {Array::kPositions, Array::kTree, Array::kBias, Array::kMask,
                              Array::kQIds, Array::kKvIds}) {
      request.arrays[array] = {};
    }
    request.options.softcap = 0;
    if (validate(request, Pointers::kChecked).cache_array() == Array::kCount) continue;
    expect_agreement<config_over_caches<false>()>(random, request, seed,
                                                  "seed " + std::to_string(seed));
  }
}

// Contiguous, which aligns rows.
Tensor rows_of_48(RandomProblem& random, i64 a, i64 b, i64 rows) {
  Tensor tensor{nullptr, DType::kBFloat16, 4, {a, b, rows, 48}, {b * rows * 48, rows * 48, 48, 1}};
  tensor.data = random.memory(static_cast<size_t>(a * b * rows * 48 * 2));
  return tensor;
}

// Two requests of 40 query rows, the second with a shared first page and left padding.
Request request_of(RandomProblem& random, i64 page_rows, i64 length) {
  Request request;
  Arrays& arrays = request.arrays;
  const i64 width = ceil_div(length + 5, page_rows);
  std::vector<i64> table(static_cast<size_t>(2 * width));
  std::iota(table.begin(), table.end(), 1);
  std::reverse(table.begin(), table.end());
  table[static_cast<size_t>(width)] = table[0];
  const i64 pages = 2 * width + 1;
  for (const Array array : {Array::kQ, Array::kO}) arrays[array] = rows_of_48(random, 2, 4, 40);
  for (const Array array : {Array::kK, Array::kV}) {
    arrays[array] = rows_of_48(random, pages, 2, page_rows);
    random.fill_normal(arrays[array]);
  }
  random.fill_normal(arrays[Array::kQ]);
  arrays[Array::kLse] = random.array(DType::kFloat32, {2, 4, 40});
  arrays[Array::kStats] = random.array(DType::kFloat32, {2, 4, 40, 2});
  Tensor& page_table = arrays[Array::kPageTable] = random.indices(DType::kInt32, table);
  page_table.rank = 2;
  page_table.shape[0] = 2;
  page_table.shape[1] = page_table.strides[0] = width;
  page_table.strides[1] = 1;
  arrays[Array::kKvLengths] = random.indices(DType::kInt32, {length, length + 3});
  arrays[Array::kKvStart] = random.indices(DType::kInt32, {0, 2});
  request.options.scale = kNan;
  request.options.causal = true;
  return request;
}

TEST(ForwardSm80OverCaches, PagesOfVectorsAgreeWithTheOracle) {
  for (const i64 page_rows : {1, 3, 16, 64}) {
    for (const i64 length : {0, 31, 32, 77}) {
      RandomProblem random(static_cast<unsigned>(page_rows + length));
      const std::string what = sentence("pages of ", page_rows, ", ", length, " keys");
      const Request request = request_of(random, page_rows, length);
      expect_agreement<config_over_caches<true>()>(random, request, 2, what);
      expect_agreement<config_of_one_buffer()>(random, request, 2, what);
      if (page_rows == 16) expect_agreement<config_of_parts()>(random, request, 2, what);
    }
  }
}

// Row i of the first request sees keys up to i + 10; the second page holds those from 16 on.
template <ForwardSm80Config kConfig>
void expect_rows_without_a_page_are_empty() {
  constexpr double kNothing = -std::numeric_limits<double>::infinity();
  RandomProblem random(3);
  const Request expected = request_of(random, 16, 50);
  cpu::scalar_forward(validate(expected, Pointers::kChecked));
  for (i64 head = 0; head < 4; ++head) {
    for (i64 row = 6; row < 40; ++row) {
      for (i64 dim = 0; dim < 48; ++dim) {
        const i64 at[kMaxRank] = {0, head, row, dim};
        store_real(RandomProblem::address(expected.arrays[Array::kO], at), DType::kBFloat16, 0);
      }
      const i64 at[kMaxRank] = {0, head, row, 0};
      store_real(RandomProblem::address(expected.arrays[Array::kLse], at), DType::kFloat32,
                 kNothing);
    }
  }
  for (const i32 id : {-1, 1 << 20}) {
    const Request actual = with_fresh_outputs(random, expected);
    static_cast<i32*>(actual.arrays[Array::kPageTable].data)[1] = id;
    FaultBytes faults{};
    launch<kConfig>(gpu::attention_params(validate(actual, Pointers::kChecked), &faults), 1);
    EXPECT_EQ(faults.bits(), u32{kFaultPages});
    expect_agreement(actual, expected, sentence("page ", id));
  }
}

TEST(ForwardSm80OverCaches, ABadPageEmptiesTheRowsThatSeeIt) {
  expect_rows_without_a_page_are_empty<config_over_caches<true>()>();
  expect_rows_without_a_page_are_empty<config_of_one_buffer()>();
}

// Lengths that are out of range count as 0.
TEST(ForwardSm80OverCaches, ABadLengthMakesItsRequestEmpty) {
  RandomProblem random(4);
  const Request expected = request_of(random, 16, 50);
  i32* const length_of = static_cast<i32*>(expected.arrays[Array::kKvLengths].data);
  static_cast<i32*>(expected.arrays[Array::kKvStart].data)[1] = length_of[1] = 0;
  cpu::scalar_forward(validate(expected, Pointers::kChecked));
  for (const i32 length : {-1, 1 << 20}) {
    const Request actual = with_fresh_outputs(random, expected);
    length_of[1] = length;
    FaultBytes faults{};
    launch<config_over_caches<true>()>(
        gpu::attention_params(validate(actual, Pointers::kChecked), &faults), 1);
    EXPECT_EQ(faults.bits(), u32{kFaultKvLengths});
    expect_agreement(actual, expected, sentence("length ", length));
  }
}

}  // namespace
}  // namespace fulmen::test
