// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Interval arithmetic on 64-bit integers.

#include "gpu/expression_ranges.h"

#include "core/arrays.h"
#include "core/program.h"

namespace fulmen::gpu {
namespace {

using expression::Op;
using expression::Step;
using expression::Type;
using expression::Variable;

constexpr i64 kLeast = std::numeric_limits<i64>::min();
constexpr i64 kMost = std::numeric_limits<i64>::max();
constexpr i64 kMost32 = std::numeric_limits<i32>::max();

// Everything where an end overflows: the value wraps then.
template <class Operation>
Range range_of(const Range& a, const Range& b, const Operation& overflows) {
  Range all{kMost, kLeast};
  for (const i64 x : {a.least, a.most}) {
    for (const i64 y : {b.least, b.most}) {
      long long end = 0;
      if (overflows(x, y, &end)) return {};
      all = {min<i64>(all.least, end), max<i64>(all.most, end)};
    }
  }
  return all;
}

Range sum(const Range& a, const Range& b) {
  return range_of(a, b, [](i64 x, i64 y, long long* z) { return __builtin_add_overflow(x, y, z); });
}
Range difference(const Range& a, const Range& b) {
  return range_of(a, b, [](i64 x, i64 y, long long* z) { return __builtin_sub_overflow(x, y, z); });
}
Range product(const Range& a, const Range& b) {
  return range_of(a, b, [](i64 x, i64 y, long long* z) { return __builtin_mul_overflow(x, y, z); });
}
Range magnitude(const Range& a) {
  if (a.least >= 0) return a;
  const Range negative = difference({0, 0}, a);
  return a.most <= 0 || negative.is_all() ? negative : Range{0, max(negative.most, a.most)};
}
Range quotient(const Range& a, const Range& b) {
  if (a.least >= 0 && b.least >= 0) return {0, a.most};
  const Range all = magnitude(a);
  return all.is_all() ? Range{} : Range{-all.most - 1, all.most};
}
// Of the sign of the divisor, and smaller.
Range remainder(const Range& b) {
  if (b.least == kLeast) return {};
  return {min<i64>(b.least + 1, 0), max<i64>(b.most - 1, 0)};
}

// Sizes up to which integers of 32 bits hold every difference of positions and every offset.
constexpr i64 kOrdinaryRows = (i64{1} << 30) - 1;
constexpr i64 kOrdinaryHeads = i64{1} << 20;

class Ranges {
 public:
  explicit Ranges(const Problem& problem) : problem_(problem), ordinary_(is_ordinary(problem)) {
    for (const Step& step : problem.program->steps) {
      all_.push_back(step.type == Type::kInt ? range(step) : Range{});
    }
  }

  std::vector<Range> all_;

 private:
  Range range(const Step& step) const {
    const auto arg = [&](int index) { return all_[static_cast<size_t>(step.args[index])]; };
    switch (step.op) {
      case Op::kConstant:
        return {step.integer, step.integer};
      case Op::kVariable:
        return range_of_variable(static_cast<Variable>(step.index));
      case Op::kRead:
        return problem_.arrays[array_read(step.index)].dtype == DType::kInt32
                   ? Range{-kMost32 - 1, kMost32}
                   : Range{};
      case Op::kAdd:
        return sum(arg(0), arg(1));
      case Op::kSubtract:
        return difference(arg(0), arg(1));
      case Op::kMultiply:
        return product(arg(0), arg(1));
      case Op::kFloorDivide:
        return quotient(arg(0), arg(1));
      case Op::kModulo:
        return remainder(arg(1));
      case Op::kNegate:
        return difference({0, 0}, arg(0));
      case Op::kMin:
        return {min(arg(0).least, arg(1).least), min(arg(0).most, arg(1).most)};
      case Op::kMax:
        return {max(arg(0).least, arg(1).least), max(arg(0).most, arg(1).most)};
      case Op::kAbs:
        return magnitude(arg(0));
      case Op::kClamp:  // one of the three; its bounds may come in either order
        return {min(max(arg(0).least, arg(1).least), arg(2).least),
                max(min(arg(0).most, arg(2).most), arg(1).most)};
      case Op::kSelect:
        return {min(arg(1).least, arg(2).least), max(arg(1).most, arg(2).most)};
      default:
        return {};
    }
  }

  Range range_of_variable(Variable variable) const {
    if (variable == Variable::kQPosition || variable == Variable::kKvPosition) {
      return {kNoPosition, kMaxPosition};
    }
    if (!ordinary_)
      return variable == Variable::kP ? Range{-kMost32 - 1, kMost32} : Range{0, kMost32};
    switch (variable) {
      case Variable::kP:
        return {-kOrdinaryRows, kOrdinaryRows};
      case Variable::kI:
      case Variable::kJ:
      case Variable::kQLen:
      case Variable::kKvLen:
        return {0, kOrdinaryRows};
      default:
        return {0, kOrdinaryHeads};
    }
  }

  const Problem& problem_;
  bool ordinary_;
};

}  // namespace

bool is_ordinary(const Problem& problem) {
  bool all = problem.q_rows <= kOrdinaryRows && problem.kv_rows <= kOrdinaryRows &&
             problem.heads_q <= kOrdinaryHeads && problem.num_sequences <= kOrdinaryHeads &&
             !problem.has(Array::kPositions);
  const auto look_at = [&](Array array) {
    const Tensor& tensor = problem.arrays[array];
    if (!tensor.present()) return;
    all = all && span_bytes(tensor) <= kMost32 && expression::num_elements(tensor) <= kMost32;
  };
  for (int index = 0; index < kNumCaptures; ++index) {
    look_at(capture(index));
    look_at(capture_gradient(index));
  }
  if (problem.has_segments()) look_at(array_read(kAlibiRead));
  return all;
}

std::vector<Range> integer_ranges(const Problem& problem) { return Ranges(problem).all_; }

}  // namespace fulmen::gpu
