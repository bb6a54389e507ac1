// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One rule a step.

#include "gpu/bounds_text.h"

#include <algorithm>
#include <limits>

#include "core/error.h"

namespace fulmen::gpu {

using expression::Op;
using expression::Type;

namespace {

bool is_of_pair(const expression::Step& step) {
  return (step.on & expression::kOnRow) != 0 && (step.on & expression::kOnColumn) != 0;
}

// The function of two or three integers; null: none.
const char* of_integers(Op op) {
  switch (op) {
    case Op::kAdd:
      return "sum";
    case Op::kSubtract:
      return "difference";
    case Op::kMultiply:
      return "product";
    case Op::kFloorDivide:
      return "quotient";
    case Op::kModulo:
      return "remainder";
    case Op::kNegate:
      return "negated";
    case Op::kMin:
      return "smaller";
    case Op::kMax:
      return "larger";
    case Op::kAbs:
      return "magnitude";
    case Op::kClamp:
      return "clamped_between";
    default:
      return nullptr;
  }
}

const char* of_booleans(Op op) {
  switch (op) {
    case Op::kAnd:
      return "smaller";
    case Op::kOr:
      return "larger";
    case Op::kNot:
      return "negation";
    case Op::kLess:
      return "is_less";
    case Op::kLessEqual:
      return "is_at_most";
    case Op::kEqual:
      return "is_equal";
    default:
      return "is_not_equal";
  }
}

}  // namespace

BoundsText::BoundsText(const Problem& problem, const StepText& steps)
    : program_(*problem.program),
      steps_(steps),
      ranges_(integer_ranges(problem)),
      known_(program_.steps.size(), true) {
  for (const i32 index : program_.mask_goal.pair) add(index);
  if (program_.mask >= 0) take(program_.mask);
  for (std::vector<i32>* taken : {&of_row, &of_column}) {
    std::ranges::sort(*taken);
    taken->erase(std::ranges::unique(*taken).begin(), taken->end());
  }
}

// A value that the bounds of a pair take, of a row or of a key.
void BoundsText::take(i32 index) {
  const Step& step = program_.step(index);
  if (step.op == Op::kConstant || is_of_pair(step)) return;
  (step.on == expression::kOnColumn ? of_column : of_row).push_back(index);
}

// Booleans are known to be true or false; numbers may be unknown, and what takes one is, too.
void BoundsText::add(i32 index) {
  const Step& step = program_.step(index);
  const std::string text = right_side(index);
  if (text.empty() && step.type != Type::kBool) {
    known_[static_cast<size_t>(index)] = false;
    return;
  }
  for (int arg = 0; arg < step.num_args && !text.empty(); ++arg) take(step.args[arg]);
  lines_.push_back(
      sentence(step.type == Type::kFloat ? "const Between<Real> x" : "const Integers x", index,
               " = ", text.empty() ? "kEither" : text, ";"));
}

std::string BoundsText::mask() const {
  return program_.mask >= 0 ? value(program_.mask) : "Integers{1, 1}";
}

// Of a step that another takes.
std::string BoundsText::value(i32 index) const {
  const Step& step = program_.step(index);
  if (is_of_pair(step)) return sentence("x", index);
  const std::string at = steps_.value(index);  // of a row, of a key, or a constant
  if (step.op == Op::kConstant && step.type == Type::kFloat) {
    return sentence("Between<Real>{", at, ", ", at, "}");
  }
  if (step.op == Op::kConstant) return sentence("Integers{", at, ", ", at, "}");
  return step.type == Type::kFloat ? at : sentence("integers(", at, ")");
}

std::string BoundsText::anything(i32 index) const {
  const Range& range = ranges_[static_cast<size_t>(index)];
  const bool is_lowest = range.least == std::numeric_limits<i64>::min();
  const std::string least = is_lowest ? "-0x7fffffffffffffffll - 1" : sentence(range.least, "ll");
  return sentence("Integers{", least, ", ", range.most, "ll}");
}

std::string BoundsText::called(const char* function, const Step& step) const {
  std::string text = sentence(function, "(");
  for (int arg = 0; arg < step.num_args; ++arg) {
    text += sentence(arg > 0 ? ", " : "", value(step.args[arg]));
  }
  return text;
}

// "" where nothing is said.
std::string BoundsText::right_side(i32 index) const {
  const Step& step = program_.step(index);
  for (int arg = 0; arg < step.num_args; ++arg) {
    if (!is_known(step.args[arg])) return "";
  }
  if (step.op == Op::kRead) return "";
  if (step.op == Op::kSelect) return called("chosen", step) + ")";
  if (step.op == Op::kToFloat) return called("reals<Real>", step) + ")";
  if (step.type == Type::kBool) return called(of_booleans(step.op), step) + ")";
  const char* const function = of_integers(step.op);
  const bool may_wrap = ranges_[static_cast<size_t>(index)].is_all();
  if (step.type != Type::kInt || function == nullptr || may_wrap) return "";
  const bool divides = step.op == Op::kFloorDivide || step.op == Op::kModulo;
  return called(function, step) + (divides ? sentence(", ", anything(index), ")") : ")");
}

}  // namespace fulmen::gpu
