// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Kinds of blocks against the definition of masks: exhaustively over drawn problems of small
// shapes, by sampling over large ones; and masks of which every kind is known.

#include "core/block_map.h"

#include <gtest/gtest.h>

#include <limits>

#include "core/expression.h"
#include "core/validate.h"
#include "drawn_expression.h"

namespace fulmen::test {
namespace {

Tensor kinds_of(RandomProblem& random, const Problem& problem, BlockSizes sizes, bool exact) {
  const Tensor kinds = random.contiguous(
      DType::kInt8, {problem.num_sequences, problem.heads_q, ceil_div(problem.max_q, sizes.rows),
                     ceil_div(problem.max_kv, sizes.keys)});
  block_map(problem, sizes, exact, kinds);
  return kinds;
}

BlockKind kind_at(const Tensor& kinds, i64 index, i64 head, i64 row, i64 key) {
  return static_cast<BlockKind>(load_bytes<u8>(kinds.address(index, head, row, key)));
}

// Of the pairs that there are.
BlockKind kind_by_definition(const Problem& problem, i64 index, i64 head, Interval rows,
                             Interval keys) {
  const CacheSequence sequence = problem.sequence(index);
  bool some = false, all = true;
  for (i64 i = rows.begin; i < min<i64>(rows.end, sequence.shape.q_len); ++i) {
    for (i64 j = keys.begin; j < min<i64>(keys.end, sequence.shape.kv_len); ++j) {
      const bool sees = problem.shows(sequence, index, head, i, j);
      some |= sees;
      all &= sees;
    }
  }
  return !some ? BlockKind::kEmpty : all ? BlockKind::kFull : BlockKind::kPartial;
}

struct Found {
  i64 blocks = 0;
  i64 unknown = 0;  // partial, though they are not
};

Found expect_right(const Problem& problem, BlockSizes sizes, const Tensor& kinds, bool exact,
                   unsigned seed, const std::string& text) {
  Found found;
  RandomProblem::for_each(kinds, [&](const i64* at) {
    const Interval rows{at[2] * sizes.rows, (at[2] + 1) * sizes.rows};
    const Interval keys{at[3] * sizes.keys, (at[3] + 1) * sizes.keys};
    const BlockKind wanted = kind_by_definition(problem, at[0], at[1], rows, keys);
    const BlockKind kind = kind_at(kinds, at[0], at[1], at[2], at[3]);
    ++found.blocks;
    if (kind == BlockKind::kPartial && wanted != kind && !exact) {
      ++found.unknown;
      return;
    }
    EXPECT_EQ(static_cast<int>(kind), static_cast<int>(wanted))
        << "seed " << seed << " [" << at[0] << "][" << at[1] << "][" << at[2] << "][" << at[3]
        << "] of " << text;
  });
  return found;
}

TEST(BlockMap, IsTheDefinitionOverDrawnMasks) {
  Found all;
  for (unsigned seed = 150000; seed < 150120; ++seed) {
    RandomProblem random(seed);
    Request request = seed % 3 == 2 ? random.draw_cache() : random.draw();
    std::string text = "options";
    if (seed % 4 != 0) request = with_expression(random, request);
    if (seed % 4 != 0) text = expression_text(request);
    if (seed % 5 == 0) request = with_blocks(random, request);
    const Problem problem = validate_dense_mask(request);
    const BlockSizes sizes{random.number(1, 40), random.number(1, 40)};
    for (const bool exact : {false, true}) {
      const Tensor kinds = kinds_of(random, problem, sizes, exact);
      const Found found = expect_right(problem, sizes, kinds, exact, seed, text);
      all.blocks += found.blocks;
      all.unknown += found.unknown;
    }
  }
  EXPECT_LT(all.unknown * 4, all.blocks);  // most blocks are told by their ends
}

// A call of one head of so many rows and keys, in which the mask alone counts.
Request masked(RandomProblem& random, i64 rows, const char* mask, const Tensor& capture0 = {}) {
  Request request;
  request.arrays[Array::kQ] = random.contiguous(DType::kFloat32, {rows, 1});
  request.arrays[Array::kK] = request.arrays[Array::kV] = request.arrays[Array::kQ];
  request.arrays[Array::kO] = random.contiguous(DType::kFloat32, {rows, 1});
  request.arrays[Array::kCapture0] = capture0;
  expression::Names names;
  if (capture0.present()) names.captures.emplace_back("a");
  request.options.expression = expression::make(nullptr, mask, std::move(names));
  return request;
}

struct Known {
  const char* mask;
  i64 empty, partial, full;  // blocks of 16 among 8 by 8
};

TEST(BlockMap, TellsEveryBlockOfMasksThatFollowTheirEnds) {
  RandomProblem random(1);
  std::vector<i64> documents;
  for (i64 i = 0; i < 128; ++i) documents.push_back(i / 32);
  const Tensor ids = random.indices(DType::kInt32, documents);
  const Known known[] = {
      {"j <= p", 28, 8, 28},
      {"j // 16 <= p // 16", 28, 0, 36},
      {"p - 16 <= j <= p", 49, 15, 0},
      {"a[i] == a[j]", 48, 0, 16},
      {"a[i] == a[j] and j <= p", 52, 8, 4},
      {"j <= p or j < 32", 27, 6, 31},
      {"not (j <= p)", 28, 8, 28},
      {"(p - j) % 2 == 0", 0, 64, 0},
      {"select(i < 64, j < 32, j >= 96)", 48, 0, 16},
      {"a[j] * 1.5 > 4.0", 48, 0, 16},
      {"sqrt(a[j] + 0.25) > 1.0", 16, 0, 48},
      {"min(i, j) >= 64", 48, 0, 16},
      {"clamp(j - p, -128, 128) == 300", 64, 0, 0},
      {"abs(i // 16 - j // 16) <= 1", 42, 0, 22},
      {"h == 0 and b == 0 and q_len == kv_len", 0, 0, 64},
  };
  for (const Known& one : known) {
    const bool reads = std::string(one.mask).find("a[") != std::string::npos;
    const Request request = masked(random, 128, one.mask, reads ? ids : Tensor{});
    const Problem problem = validate_dense_mask(request);
    const Tensor kinds = kinds_of(random, problem, {16, 16}, false);
    i64 counts[3] = {};
    RandomProblem::for_each(kinds, [&](const i64* at) {
      ++counts[static_cast<int>(kind_at(kinds, at[0], at[1], at[2], at[3]))];
    });
    EXPECT_EQ(counts[0], one.empty) << one.mask;
    EXPECT_EQ(counts[1], one.partial) << one.mask;
    EXPECT_EQ(counts[2], one.full) << one.mask;
  }
}

// What has no order: NaN, infinities, integers that wrap, divisors of 0.
TEST(BlockMap, SaysNothingOfWhatItCannotKnow) {
  RandomProblem random(2);
  const Tensor numbers = random.contiguous(DType::kFloat32, {64});
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double values[] = {
      std::numeric_limits<double>::quiet_NaN(), kInfinity, -kInfinity, 1e38, -3.5, 0.0, 2.0, 7.25};
  RandomProblem::for_each(numbers, [&](const i64* at) {
    store_real(RandomProblem::address(numbers, at), DType::kFloat32, values[at[0] / 3 % 8]);
  });
  for (const char* mask : {"a[j] < 3.0",
                           "a[j] == a[i]",
                           "a[i] != a[j]",
                           "a[i] + a[j] > 0.0",
                           "a[i] * a[j] < 1e30",
                           "max(a[i], a[j]) >= 2.0",
                           "min(a[i], 0.0) <= a[j]",
                           "1.0 / a[j] < 2.0",
                           "log(a[j]) < 1.0",
                           "exp(a[j]) > 3.0",
                           "sqrt(a[i]) < a[j]",
                           "clamp(a[i], a[j], 2.0) > 0.5",
                           "floor(a[j]) < 3",
                           "abs(a[j] - 1.0) < 2.0",
                           "not (a[j] > 0.0)",
                           "tanh(a[j]) < 0.5",
                           "-a[j] < a[i]",
                           "(i * 9223372036854775807 + j) % 3 == 1",
                           "i // (j - 20) == 0",
                           "(i - 30) % (j - 9) == 2",
                           "select(a[j] > 1.0, a[i], a[j]) > 0.0",
                           "-9223372036854775807 - 1 - i < j",
                           "abs(j * 4611686018427387904) > 0",
                           "(j - 40) // 3 < i - 50",
                           "(j - 31) % 7 < i % 5"}) {
    const bool reads = std::string(mask).find("a[") != std::string::npos;
    const Problem problem =
        validate_dense_mask(masked(random, 64, mask, reads ? numbers : Tensor{}));
    for (const BlockSizes sizes : {BlockSizes{1, 1}, BlockSizes{3, 2}, BlockSizes{7, 11}}) {
      for (const bool exact : {false, true}) {
        expect_right(problem, sizes, kinds_of(random, problem, sizes, exact), exact, 2, mask);
      }
    }
  }
}

TEST(BlockMap, IsRightOfLongSequences) {
  RandomProblem random(3);
  constexpr i64 kRows = 8192;
  std::vector<i64> documents;
  for (i64 i = 0, id = 0; i < kRows; ++i) documents.push_back(id += random.chance(0.002) ? 1 : 0);
  const Tensor ids = random.indices(DType::kInt64, documents);
  for (const char* mask : {"a[i] == a[j] and j <= p", "j <= p and (p - j < 700 or j < 4)",
                           "a[i] <= a[j] + 1 and j // 512 <= p // 512"}) {
    const bool reads = std::string(mask).find("a[") != std::string::npos;
    const Problem problem =
        validate_dense_mask(masked(random, kRows, mask, reads ? ids : Tensor{}));
    const BlockSizes sizes{128, 128};
    const Tensor kinds = kinds_of(random, problem, sizes, false);
    const CacheSequence sequence = problem.sequence(0);
    for (i64 sample = 0; sample < 200000; ++sample) {
      const i64 i = random.number(0, kRows - 1), j = random.number(0, kRows - 1);
      const BlockKind kind = kind_at(kinds, 0, 0, i / sizes.rows, j / sizes.keys);
      if (kind == BlockKind::kPartial) continue;
      ASSERT_EQ(problem.shows(sequence, 0, 0, i, j), kind == BlockKind::kFull)
          << i << ", " << j << " of " << mask;
    }
  }
}

}  // namespace
}  // namespace fulmen::test
