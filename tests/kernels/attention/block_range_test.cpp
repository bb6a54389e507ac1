// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Visited and full blocks against the dense definition, exhaustively over small shapes and block
// sizes, in both directions. Four laws: visited blocks hold every visible entry; none of them is
// wholly hidden; a full block is whole and wholly visible; every such block is called full.
#include "kernels/attention/block_range.cuh"

#include "kernels/attention/small_masks.h"

namespace fulmen::test {
namespace {

constexpr i64 kBlockSizes[] = {1, 2, 3, 4, 8};

// `some`: indices that a line of the block sees; `all`: those that every line sees.
void check_laws(const BlockRange& range, u32 some, u32 all, i64 block_size, i64 length,
                const std::string& where) {
  for (i64 block = 0; block < ceil_div(length, block_size); ++block) {
    const u32 bits = bits_of(block * block_size, min((block + 1) * block_size, length));
    const bool has_visible = (some & bits) != 0;
    const bool is_whole = (block + 1) * block_size <= length;
    const bool is_full = is_whole && (all & bits) == bits;
    if (range.visible.contains(block) != has_visible || range.is_full(block) != is_full) {
      ADD_FAILURE() << where << ", block " << block << " of size " << block_size << ": visible "
                    << has_visible << " full " << is_full << ", got visit [" << range.visible.begin
                    << ", " << range.visible.end << ") full [" << range.full.begin << ", "
                    << range.full.end << ")";
    }
  }
  const bool is_part = range.visible.begin <= range.full.begin &&
                       range.full.begin <= range.full.end && range.full.end <= range.visible.end &&
                       range.visible.end <= ceil_div(length, block_size);
  if (!is_part) ADD_FAILURE() << where << ": full is no part of visit";
}

// lines: the bits of each row (or column); seen: of the other axis.
template <class Range>
void check_blocks(const u32* lines, i64 num_lines, i64 length, const Range& range_of,
                  const std::string& where) {
  for (const i64 lines_per_block : kBlockSizes) {
    for (i64 begin = 0; begin < num_lines; begin += lines_per_block) {
      const Interval block{begin, min(begin + lines_per_block, num_lines)};
      u32 some = 0;
      u32 all = ~0u;
      for (i64 line = block.begin; line < block.end; ++line) {
        some |= lines[line];
        all &= lines[line];
      }
      for (const i64 size : kBlockSizes) {
        check_laws(range_of(block, size), some, all, size, length, where);
      }
    }
  }
}

TEST(VisibleColumnBlocks, ObeyTheFourLaws) {
  for_each_small_mask([](const SmallMask& small) {
    const auto range_of = [&small](Interval rows, i64 block_cols) {
      return visible_column_blocks(small.mask, small.shape, rows, block_cols);
    };
    check_blocks(small.row, small.shape.q_len, small.shape.kv_len, range_of, small.text());
  });
}

TEST(VisibleRowBlocks, ObeyTheFourLaws) {
  for_each_small_mask([](const SmallMask& small) {
    const auto range_of = [&small](Interval columns, i64 block_rows) {
      return visible_row_blocks(small.mask, small.shape, columns, block_rows);
    };
    check_blocks(small.column, small.shape.kv_len, small.shape.q_len, range_of, small.text());
  });
}

TEST(VisibleColumnBlocks, LargestLengthsDoNotWrap) {
  const i32 huge = 2147483647;
  const SequenceShape shape{huge, huge, 0};
  const BlockRange range = visible_column_blocks({.causal = true}, shape, {huge - 64, huge}, 64);
  EXPECT_EQ(range.visible.end, ceil_div(huge, 64));
  EXPECT_EQ(range.full.end, (i64{huge} - 63) / 64);
}

}  // namespace
}  // namespace fulmen::test
