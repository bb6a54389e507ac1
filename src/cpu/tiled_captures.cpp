// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The pass for gradients of what an expression reads: dC[c] = sum of dS' d s' / d C over the pairs
// that read element c. A task is a tile of pairs of one head. It computes its terms beside others,
// and adds them in the order of the tasks, in float64: the same bits on any number of threads.

#include <algorithm>

#include "cpu/backward_tile.h"
#include "cpu/expression_tile.h"
#include "cpu/rows.h"
#include "cpu/thread_pool.h"
#include "kernels/attention/block_range.cuh"

namespace fulmen::cpu {
namespace {

using expression::Derivative;

// Terms of a tile: values (rows, columns) and the elements that they belong to.
template <class Real>
struct Terms {
  Real* values;
  i64* elements;
  i64 stride;
  i64 rows;
  i64 columns;
};

// Where all pairs of a row, of a key or of the tile read one element, their sum is one term: that
// of the first. Returns how many rows and columns are left.
template <class Real>
void reduce(Terms<Real>& terms, u8 on) {
  if (on & expression::kOnScore) return;
  if (!(on & expression::kOnColumn)) {
    for (i64 row = 0; row < terms.rows; ++row) {
      Real* const values = terms.values + row * terms.stride;
      double sum = 0;
      for (i64 column = 0; column < terms.columns; ++column)
        sum += static_cast<double>(values[column]);
      values[0] = static_cast<Real>(sum);
    }
    terms.columns = 1;
  }
  if (!(on & expression::kOnRow)) {
    for (i64 column = 0; column < terms.columns; ++column) {
      double sum = 0;
      for (i64 row = 0; row < terms.rows; ++row) {
        sum += static_cast<double>(terms.values[row * terms.stride + column]);
      }
      terms.values[column] = static_cast<Real>(sum);
    }
    terms.rows = 1;
  }
}

template <class Real>
void scatter(const Terms<Real>& terms, double* sums) {
  for (i64 row = 0; row < terms.rows; ++row) {
    const i64 at = row * terms.stride;
    for (i64 column = 0; column < terms.columns; ++column) {
      sums[terms.elements[at + column]] += static_cast<double>(terms.values[at + column]);
    }
  }
}

// values = dS' values; 0 where a pair is hidden, whatever the derivative is there.
template <class Real>
void multiply_by(const Real* dS, const Real* addend, Terms<Real>& terms) {
  for (i64 row = 0; row < terms.rows; ++row) {
    const i64 at = row * terms.stride;
    for (i64 column = at; column < at + terms.columns; ++column) {
      const bool is_hidden = addend && addend[column] == -std::numeric_limits<Real>::infinity();
      terms.values[column] = is_hidden ? Real(0) : dS[column] * terms.values[column];
    }
  }
}

struct CaptureTile {
  i64 index;  // of the sequence
  i64 head;
  Interval rows;
  Interval keys;
  bool is_visible;
  bool is_full;
};

// When an addition to an array comes: tasks in order, and in a task the derivatives that read it.
struct CapturePosition {
  size_t order;  // number of the first of these derivatives
  i64 position;

  CapturePosition(const Problem& problem, size_t number, i64 task) {
    const std::vector<Derivative>& derivatives = problem.program->derivatives;
    const auto array_of = [&](size_t each) {
      return problem.program->step(derivatives[each].read).index;
    };
    i64 before = 0, all = 0;
    order = number;
    for (size_t each = 0; each < derivatives.size(); ++each) {
      if (array_of(each) != array_of(number)) continue;
      if (each < order) order = each;
      before += each < number;
      ++all;
    }
    position = task * all + before;
  }
};

CaptureTile tile_of(const Problem& problem, const TileSizes& sizes, const i64* first, i64 task) {
  const i64 index = sequence_of(first, problem.num_sequences, task);
  const SequenceShape shape = problem.sequence(index).shape;
  const i64 row_blocks = ceil_div(i64{shape.q_len}, sizes.rows);
  const i64 key_blocks = ceil_div(i64{shape.kv_len}, sizes.columns);
  const i64 local = task - first[index];
  const i64 key_block = local / row_blocks % key_blocks;
  const Interval rows = rows_of_block(local % row_blocks, sizes.rows, shape.q_len);
  const BlockRange blocks = visible_column_blocks(problem.mask, shape, rows, sizes.columns);
  return {index,
          local / (row_blocks * key_blocks),
          rows,
          rows_of_block(key_block, sizes.columns, shape.kv_len),
          blocks.visible.contains(key_block),
          blocks.is_full(key_block)};
}

}  // namespace

template <class Real>
i64 start_captures(const Problem& problem, const TileSizes& sizes,
                   const BackwardShared<Real>& shared) {
  i64 tiles = 0;
  for (i64 index = 0; index < problem.num_sequences; ++index) {
    const SequenceShape shape = problem.sequence(index).shape;
    shared.tiles[index] = tiles;
    tiles += problem.heads_q * ceil_div(i64{shape.q_len}, sizes.rows) *
             ceil_div(i64{shape.kv_len}, sizes.columns);
  }
  shared.tiles[problem.num_sequences] = tiles;
  std::fill_n(shared.captures_order, problem.program->derivatives.size(), 0);
  for (int index = 0; index < kNumCaptures; ++index) {
    if (!shared.captures[index]) continue;
    const Tensor& gradient = problem.arrays[capture_gradient(index)];
    std::fill_n(shared.captures[index], expression::num_elements(gradient), 0.0);
  }
  return tiles;
}

template <class Real>
void add_captures_tile(const Problem& problem, const TileSizes& sizes,
                       const BackwardShared<Real>& shared, const BackwardScratch<Real>& scratch,
                       i64 task) {
  CaptureTile at = tile_of(problem, sizes, shared.tiles, task);
  BackwardTile<Real> tile(problem, sizes, shared, scratch, at.index, nullptr);
  if (at.is_visible) at.is_visible = !tile.is_empty(at.head, at.rows, at.keys);
  if (at.is_visible) {
    tile.load_keys(problem.kv_head(at.head), at.keys, true);
    tile.load_queries(at.head, at.rows, at.keys);
    tile.weigh(at.is_full, BackwardTile<Real>::Of::kMapped);
  }
  ExpressionTile<Real> pairs(problem, tile.sequence(), at.index, at.head, scratch.steps);
  const std::vector<Derivative>& derivatives = problem.program->derivatives;
  for (size_t number = 0; number < derivatives.size(); ++number) {
    const expression::Step& read = problem.program->step(derivatives[number].read);
    double* const sums = shared.captures[read.index];
    if (!sums) continue;
    Terms<Real> terms{scratch.P, scratch.elements, sizes.padded_columns, at.rows.size(),
                      at.keys.size()};
    if (at.is_visible) {
      pairs.differentiate(derivatives[number], at.rows, at.keys, scratch.slope, terms.values,
                          terms.elements, terms.stride);
      multiply_by(scratch.dS, tile.addend(), terms);
      reduce(terms, read.on);
    }
    const CapturePosition place(problem, number, task);
    await_order(shared.captures_order[place.order], place.position);
    if (at.is_visible) scatter(terms, sums);
    advance_order(shared.captures_order[place.order], place.position + 1);
  }
}

template <class Real>
void store_captures(const Problem& problem, const BackwardShared<Real>& shared) {
  for (int index = 0; index < kNumCaptures; ++index) {
    if (!shared.captures[index]) continue;
    const Tensor& gradient = problem.arrays[capture_gradient(index)];
    for (i64 element = 0; element < expression::num_elements(gradient); ++element) {
      expression::store_element(gradient, element, shared.captures[index][element]);
    }
  }
}

#define FULMEN_CAPTURES_OF(Real)                                                                 \
  template i64 start_captures(const Problem&, const TileSizes&, const BackwardShared<Real>&);    \
  template void add_captures_tile(const Problem&, const TileSizes&, const BackwardShared<Real>&, \
                                  const BackwardScratch<Real>&, i64);                            \
  template void store_captures(const Problem&, const BackwardShared<Real>&);
FULMEN_CAPTURES_OF(float)
FULMEN_CAPTURES_OF(double)
#undef FULMEN_CAPTURES_OF

}  // namespace fulmen::cpu
