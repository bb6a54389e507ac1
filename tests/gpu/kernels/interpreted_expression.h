// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A user's expression in kernels that tests compile. In place of the text that a plan generates it
// runs the steps of the oracle, so that one compiled kernel takes every expression: what is tested
// is where kernels ask, with which pair, and what becomes of the answer. The cases of fulmen verify
// run the generated text.
#pragma once

#include <algorithm>
#include <vector>

#include "core/box_bounds.h"
#include "core/problem.h"
#include "core/program.h"
#include "gpu/expression_text.h"
#include "kernels/common/expression.cuh"

namespace fulmen {
namespace test {

inline const Problem* interpreted;  // that of the launch

// Every step of a goal for a pair, as the oracle has them.
inline std::vector<expression::Value> steps_of(const expression::Goal& goal,
                                               const ExpressionPair& pair, double s) {
  using expression::Variable;
  expression::Operands operands;
  const i64 values[] = {0,      pair.b, pair.h,     pair.hk,    pair.i,
                        pair.j, pair.p, pair.q_len, pair.kv_len};
  std::copy(std::begin(values), std::end(values), operands.variables.begin());
  if (interpreted->has_segments()) {
    const auto set = [&operands](Variable variable, i64 position) {
      operands.variables[static_cast<size_t>(variable)] = position;
    };
    set(Variable::kQPosition, interpreted->q_position(pair.b, pair.i));
    set(Variable::kKvPosition, interpreted->kv_position(pair.b, pair.j));
  }
  operands.s = s;
  operands.scalars = interpreted->scalars.data();
  operands.arrays = &interpreted->arrays;
  std::vector<expression::Value> steps(interpreted->program->steps.size());
  evaluate(*interpreted->program, goal, operands, steps.data());
  return steps;
}

// Whether a read of the goal has an index that is out of range.
inline bool reads_outside(const expression::Goal& goal,
                          const std::vector<expression::Value>& values) {
  const auto is_outside = [&](i32 number) {
    const expression::Step& step = interpreted->program->step(number);
    if (step.op != expression::Op::kRead) return false;
    const Tensor& array = interpreted->arrays[array_read(step.index)];
    for (int n = 0; n < step.num_args; ++n) {
      const i64 index = values[static_cast<size_t>(step.args[n])].integer;
      if (index < 0 || index >= array.shape[kMaxRank - step.num_args + n]) return true;
    }
    return false;
  };
  return std::ranges::any_of(goal.constant, is_outside) ||
         std::ranges::any_of(goal.row, is_outside) ||
         std::ranges::any_of(goal.column, is_outside) || std::ranges::any_of(goal.pair, is_outside);
}

inline expression::Bounds bounds_between(i64 first, i64 last) {
  return {static_cast<double>(first), static_cast<double>(last), first, last};
}

// What the mask may be where i, p and j are any between the first and the last. Of arrays it is not
// looked at what lies between: every lane would.
inline Integers mask_between(const ExpressionPair& first, const ExpressionPair& last) {
  const expression::Program& program = *interpreted->program;
  expression::BoxOperands operands;
  const i64 ends[][2] = {{0, 0},
                         {first.b, first.b},
                         {first.h, first.h},
                         {first.hk, first.hk},
                         {first.i, last.i},
                         {first.j, last.j},
                         {first.p, last.p},
                         {first.q_len, first.q_len},
                         {first.kv_len, first.kv_len}};
  if (interpreted->has_segments()) return {0, 1};
  for (size_t n = 0; n < std::size(ends); ++n) {
    operands.variables[n] = bounds_between(ends[n][0], ends[n][1]);
  }
  operands.scalars = interpreted->scalars.data();
  operands.arrays = &interpreted->arrays;
  std::vector<expression::Bounds> steps(program.steps.size());
  const expression::Goal& goal = program.mask_goal;
  for (const std::vector<i32>* list : {&goal.constant, &goal.row, &goal.column, &goal.pair}) {
    for (const i32 index : *list) {
      if (program.step(index).op == expression::Op::kRead) return {0, 1};
      steps[static_cast<size_t>(index)] = bounds_of(program.step(index), steps.data(), operands);
    }
  }
  const expression::Bounds& mask = steps[static_cast<size_t>(program.mask)];
  return {mask.first, mask.last};
}

}  // namespace test

template <class Math>
struct UserExpression {
  using Real = typename Math::Real;
  static constexpr bool kReadsSegments = true;
  static constexpr i32 kNumDerivatives = 64;

  using Row = ExpressionPair;
  struct Column {
    i64 j;
  };

  static Row row(const ExpressionParams&, const ExpressionPair& pair, bool&) { return pair; }
  static Column column(const ExpressionParams&, const Row&, const ExpressionPair& pair, bool&) {
    return {pair.j};
  }
  // A score's key is what lies on the pair's diagonal in its row.
  struct Diagonal {
    i32 away;
  };
  static constexpr i32 kDiagonalWords = 1;
  static Diagonal diagonal(const ExpressionParams&, const Row& row, const Column& column, bool&) {
    return {static_cast<i32>(column.j - row.i)};
  }
  static Real score(const ExpressionParams& e, const Row& row, const Column& column,
                    const Diagonal& diagonal, Real s, bool& outside) {
    return mapped(e, row, column, diagonal, s, outside).score;
  }
  static MappedScore<Real> mapped(const ExpressionParams&, const Row& row, const Column&,
                                  const Diagonal& diagonal, Real s, bool&) {
    const expression::Program& program = *test::interpreted->program;
    if (program.score < 0) return {s, 1};
    const auto steps = test::steps_of(program.slope_goal, pair_of(row, {row.i + diagonal.away}),
                                      static_cast<double>(s));
    return {static_cast<Real>(steps[static_cast<size_t>(program.score)].real),
            static_cast<Real>(steps[static_cast<size_t>(program.slope)].real)};
  }
  static bool shows(const ExpressionParams&, const Row& row, const Column& column, bool& outside) {
    const expression::Program& program = *test::interpreted->program;
    if (program.mask < 0) return true;
    const auto steps = test::steps_of(program.mask_goal, pair_of(row, column), 0);
    outside |= test::reads_outside(program.mask_goal, steps);
    return steps[static_cast<size_t>(program.mask)].integer != 0;
  }
  struct RowBounds {
    Row any;
    Integers i, p;
  };
  struct ColumnBounds {
    Integers j;
  };
  static RowBounds bounds_of(const Row& row) { return {row, between(row.i), between(row.p)}; }
  static ColumnBounds bounds_of(const Column& column) { return {between(column.j)}; }
  template <class Call>
  static void each(RowBounds& a, const RowBounds& b, const Call& call) {
    a.any = b.any;
    call(a.i, b.i);
    call(a.p, b.p);
  }
  template <class Call>
  static void each(ColumnBounds& a, const ColumnBounds& b, const Call& call) {
    call(a.j, b.j);
  }
  static Integers shows_between(const RowBounds& row, const ColumnBounds& column) {
    ExpressionPair first = row.any, last = row.any;
    first.i = row.i.least, last.i = row.i.most;
    first.p = row.p.least, last.p = row.p.most;
    first.j = column.j.least, last.j = column.j.most;
    return test::mask_between(first, last);
  }

  template <class Add>
  static void differentiate(const ExpressionParams& e, const Row& row, const Column& column, Real s,
                            const Add& add) {
    i32 n = 0;
    for (const expression::Derivative& one : test::interpreted->program->derivatives) {
      const expression::Step& read = test::interpreted->program->step(one.read);
      if (e.sums[read.index] != nullptr) {
        const auto steps = test::steps_of(one.goal, pair_of(row, column), static_cast<double>(s));
        const Tensor sums =
            expression::contiguous(test::interpreted->arrays[capture_gradient(read.index)]);
        add(n, e.sums[read.index] + expression::offset_of(read, steps.data(), sums),
            static_cast<Real>(steps[static_cast<size_t>(one.value)].real));
      }
      ++n;
    }
  }

 private:
  static ExpressionPair pair_of(Row row, const Column& column) {
    row.j = column.j;
    return row;
  }
};

}  // namespace fulmen
