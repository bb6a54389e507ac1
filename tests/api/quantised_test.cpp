// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Arrays of 8 bits through the C interface: the same results as those of the numbers that
// they stand for, scales of every extent, over pages too; hidden ones may hold anything; and what
// is refused.
#include <gmock/gmock.h>

#include <cmath>

#include "api/cache_call.h"
#include "api/refusal.h"
#include "core/tensor.h"

namespace fulmen::test {
namespace {

using T = fulmen_tensors;

const fulmen_dtype kTypes[] = {FULMEN_FLOAT8_E4M3, FULMEN_FLOAT8_E5M2, FULMEN_INT8};

void quantise(TestCall& call, fulmen_dtype dtype) {
  const Sizes& s = call.sizes;
  call.input(&T::k, dtype, {s.batch, s.kv_heads, s.kv_rows, s.dim_qk});
  call.input(&T::v, dtype, {s.batch, s.kv_heads, s.kv_rows, s.dim_v});
}

// Powers of 2, so that scale * k is a float32 number.
void add_scale(TestCall& call, Member member, const Shape& shape) {
  fulmen_tensor& scale = call.input(member, FULMEN_FLOAT32, shape);
  float* const numbers = static_cast<float*>(scale.data);
  for (size_t i = 0; i < size_of(scale) / sizeof(float); ++i) {
    numbers[i] = std::ldexp(1.0f, static_cast<int>(i % 5) - 2);
  }
}

// The scale of element (a, h, row) of k or v, by the rule of broadcasting.
float scale_at(const fulmen_tensor& scale, const int64_t* at) {
  if (scale.data == nullptr) return 1;
  int64_t index = 0;
  for (int axis = 0; axis < scale.rank; ++axis) {
    const int of_four = axis + 4 - scale.rank;
    if (scale.shape[axis] > 1) index += at[of_four] * scale.strides[axis];
  }
  return static_cast<const float*>(scale.data)[index];
}

// Contiguous float32 numbers of the same shape.
void dequantise(const fulmen_tensor& from, const fulmen_tensor& scale, const fulmen_tensor& to) {
  ASSERT_EQ(to.dtype, FULMEN_FLOAT32);
  int64_t at[4];
  float* out = static_cast<float*>(to.data);
  const char* in = static_cast<const char*>(from.data);
  for (at[0] = 0; at[0] < from.shape[0]; ++at[0]) {
    for (at[1] = 0; at[1] < from.shape[1]; ++at[1]) {
      for (at[2] = 0; at[2] < from.shape[2]; ++at[2]) {
        for (at[3] = 0; at[3] < from.shape[3]; ++at[3]) {
          const double stored = load_real(in++, static_cast<DType>(from.dtype));
          *out++ = scale_at(scale, at) * static_cast<float>(stored);
        }
      }
    }
  }
}

// The scalar implementation gives the same bits, the tiled one nearly.
void expect_same_as_dequantised(TestCall& call, TestCall& wide) {
  if (call.tensors.q.dtype == FULMEN_FLOAT32) {
    wide.tensors.q = call.tensors.q;
  } else {
    dequantise(call.tensors.q, call.tensors.q_scale, wide.tensors.q);
  }
  dequantise(call.tensors.k, call.tensors.k_scale, wide.tensors.k);
  dequantise(call.tensors.v, call.tensors.v_scale, wide.tensors.v);
  for (TestCall* one : {&call, &wide}) {
    one->problem.implementation = FULMEN_SCALAR;
    ASSERT_EQ(one->forward(), FULMEN_OK) << fulmen_last_error();
  }
  for (const Member member : {&T::o, &T::lse, &T::stats}) {
    EXPECT_EQ(call.bytes(member), wide.bytes(member));
  }
  call.problem.implementation = FULMEN_TILED;
  ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  for (const Member member : {&T::o, &T::lse}) {
    const std::vector<float> got = call.floats(member), expected = wide.floats(member);
    for (size_t i = 0; i < got.size(); ++i) {
      if (std::isfinite(expected[i])) {
        EXPECT_NEAR(got[i], expected[i], 1e-4) << i;
      } else {
        EXPECT_EQ(got[i], expected[i]) << i;
      }
    }
  }
}

TEST(Quantised, IsTheNumbersTimesTheirScales) {
  const Shape shapes[] = {{1}, {2, 1, 1}, {2, 2, 1, 1}, {5, 1}, {2, 1, 5, 1}, {2, 2, 5, 1}};
  for (const fulmen_dtype dtype : kTypes) {
    for (const Shape& shape : shapes) {
      TestCall call, wide;
      quantise(call, dtype);
      add_scale(call, &T::k_scale, shape);
      add_scale(call, &T::v_scale, shape);
      call.problem.causal = wide.problem.causal = 1;
      expect_same_as_dequantised(call, wide);
    }
  }
}

TEST(Quantised, QueriesAreToo) {
  const Shape shapes[] = {{1}, {4, 1, 1}, {2, 1, 3, 1}, {2, 4, 3, 1}};
  for (const fulmen_dtype dtype : kTypes) {
    for (const Shape& shape : shapes) {
      TestCall call, wide;
      const Sizes& s = call.sizes;
      quantise(call, dtype);
      call.input(&T::q, dtype, {s.batch, s.heads, s.q_rows, s.dim_qk});
      add_scale(call, &T::q_scale, shape);
      add_scale(call, &T::v_scale, {s.kv_heads, 1, s.dim_v});
      expect_same_as_dequantised(call, wide);
    }
  }
}

TEST(Quantised, NeedsNoScales) {
  for (const fulmen_dtype dtype : kTypes) {
    TestCall call, wide;
    quantise(call, dtype);
    expect_same_as_dequantised(call, wide);
  }
}

// Dimensions that are read where they lie, keys of several splits.
TEST(Quantised, IsReadInPlaceByFewRows) {
  for (const fulmen_dtype dtype : kTypes) {
    const Sizes sizes{.batch = 1, .q_rows = 1, .kv_rows = 1100, .dim_qk = 64, .dim_v = 32};
    TestCall call(sizes), wide(sizes);
    quantise(call, dtype);
    add_scale(call, &T::k_scale, {2, 1100, 1});
    add_scale(call, &T::v_scale, {2, 1100, 1});
    expect_same_as_dequantised(call, wide);
  }
}

TEST(Quantised, PagesHaveScalesPerPageHeadAndRow) {
  for (const Shape& shape : {Shape{9, 2, 3, 1}, Shape{9, 1, 1, 1}, Shape{2, 1, 1}}) {
    for (const fulmen_dtype dtype : kTypes) {
      TestCall call = paged_call(), wide = paged_call();
      call.input(&T::k, dtype, {9, 2, 3, 4});
      call.input(&T::v, dtype, {9, 2, 3, 6});
      add_scale(call, &T::k_scale, shape);
      add_scale(call, &T::v_scale, shape);
      expect_same_as_dequantised(call, wide);
    }
  }
}

TEST(Quantised, HiddenKeysMayHoldAnything) {
  for (const fulmen_dtype dtype : kTypes) {
    for (const fulmen_implementation implementation : {FULMEN_SCALAR, FULMEN_TILED}) {
      std::string results[2];
      for (const bool poisoned : {false, true}) {
        TestCall call;
        call.problem.implementation = implementation;
        quantise(call, dtype);
        add_scale(call, &T::k_scale, {2, 2, 5, 1});
        add_scale(call, &T::v_scale, {2, 2, 5, 1});
        call.indices(&T::kv_lengths, {3, 4});
        for (int64_t b = 0; b < 2 && poisoned; ++b) {
          for (int64_t head = 0; head < 2; ++head) {
            const int64_t row = (b * 2 + head) * 5 + 4;  // the last one
            std::memset(static_cast<char*>(call.tensors.k.data) + row * 4, 0xff, 4);
            std::memset(static_cast<char*>(call.tensors.v.data) + row * 6, 0x7c, 6);
            static_cast<float*>(call.tensors.k_scale.data)[row] = NAN;
            static_cast<float*>(call.tensors.v_scale.data)[row] = HUGE_VALF;
          }
        }
        ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
        results[poisoned] = call.bytes(&T::o) + call.bytes(&T::lse);
      }
      EXPECT_EQ(results[0], results[1]);
    }
  }
}

TEST(Quantised, VisibleNaNIsSeen) {
  for (const fulmen_implementation implementation : {FULMEN_SCALAR, FULMEN_TILED}) {
    TestCall call;
    call.problem.implementation = implementation;
    call.problem.causal = 1;
    quantise(call, FULMEN_FLOAT8_E4M3);
    static_cast<unsigned char*>(call.tensors.v.data)[4 * 6] = 0x7f;  // key 4: of the last row alone
    ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
    const std::vector<float> o = call.floats(&T::o), lse = call.floats(&T::lse);
    EXPECT_FALSE(std::isnan(o[6]));
    EXPECT_TRUE(std::isnan(o[12]));
    EXPECT_FALSE(std::isnan(lse[2]));
  }
}

const Refusal kRefused[] = {
    {"scales of numbers that are not quantised",
     [](TestCall& c) { c.input(&T::k_scale, FULMEN_FLOAT32, {1}); },
     FULMEN_ERROR_ARGUMENT,
     {"k_scale is given where k is float32", "float8_e4m3fn, float8_e5m2 and int8"}},
    {"k and v of two types",
     [](TestCall& c) {
       quantise(c, FULMEN_INT8);
       c.tensors.v.dtype = FULMEN_FLOAT8_E4M3;
     },
     FULMEN_ERROR_DTYPE,
     {"v is float8_e4m3fn where k is int8", "the dtype of k"}},
    {"q of 8 bits beside k of others",
     [](TestCall& c) { c.tensors.q.dtype = FULMEN_FLOAT8_E4M3; },
     FULMEN_ERROR_DTYPE,
     {"k is float32 where q is float8_e4m3fn", "the dtype of q"}},
    {"q of 8 bits beside k of other 8 bits",
     [](TestCall& c) {
       quantise(c, FULMEN_INT8);
       c.tensors.q.dtype = FULMEN_FLOAT8_E4M3;
     },
     FULMEN_ERROR_DTYPE,
     {"k is int8 where q is float8_e4m3fn", "the dtype of q"}},
    {"scales of q that is not quantised",
     [](TestCall& c) {
       quantise(c, FULMEN_INT8);
       c.input(&T::q_scale, FULMEN_FLOAT32, {1});
     },
     FULMEN_ERROR_ARGUMENT,
     {"q_scale is given where q is float32", "leave it out"}},
    {"half scales",
     [](TestCall& c) {
       quantise(c, FULMEN_INT8);
       c.input(&T::v_scale, FULMEN_FLOAT16, {1});
     },
     FULMEN_ERROR_DTYPE,
     {"v_scale is float16", "allowed is float32"}},
    {"scales of query heads",
     [](TestCall& c) {
       quantise(c, FULMEN_INT8);
       c.input(&T::k_scale, FULMEN_FLOAT32, {4, 1, 1});
     },
     FULMEN_ERROR_SHAPE,
     {"k_scale has shape (4, 1, 1)", "kv_head = 2 or 1"}},
    {"scales of channels",
     [](TestCall& c) {
       quantise(c, FULMEN_INT8);
       c.input(&T::k_scale, FULMEN_FLOAT32, {2, 1, 4});
     },
     FULMEN_ERROR_SHAPE,
     {"k_scale has shape (2, 1, 4)", "all dims = 1"}},
    {"scales of rows and channels",
     [](TestCall& c) {
       quantise(c, FULMEN_INT8);
       c.input(&T::v_scale, FULMEN_FLOAT32, {5, 6});
     },
     FULMEN_ERROR_SHAPE,
     {"v_scale has an extent of 6 along dim_v", "allowed is one of them"}},
};

TEST(RefusalOfQuantised, ByCallsAndPlans) {
  for (const Refusal& row : kRefused) {
    expect_call_refuses(row);
    expect_plan_refuses(row);
  }
}

TEST(RefusalOfQuantised, OfFloat64Queries) {
  TestCall call({}, FULMEN_FLOAT64);
  quantise(call, FULMEN_FLOAT8_E4M3);
  const Refusal row{
      "float64", nullptr, FULMEN_ERROR_DTYPE, {"k is float8_e4m3fn where q is float64"}};
  expect_refused(call, row, call.forward());
}

TEST(RefusalOfQuantised, OfGradients) {
  TestCall call;
  call.add_backward();
  quantise(call, FULMEN_FLOAT8_E5M2);
  const Refusal row{"gradients",
                    nullptr,
                    FULMEN_ERROR_UNSUPPORTED,
                    {"backward does not take k and v of float8_e5m2", "pass scale * k"}};
  expect_refused(call, row, call.backward());
}

TEST(RefusalOfQuantised, OfGradientsOfQ) {
  TestCall call;
  call.add_backward();
  quantise(call, FULMEN_FLOAT8_E4M3);
  call.tensors.q.dtype = FULMEN_FLOAT8_E4M3;
  const Refusal row{"gradients",
                    nullptr,
                    FULMEN_ERROR_UNSUPPORTED,
                    {"backward does not take q, k and v of float8_e4m3fn", "pass scale * q"}};
  expect_refused(call, row, call.backward());
}

TEST(RefusalOfQuantised, OfTensorCores) {
  TestCall call;
  quantise(call, FULMEN_INT8);
  call.problem.implementation = FULMEN_SM90;
  call.problem.device_name = "h100";
  const Refusal row{
      "sm90", nullptr, FULMEN_ERROR_UNSUPPORTED, {"sm90: does not take k and v of int8"}};
  fulmen_plan* plan = nullptr;
  expect_refused(call, row,
                 fulmen_plan_create(&call.problem, &call.tensors, FULMEN_OPERATION_FORWARD, &plan));
}

}  // namespace
}  // namespace fulmen::test
