// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which rows a sequence owns, and which of them count; and that entries out of range are empty.
#include "core/problem.h"

#include <gtest/gtest.h>

#include <vector>

namespace fulmen::test {
namespace {

Tensor row(std::vector<i64>& values) {
  return {values.data(),
          DType::kInt64,
          kMaxRank,
          {1, 1, 1, static_cast<i64>(values.size())},
          {0, 0, 0, 1}};
}

Problem dense(i64 batch, i64 q_rows, i64 kv_rows) {
  Problem problem;
  problem.num_sequences = batch;
  problem.q_rows = q_rows;
  problem.kv_rows = kv_rows;
  return problem;
}

TEST(Sequence, DenseOwnsAllRows) {
  const Sequence sequence = dense(3, 5, 7).sequence(2);
  EXPECT_EQ(sequence.batch, 2);
  EXPECT_EQ(sequence.q_begin, 0);
  EXPECT_EQ(sequence.q_slot, 5);
  EXPECT_EQ(sequence.shape.q_len, 5);
  EXPECT_EQ(sequence.shape.kv_len, 7);
  EXPECT_EQ(sequence.shape.shift, 2);
}

TEST(Sequence, LengthsShortenRowsNotSlots) {
  std::vector<i64> q_lengths{3, 0}, kv_lengths{7, 2};
  Problem problem = dense(2, 5, 7);
  problem.arrays[Array::kQLengths] = row(q_lengths);
  problem.arrays[Array::kKvLengths] = row(kv_lengths);
  problem.alignment = Alignment::kBottomRight;
  EXPECT_EQ(problem.sequence(0).shape.q_len, 3);
  EXPECT_EQ(problem.sequence(0).q_slot, 5);
  EXPECT_EQ(problem.sequence(0).shape.shift, 4);
  EXPECT_EQ(problem.sequence(1).shape.q_len, 0);
  EXPECT_EQ(problem.sequence(1).shape.shift, 2);
  problem.alignment = Alignment::kTopLeft;
  EXPECT_EQ(problem.sequence(1).shape.shift, 0);
}

TEST(Sequence, LastPackedSequenceOwnsTheRest) {
  std::vector<i64> cu_q{0, 2, 2, 5}, cu_kv{0, 0, 4, 6};
  Problem problem = dense(3, 9, 6);
  problem.packed = {true, true};
  problem.arrays[Array::kCuQ] = row(cu_q);
  problem.arrays[Array::kCuKv] = row(cu_kv);
  EXPECT_EQ(problem.sequence(0).q_slot, 2);
  EXPECT_EQ(problem.sequence(0).shape.kv_len, 0);
  EXPECT_EQ(problem.sequence(1).q_slot, 0);
  EXPECT_EQ(problem.sequence(1).kv_begin, 0);
  const Sequence last = problem.sequence(2);
  EXPECT_EQ(last.batch, 0);
  EXPECT_EQ(last.q_begin, 2);
  EXPECT_EQ(last.q_slot, 7);
  EXPECT_EQ(last.shape.q_len, 3);
  EXPECT_EQ(last.shape.kv_len, 2);
}

TEST(Sequence, EntriesOutOfRangeAreEmpty) {
  std::vector<i64> lengths{-1, 99};
  Problem problem = dense(2, 5, 7);
  problem.arrays[Array::kQLengths] = row(lengths);
  EXPECT_EQ(problem.sequence(0).shape.q_len, 0);
  EXPECT_EQ(problem.sequence(1).shape.q_len, 0);
  for (std::vector<i64> offsets : {std::vector<i64>{3, 1}, {-2, 4}, {0, 6}}) {
    Problem packed = dense(1, 5, 7);
    packed.packed = {true, true};
    std::vector<i64> whole{0, 7};
    packed.arrays[Array::kCuQ] = row(offsets);
    packed.arrays[Array::kCuKv] = row(whole);
    EXPECT_EQ(packed.sequence(0).shape.q_len, 0) << offsets[0] << " " << offsets[1];
  }
}

TEST(Problem, HeadsOfAGroupShareTheirKeys) {
  Problem problem;
  problem.heads_q = 12;
  problem.heads_kv = 4;
  EXPECT_EQ(problem.group_size(), 3);
  EXPECT_EQ(problem.kv_head(2), 0);
  EXPECT_EQ(problem.kv_head(3), 1);
  EXPECT_EQ(problem.batch_head(2, 5), 29u);
}

}  // namespace
}  // namespace fulmen::test
