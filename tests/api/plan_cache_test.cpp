// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Calls like an earlier one find its plan; what pointers, contents and the seed decide is still
// looked at in each of them.
#include "api/test_call.h"

namespace fulmen::test {
namespace {

using T = fulmen_tensors;

testing::AssertionResult says(fulmen_status got, fulmen_status wanted, const char* words) {
  const std::string said = got == FULMEN_OK ? "" : fulmen_last_error();
  if (got == wanted && said.find(words) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << fulmen_status_name(got) << ": " << said;
}

// A call whose plan an earlier one has left behind.
TestCall later_call() {
  TestCall earlier;
  EXPECT_EQ(earlier.forward(), FULMEN_OK) << fulmen_last_error();
  return TestCall();
}

TEST(PlanCache, ALaterCallComputesWithItsOwnArrays) {
  TestCall fresh;
  ASSERT_EQ(fresh.forward(), FULMEN_OK) << fulmen_last_error();
  TestCall later = later_call();
  std::memset(later.tensors.v.data, 0, size_of(later.tensors.v));
  ASSERT_EQ(later.forward(), FULMEN_OK) << fulmen_last_error();
  for (const float x : later.floats(&T::o)) EXPECT_EQ(x, 0);
  EXPECT_EQ(later.bytes(&T::lse), fresh.bytes(&T::lse));
}

TEST(PlanCache, PointersAreCheckedInEachCall) {
  TestCall null = later_call();
  null.tensors.k.data = nullptr;
  EXPECT_TRUE(says(null.forward(), FULMEN_ERROR_ARGUMENT, "k has elements"));
  EXPECT_TRUE(null.outputs_untouched());
  TestCall overlapping = later_call();
  overlapping.tensors.lse.data = overlapping.tensors.o.data;
  EXPECT_TRUE(says(overlapping.forward(), FULMEN_ERROR_ARGUMENT, "o overlaps lse"));
  EXPECT_TRUE(overlapping.outputs_untouched());
}

TEST(PlanCache, LengthsAreCheckedInEachCall) {
  for (const int64_t length : {int64_t{4}, int64_t{6}, int64_t{0}}) {
    TestCall call;
    call.indices(&T::kv_lengths, {5, length});
    const fulmen_status status = call.forward();
    if (length <= 5) {
      EXPECT_EQ(status, FULMEN_OK) << fulmen_last_error();
    } else {
      EXPECT_TRUE(says(status, FULMEN_ERROR_ARGUMENT, "kv_lengths"));
      EXPECT_TRUE(call.outputs_untouched());
    }
  }
}

TEST(PlanCache, DropoutIsThatOfTheCall) {
  std::string first;
  for (const uint64_t seed : {uint64_t{1}, uint64_t{2}, uint64_t{1}}) {
    TestCall call;
    call.problem.dropout_p = 0.5;
    call.problem.rng_seed = seed;
    ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
    if (first.empty()) first = call.bytes(&T::o);
    EXPECT_EQ(call.bytes(&T::o) == first, seed == 1);
  }
}

TEST(PlanCache, OptionsAndThreadsHavePlansOfTheirOwn) {
  TestCall plain = later_call();
  ASSERT_EQ(plain.forward(), FULMEN_OK);
  TestCall causal = later_call();
  causal.problem.causal = 1;
  ASSERT_EQ(causal.forward(), FULMEN_OK);
  EXPECT_NE(causal.bytes(&T::o), plain.bytes(&T::o));
  for (const int32_t threads : {1, 7, 2, 0}) {  // a plan for one thread has scratch for one
    ASSERT_EQ(fulmen_set_num_threads(threads), FULMEN_OK);
    TestCall call;
    ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
    EXPECT_EQ(call.bytes(&T::o), plain.bytes(&T::o));
  }
}

}  // namespace
}  // namespace fulmen::test
