// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Literals, leaves, and what each operation is in C++.

#include "gpu/expression_steps.h"

#include <charconv>
#include <cmath>
#include <limits>

#include "core/error.h"

namespace fulmen::gpu {

using expression::Op;
using expression::Type;
using expression::Variable;

namespace {

// Of exactly this value, whatever the locale.
std::string literal(double value) {
  if (!std::isfinite(value)) {
    const char* const infinity = value < 0 ? "-kInfinity<Real>" : "kInfinity<Real>";
    return std::isnan(value) ? "(kInfinity<Real> - kInfinity<Real>)" : infinity;
  }
  char digits[64];
  const auto end =
      std::to_chars(digits, digits + sizeof(digits), std::abs(value), std::chars_format::hex).ptr;
  return sentence("static_cast<Real>(", std::signbit(value) ? "-0x" : "0x",
                  std::string(digits, end), ")");
}

std::string literal(i64 value, const char* type) {
  if (value != std::numeric_limits<i64>::min()) return sentence(type, "{", value, "}");
  return "(-0x7fffffffffffffffll - 1)";
}

const char* element_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return "double";
    case DType::kFloat32:
      return "float";
    case DType::kFloat16:
      return "f16";
    case DType::kBFloat16:
      return "bf16";
    case DType::kInt64:
      return "i64";
    case DType::kInt32:
      return "i32";
    default:
      return "u8";
  }
}

}  // namespace

// The type in which a step over integers is computed: of 32 bits where it and all that it takes
// are.
const char* StepText::width(i32 index, const Step& step) const {
  bool narrow = step.type != Type::kInt || range_at(index).fits32();
  for (int arg = 0; arg < step.num_args; ++arg) {
    narrow = narrow && range_at(step.args[arg]).fits32();
  }
  return narrow ? "i32" : "i64";
}

const char* StepText::type_of(i32 index) const {
  const Type type = program_.step(index).type;
  if (type == Type::kFloat) return "Real";
  return type == Type::kBool ? "bool" : range_at(index).fits32() ? "i32" : "i64";
}

// Whose member a value is where it is used.
const char* StepText::owner(const Step& step) const {
  if (scope == Scope::kRow) return "";
  if (step.on == 0 || step.on == expression::kOnRow) return "row.";
  return step.on == expression::kOnColumn && scope == Scope::kPair ? "column." : "";
}
bool StepText::is_along(i32 index) const {
  return !along.empty() && along[static_cast<size_t>(index)] != 0;
}
std::string StepText::value(i32 index) const {
  const Step& step = program_.step(index);
  if (is_along(index)) return sentence("diagonal.x", index);
  if (step.op != Op::kConstant) return sentence(owner(step), "x", index);
  if (step.type == Type::kFloat) return literal(step.real);
  return step.type == Type::kBool ? (step.integer != 0 ? "true" : "false")
                                  : literal(step.integer, type_of(index));
}
std::string StepText::arg_as(const char* type, const Step& step, int index) const {
  return sentence("static_cast<", type, ">(", arg(step, index), ")");
}

std::string StepText::right_side(i32 index) const {
  const Step& step = program_.step(index);
  switch (step.op) {
    case Op::kVariable:
      return variable_text(index, static_cast<Variable>(step.index));
    case Op::kScalar:
      return sentence("e.scalar(", step.index, ", Real(0))");
    case Op::kRead:
      return read_text(step);
    case Op::kToFloat:
      return arg_as("Real", step, 0);
    case Op::kFloor:
      return sentence("floor_of(", arg(step, 0), ")");
    case Op::kSelect:
      return sentence(arg(step, 0), " ? ", arg_as(type_of(index), step, 1), " : ",
                      arg_as(type_of(index), step, 2));
    default:
      if (step.type == Type::kFloat) return float_text(step);
      return step.type == Type::kBool ? bool_text(index, step) : integer_text(index, step);
  }
}

std::string StepText::variable_text(i32 index, Variable variable) const {
  constexpr const char* kNames[] = {"s", "b", "h", "hk", "i", "j", "p", "q_len", "kv_len"};
  if (variable == Variable::kS) return "s";
  if (variable == Variable::kQPosition || variable == Variable::kKvPosition) {
    const bool is_row = variable == Variable::kQPosition;
    return sentence("position_by(e.", is_row ? "q" : "kv", "_segments, ",
                    arg(program_.step(index), 0), ", at.", is_row ? "i" : "j", ")");
  }
  return sentence("static_cast<", type_of(index), ">(at.", kNames[static_cast<int>(variable)], ")");
}

std::string StepText::index_text(const Step& read, int index) const {
  const int axis = kMaxRank - read.num_args + index;
  const bool narrow = ordinary_ && range_at(read.args[index]).fits32();
  return sentence("inside<", offset(), ">(e, ", read.index, ", ", axis, ", ",
                  arg_as(narrow ? "i32" : "i64", read, index), ", outside)");
}

std::string StepText::read_text(const Step& step) const {
  std::string at = sentence(offset(), "{0}");
  for (int index = 0; index < step.num_args; ++index) {
    const int axis = kMaxRank - step.num_args + index;
    at += sentence(" + ", index_text(step, index), " * stride<", offset(), ">(e, ", step.index,
                   ", ", axis, ")");
  }
  const char* const type = element_type(problem_.arrays[array_read(step.index)].dtype);
  const std::string element = sentence("(e, ", step.index, ", ", at, ")");
  if (step.type == Type::kFloat) return sentence("real_element<", type, ", Real>", element);
  return sentence("element<", type, ">", element, step.type == Type::kBool ? " != 0" : "");
}

std::string StepText::called(const char* function, const Step& step) const {
  std::string text = sentence(function, "(");
  for (int index = 0; index < step.num_args; ++index) {
    text += sentence(index > 0 ? ", " : "", arg(step, index));
  }
  return text + ")";
}

std::string StepText::float_text(const Step& step) const {
  const auto between = [&](const char* sign) {
    return sentence(arg(step, 0), " ", sign, " ", arg(step, 1));
  };
  switch (step.op) {
    case Op::kAdd:
      return between("+");
    case Op::kSubtract:
      return between("-");
    case Op::kMultiply:
      return between("*");
    case Op::kDivide:
      return called("Math::quotient", step);
    case Op::kNegate:
      return sentence("-", arg(step, 0));
    case Op::kMin:
      return called("least_of", step);
    case Op::kMax:
      return called("most_of", step);
    case Op::kAbs:
      return called("Math::abs", step);
    case Op::kExp:
      return called("Math::exp", step);
    case Op::kLog:
      return called("Math::log", step);
    case Op::kTanh:
      return called("Math::tanh", step);
    case Op::kSqrt:
      return called("Math::sqrt", step);
    default:
      return called("bounded", step);
  }
}

std::string StepText::bool_text(i32 index, const Step& step) const {
  const char* sign = step.op == Op::kAnd         ? " && "
                     : step.op == Op::kOr        ? " || "
                     : step.op == Op::kLess      ? " < "
                     : step.op == Op::kLessEqual ? " <= "
                     : step.op == Op::kEqual     ? " == "
                                                 : " != ";
  if (step.op == Op::kNot) return sentence("!", arg(step, 0));
  if (step.operand != Type::kInt) return sentence(arg(step, 0), sign, arg(step, 1));
  const char* const type = width(index, step);
  return sentence(arg_as(type, step, 0), sign, arg_as(type, step, 1));
}

// Whether a sum, difference or product may leave 64 bits.
std::string StepText::wrapping(i32 index, const Step& step, const char* type,
                               const char* sign) const {
  if (!range_at(index).is_all()) {
    return sentence(arg_as(type, step, 0), sign, arg_as(type, step, 1));
  }
  return sentence("wrapped(", arg_as("u64", step, 0), sign, arg_as("u64", step, 1), ")");
}

std::string StepText::integer_text(i32 index, const Step& step) const {
  const char* const type = width(index, step);
  const std::string a = arg_as(type, step, 0);
  const std::string b = step.num_args > 1 ? arg_as(type, step, 1) : "";
  std::string text;
  switch (step.op) {
    case Op::kAdd:
      text = wrapping(index, step, type, " + ");
      break;
    case Op::kSubtract:
      text = wrapping(index, step, type, " - ");
      break;
    case Op::kMultiply:
      text = wrapping(index, step, type, " * ");
      break;
    case Op::kFloorDivide:
    case Op::kModulo:
      text = division(step, type, a, b);
      break;
    case Op::kNegate:
      text = range_at(index).is_all() ? sentence("wrapped(0 - static_cast<u64>(", a, "))")
                                      : sentence("-", a);
      break;
    case Op::kMin:
      text = sentence("least_of(", a, ", ", b, ")");
      break;
    case Op::kMax:
      text = sentence("most_of(", a, ", ", b, ")");
      break;
    case Op::kAbs:
      text = sentence(a, " < 0 ? wrapped(0 - static_cast<u64>(", a, ")) : ", a);
      if (!range_at(index).is_all()) text = sentence(a, " < 0 ? -", a, " : ", a);
      break;
    default:
      text = sentence("bounded(", a, ", ", b, ", ", arg_as(type, step, 2), ")");
  }
  return sentence("static_cast<", type_of(index), ">(", text, ")");
}

// Without signs where there are none: a multiplication for a divisor that is known.
std::string StepText::division(const Step& step, const char* type, const std::string& a,
                               const std::string& b) const {
  const bool is_quotient = step.op == Op::kFloorDivide;
  if (range_at(step.args[0]).least >= 0 && range_at(step.args[1]).least > 0) {
    const char* const bare = type[1] == '3' ? "u32" : "u64";
    return sentence("static_cast<", bare, ">(", a, ") ", is_quotient ? "/" : "%", " static_cast<",
                    bare, ">(", b, ")");
  }
  return sentence(is_quotient ? "floor_quotient" : "floor_remainder", "<", type, ">(", a, ", ", b,
                  ")");
}

}  // namespace fulmen::gpu
