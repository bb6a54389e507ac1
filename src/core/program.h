// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// An expression with types: a list of steps, each of which takes earlier ones, for the dtypes of
// the arrays of a call. Equal steps are one, constants are folded. Derivatives are steps of the
// same list: d score / d s, and d score / d (what is read) for each read of a floating-point array.
// What a backend computes is one goal: the steps that some values need, sorted by what they depend
// on, so that each is computed no more often than it changes.
//
// Arithmetic: floats in the type of sums; integers in 64 bits, overflow wraps, // and % round
// towards minus infinity, and are 0 where the divisor is; floor gives an integer, the nearest that
// there is. A NaN in min, max and clamp stays NaN. Indices are clamped.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "core/expression.h"
#include "core/problem.h"
#include "core/tensor.h"
#include "kernels/attention/integers.cuh"

namespace fulmen::expression {

// What a step depends on, as bits; what is the same for a whole head has none.
enum Dependence : u8 { kOnRow = 1, kOnColumn = 2, kOnScore = 4 };

struct Step {
  Op op;
  Type type;
  Type operand;  // of the last value that it takes; unknown where it takes none
  u8 on;         // of Dependence
  u8 num_args;
  i32 args[kMaxIndices];
  i32 index;    // of a variable, a scalar or a capture
  i64 integer;  // of a constant that is no float
  double real;  // of a constant that is one

  bool operator==(const Step&) const = default;
};

// Steps in an order in which each follows those that it takes.
struct Goal {
  std::vector<i32> constant;  // for a head
  std::vector<i32> row;       // depend on the row alone
  std::vector<i32> column;    // depend on the key alone
  std::vector<i32> pair;
  // Of each of those: whether the next takes it, arithmetic of floats both, and whether nothing
  // else does.
  std::vector<u8> flow;

  static constexpr u8 kPassed = 1, kAlone = 2;
};

// A read of a floating-point array that the score depends on.
struct Derivative {
  i32 read;   // the step
  i32 value;  // d score / d (what it reads); a step
  Goal goal;  // both
};

// What segments make of a call: i, j and p are positions, and options that speak of positions are
// steps beside those of the texts.
struct SegmentTerms {
  bool of_rows = false;
  bool of_keys = false;
  bool alibi = false;
  DType slopes = DType::kNone;
  IntervalMask mask;
};

struct Program {
  std::shared_ptr<const Expression> expression;  // null: none of the caller's
  SegmentTerms segments;
  std::vector<Step> steps;
  i32 score = -1;  // a float; -1: there is none, or it is s itself
  i32 mask = -1;   // a boolean
  i32 slope = -1;  // d score / d s
  Goal score_goal, mask_goal;
  Goal slope_goal;  // score and slope
  std::vector<Derivative> derivatives;

  const Step& step(i32 index) const { return steps[static_cast<size_t>(index)]; }
};

// dtypes: of the captures; fewer than there are: unknown, and what is made is good for nothing but
// its sentences. Throws Error.
std::shared_ptr<const Program> compile(std::shared_ptr<const Expression> expression,
                                       std::span<const DType> dtypes,
                                       const SegmentTerms& segments = {});

Type type_of(DType dtype);

// Beside segments: what the mask of the options shows, and the score after ALiBi; steps.
i32 position_mask(Program& program, const IntervalMask& mask, bool of_keys);
i32 position_alibi(Program& program, DType slopes);

// Fills slope, slope_goal and derivatives. Throws Error.
void differentiate(Program& program);

Goal goal_of(const Program& program, std::span<const i32> values);
inline Goal goal_of(const Program& program, std::initializer_list<i32> values) {
  return goal_of(program, std::span(values.begin(), values.size()));
}

// Of each step, whether what it is for a pair is told by the key less the row, where p is the row
// and something that is the same for the head.
std::vector<char> diagonal_steps(const Program& program);

// Adds a step, or finds its equal, folds it where all that it takes is constant, and drops factors
// of 1: the number of the step that has the value.
class Builder {
 public:
  explicit Builder(Program& program) : program_(program) {}

  i32 constant(double real);
  i32 constant(Type type, i64 integer);
  i32 leaf(Op op, Type type, u8 on, i32 index, std::span<const i32> indices = {});
  i32 variable(Variable variable);
  i32 add(Op op, Type type, std::initializer_list<i32> args);
  i32 to_float(i32 value);

 private:
  i32 find_or_add(const Step& step);

  Program& program_;
};

// ---- Many pairs --------------------------------------------------------------------------------

// The most pairs that a step is computed for at once, and what their number is a multiple of.
// Values lie one behind the other, floats in the type of sums, integers as i64, booleans as bytes,
// and step n begins at n * kStepBytes.
inline constexpr i64 kStepLanes = 384;
inline constexpr i64 kStepUnit = 32;
inline constexpr i64 kStepBytes = kStepLanes * static_cast<i64>(sizeof(i64));

// ---- One pair ----------------------------------------------------------------------------------

struct Value {
  double real = 0;
  i64 integer = 0;  // also of a boolean: 0 or 1
};

// Scratch of an interpreter of many pairs: the values of all steps, and one more of each.
inline i64 scratch_bytes(const Program& program) {
  return static_cast<i64>(program.steps.size()) * (kStepBytes + static_cast<i64>(sizeof(Value)));
}

// What steps read of one pair. Floats are float64.
struct Operands {
  std::array<i64, static_cast<size_t>(Variable::kCount)> variables{};  // but s
  double s = 0;
  const double* scalars = nullptr;
  const Arrays* arrays = nullptr;  // in normal form: as many axes as indices, at the end
};

// What row i of a head and key j of a sequence are for it. i: of a row that there is.
Operands operands_of(const Problem& problem, const CacheSequence& sequence, i64 index, i64 head,
                     i64 i, i64 j);

// A step from those that it takes.
Value evaluate(const Step& step, const Value* values, const Operands& operands);

// Where a read finds its element: the indices clamped, in elements from the first.
i64 offset_of(const Step& read, const Value* values, const Tensor& capture);

// Of an array in normal form.
i64 num_elements(const Tensor& tensor);

// A gradient as sums hold it: the extents of the array, one element behind the other.
Tensor contiguous(Tensor gradient);
// Element n of that, rounded once into the array.
void store_element(const Tensor& gradient, i64 element, double value);

// All of a goal, in order, into values (one for each step of the program).
void evaluate(const Program& program, const Goal& goal, const Operands& operands, Value* values);

}  // namespace fulmen::expression
