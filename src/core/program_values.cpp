// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The meaning of each step, for one pair and in float64: what the oracle computes, what constants
// are folded by, and what faster interpreters are compared with.

#include <cmath>

#include "core/program.h"

namespace fulmen::expression {
namespace {

bool is_nan(double x) { return x != x; }

double of_floats(Op op, double a, double b, double c) {
  switch (op) {
    case Op::kAdd:
      return a + b;
    case Op::kSubtract:
      return a - b;
    case Op::kMultiply:
      return a * b;
    case Op::kDivide:
      return a / b;
    case Op::kNegate:
      return -a;
    case Op::kMin:
      return b < a || is_nan(b) ? b : a;
    case Op::kMax:
      return a < b || is_nan(b) ? b : a;
    case Op::kAbs:
      return std::abs(a);
    case Op::kExp:
      return std::exp(a);
    case Op::kLog:
      return std::log(a);
    case Op::kTanh:
      return std::tanh(a);
    case Op::kSqrt:
      return std::sqrt(a);
    case Op::kClamp:
      return a < b ? b : c < a ? c : a;
    default:
      return 0;
  }
}

i64 of_integers(Op op, i64 a, i64 b, i64 c) {
  const u64 x = static_cast<u64>(a), y = static_cast<u64>(b);
  switch (op) {
    case Op::kAdd:
      return wrapped(x + y);
    case Op::kSubtract:
      return wrapped(x - y);
    case Op::kMultiply:
      return wrapped(x * y);
    case Op::kFloorDivide:
      return floor_quotient(a, b);
    case Op::kModulo:
      return floor_remainder(a, b);
    case Op::kNegate:
      return wrapped(0 - x);
    case Op::kMin:
      return min(a, b);
    case Op::kMax:
      return max(a, b);
    case Op::kAbs:
      return a < 0 ? wrapped(0 - x) : a;
    case Op::kClamp:
      return a < b ? b : c < a ? c : a;
    default:
      return 0;
  }
}

template <class Number>
bool compared(Op op, Number a, Number b) {
  switch (op) {
    case Op::kLess:
      return a < b;
    case Op::kLessEqual:
      return a <= b;
    case Op::kEqual:
      return a == b;
    default:
      return a != b;
  }
}

bool logical(const Step& step, const Value& a, const Value& b) {
  switch (step.op) {
    case Op::kAnd:
      return a.integer != 0 && b.integer != 0;
    case Op::kOr:
      return a.integer != 0 || b.integer != 0;
    case Op::kNot:
      return a.integer == 0;
    default:
      return step.operand == Type::kFloat ? compared(step.op, a.real, b.real)
                                          : compared(step.op, a.integer, b.integer);
  }
}

Value element_at(const Tensor& tensor, i64 offset) {
  const char* const address =
      static_cast<const char*>(tensor.data) + offset * size_bytes(tensor.dtype);
  if (is_float(tensor.dtype)) return {load_real(address, tensor.dtype), 0};
  if (tensor.dtype == DType::kBool) return {0, load_bytes<u8>(address) != 0};
  return {0, load_index(address, tensor.dtype)};
}

Value leaf(const Step& step, const Value* values, const Operands& operands) {
  switch (step.op) {
    case Op::kConstant:
      return {step.real, step.integer};
    case Op::kScalar:
      return {operands.scalars[step.index], 0};
    case Op::kRead: {
      const Tensor& capture = (*operands.arrays)[array_read(step.index)];
      return element_at(capture, offset_of(step, values, capture));
    }
    default:
      if (static_cast<Variable>(step.index) == Variable::kS) return {operands.s, 0};
      return {0, operands.variables[static_cast<size_t>(step.index)]};
  }
}

}  // namespace

i64 offset_of(const Step& read, const Value* values, const Tensor& capture) {
  i64 offset = 0;
  for (int index = 0; index < read.num_args; ++index) {
    const int axis = kMaxRank - read.num_args + index;
    const i64 given = values[read.args[index]].integer;
    offset += clamp<i64>(given, 0, capture.shape[axis] - 1) * capture.strides[axis];
  }
  return offset;
}

Value evaluate(const Step& step, const Value* values, const Operands& operands) {
  if (step.op < Op::kToFloat) return leaf(step, values, operands);
  const auto arg = [&](int index) {
    return index < step.num_args ? values[step.args[index]] : Value{};
  };
  const Value a = arg(0), b = arg(1), c = arg(2);
  if (step.op == Op::kToFloat) return {static_cast<double>(a.integer), 0};
  if (step.op == Op::kSelect) return a.integer != 0 ? b : c;
  if (step.type == Type::kBool) return {0, logical(step, a, b)};
  if (step.op == Op::kFloor) return {0, floor_of(a.real)};
  if (step.type == Type::kFloat) return {of_floats(step.op, a.real, b.real, c.real), 0};
  return {0, of_integers(step.op, a.integer, b.integer, c.integer)};
}

i64 num_elements(const Tensor& tensor) {
  return tensor.shape[0] * tensor.shape[1] * tensor.shape[2] * tensor.shape[3];
}

Tensor contiguous(Tensor gradient) {
  i64 stride = 1;
  for (int axis = kMaxRank; axis-- > 0;) {
    gradient.strides[axis] = stride;
    stride *= gradient.shape[axis];
  }
  return gradient;
}

void store_element(const Tensor& gradient, i64 element, double value) {
  i64 at[kMaxRank];
  for (int axis = kMaxRank; axis-- > 0; element /= gradient.shape[axis]) {
    at[axis] = element % gradient.shape[axis];
  }
  gradient.set_real(at[0], at[1], at[2], at[3], value);
}

void evaluate(const Program& program, const Goal& goal, const Operands& operands, Value* values) {
  for (const std::vector<i32>* list : {&goal.constant, &goal.row, &goal.column, &goal.pair}) {
    for (const i32 index : *list) values[index] = evaluate(program.step(index), values, operands);
  }
}

}  // namespace fulmen::expression
