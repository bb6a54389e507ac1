// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen_merge: attention over all keys from attention over parts of them, in any order, in place,
// with empty parts, NaN and sinks; and what it refuses.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "api/refusal.h"

namespace fulmen::test {
namespace {

using testing::HasSubstr;
using T = fulmen_tensors;

constexpr double kInf = std::numeric_limits<double>::infinity();

// One part of `count`: a call whose keys are rows [first, first + rows) of `whole`.
TestCall part_of(const TestCall& whole, int64_t first, int64_t rows) {
  Sizes sizes = whole.sizes;
  sizes.kv_rows = rows;
  TestCall part(sizes, whole.dtype);
  part.tensors.q = whole.tensors.q;
  for (const Member member : {&T::k, &T::v}) {
    fulmen_tensor& tensor = part.tensors.*member;
    tensor = whole.tensors.*member;
    tensor.shape[2] = rows;
    tensor.data = static_cast<char*>(tensor.data) +
                  static_cast<size_t>(first * tensor.strides[2]) * size_of(whole.dtype);
  }
  EXPECT_EQ(part.forward(), FULMEN_OK) << fulmen_last_error();
  return part;
}

fulmen_merge_part merge_part(const TestCall& call) {
  fulmen_merge_part part;
  fulmen_merge_part_init(&part);
  part.o = call.tensors.o;
  part.lse = call.tensors.lse;
  return part;
}

void expect_near(const TestCall& got, const TestCall& expected, Member member, double tolerance) {
  const double* a = static_cast<const double*>((got.tensors.*member).data);
  const double* b = static_cast<const double*>((expected.tensors.*member).data);
  for (size_t i = 0; i < size_of(got.tensors.*member) / sizeof(double); ++i) {
    if (a[i] != b[i]) {
      ASSERT_NEAR(a[i], b[i], tolerance) << i;
    }
  }
}

constexpr Sizes kSizes{.batch = 2, .heads = 4, .q_rows = 70, .kv_rows = 9, .dim_v = 5};

TEST(Merge, PartsMakeTheWholeInAnyOrder) {
  TestCall whole(kSizes, FULMEN_FLOAT64);
  ASSERT_EQ(whole.forward(), FULMEN_OK);
  const TestCall a = part_of(whole, 0, 4);
  const TestCall b = part_of(whole, 4, 0);  // saw nothing
  const TestCall c = part_of(whole, 4, 5);
  std::vector<fulmen_merge_part> parts{merge_part(a), merge_part(b), merge_part(c)};
  for (int order = 0; order < 3; ++order) {
    TestCall merged(kSizes, FULMEN_FLOAT64);
    ASSERT_EQ(fulmen_merge(parts.data(), parts.size(), nullptr, &merged.tensors.o,
                           &merged.tensors.lse, nullptr),
              FULMEN_OK)
        << fulmen_last_error();
    expect_near(merged, whole, &T::o, 1e-14);
    expect_near(merged, whole, &T::lse, 1e-14);
    std::rotate(parts.begin(), parts.begin() + 1, parts.end());
  }
}

TEST(Merge, SinksEnterOnce) {
  TestCall whole(kSizes, FULMEN_FLOAT64);
  const TestCall a = part_of(whole, 0, 4);
  const TestCall b = part_of(whole, 4, 5);
  const fulmen_tensor sinks = whole.input(&T::sinks, FULMEN_FLOAT64, {4});
  ASSERT_EQ(whole.forward(), FULMEN_OK);
  TestCall merged(kSizes, FULMEN_FLOAT64);
  const fulmen_merge_part parts[] = {merge_part(a), merge_part(b)};
  ASSERT_EQ(fulmen_merge(parts, 2, &sinks, &merged.tensors.o, &merged.tensors.lse, nullptr),
            FULMEN_OK)
      << fulmen_last_error();
  expect_near(merged, whole, &T::o, 1e-14);
  expect_near(merged, whole, &T::lse, 1e-14);  // without the sinks
}

TEST(Merge, InPlaceOfAPart) {
  TestCall whole(kSizes, FULMEN_FLOAT64);
  ASSERT_EQ(whole.forward(), FULMEN_OK);
  TestCall a = part_of(whole, 0, 4);
  const TestCall b = part_of(whole, 4, 5);
  const fulmen_merge_part parts[] = {merge_part(b), merge_part(a)};
  ASSERT_EQ(fulmen_merge(parts, 2, nullptr, &a.tensors.o, &a.tensors.lse, nullptr), FULMEN_OK)
      << fulmen_last_error();
  expect_near(a, whole, &T::o, 1e-14);
  expect_near(a, whole, &T::lse, 1e-14);
}

// (2, 2) arrays of float64 for rules about single values.
struct Rows {
  double o[2][2];
  double lse[2];

  fulmen_merge_part part() {
    fulmen_merge_part made;
    fulmen_merge_part_init(&made);
    made.o = tensor(&o[0][0], {2, 2});
    made.lse = tensor(lse, {2});
    return made;
  }
  static fulmen_tensor tensor(void* data, const Shape& shape) {
    fulmen_tensor made;
    EXPECT_EQ(fulmen_tensor_init(&made, data, FULMEN_FLOAT64, static_cast<int32_t>(shape.size()),
                                 shape.data()),
              FULMEN_OK);
    return made;
  }
};

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(Merge, EmptyPartsChangeNothingWhateverTheyHold) {
  Rows seen{{{1, 2}, {3, 4}}, {0.5, -kInf}};
  Rows empty{{{kNan, kInf}, {kNan, 7}}, {-kInf, -kInf}};
  Rows out{};
  const fulmen_merge_part parts[] = {empty.part(), seen.part(), empty.part()};
  const fulmen_merge_part target = out.part();
  ASSERT_EQ(fulmen_merge(parts, 3, nullptr, &target.o, &target.lse, nullptr), FULMEN_OK);
  EXPECT_EQ(out.o[0][0], 1);
  EXPECT_EQ(out.o[0][1], 2);
  EXPECT_EQ(out.lse[0], 0.5);
  EXPECT_EQ(out.o[1][0], 0);  // no part saw a key
  EXPECT_EQ(out.lse[1], -kInf);
}

TEST(Merge, NanIsNotAnEmptyPart) {
  Rows good{{{1, 2}, {3, 4}}, {0.5, 0.5}};
  Rows bad{{{kNan, kNan}, {kNan, 5}}, {kNan, 1}};
  Rows out{};
  const fulmen_merge_part parts[] = {good.part(), bad.part()};
  const fulmen_merge_part target = out.part();
  ASSERT_EQ(fulmen_merge(parts, 2, nullptr, &target.o, &target.lse, nullptr), FULMEN_OK);
  EXPECT_TRUE(std::isnan(out.lse[0]) && std::isnan(out.o[0][0]) && std::isnan(out.o[0][1]));
  // A NaN in v: the lse is sound, and so is the other column.
  EXPECT_FALSE(std::isnan(out.lse[1]));
  EXPECT_TRUE(std::isnan(out.o[1][0]));
  EXPECT_FALSE(std::isnan(out.o[1][1]));
}

TEST(Merge, HugeScoresDoNotOverflow) {
  Rows high{{{1, 1}, {1, 1}}, {1e6, -1e6}};
  Rows low{{{3, 3}, {3, 3}}, {1e6, -1e6 - 5000}};
  Rows out{};
  const fulmen_merge_part parts[] = {low.part(), high.part()};
  const fulmen_merge_part target = out.part();
  ASSERT_EQ(fulmen_merge(parts, 2, nullptr, &target.o, &target.lse, nullptr), FULMEN_OK);
  EXPECT_EQ(out.o[0][0], 2);
  EXPECT_DOUBLE_EQ(out.lse[0], 1e6 + std::log(2.0));
  EXPECT_EQ(out.o[1][0], 1);
  EXPECT_EQ(out.lse[1], -1e6);
}

TEST(Merge, ZeroSizesAreLegalAndLseOptional) {
  fulmen_merge_part part;
  fulmen_merge_part_init(&part);
  part.o = Rows::tensor(nullptr, {0, 2});
  part.lse = Rows::tensor(nullptr, {0});
  EXPECT_EQ(fulmen_merge(&part, 1, nullptr, &part.o, nullptr, nullptr), FULMEN_OK)
      << fulmen_last_error();
}

// What is spoilt in a merge of two parts with sinks.
struct TwoParts {
  TestCall a{{.batch = 1, .heads = 1, .kv_heads = 1}};
  TestCall b{{.batch = 1, .heads = 1, .kv_heads = 1}};
  TestCall out{{.batch = 1, .heads = 1, .kv_heads = 1}};
  fulmen_merge_part parts[2];
  fulmen_tensor sinks;
  size_t num_parts = 2;
  TwoParts() {
    EXPECT_EQ(a.forward(), FULMEN_OK);
    EXPECT_EQ(b.forward(), FULMEN_OK);
    parts[0] = merge_part(a);
    parts[1] = merge_part(b);
    sinks = a.input(&T::sinks, FULMEN_FLOAT32, {1});
  }
};

struct MergeRefusal {
  void (*spoil)(TwoParts& two);
  fulmen_status status;
  const char* words;
};

const MergeRefusal kRefusals[] = {
    {[](TwoParts& s) { s.num_parts = 0; }, FULMEN_ERROR_ARGUMENT, "num_parts is 0"},
    {[](TwoParts& s) { s.parts[1].struct_size = 0; }, FULMEN_ERROR_ARGUMENT,
     "parts[1].struct_size is 0"},
    {[](TwoParts& s) { s.parts[1].o.struct_size = 0; }, FULMEN_ERROR_ARGUMENT,
     "parts[1].o.struct_size is 0"},
    {[](TwoParts& s) {
       s.parts[0].lse = fulmen_merge_part{}.lse;
       s.parts[0].lse.struct_size = sizeof(fulmen_tensor);
     },
     FULMEN_ERROR_ARGUMENT, "parts[0].lse is missing"},
    {[](TwoParts& s) { set_shape(s.parts[1].o, {1, 1, 2, 6}); }, FULMEN_ERROR_SHAPE,
     "parts[1].o has shape (1, 1, 2, 6)"},
    {[](TwoParts& s) { set_shape(s.parts[1].lse, {2}); }, FULMEN_ERROR_SHAPE,
     "parts[1].lse has shape (2)"},
    {[](TwoParts& s) { s.parts[0].o.dtype = FULMEN_INT32; }, FULMEN_ERROR_DTYPE,
     "parts[0].o is int32"},
    {[](TwoParts& s) { s.parts[0].lse.dtype = FULMEN_FLOAT16; }, FULMEN_ERROR_DTYPE,
     "parts[0].lse is float16"},
    {[](TwoParts& s) { s.parts[0].o.data = nullptr; }, FULMEN_ERROR_ARGUMENT,
     "parts[0].o has elements"},
    {[](TwoParts& s) { s.sinks.shape[0] = 2; }, FULMEN_ERROR_SHAPE, "sinks has shape (2)"},
    {[](TwoParts& s) { s.sinks.dtype = FULMEN_BOOL; }, FULMEN_ERROR_DTYPE, "sinks is bool"},
    {[](TwoParts& s) { s.out.tensors.o.dtype = FULMEN_INT64; }, FULMEN_ERROR_DTYPE, "o is int64"},
    {[](TwoParts& s) { s.out.tensors.o.strides[2] = 0; }, FULMEN_ERROR_ARGUMENT, "o has strides"},
    {[](TwoParts& s) { s.out.tensors.lse.data = s.out.tensors.o.data; }, FULMEN_ERROR_ARGUMENT,
     "lse overlaps o"},
    {[](TwoParts& s) { s.out.tensors.lse.data = s.parts[0].o.data; }, FULMEN_ERROR_ARGUMENT,
     "lse overlaps parts[0].o"},
    {[](TwoParts& s) { s.out.tensors.o.data = static_cast<char*>(s.parts[1].o.data) + 4; },
     FULMEN_ERROR_ARGUMENT, "o overlaps parts[1].o"},
};

TEST(Merge, RefusesWithNothingWritten) {
  for (const MergeRefusal& row : kRefusals) {
    SCOPED_TRACE(row.words);
    TwoParts two;
    const std::string a = two.a.bytes(&T::o);
    const std::string b = two.b.bytes(&T::o);
    row.spoil(two);
    EXPECT_EQ(fulmen_merge(two.parts, two.num_parts, &two.sinks, &two.out.tensors.o,
                           &two.out.tensors.lse, nullptr),
              row.status);
    EXPECT_THAT(fulmen_last_error(), HasSubstr(row.words));
    EXPECT_TRUE(two.out.outputs_untouched());
    EXPECT_EQ(two.a.bytes(&T::o), a);
    EXPECT_EQ(two.b.bytes(&T::o), b);
  }
  TwoParts good;
  EXPECT_EQ(
      fulmen_merge(good.parts, 2, &good.sinks, &good.out.tensors.o, &good.out.tensors.lse, nullptr),
      FULMEN_OK)
      << fulmen_last_error();
  EXPECT_EQ(fulmen_merge(good.parts, 2, nullptr, nullptr, nullptr, nullptr), FULMEN_ERROR_ARGUMENT);
  EXPECT_EQ(fulmen_merge(nullptr, 2, nullptr, &good.out.tensors.o, nullptr, nullptr),
            FULMEN_ERROR_ARGUMENT);
}

}  // namespace
}  // namespace fulmen::test
