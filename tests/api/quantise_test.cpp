// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen_quantise through the C ABI: by hand, and what it refuses.
#include <gmock/gmock.h>

#include <algorithm>

#include "api/refusal.h"

namespace fulmen::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

fulmen_tensor tensor_over(void* data, fulmen_dtype dtype, const Shape& shape) {
  fulmen_tensor made;
  EXPECT_EQ(
      fulmen_tensor_init(&made, data, dtype, static_cast<int32_t>(shape.size()), shape.data()),
      FULMEN_OK);
  return made;
}

// One head of two rows of four numbers.
struct QuantiseCall {
  float x[8] = {9, 1, 2, 0, 9, -1, 0, 2};
  int8_t values[8];
  float constant[4] = {9, 0, 0, 0};
  float scale[8] = {0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f};
  int64_t lengths[1] = {2};
  fulmen_quantisation given;

  QuantiseCall() {
    std::fill(values, values + 8, int8_t{99});
    fulmen_quantisation_init(&given);
    given.x = tensor_over(x, FULMEN_FLOAT32, {1, 1, 2, 4});
    given.values = tensor_over(values, FULMEN_INT8, {1, 1, 2, 4});
  }
  void add_constant() { given.constant = tensor_over(constant, FULMEN_FLOAT32, {1, 1, 1, 4}); }
  void add_scale(const Shape& shape) { given.scale = tensor_over(scale, FULMEN_FLOAT32, shape); }
  fulmen_status run() { return fulmen_quantise(&given, nullptr); }
};

TEST(QuantiseAbi, ByHand) {
  QuantiseCall call;
  call.add_constant();
  call.add_scale({1, 1, 1, 1});
  ASSERT_EQ(call.run(), FULMEN_OK) << fulmen_last_error();
  EXPECT_THAT(call.values, ElementsAre(0, 2, 4, 0, 0, -2, 0, 4));
  call.given.rotate = 1;  // (1, -1, 1, -1; ..) / 2 of (0, 1, 2, 0) and (0, -1, 0, 2)
  ASSERT_EQ(call.run(), FULMEN_OK) << fulmen_last_error();
  EXPECT_THAT(call.values, ElementsAre(3, 1, -1, -3, 1, -1, -3, 3));
}

TEST(QuantiseAbi, FindsConstantsAndScales) {
  QuantiseCall call;
  call.add_constant();
  call.add_scale({2, 1});
  call.given.find_constant = call.given.find_scale = 1;
  call.given.headroom = 2;
  ASSERT_EQ(call.run(), FULMEN_OK) << fulmen_last_error();
  EXPECT_THAT(call.constant, ElementsAre(9, 0, 1, 1));
  EXPECT_FLOAT_EQ(call.scale[0], 2 / 127.f);
  EXPECT_FLOAT_EQ(call.scale[1], 2 / 127.f);
  EXPECT_THAT(call.values, ElementsAre(0, 64, 64, -64, 0, -64, -64, 64));
  call.lengths[0] = 1;
  call.given.lengths = tensor_over(call.lengths, FULMEN_INT64, {1});
  ASSERT_EQ(call.run(), FULMEN_OK) << fulmen_last_error();
  EXPECT_THAT(call.constant, ElementsAre(9, 1, 2, 0));
  EXPECT_THAT(call.values, ElementsAre(0, 0, 0, 0, 0, 0, 0, 0));
}

void make_absent(fulmen_tensor& tensor) {
  tensor.data = nullptr;
  tensor.rank = 0;
}

struct QuantiseRefusal {
  const char* label;
  void (*spoil)(QuantiseCall& call);
  fulmen_status status;
  const char* words;
};

constexpr QuantiseRefusal kQuantiseRefusals[] = {
    {"no x", [](QuantiseCall& call) { make_absent(call.given.x); }, FULMEN_ERROR_ARGUMENT,
     "x is missing; (batch, head, row, dim) is needed"},
    {"no values", [](QuantiseCall& call) { make_absent(call.given.values); }, FULMEN_ERROR_ARGUMENT,
     "values is missing"},
    {"rotate", [](QuantiseCall& call) { call.given.rotate = 2; }, FULMEN_ERROR_ARGUMENT,
     "rotate is 2; allowed is 0 or 1"},
    {"find constant", [](QuantiseCall& call) { call.given.find_constant = 1; },
     FULMEN_ERROR_ARGUMENT, "find_constant is 1 and constant is missing"},
    {"find scale", [](QuantiseCall& call) { call.given.find_scale = 1; }, FULMEN_ERROR_ARGUMENT,
     "find_scale is 1 and scale is missing"},
    {"headroom", [](QuantiseCall& call) { call.given.headroom = INFINITY; }, FULMEN_ERROR_ARGUMENT,
     "headroom is inf; allowed are finite numbers from 1 on"},
    {"x of 8 bits", [](QuantiseCall& call) { call.given.x.dtype = FULMEN_INT8; },
     FULMEN_ERROR_DTYPE, "x is int8; allowed is float32, float16 or bfloat16"},
    {"bytes", [](QuantiseCall& call) { call.given.values.dtype = FULMEN_UINT8; },
     FULMEN_ERROR_DTYPE, "values is uint8; allowed is float8_e4m3fn"},
    {"a scale of 32 bits",
     [](QuantiseCall& call) {
       call.given.values = tensor_over(call.scale, FULMEN_FLOAT32, {1, 1, 2, 4});
       call.given.scale = tensor_over(call.constant, FULMEN_FLOAT32, {1, 1, 1, 1});
     },
     FULMEN_ERROR_ARGUMENT, "scale is given and values is float32, as x"},
    {"scales of all", [](QuantiseCall& call) { call.add_scale({1, 1, 2, 4}); }, FULMEN_ERROR_SHAPE,
     "scale has an element for each row and each dim"},
    {"a constant of rows",
     [](QuantiseCall& call) {
       call.given.constant = tensor_over(call.scale, FULMEN_FLOAT32, {1, 1, 2, 4});
     },
     FULMEN_ERROR_SHAPE, "constant has shape (1, 1, 2, 4)"},
    {"a constant of one dim",
     [](QuantiseCall& call) {
       call.given.constant = tensor_over(call.constant, FULMEN_FLOAT32, {1, 1, 1, 4});
       call.given.x = tensor_over(call.x, FULMEN_FLOAT32, {2, 1, 1, 4});
       call.given.values = tensor_over(call.values, FULMEN_INT8, {2, 1, 1, 4});
       call.given.find_constant = 1;
     },
     FULMEN_ERROR_SHAPE, "(2, 1, 1, 4) is needed, one for each head and dim"},
    {"values of another shape",
     [](QuantiseCall& call) { call.given.values = tensor_over(call.values, FULMEN_INT8, {2, 2}); },
     FULMEN_ERROR_SHAPE, "values has shape (2, 2)"},
    {"a length",
     [](QuantiseCall& call) {
       call.lengths[0] = 3;
       call.given.lengths = tensor_over(call.lengths, FULMEN_INT64, {1});
     },
     FULMEN_ERROR_ARGUMENT, "lengths[0] is 3; allowed is 0 to 2"},
    {"one place for two", [](QuantiseCall& call) { call.given.values.strides[2] = 0; },
     FULMEN_ERROR_ARGUMENT, "values has strides by which two of its elements are one"},
    {"in place", [](QuantiseCall& call) { call.given.values.data = call.x; }, FULMEN_ERROR_ARGUMENT,
     "values overlaps x in memory"},
};

TEST(QuantiseAbi, Refusals) {
  for (const QuantiseRefusal& row : kQuantiseRefusals) {
    QuantiseCall call;
    row.spoil(call);
    EXPECT_EQ(call.run(), row.status) << row.label;
    EXPECT_THAT(fulmen_last_error(), HasSubstr(row.words)) << row.label;
    EXPECT_THAT(call.values, testing::Each(int8_t{99})) << row.label;
  }
  EXPECT_EQ(fulmen_quantise(nullptr, nullptr), FULMEN_ERROR_ARGUMENT);
}

}  // namespace
}  // namespace fulmen::test
