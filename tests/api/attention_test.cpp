// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The simple call: a 2 by 2 problem computed by hand, ranks and strides, empty problems, hidden
// memory, in every implementation and dtype.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "api/refusal.h"
#include "core/tensor.h"

namespace fulmen::test {
namespace {

using T = fulmen_tensors;

constexpr float kInf = std::numeric_limits<float>::infinity();

class Implementation : public testing::TestWithParam<fulmen_implementation> {
 protected:
  TestCall call(const Sizes& sizes = {}, fulmen_dtype dtype = FULMEN_FLOAT32) const {
    TestCall made(sizes, dtype);
    made.problem.implementation = GetParam();
    return made;
  }
};

INSTANTIATE_TEST_SUITE_P(Each, Implementation, testing::Values(FULMEN_SCALAR, FULMEN_TILED),
                         [](const auto& info) {
                           return info.param == FULMEN_SCALAR ? "scalar" : "tiled";
                         });

void set_floats(const fulmen_tensor& tensor, const std::vector<float>& values) {
  ASSERT_EQ(size_of(tensor), values.size() * sizeof(float));
  std::memcpy(tensor.data, values.data(), size_of(tensor));
}

constexpr Sizes kTwoByTwo{
    .batch = 1, .heads = 1, .kv_heads = 1, .q_rows = 2, .kv_rows = 2, .dim_qk = 1, .dim_v = 1};

// q = (1, 2), k = (log 2, log 3) at scale 1: weights of row 0 are 2 : 3, of row 1 4 : 9.
TestCall two_by_two(fulmen_implementation implementation) {
  TestCall call(kTwoByTwo);
  call.problem.implementation = implementation;
  call.problem.scale = 1;
  set_floats(call.tensors.q, {1, 2});
  set_floats(call.tensors.k, {std::log(2.0f), std::log(3.0f)});
  set_floats(call.tensors.v, {10, 20});
  return call;
}

TEST_P(Implementation, ComputesTwoByTwoAsByHand) {
  TestCall call = two_by_two(GetParam());
  ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  const std::vector<float> o = call.floats(&T::o);
  EXPECT_NEAR(o[0], 10 * 2 / 5.0 + 20 * 3 / 5.0, 1e-5);
  EXPECT_NEAR(o[1], 10 * 4 / 13.0 + 20 * 9 / 13.0, 1e-5);
  const std::vector<float> lse = call.floats(&T::lse);
  EXPECT_NEAR(lse[0], std::log(5.0), 1e-6);
  EXPECT_NEAR(lse[1], std::log(13.0), 1e-6);
}

// Strides that no element is behind: sums of them would not fit 64 bits, which UBSan sees.
TEST_P(Implementation, EmptyArraysMayHaveAnyStrides) {
  for (const Sizes& sizes :
       {Sizes{.dim_qk = 0}, Sizes{.q_rows = 0}, Sizes{.kv_rows = 0}, Sizes{.batch = 0}}) {
    TestCall call(sizes);
    call.problem.implementation = GetParam();
    call.add_backward();
    for (const Member member : {&T::q, &T::k, &T::v, &T::o, &T::dout, &T::dq, &T::dk, &T::dv,
                                &T::lse, &T::stats, &T::dlse}) {
      fulmen_tensor& tensor = call.tensors.*member;
      if (size_of(tensor) > 0) continue;
      for (int64_t& stride : tensor.strides) stride = std::numeric_limits<int64_t>::max() - 1;
      tensor.strides[tensor.rank - 1] = 1;
    }
    EXPECT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
    EXPECT_EQ(call.backward(), FULMEN_OK) << fulmen_last_error();
  }
}

// Row 0 of dP is (10, 20), P = (.4, .6), delta = 16: dS = (-2.4, 2.4), dq = 2.4 log(3 / 2).
TEST_P(Implementation, DifferentiatesTwoByTwoAsByHand) {
  TestCall call = two_by_two(GetParam());
  ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  call.add_backward();
  call.remove(&T::dlse);
  set_floats(call.tensors.dout, {1, 0});
  ASSERT_EQ(call.backward(), FULMEN_OK) << fulmen_last_error();
  const std::vector<float> dq = call.floats(&T::dq);
  EXPECT_NEAR(dq[0], 2.4 * std::log(1.5), 1e-5);
  EXPECT_EQ(dq[1], 0);
  const std::vector<float> dk = call.floats(&T::dk);
  EXPECT_NEAR(dk[0], -2.4, 1e-5);
  EXPECT_NEAR(dk[1], 2.4, 1e-5);
  const std::vector<float> dv = call.floats(&T::dv);
  EXPECT_NEAR(dv[0], 0.4, 1e-6);
  EXPECT_NEAR(dv[1], 0.6, 1e-6);
}

TEST_P(Implementation, SinkTakesItsShare) {
  TestCall call = two_by_two(GetParam());
  set_floats(call.input(&T::sinks, FULMEN_FLOAT32, {1}), {std::log(5.0f)});
  ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  EXPECT_NEAR(call.floats(&T::o)[0], (10 * 2 + 20 * 3) / 10.0, 1e-5);
  EXPECT_NEAR(call.floats(&T::lse)[0], std::log(5.0), 1e-6);  // without the sink
}

TEST_P(Implementation, RowsThatSeeNothingAreZero) {
  TestCall call = this->call({.q_rows = 5, .kv_rows = 2});
  call.problem.causal = 1;  // rows 0, 1, 2 lie before the first key
  ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  const std::vector<float> o = call.floats(&T::o);
  const std::vector<float> lse = call.floats(&T::lse);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(lse[i], -kInf);
    for (size_t d = 0; d < 6; ++d) EXPECT_EQ(o[i * 6 + d], 0);
  }
  EXPECT_GT(lse[3], -kInf);
}

TEST_P(Implementation, HiddenKeysMayHoldAnything) {
  TestCall clean = this->call();
  TestCall dirty = this->call();
  for (TestCall* call : {&clean, &dirty}) call->indices(&T::kv_lengths, {3, 3});
  for (const Member member : {&T::k, &T::v}) {
    const fulmen_tensor& tensor = dirty.tensors.*member;
    for (int64_t head = 0; head < 4; ++head) {
      char* const rows = static_cast<char*>(tensor.data) + 4 * head * tensor.strides[1];
      std::memset(rows + 4 * 3 * tensor.strides[2], 0xff,
                  4 * 2 * static_cast<size_t>(tensor.strides[2]));
    }
  }
  ASSERT_EQ(clean.forward(), FULMEN_OK);
  ASSERT_EQ(dirty.forward(), FULMEN_OK);
  EXPECT_EQ(dirty.bytes(&T::o), clean.bytes(&T::o));
  EXPECT_EQ(dirty.bytes(&T::lse), clean.bytes(&T::lse));
}

TEST_P(Implementation, LeadingAxesOfOneMayBeLeftOut) {
  const Sizes sizes{.batch = 1, .heads = 1, .kv_heads = 1};
  TestCall full = this->call(sizes);
  TestCall bare = this->call(sizes);
  set_shape(bare.tensors.q, {3, 4});
  set_shape(bare.tensors.k, {1, 5, 4});
  set_shape(bare.tensors.v, {5, 6});
  set_shape(bare.tensors.o, {3, 6});
  set_shape(bare.tensors.lse, {3});
  set_shape(bare.tensors.stats, {1, 3, 2});
  ASSERT_EQ(full.forward(), FULMEN_OK);
  ASSERT_EQ(bare.forward(), FULMEN_OK) << fulmen_last_error();
  EXPECT_EQ(bare.bytes(&T::o), full.bytes(&T::o));
  EXPECT_EQ(bare.bytes(&T::stats), full.bytes(&T::stats));
}

// Axes of extent 1 and of empty arrays have strides that say nothing.
TEST_P(Implementation, StridesThatNeverActAreIgnored) {
  TestCall call = this->call({.batch = 1});
  call.tensors.q.strides[0] = -77;
  call.tensors.o.strides[0] = 0;
  EXPECT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
}

TEST_P(Implementation, EmptyProblemsAreLegal) {
  for (const Sizes& sizes : {Sizes{.batch = 0}, Sizes{.heads = 0}, Sizes{.heads = 0, .kv_heads = 0},
                             Sizes{.q_rows = 0}, Sizes{.kv_rows = 0}, Sizes{.dim_qk = 0}}) {
    TestCall call = this->call(sizes);
    ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
    call.add_backward();
    ASSERT_EQ(call.backward(), FULMEN_OK) << fulmen_last_error();
    for (const Member member : {&T::o, &T::dq, &T::dk, &T::dv}) {
      const std::vector<float> values = call.floats(member);
      EXPECT_TRUE(
          std::none_of(values.begin(), values.end(), [](float x) { return std::isnan(x); }));
    }
  }
}

TEST_P(Implementation, NullIsLegalWhereNothingIsRead) {
  TestCall call = this->call({.kv_rows = 0});
  call.tensors.k.data = call.tensors.v.data = nullptr;
  ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  EXPECT_EQ(call.floats(&T::o)[0], 0);
  EXPECT_EQ(call.floats(&T::lse)[0], -kInf);
}

// Sums of bounded numbers: 16-bit results lie within a few units in the last place of float64's.
TEST_P(Implementation, EveryDtypeComputesTheSame) {
  TestCall wide = this->call({}, FULMEN_FLOAT64);
  ASSERT_EQ(wide.forward(), FULMEN_OK);
  for (const fulmen_dtype dtype : {FULMEN_FLOAT32, FULMEN_FLOAT16, FULMEN_BFLOAT16}) {
    TestCall call = this->call({}, dtype);
    TestCall reference = this->call({}, FULMEN_FLOAT64);
    for (const Member member : {&T::q, &T::k, &T::v}) {  // the same numbers, rounded
      const char* from = static_cast<const char*>((call.tensors.*member).data);
      double* to = static_cast<double*>((reference.tensors.*member).data);
      const size_t count = size_of(reference.tensors.*member) / sizeof(double);
      for (size_t i = 0; i < count; ++i) {
        to[i] = load_real(from + i * size_of(dtype), static_cast<DType>(dtype));
      }
    }
    ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
    ASSERT_EQ(reference.forward(), FULMEN_OK);
    const double epsilon = dtype == FULMEN_FLOAT32   ? 0x1p-23
                           : dtype == FULMEN_FLOAT16 ? 0x1p-10
                                                     : 0x1p-7;
    const char* got = static_cast<const char*>(call.tensors.o.data);
    const double* expected = static_cast<const double*>(reference.tensors.o.data);
    for (size_t i = 0; i < size_of(reference.tensors.o) / sizeof(double); ++i) {
      const double value = load_real(got + i * size_of(dtype), static_cast<DType>(dtype));
      EXPECT_NEAR(value, expected[i], 4 * epsilon) << i;
    }
  }
}

}  // namespace
}  // namespace fulmen::test
