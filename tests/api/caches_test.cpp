// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Calls over caches on the CPU, against the same calls over whole arrays: pages, left padding,
// positions, trees, and which implementation takes them.
#include <gmock/gmock.h>

#include "api/cache_call.h"

namespace fulmen::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using T = fulmen_tensors;

void expect_equal_results(TestCall& a, TestCall& b) {
  a.problem.implementation = b.problem.implementation = FULMEN_SCALAR;
  ASSERT_EQ(a.forward(), FULMEN_OK) << fulmen_last_error();
  ASSERT_EQ(b.forward(), FULMEN_OK) << fulmen_last_error();
  for (const Member member : {&T::o, &T::lse, &T::stats})
    EXPECT_EQ(a.bytes(member), b.bytes(member));
}

void add_options(TestCall& call, int64_t columns) {
  call.problem.causal = 1;
  call.problem.window_left = 4;
  call.problem.dropout_p = 0.25;
  call.problem.rng_seed = 7;
  call.tensors.alibi_slopes = {};
  call.input(&T::alibi_slopes, FULMEN_FLOAT32, {4});
  call.input(&T::bias, FULMEN_FLOAT32, {4, 3, columns});
  fulmen_tensor& mask = call.output(&T::mask, FULMEN_BOOL, {3, 1, 3, columns});
  for (size_t at = 0; at < size_of(mask); ++at) {
    static_cast<char*>(mask.data)[at] = at % 5 != 2;
  }
  call.indices(&T::q_ids, {0, 1, 0});
  fulmen_tensor& ids = call.indices(&T::kv_ids, {});
  std::vector<int64_t> columns_of(static_cast<size_t>(columns));
  for (size_t j = 0; j < columns_of.size(); ++j) columns_of[j] = static_cast<int64_t>(j % 3 / 2);
  ids = call.indices(&T::kv_ids, columns_of);
}

TEST(Caches, PagesAreTheirKeysInOrder) {
  TestCall paged = paged_call();
  TestCall gathered = gathered_call(paged);
  expect_equal_results(paged, gathered);
}

TEST(Caches, EveryOptionActsOnKeysByNumber) {
  const CacheSizes sizes;
  TestCall paged = paged_call(sizes, FULMEN_FLOAT16);
  TestCall gathered = gathered_call(paged, sizes);
  add_options(paged, 12);
  add_options(gathered, 12);
  for (const Member member : {&T::alibi_slopes, &T::bias}) {
    gathered.tensors.*member = paged.tensors.*member;
  }
  expect_equal_results(paged, gathered);
}

TEST(Caches, ARaggedTableIsTheSame) {
  TestCall padded = paged_call();
  TestCall ragged = paged_call();
  for (const Member member : {&T::q, &T::k, &T::v}) ragged.tensors.*member = padded.tensors.*member;
  ragged.indices(&T::page_table, {-3, 4, 0, 7, 0, 8, 77});
  ragged.indices(&T::page_indptr, {1, 4, 4, 6});
  ragged.problem.max_kv = 9;
  expect_equal_results(padded, ragged);
}

// One page for each entry of a contiguous cache.
TEST(Caches, AnIndexOfTheBatchIsATableOfOneColumn) {
  CacheSizes sizes;
  sizes.page_rows = 8;
  sizes.num_pages = 5;
  sizes.pages = {{3}, {1}, {0}};
  TestCall paged = paged_call(sizes);
  TestCall gathered = gathered_call(paged, sizes);
  expect_equal_results(paged, gathered);
}

TEST(Caches, QueriesMayBePacked) {
  TestCall padded = paged_call();
  padded.problem.causal = 1;
  padded.indices(&T::q_lengths, {2, 0, 3});
  padded.problem.implementation = FULMEN_SCALAR;
  ASSERT_EQ(padded.forward(), FULMEN_OK) << fulmen_last_error();

  CacheSizes sizes;
  sizes.call.q_rows = 5;
  TestCall packed = paged_call(sizes);
  packed.problem.implementation = FULMEN_SCALAR;
  packed.problem.causal = 1;
  packed.input(&T::q, FULMEN_FLOAT32, {4, 5, 4});
  packed.output(&T::o, FULMEN_FLOAT32, {4, 5, 6});
  packed.output(&T::lse, FULMEN_FLOAT32, {4, 5});
  packed.remove(&T::stats);
  packed.tensors.k = padded.tensors.k;
  packed.tensors.v = padded.tensors.v;
  packed.indices(&T::cu_q, {0, 2, 2, 5});
  const std::vector<float> rows = padded.floats(&T::q);
  float* const q = static_cast<float*>(packed.tensors.q.data);
  const auto copy_row = [&](int head, int row, int batch, int from) {
    for (int d = 0; d < 4; ++d) {
      q[(head * 5 + row) * 4 + d] =
          rows[static_cast<size_t>(((batch * 4 + head) * 3 + from) * 4 + d)];
    }
  };
  for (int head = 0; head < 4; ++head) {
    for (int i = 0; i < 2; ++i) copy_row(head, i, 0, i);
    for (int i = 0; i < 3; ++i) copy_row(head, 2 + i, 2, i);
  }
  ASSERT_EQ(packed.forward(), FULMEN_OK) << fulmen_last_error();
  const std::vector<float> expected = padded.floats(&T::lse), got = packed.floats(&T::lse);
  for (size_t head = 0; head < 4; ++head) {
    for (size_t i = 0; i < 2; ++i) EXPECT_EQ(got[head * 5 + i], expected[head * 3 + i]);
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(got[head * 5 + 2 + i], expected[(8 + head) * 3 + i]);
  }
}

// The keys from kv_start on, as arrays of their own.
TEST(Caches, LeftPaddingIsACallOverTheRest) {
  const Sizes sizes{.batch = 1, .q_rows = 3, .kv_rows = 7};
  TestCall padded(sizes), rest({.batch = 1, .q_rows = 3, .kv_rows = 5});
  padded.indices(&T::kv_start, {2});
  rest.tensors.q = padded.tensors.q;
  for (const Member member : {&T::k, &T::v}) {
    fulmen_tensor& tensor = rest.tensors.*member;
    tensor = padded.tensors.*member;
    tensor.data = static_cast<float*>(tensor.data) + 2 * tensor.strides[2];
    tensor.shape[2] = 5;
  }
  for (TestCall* call : {&padded, &rest}) {
    call->problem.causal = 1;
    call->problem.prefix = 2;
    call->problem.chunk = 4;
    call->problem.dropout_p = 0.5;
    call->input(&T::alibi_slopes, FULMEN_FLOAT32, {4});
  }
  rest.tensors.alibi_slopes = padded.tensors.alibi_slopes;
  expect_equal_results(padded, rest);
}

TEST(Caches, PositionsReplaceTheShift) {
  TestCall shifted = paged_call(), placed = paged_call();
  for (const Member member : {&T::q, &T::k, &T::v})
    placed.tensors.*member = shifted.tensors.*member;
  for (TestCall* call : {&shifted, &placed}) {
    call->problem.causal = 1;
    call->problem.window_left = 2;
  }
  fulmen_tensor& positions = placed.indices(&T::positions, {4, 5, 6, -3, -2, -1, 2, 3, 4});
  positions.rank = 2;
  positions.shape[0] = positions.shape[1] = positions.strides[0] = 3;
  positions.strides[1] = 1;
  expect_equal_results(shifted, placed);
}

std::vector<std::string> visible(const TestCall& call, const Shape& shape) {
  std::string bytes(static_cast<size_t>(shape[0] * shape[1] * shape[2] * shape[3]), '?');
  fulmen_tensor tensor;
  EXPECT_EQ(fulmen_tensor_init(&tensor, bytes.data(), FULMEN_BOOL, 4, shape.data()), FULMEN_OK);
  EXPECT_EQ(fulmen_dense_mask(&call.problem, &call.tensors, &tensor), FULMEN_OK)
      << fulmen_last_error();
  std::vector<std::string> lines;
  for (size_t at = 0; at < bytes.size(); ++at) {
    if (at % static_cast<size_t>(shape[3]) == 0) lines.emplace_back();
    lines.back() += bytes[at] == 1 ? '#' : bytes[at] == 0 ? '.' : '?';
  }
  return lines;
}

TestCall tree_call() {
  TestCall call({.batch = 1, .heads = 1, .kv_heads = 1, .q_rows = 3, .kv_rows = 7});
  call.indices(&T::tree, {0b001, 0b011, 0b101});
  return call;
}

TEST(Caches, ATreeShowsAncestorsAmongTheLastKeys) {
  TestCall call = tree_call();
  EXPECT_THAT(visible(call, {1, 1, 3, 7}), ElementsAre("#####..", "######.", "#####.#"));
  call.indices(&T::kv_start, {2});
  EXPECT_THAT(visible(call, {1, 1, 3, 7}), ElementsAre("..###..", "..####.", "..###.#"));
}

// Keys 4, 5, 6 of seven are drafts: the second and the third both follow the first, at position 5.
TEST(Caches, DraftsStandAtTheirPositions) {
  TestCall call = tree_call();
  call.indices(&T::positions, {4, 5, 5});
  call.problem.causal = 1;
  call.problem.window_left = 1;
  EXPECT_THAT(visible(call, {1, 1, 3, 7}), ElementsAre("...##..", "....##.", "....#.#"));
}

TEST(Caches, DenseMaskHasAColumnForEachKeyOfTheTable) {
  TestCall call = paged_call();
  call.problem.causal = 1;
  call.problem.max_kv = 8;
  call.indices(&T::kv_start, {1, 0, 5});
  EXPECT_THAT(visible(call, {3, 4, 3, 8})[1], ".#####..");
  call.tensors.page_table.data = nullptr;  // not read
  EXPECT_THAT(visible(call, {3, 4, 3, 8})[2], ".######.");
}

TEST(Caches, AutoFindsAnImplementation) {
  for (const Member member : {&T::page_table, &T::kv_start, &T::positions, &T::tree}) {
    TestCall call = paged_call();
    call.indices(&T::kv_start, {0, 0, 0});
    call.indices(&T::positions, {0, 1, 2});
    call.indices(&T::tree, {1, 1, 1});
    for (const Member other : {&T::page_table, &T::kv_start, &T::positions, &T::tree}) {
      if (other != member) call.remove(other);
    }
    if (member != &T::page_table) {
      call.input(&T::k, FULMEN_FLOAT32, {3, 2, 7, 4});
      call.input(&T::v, FULMEN_FLOAT32, {3, 2, 7, 6});
    }
    EXPECT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  }
}

}  // namespace
}  // namespace fulmen::test
