// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Derivatives of the score, as steps: with respect to s, and to each read of a floating-point
// array. Forward, value by value, so that select takes the derivative of its branch and no factor
// of 0 ever meets what the other branch made. Comparisons and integers have none; abs has 0 at 0,
// min and max at a tie that of their first argument, clamp 1 inside and 0 outside and at its ends.

#include "core/program.h"

namespace fulmen::expression {
namespace {

constexpr i32 kZero = -1;  // a derivative that is 0 everywhere

class Tangents {
 public:
  // with respect to step `variable`
  Tangents(Program& program, i32 variable)
      : program_(program), builder_(program), variable_(variable) {}

  // d score / d variable, a step, or kZero.
  i32 of_score() {
    const i32 score = program_.score;
    tangents_.assign(static_cast<size_t>(score) + 1, kZero);
    for (i32 index = 0; index <= score; ++index) {
      const Step step = program_.step(index);  // a copy: the list grows
      if (step.type == Type::kFloat) tangents_[static_cast<size_t>(index)] = of_step(index, step);
    }
    return at(score);
  }

 private:
  // 0 of what is no float.
  i32 at(i32 step) const { return tangents_[static_cast<size_t>(step)]; }

  i32 add(Op op, std::initializer_list<i32> args) { return builder_.add(op, Type::kFloat, args); }
  i32 less(i32 a, i32 b) { return builder_.add(Op::kLess, Type::kBool, {a, b}); }
  i32 number(double real) { return builder_.constant(real); }

  i32 sum(i32 a, i32 b) { return a == kZero ? b : b == kZero ? a : add(Op::kAdd, {a, b}); }
  i32 negative(i32 a) { return a == kZero ? kZero : add(Op::kNegate, {a}); }
  i32 product(i32 tangent, i32 factor) {
    return tangent == kZero ? kZero : add(Op::kMultiply, {tangent, factor});
  }
  i32 quotient(i32 tangent, i32 divisor) {
    return tangent == kZero ? kZero : add(Op::kDivide, {tangent, divisor});
  }
  i32 choice(i32 condition, i32 a, i32 b) {
    if (a == b) return a;
    return add(Op::kSelect, {condition, a == kZero ? number(0) : a, b == kZero ? number(0) : b});
  }

  i32 of_quotient(i32 y, i32 a, i32 b) {  // (da - y db) / b
    return quotient(sum(at(a), negative(product(at(b), y))), b);
  }

  i32 of_abs(i32 a) {
    if (at(a) == kZero) return kZero;
    const i32 zero = number(0);
    return choice(less(zero, a), at(a), choice(less(a, zero), negative(at(a)), kZero));
  }

  i32 of_tanh(i32 y, i32 a) {  // (1 - y^2) da
    if (at(a) == kZero) return kZero;
    return product(at(a), add(Op::kSubtract, {number(1), add(Op::kMultiply, {y, y})}));
  }

  i32 of_sqrt(i32 y, i32 a) {
    if (at(a) == kZero) return kZero;
    return quotient(at(a), add(Op::kMultiply, {number(2), y}));
  }

  i32 of_clamp(i32 x, i32 low, i32 high) {
    const i32 outside =
        choice(builder_.add(Op::kLessEqual, Type::kBool, {x, low}), at(low), at(high));
    if (at(x) == kZero && outside == kZero) return kZero;
    const i32 inside = builder_.add(Op::kAnd, Type::kBool, {less(low, x), less(x, high)});
    return choice(inside, at(x), outside);
  }

  i32 of_step(i32 index, const Step& step) {
    if (index == variable_) return number(1);
    const i32 a = step.args[0], b = step.args[1], c = step.args[2];
    switch (step.op) {
      case Op::kAdd:
        return sum(at(a), at(b));
      case Op::kSubtract:
        return sum(at(a), negative(at(b)));
      case Op::kMultiply:
        return sum(product(at(a), b), product(at(b), a));
      case Op::kDivide:
        return of_quotient(index, a, b);
      case Op::kNegate:
        return negative(at(a));
      case Op::kMin:
        return choice(less(b, a), at(b), at(a));
      case Op::kMax:
        return choice(less(a, b), at(b), at(a));
      case Op::kAbs:
        return of_abs(a);
      case Op::kExp:
        return product(at(a), index);
      case Op::kLog:
        return quotient(at(a), a);
      case Op::kTanh:
        return of_tanh(index, a);
      case Op::kSqrt:
        return of_sqrt(index, a);
      case Op::kClamp:
        return of_clamp(a, b, c);
      case Op::kSelect:
        return choice(a, at(b), at(c));
      default:
        return kZero;
    }
  }

  Program& program_;
  Builder builder_;
  i32 variable_;
  std::vector<i32> tangents_;
};

bool is_score(const Step& step) {
  return step.op == Op::kVariable && static_cast<Variable>(step.index) == Variable::kS;
}

}  // namespace

void differentiate(Program& program) {
  const auto own = static_cast<i32>(program.steps.size());  // those of the texts
  i32 slope = kZero;
  for (i32 index = 0; index < own; ++index) {
    const Step step = program.step(index);
    const bool is_array =
        step.op == Op::kRead && step.type == Type::kFloat && step.index != kAlibiRead;
    if (!is_score(step) && !is_array) continue;
    if (index > program.score) continue;  // of the mask
    const i32 value = Tangents(program, index).of_score();
    if (is_score(step)) slope = value;
    if (is_array && value != kZero) program.derivatives.push_back({index, value, {}});
  }
  program.slope = slope == kZero ? Builder(program).constant(0.0) : slope;
  program.slope_goal = goal_of(program, {program.score, program.slope});
  for (Derivative& one : program.derivatives) one.goal = goal_of(program, {one.value, one.read});
}

}  // namespace fulmen::expression
