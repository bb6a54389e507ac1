// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen_dense_mask: every mask that is an array, and their combination; '#' is visible.
#include <gmock/gmock.h>

#include <algorithm>
#include <limits>

#include "api/refusal.h"

namespace fulmen::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using T = fulmen_tensors;

constexpr Sizes kSizes{.batch = 2, .heads = 2, .kv_heads = 1, .q_rows = 2, .kv_rows = 4};

// visible as text, one line a row, in the order of its axes.
struct Visible {
  explicit Visible(const Shape& shape) {
    EXPECT_EQ(fulmen_tensor_init(&tensor, nullptr, FULMEN_BOOL, 4, shape.data()), FULMEN_OK);
    bytes.assign(size_of(tensor), '?');
    tensor.data = bytes.data();
  }
  std::vector<std::string> lines() const {
    std::vector<std::string> text;
    const size_t columns = static_cast<size_t>(tensor.shape[3]);
    for (size_t at = 0; at < bytes.size(); ++at) {
      if (at % columns == 0) text.emplace_back();
      text.back() += bytes[at] == 1 ? '#' : bytes[at] == 0 ? '.' : '?';
    }
    return text;
  }

  std::string bytes;
  fulmen_tensor tensor;
};

std::vector<std::string> dense(const TestCall& call, const Shape& shape) {
  Visible visible(shape);
  EXPECT_EQ(fulmen_dense_mask(&call.problem, &call.tensors, &visible.tensor), FULMEN_OK)
      << fulmen_last_error();
  return visible.lines();
}

TEST(DenseMask, NeedsOnlyExtentsOfQAndK) {
  TestCall call({.batch = 1, .heads = 1, .kv_heads = 1, .q_rows = 2, .kv_rows = 4});
  for (const Member member : {&T::v, &T::o, &T::lse, &T::stats}) call.remove(member);
  call.tensors.q.data = call.tensors.k.data = nullptr;
  call.problem.causal = 1;
  EXPECT_THAT(dense(call, {1, 1, 2, 4}), ElementsAre("###.", "####"));
}

TEST(DenseMask, LengthsHideRowsAndKeys) {
  TestCall call(kSizes);
  call.problem.causal = 1;
  call.indices(&T::kv_lengths, {4, 2});
  call.indices(&T::q_lengths, {2, 1});
  EXPECT_THAT(dense(call, {2, 2, 2, 4}),
              ElementsAre("###.", "####", "###.", "####", "##..", "....", "##..", "...."));
}

TEST(DenseMask, BooleanMaskBroadcasts) {
  TestCall call({.batch = 1, .heads = 2, .kv_heads = 1, .q_rows = 2, .kv_rows = 4});
  fulmen_tensor& mask = call.output(&T::mask, FULMEN_BOOL, {2, 1, 4});
  std::memcpy(mask.data, "\1\0\2\0\0\1\1\1", 8);  // anything but 0 is true
  EXPECT_THAT(dense(call, {1, 2, 2, 4}), ElementsAre("#.#.", "#.#.", ".###", ".###"));
}

TEST(DenseMask, DocumentsMeetThemselves) {
  TestCall call(kSizes);
  call.indices(&T::q_ids, {7, -1});
  fulmen_tensor& kv_ids = call.indices(&T::kv_ids, {7, 7, -1, 5, -1, 7, 0, -1});
  set_shape(kv_ids, {2, 4});
  EXPECT_THAT(dense(call, {2, 2, 2, 4}),
              ElementsAre("##..", "..#.", "##..", "..#.", ".#..", "#..#", ".#..", "#..#"));
}

TEST(DenseMask, BiasHidesWhereMinusInfinite) {
  TestCall call({.batch = 1, .heads = 1, .kv_heads = 1, .q_rows = 2, .kv_rows = 4});
  fulmen_tensor& bias = call.input(&T::bias, FULMEN_FLOAT32, {4});
  const float inf = std::numeric_limits<float>::infinity();
  const float values[] = {-inf, std::numeric_limits<float>::lowest(), inf, -inf};
  std::memcpy(bias.data, values, sizeof values);
  EXPECT_THAT(dense(call, {1, 1, 2, 4}), ElementsAre(".##.", ".##."));
}

TEST(DenseMask, AllMasksMustAgree) {
  TestCall call({.batch = 1, .heads = 1, .kv_heads = 1, .q_rows = 3, .kv_rows = 6});
  call.problem.causal = 1;
  call.problem.prefix = 5;
  call.problem.window_left = 4;
  call.problem.chunk = 4;
  fulmen_tensor& mask = call.output(&T::mask, FULMEN_BOOL, {6});
  std::memcpy(mask.data, "\1\1\1\1\0\1", 6);
  EXPECT_THAT(dense(call, {1, 1, 3, 6}), ElementsAre("####..", "......", ".....#"));
}

TEST(DenseMask, PackedIsAsLargeAsTheLongest) {
  TestCall call = packed_call();  // 2 and 4 query rows, 3 and 5 keys
  call.problem.causal = 1;
  const std::vector<std::string> lines = dense(call, {2, 4, 4, 5});
  EXPECT_THAT(std::vector<std::string>(lines.begin(), lines.begin() + 4),
              ElementsAre("##...", "###..", ".....", "....."));
  EXPECT_THAT(std::vector<std::string>(lines.end() - 4, lines.end()),
              ElementsAre("##...", "###..", "####.", "#####"));
}

// The extents of q and k are all that is read of them, so their dtype binds nothing.
TEST(DenseMask, TakesABiasOfAnyFloat) {
  for (const fulmen_dtype dtype :
       {FULMEN_FLOAT64, FULMEN_FLOAT32, FULMEN_FLOAT16, FULMEN_BFLOAT16}) {
    TestCall call(kSizes);
    call.input(&T::bias, dtype, {2, 4});
    Visible visible({2, 2, 2, 4});
    EXPECT_EQ(fulmen_dense_mask(&call.problem, &call.tensors, &visible.tensor), FULMEN_OK)
        << fulmen_last_error();
    EXPECT_EQ(visible.bytes, std::string(visible.bytes.size(), '\1'));
  }
  TestCall call(kSizes);
  call.input(&T::bias, FULMEN_INT32, {2, 4});
  Visible visible({2, 2, 2, 4});
  EXPECT_EQ(fulmen_dense_mask(&call.problem, &call.tensors, &visible.tensor), FULMEN_ERROR_DTYPE);
}

TEST(DenseMask, RefusesWithNothingWritten) {
  TestCall call(kSizes);
  Visible visible({2, 2, 2, 4});
  const auto refused = [&](fulmen_status status, const char* words) {
    EXPECT_EQ(fulmen_dense_mask(&call.problem, &call.tensors, &visible.tensor), status);
    EXPECT_THAT(fulmen_last_error(), HasSubstr(words));
    EXPECT_EQ(visible.bytes, std::string(visible.bytes.size(), '?'));
  };
  visible.tensor.dtype = FULMEN_FLOAT32;
  refused(FULMEN_ERROR_DTYPE, "visible is float32; allowed is bool");
  visible.tensor.dtype = FULMEN_BOOL;
  visible.tensor.shape[3] = 3;
  refused(FULMEN_ERROR_SHAPE, "visible has shape (2, 2, 2, 3)");
  visible.tensor.shape[3] = 4;
  visible.tensor.strides[1] = 0;
  refused(FULMEN_ERROR_ARGUMENT, "visible has strides");
  visible.tensor.strides[1] = 8;
  visible.tensor.data = nullptr;
  refused(FULMEN_ERROR_ARGUMENT, "visible has elements");
  visible.tensor.data = visible.bytes.data();
  call.indices(&T::kv_lengths, {4, 5});
  refused(FULMEN_ERROR_ARGUMENT, "kv_lengths[1] is 5");
  call.remove(&T::kv_lengths);
  call.output(&T::mask, FULMEN_BOOL, {4});
  call.tensors.mask.data = visible.bytes.data();
  refused(FULMEN_ERROR_ARGUMENT, "visible overlaps mask");
  call.tensors.mask.data = nullptr;
  refused(FULMEN_ERROR_ARGUMENT, "mask has elements");
}

}  // namespace
}  // namespace fulmen::test
