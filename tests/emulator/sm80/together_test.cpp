// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Blocks of backward_sm80 that run at the same time, in 20 schedules. With config.deterministic
// they add to dQ in the order of their keys: whoever is first, every sum has the same bits. Else
// they zero dq_accum for those that come later: no schedule adds to sums that are not zero yet. dK
// and dV are a block's own, and have the same bits in any case.
#include <gtest/gtest.h>

#include "cpu/backend.h"
#include "cpu/random_problem.h"
#include "cpu/tiled_support.h"
#include "emulator/sm80/launch_backward.h"
#include "gpu/params.h"

namespace fulmen::test {
namespace {

constexpr u32 kSchedules = 20;

// Blocks of 64 threads and 32 keys.
constexpr BackwardSm80Config small() {
  BackwardSm80Config config;
  config.d_qk = config.d_v = 32;
  config.warps = 2;
  config.q_rows = config.kv_rows = 32;
  config.stages = 1;
  config.s_rows = config.s_columns = 16;
  config.dkv_rows = config.dq_rows = config.dq_dims = 16;
  config.deterministic = true;
  return config;
}
constexpr BackwardSm80Config kOrdered = small();
// dQ of an iteration in the next one.
constexpr BackwardSm80Config kOrderedLate = [] {
  BackwardSm80Config config = small();
  config.stages = config.pair_stages = 2;
  return config;
}();
constexpr BackwardSm80Config kOrderedRoles = [] {
  BackwardSm80Config config = kOrderedLate;
  config.warps = 4;
  config.split_roles = config.late_prefetch = config.hopper = true;
  return config;
}();
// A semaphore orders every block, also where documents leave some out.
constexpr BackwardSm80Config kOrderedDocuments = [] {
  BackwardSm80Config config = small();
  config.score.documents = true;
  return config;
}();
constexpr BackwardSm80Config kZeroing = [] {
  BackwardSm80Config config = small();
  config.deterministic = false;
  config.zeroes_dq = true;
  return config;
}();
// Nothing waits for dS of all warps.
constexpr BackwardSm80Config kWithoutDq = [] {
  BackwardSm80Config config = small();
  config.deterministic = config.dq = false;
  return config;
}();

void expect_equal_bits(const Request& found, const Request& first, Array array, u32 seed) {
  const Tensor &one = found.arrays[array], &other = first.arrays[array];
  RandomProblem::for_each(one, [&](const i64* at) {
    if (testing::Test::HasFailure()) return;
    EXPECT_EQ(std::memcmp(RandomProblem::address(one, at), RandomProblem::address(other, at),
                          static_cast<size_t>(size_bytes(one.dtype))),
              0)
        << "seed " << seed << ", bits of " << name(array) << "[" << at[0] << "][" << at[1] << "]["
        << at[2] << "][" << at[3] << "]";
  });
}

Request forward_request(RandomProblem& random, bool causal, i64 heads, i64 rows, i64 keys) {
  Request request;
  Arrays& arrays = request.arrays;
  for (const Array array : {Array::kQ, Array::kO}) {
    arrays[array] = random.array(DType::kBFloat16, {1, heads, rows, 32});
  }
  for (const Array array : {Array::kK, Array::kV}) {
    arrays[array] = random.array(DType::kBFloat16, {1, heads, keys, 32});
  }
  arrays[Array::kLse] = random.array(DType::kFloat32, {1, heads, rows});
  for (const Array array : {Array::kQ, Array::kK, Array::kV}) random.fill_normal(arrays[array]);
  request.options.scale = kNan;
  request.options.causal = causal;
  if (causal && heads > 1) request.options.window_left = 10;
  return request;
}

// Documents of 50 rows; every block of keys meets another set of blocks of queries.
void add_documents(RandomProblem& random, Request& request) {
  for (const auto& [ids, of] :
       {std::pair{Array::kQIds, Array::kQ}, std::pair{Array::kKvIds, Array::kK}}) {
    std::vector<i64> numbers;
    for (i64 i = 0; i < request.arrays[of].shape[2]; ++i) numbers.push_back(i / 50);
    Tensor tensor = random.indices(DType::kInt64, numbers);
    tensor.rank = 2;
    tensor.shape[1] = tensor.shape[0];
    tensor.shape[0] = 1;
    tensor.strides[1] = 1;
    tensor.strides[0] = tensor.shape[1];
    request.arrays[ids] = tensor;
  }
}

template <BackwardSm80Config kConfig>
void expect_one_result(bool causal) {
  RandomProblem random(17);
  // Four blocks of keys that add to two of queries, or three; or three groups of two heads.
  Request forward = kConfig.zeroes_dq ? forward_request(random, causal, 6, 31, 95)
                                      : forward_request(random, causal, 1,
                                                        kConfig.score.documents ? 95 : 63, 127);
  if constexpr (kConfig.score.documents) add_documents(random, forward);
  cpu::scalar_forward(validate(forward, Pointers::kChecked));
  Request expected = to_backward(random, forward, kConfig.dq ? 7 : 6);  // bits: dq, dk, dv
  expected.arrays[Array::kDLse] = Tensor{};
  cpu::scalar_backward(validate(expected, Pointers::kChecked));
  Request first;
  std::vector<float> first_sums;
  for (u32 seed = 1; seed <= kSchedules; ++seed) {
    const Request actual = with_fresh_outputs(random, expected);
    const Problem problem = validate(actual, Pointers::kChecked);
    const std::vector<float> sums = launch<kConfig>(gpu::attention_params(problem), seed, true);
    if (seed == 1) first = actual, first_sums = sums;
    if (kConfig.deterministic) {
      ASSERT_EQ(std::memcmp(sums.data(), first_sums.data(), sums.size() * sizeof(float)), 0)
          << "seed " << seed << ", bits of the sums of dQ";
    }
    expect_equal_bits(actual, first, Array::kDK, seed);
    expect_equal_bits(actual, first, Array::kDV, seed);
    for (const Array output : {Array::kDQ, Array::kDK, Array::kDV}) {
      if (!actual.arrays[output].present()) continue;
      const Difference difference = compare(actual.arrays[output], expected.arrays[output]);
      const double allowed = 2 * tolerance(DType::kBFloat16, DType::kBFloat16);
      ASSERT_LE(difference.largest, allowed * max(difference.magnitude, 1.0))
          << "seed " << seed << ", " << name(output) << difference.place;
    }
  }
}

TEST(BackwardSm80Together, OrderedAddsInOneOrder) { expect_one_result<kOrdered>(false); }
TEST(BackwardSm80Together, OrderedLateAddsInOneOrder) { expect_one_result<kOrderedLate>(true); }
TEST(BackwardSm80Together, OrderedRolesAddInOneOrder) { expect_one_result<kOrderedRoles>(true); }
TEST(BackwardSm80Together, OrderedDocumentsAddInOneOrder) {
  expect_one_result<kOrderedDocuments>(false);
}
// The first blocks of keys add nothing where a window hides them, and zero all the same.
TEST(BackwardSm80Together, NothingIsAddedBeforeItIsZero) {
  expect_one_result<kZeroing>(false);
  expect_one_result<kZeroing>(true);
}

TEST(BackwardSm80Together, KeysAloneHaveTheSameBits) { expect_one_result<kWithoutDq>(false); }

}  // namespace
}  // namespace fulmen::test
