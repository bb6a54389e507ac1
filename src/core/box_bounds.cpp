// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One rule a step. What cannot be said is everything: the widest bounds are right for any step.

#include "core/box_bounds.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>

namespace fulmen::expression {

Bounds either(const Bounds& a, const Bounds& b) {
  return {std::min(a.least, b.least), std::max(a.most, b.most), min(a.first, b.first),
          max(a.last, b.last), a.may_be_nan || b.may_be_nan};
}

namespace {

constexpr i64 kFirst = std::numeric_limits<i64>::min();
constexpr i64 kLast = std::numeric_limits<i64>::max();
constexpr double kInfinite = std::numeric_limits<double>::infinity();

constexpr Bounds kAnyFloat{-kInfinite, kInfinite, 0, 0, true};
constexpr Bounds kAnyInteger{0, 0, kFirst, kLast, false};

constexpr Bounds integers(i64 first, i64 last) { return {0, 0, first, last, false}; }
constexpr Bounds booleans(bool may_be_false, bool may_be_true) {
  return integers(may_be_false ? 0 : 1, may_be_true ? 1 : 0);
}

bool is_finite(const Bounds& x) { return std::isfinite(x.least) && std::isfinite(x.most); }

// Of arithmetic in float32 or float64: results are off by a few of the last digits of either, and
// infinite where they are too large for one of them.
Bounds floats(double least, double most, bool may_be_nan) {
  constexpr double kRelative = 0x1p-18, kSmallest = 0x1p-120, kLargest = 0x1p127;
  if (std::isnan(least) || std::isnan(most)) return kAnyFloat;
  least -= std::abs(least) * kRelative + kSmallest;
  most += std::abs(most) * kRelative + kSmallest;
  return {least < -kLargest ? -kInfinite : least, most > kLargest ? kInfinite : most, 0, 0,
          may_be_nan};
}

// Of numbers that are only converted to the type of sums: as they are where float32 has them.
Bounds converted(double least, double most, bool may_be_nan = false) {
  const auto is_exact = [](double x) {
    return static_cast<double>(static_cast<float>(x)) == x || std::isinf(x);
  };
  if (is_exact(least) && is_exact(most)) return {least, most, 0, 0, may_be_nan};
  return floats(least, most, may_be_nan);
}

// ---- Floats ------------------------------------------------------------------------------------

Bounds corners(std::initializer_list<double> values, bool may_be_nan) {
  return floats(std::min(values), std::max(values), may_be_nan);
}

// A function that never decreases, where its argument is a number.
template <class Function>
Bounds rising(const Bounds& a, const Function& function) {
  return floats(function(a.least), function(a.most), a.may_be_nan);
}

Bounds of_two_floats(Op op, const Bounds& a, const Bounds& b) {
  const bool may_be_nan = a.may_be_nan || b.may_be_nan;
  if (op == Op::kMin) {
    return {std::min(a.least, b.least), std::min(a.most, b.most), 0, 0, may_be_nan};
  }
  if (op == Op::kMax) {
    return {std::max(a.least, b.least), std::max(a.most, b.most), 0, 0, may_be_nan};
  }
  if (!is_finite(a) || !is_finite(b)) return kAnyFloat;
  switch (op) {
    case Op::kAdd:
      return floats(a.least + b.least, a.most + b.most, may_be_nan);
    case Op::kSubtract:
      return floats(a.least - b.most, a.most - b.least, may_be_nan);
    case Op::kMultiply:
      return corners({a.least * b.least, a.least * b.most, a.most * b.least, a.most * b.most},
                     may_be_nan);
    default:  // kDivide
      if (b.least <= 0 && b.most >= 0) return kAnyFloat;
      return corners({a.least / b.least, a.least / b.most, a.most / b.least, a.most / b.most},
                     may_be_nan);
  }
}

Bounds of_floats(Op op, const Bounds& a, const Bounds& b, const Bounds& c) {
  switch (op) {
    case Op::kNegate:
      return {-a.most, -a.least, 0, 0, a.may_be_nan};
    case Op::kAbs:
      return {std::max({0.0, a.least, -a.most}), std::max(-a.least, a.most), 0, 0, a.may_be_nan};
    case Op::kExp:
      return rising(a, [](double x) { return std::exp(x); });
    case Op::kTanh:
      return rising(a, [](double x) { return std::tanh(x); });
    case Op::kLog:
      return a.least > 0 ? rising(a, [](double x) { return std::log(x); }) : kAnyFloat;
    case Op::kSqrt:
      return a.least >= 0 ? rising(a, [](double x) { return std::sqrt(x); }) : kAnyFloat;
    case Op::kClamp: {  // to bounds that cannot cross
      if (!(b.most <= c.least) || b.may_be_nan || c.may_be_nan) return either(either(a, b), c);
      const auto clamped_to = [](double x, double least, double most) {
        return std::min(std::max(x, least), most);
      };
      return {clamped_to(a.least, b.least, c.least), clamped_to(a.most, b.most, c.most), 0, 0,
              a.may_be_nan};
    }
    default:
      return of_two_floats(op, a, b);
  }
}

// As floor: of NaN 0, and what lies beyond 64 bits the nearest inside.
Bounds floor_bounds(const Bounds& a) {
  const auto below = [](double x) {
    if (x >= 0x1p63) return kLast;
    return x < -0x1p63 ? kFirst : static_cast<i64>(std::floor(x));
  };
  const Bounds all = integers(below(a.least), below(a.most));
  return a.may_be_nan ? either(all, integers(0, 0)) : all;
}

// ---- Integers ----------------------------------------------------------------------------------

// The ends, or anything where one of them would wrap.
template <class Operation>
Bounds unless_wrapped(const Operation& operation, std::initializer_list<std::array<i64, 2>> pairs) {
  Bounds all = integers(kLast, kFirst);
  for (const auto& [x, y] : pairs) {
    i64 value = 0;
    if (operation(x, y, &value)) return kAnyInteger;
    all = either(all, integers(value, value));
  }
  return all;
}

Bounds quotients(const Bounds& a, const Bounds& b) {
  const bool may_wrap = a.first == kFirst && b.first <= -1 && b.last >= -1;
  if ((b.first <= 0 && b.last >= 0) || may_wrap) return kAnyInteger;
  Bounds all = integers(kLast, kFirst);
  for (const i64 x : {a.first, a.last}) {
    for (const i64 y : {b.first, b.last}) {
      const i64 value = floor_quotient(x, y);
      all = either(all, integers(value, value));
    }
  }
  return all;
}

// Of a positive divisor: below it, and as it is within one period.
Bounds remainders(const Bounds& a, const Bounds& b) {
  if (b.first <= 0) return kAnyInteger;
  const bool is_one_period =
      b.first == b.last && floor_quotient(a.first, b.first) == floor_quotient(a.last, b.first);
  if (is_one_period) {
    return integers(floor_remainder(a.first, b.first), floor_remainder(a.last, b.first));
  }
  return integers(0, b.last - 1);
}

Bounds of_integers(Op op, const Bounds& a, const Bounds& b, const Bounds& c) {
  switch (op) {
    case Op::kAdd:
      return unless_wrapped(
          [](i64 x, i64 y, i64* sum) { return __builtin_add_overflow(x, y, sum); },
          {{a.first, b.first}, {a.last, b.last}});
    case Op::kSubtract:
      return unless_wrapped(
          [](i64 x, i64 y, i64* difference) { return __builtin_sub_overflow(x, y, difference); },
          {{a.first, b.last}, {a.last, b.first}});
    case Op::kMultiply:
      return unless_wrapped(
          [](i64 x, i64 y, i64* product) { return __builtin_mul_overflow(x, y, product); },
          {{a.first, b.first}, {a.first, b.last}, {a.last, b.first}, {a.last, b.last}});
    case Op::kFloorDivide:
      return quotients(a, b);
    case Op::kModulo:
      return remainders(a, b);
    case Op::kNegate:
      return a.first == kFirst ? kAnyInteger : integers(-a.last, -a.first);
    case Op::kAbs:
      if (a.first == kFirst) return kAnyInteger;
      return integers(max(max(a.first, -a.last), i64{0}), max(-a.first, a.last));
    case Op::kMin:
      return integers(min(a.first, b.first), min(a.last, b.last));
    case Op::kMax:
      return integers(max(a.first, b.first), max(a.last, b.last));
    case Op::kClamp:
      if (b.last > c.first) return either(either(a, b), c);
      return integers(min(max(a.first, b.first), c.first), min(max(a.last, b.last), c.last));
    default:
      return kAnyInteger;
  }
}

// ---- Booleans ----------------------------------------------------------------------------------

// Of numbers from a to a_last and from b to b_last.
template <class Number>
Bounds compared(Op op, Number a, Number a_last, Number b, Number b_last, bool may_be_nan) {
  const bool are_apart = a_last < b || b_last < a;
  const bool are_one = a == a_last && b == b_last && a == b;
  switch (op) {
    case Op::kLess:
      return booleans(may_be_nan || !(a_last < b), a < b_last);
    case Op::kLessEqual:
      return booleans(may_be_nan || !(a_last <= b), a <= b_last);
    case Op::kEqual:
      return booleans(may_be_nan || !are_one, !are_apart);
    default:
      return booleans(!are_apart, may_be_nan || !are_one);
  }
}

Bounds logical(const Step& step, const Bounds& a, const Bounds& b) {
  switch (step.op) {
    case Op::kAnd:
      return integers(min(a.first, b.first), min(a.last, b.last));
    case Op::kOr:
      return integers(max(a.first, b.first), max(a.last, b.last));
    case Op::kNot:
      return integers(1 - a.last, 1 - a.first);
    default:
      break;
  }
  if (step.operand != Type::kFloat) {
    return compared(step.op, a.first, a.last, b.first, b.last, false);
  }
  return compared(step.op, a.least, a.most, b.least, b.most, a.may_be_nan || b.may_be_nan);
}

// ---- Leaves ------------------------------------------------------------------------------------

Bounds anything(const Tensor& tensor) {
  if (tensor.dtype == DType::kBool) return booleans(true, true);
  return is_float(tensor.dtype) ? kAnyFloat : kAnyInteger;
}

// The least and the most of all elements that the indices may mean.
Bounds read(const Step& step, const Bounds* values, const Tensor& tensor) {
  i64 first[kMaxRank] = {}, last[kMaxRank] = {};
  i64 count = 1;
  for (int index = 0; index < step.num_args; ++index) {
    const int axis = kMaxRank - step.num_args + index;
    const Bounds& given = values[step.args[index]];
    first[axis] = clamp<i64>(given.first, 0, tensor.shape[axis] - 1);
    last[axis] = clamp<i64>(given.last, 0, tensor.shape[axis] - 1);
    count *= last[axis] - first[axis] + 1;
    if (count > kMostElements) return anything(tensor);
  }
  Bounds all{kInfinite, -kInfinite, kLast, kFirst, false};
  std::array<i64, kMaxRank> at{0, 0, 0, first[3]};
  for (at[0] = first[0]; at[0] <= last[0]; ++at[0]) {
    for (at[1] = first[1]; at[1] <= last[1]; ++at[1]) {
      for (at[2] = first[2]; at[2] <= last[2]; ++at[2]) {
        all = either(all, elements_bounds(tensor, at, last[3] - first[3] + 1));
      }
    }
  }
  if (!is_float(tensor.dtype)) return integers(all.first, all.last);
  if (all.least > all.most) return {0, 0, 0, 0, true};  // NaN alone
  return converted(all.least, all.most, all.may_be_nan);
}

Bounds leaf(const Step& step, const Bounds* values, const BoxOperands& operands) {
  switch (step.op) {
    case Op::kConstant:
      if (step.type != Type::kFloat) return integers(step.integer, step.integer);
      return std::isnan(step.real) ? kAnyFloat : converted(step.real, step.real);
    case Op::kScalar:
      return converted(operands.scalars[step.index], operands.scalars[step.index]);
    case Op::kRead:
      return read(step, values, (*operands.arrays)[array_read(step.index)]);
    default:
      return operands.variables[static_cast<size_t>(step.index)];
  }
}

// Of rows, or keys, by segments: those of each segment rise, and what none has is kNoPosition.
Bounds position_bounds(const Problem& problem, Array segments, i64 index, Interval rows) {
  if (!problem.has(segments)) return integers(rows.begin, rows.end - 1);
  Bounds all = integers(kLast, kFirst);
  i64 left = rows.size();
  for (i64 n = 0; n < problem.num_segments(segments); ++n) {
    const Segment segment = problem.segment(segments, index, n);
    const i64 begin = max(rows.begin, segment.first);
    const i64 end = min(rows.end, segment.first + segment.count);
    if (begin >= end) continue;
    all = either(all, integers(segment.position_of(begin), segment.position_of(end - 1)));
    left -= end - begin;
  }
  return left > 0 ? either(all, integers(kNoPosition, kNoPosition)) : all;
}

Bounds element_bounds(const Tensor& tensor, const std::array<i64, kMaxRank>& at) {
  if (is_float(tensor.dtype)) {
    const double x = tensor.real(at[0], at[1], at[2], at[3]);
    if (std::isnan(x)) return {kInfinite, -kInfinite, 0, 0, true};
    return {x, x, 0, 0, false};
  }
  if (tensor.dtype == DType::kBool) {
    const i64 x = tensor.boolean(at[0], at[1], at[2], at[3]) ? 1 : 0;
    return integers(x, x);
  }
  const i64 x = tensor.index(at[0], at[1], at[2], at[3]);
  return integers(x, x);
}

// Integers one behind the other: a compiler makes vectors of a fixed number of them.
template <class Integer>
Bounds ends_of(const char* from, i64 count) {
  constexpr i64 kLanes = 16;
  Integer least[kLanes], most[kLanes], x[kLanes];
  std::memcpy(least, from, sizeof(x));
  std::memcpy(most, from, sizeof(x));
  for (i64 n = kLanes; n < count; n += kLanes) {
    const i64 last = min(n, count - kLanes);  // some of them twice
    std::memcpy(x, from + last * i64{sizeof(Integer)}, sizeof(x));
    for (i64 lane = 0; lane < kLanes; ++lane) {
      least[lane] = x[lane] < least[lane] ? x[lane] : least[lane];
      most[lane] = x[lane] > most[lane] ? x[lane] : most[lane];
    }
  }
  return integers(*std::min_element(least, least + kLanes), *std::max_element(most, most + kLanes));
}

}  // namespace

Bounds elements_bounds(const Tensor& tensor, const std::array<i64, kMaxRank>& first, i64 count) {
  if (tensor.strides[3] == 1 && count >= 16) {
    const char* const from = tensor.address(first[0], first[1], first[2], first[3]);
    if (tensor.dtype == DType::kInt32) return ends_of<i32>(from, count);
    if (tensor.dtype == DType::kInt64) return ends_of<i64>(from, count);
  }
  Bounds all = element_bounds(tensor, first);
  for (std::array<i64, kMaxRank> at = first; at[3] < first[3] + count; ++at[3]) {
    all = either(all, element_bounds(tensor, at));
  }
  return all;
}

Bounds bounds_of(const Step& step, const Bounds* values, const BoxOperands& operands) {
  if (step.op < Op::kToFloat) return leaf(step, values, operands);
  const auto arg = [&](int index) {
    return index < step.num_args ? values[step.args[index]] : Bounds{};
  };
  const Bounds a = arg(0), b = arg(1), c = arg(2);
  if (step.op == Op::kToFloat) {
    return converted(static_cast<double>(a.first), static_cast<double>(a.last));
  }
  if (step.op == Op::kSelect) return a.first == a.last ? (a.first != 0 ? b : c) : either(b, c);
  if (step.type == Type::kBool) return logical(step, a, b);
  if (step.op == Op::kFloor) return floor_bounds(a);
  return step.type == Type::kFloat ? of_floats(step.op, a, b, c) : of_integers(step.op, a, b, c);
}

BoxOperands box_of(const Problem& problem, const CacheSequence& sequence, i64 index, i64 head,
                   Interval rows, Interval keys) {
  BoxOperands operands;
  const auto set = [&operands](Variable variable, i64 first, i64 last) {
    operands.variables[static_cast<size_t>(variable)] = integers(first, last);
  };
  set(Variable::kB, index, index);
  set(Variable::kH, head, head);
  set(Variable::kHk, problem.kv_head(head), problem.kv_head(head));
  set(Variable::kI, rows.begin, rows.end - 1);
  set(Variable::kJ, keys.begin, keys.end - 1);
  set(Variable::kQLen, sequence.shape.q_len, sequence.shape.q_len);
  set(Variable::kKvLen, sequence.shape.kv_len, sequence.shape.kv_len);
  i64 first = problem.position(sequence, rows.begin);
  i64 last = problem.position(sequence, rows.end - 1);
  if (problem.has(Array::kPositions)) {
    for (i64 i = rows.begin; i < rows.end; ++i) {
      const i64 position = problem.position(sequence, i);
      first = min(first, position);
      last = max(last, position);
    }
  }
  set(Variable::kP, first, last);
  if (problem.has_segments()) {
    const auto set_positions = [&](Variable variable, Array segments, Interval all) {
      const Bounds bounds = position_bounds(problem, segments, index, all);
      operands.variables[static_cast<size_t>(variable)] = bounds;
    };
    set_positions(Variable::kQPosition, Array::kQSegments, rows);
    set_positions(Variable::kKvPosition, Array::kKvSegments, keys);
  }
  operands.scalars = problem.scalars.data();
  operands.arrays = &problem.arrays;
  return operands;
}

}  // namespace fulmen::expression
