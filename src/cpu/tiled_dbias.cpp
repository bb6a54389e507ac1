// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The pass for dbias.

#include <algorithm>

#include "cpu/backward_tile.h"
#include "cpu/rows.h"
#include "kernels/attention/block_range.cuh"

namespace fulmen::cpu {
namespace {

// Entries [index, index + 1), or all `count` of them where the axis of dbias has extent 1.
Interval along(i64 extent, i64 index, i64 count) {
  return extent == 1 ? Interval{0, count} : Interval{index, index + 1};
}

// Blocks of the sequence that a tile touches along one axis: all, or the one that starts where it
// does.
Interval blocks_of_tile(bool sums, Interval tile, i64 block_size, i64 length) {
  if (sums) return {0, ceil_div(length, block_size)};
  const i64 block = tile.begin / block_size;
  return {block, min(block + 1, ceil_div(length, block_size))};
}

template <class Real>
void add_pairs(const DBiasTile& at, Interval rows, Interval keys, const Real* dS, Real* sum,
               i64 stride) {
  for (i64 i = 0; i < rows.size(); ++i) {
    const Real* const from = dS + i * stride;
    Real* const to = sum + (at.sums_rows ? 0 : i * stride);
    if (at.sums_columns) {
      Real row_sum = 0;
      for (i64 j = 0; j < keys.size(); ++j) row_sum += from[j];
      to[0] += row_sum;
    } else {
      for (i64 j = 0; j < keys.size(); ++j) to[j] += from[j];
    }
  }
}

}  // namespace

DBiasTiles::DBiasTiles(const Problem& problem, const TileSizes& sizes)
    : problem_(problem),
      sizes_(sizes),
      row_blocks_(ceil_div(problem.arrays[Array::kDBias].shape[2], sizes.rows)),
      column_blocks_(ceil_div(problem.arrays[Array::kDBias].shape[3], sizes.columns)) {}

i64 DBiasTiles::size() const {
  const i64* const extent = problem_.arrays[Array::kDBias].shape;
  return extent[0] * extent[1] * row_blocks_ * column_blocks_;
}

DBiasTile DBiasTiles::at(i64 task) const {
  const i64* const extent = problem_.arrays[Array::kDBias].shape;
  const i64 column_block = task % column_blocks_;
  const i64 row_block = task / column_blocks_ % row_blocks_;
  const i64 batch_head = task / column_blocks_ / row_blocks_;
  return {along(extent[0], batch_head / extent[1], problem_.num_sequences),
          along(extent[1], batch_head % extent[1], problem_.heads_q),
          rows_of_block(row_block, sizes_.rows, extent[2]),
          rows_of_block(column_block, sizes_.columns, extent[3]),
          extent[2] == 1,
          extent[3] == 1};
}

template <class Real>
void sum_dbias_tile(const Problem& problem, const TileSizes& sizes,
                    const BackwardShared<Real>& shared, const BackwardScratch<Real>& scratch,
                    const DBiasTile& at) {
  Real* const sum = scratch.dbias;
  std::fill_n(sum, sizes.rows * sizes.padded_columns, Real(0));
  for (i64 index = at.sequences.begin; index < at.sequences.end; ++index) {
    BackwardTile<Real> tile(problem, sizes, shared, scratch, index, nullptr);
    const SequenceShape& shape = tile.sequence().shape;
    const Interval row_blocks = blocks_of_tile(at.sums_rows, at.rows, sizes.rows, shape.q_len);
    const Interval key_blocks =
        blocks_of_tile(at.sums_columns, at.columns, sizes.columns, shape.kv_len);
    for (i64 head = at.heads.begin; head < at.heads.end; ++head) {
      for (i64 key_block = key_blocks.begin; key_block < key_blocks.end; ++key_block) {
        const Interval keys = rows_of_block(key_block, sizes.columns, shape.kv_len);
        tile.load_keys(problem.kv_head(head), keys, true);
        for (i64 row_block = row_blocks.begin; row_block < row_blocks.end; ++row_block) {
          const Interval rows = rows_of_block(row_block, sizes.rows, shape.q_len);
          const BlockRange blocks = visible_column_blocks(problem.mask, shape, rows, sizes.columns);
          if (!blocks.visible.contains(key_block) || tile.is_empty(head, rows, keys)) {
            continue;
          }
          tile.load_queries(head, rows, keys);
          tile.weigh(blocks.is_full(key_block), BackwardTile<Real>::Of::kScore);
          add_pairs(at, rows, keys, scratch.dS, sum, sizes.padded_columns);
        }
      }
    }
  }
  const Tensor& dbias = problem.arrays[Array::kDBias];
  const Real one = 1;
  kernels<Real>().store_rows(
      {sum, sizes.padded_columns}, at.rows.size(), at.columns.size(), &one, 0,
      {dbias.address(dbias.shape[0] == 1 ? 0 : at.sequences.begin,
                     dbias.shape[1] == 1 ? 0 : at.heads.begin, at.rows.begin, at.columns.begin),
       dbias.dtype, dbias.strides[2], dbias.strides[3]});
}

template void sum_dbias_tile(const Problem&, const TileSizes&, const BackwardShared<float>&,
                             const BackwardScratch<float>&, const DBiasTile&);
template void sum_dbias_tile(const Problem&, const TileSizes&, const BackwardShared<double>&,
                             const BackwardScratch<double>&, const DBiasTile&);

}  // namespace fulmen::cpu
