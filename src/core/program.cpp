// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Types of nodes, and steps from nodes.

#include "core/program.h"

#include <algorithm>
#include <limits>

namespace fulmen::expression {
namespace {

constexpr size_t kMaxSteps = 4096;  // with derivatives

constexpr u8 dependence_of(Variable variable) {
  switch (variable) {
    case Variable::kS:
      return kOnScore;
    case Variable::kI:
    case Variable::kP:
    case Variable::kQPosition:
      return kOnRow;
    case Variable::kJ:
    case Variable::kKvPosition:
      return kOnColumn;
    default:
      return 0;
  }
}

// From the nodes of a text to steps.
class Compiler {
 public:
  // s: the step that the score is to a text.
  Compiler(Program& program, const Text& text, std::span<const DType> dtypes, i32 s)
      : program_(program), builder_(program), text_(text), dtypes_(dtypes), s_(s) {}

  // The step of the text's value, converted to what it must be.
  i32 run(Type wanted) {
    steps_.resize(text_.nodes.size());
    for (size_t index = 0; index < steps_.size(); ++index) {
      node_ = &text_.nodes[index];
      steps_[index] = step_of(*node_);
    }
    i32 value = steps_.back();
    const Type type = type_at(value);
    if (wanted == Type::kFloat && type == Type::kInt) value = builder_.to_float(value);
    const bool fits =
        type == wanted || type == Type::kUnknown || (wanted == Type::kFloat && type == Type::kInt);
    if (!fits) {
      fail(wanted == Type::kBool
               ? sentence("is a number (", name(type), "); a mask is true or false: compare it")
               : std::string("is true or false; a score is a number: select(c, a, b) chooses one"));
    }
    return value;
  }

 private:
  Type type_at(i32 step) const { return program_.step(step).type; }

  [[noreturn]] void fail(const std::string& what) const { refuse_at(text_, node_->column, what); }

  i32 arg(int index) const { return steps_[static_cast<size_t>(node_->args[index])]; }
  Type arg_type(int index) const { return type_at(arg(index)); }

  void want_number(int index) const {
    if (arg_type(index) == Type::kBool) {
      fail("computes with true or false; select(c, a, b) makes a number of it");
    }
  }
  void want_bool(int index) const {
    const Type type = arg_type(index);
    if (type != Type::kBool && type != Type::kUnknown) {
      fail(sentence("has a number (", name(type), ") where true or false is expected"));
    }
  }
  void want_int(int index, const char* why) const {
    const Type type = arg_type(index);
    if (type != Type::kInt && type != Type::kUnknown) {
      fail(sentence("has a ", name(type), " value where ", why));
    }
  }

  // The type of numbers [first, num_args) together.
  Type common(int first) const {
    Type type = Type::kInt;
    for (int index = first; index < node_->num_args; ++index) {
      const Type one = arg_type(index);
      if (one == Type::kUnknown) return one;
      if (one == Type::kFloat) type = one;
    }
    return type;
  }

  i32 as(Type type, i32 value) {
    return type == Type::kFloat && type_at(value) == Type::kInt ? builder_.to_float(value) : value;
  }

  i32 arithmetic(Op op) {
    for (int index = 0; index < node_->num_args; ++index) want_number(index);
    const Type type = common(0);
    if (node_->num_args == 1) return builder_.add(op, type, {arg(0)});
    if (node_->num_args == 2) return builder_.add(op, type, {as(type, arg(0)), as(type, arg(1))});
    return builder_.add(op, type, {as(type, arg(0)), as(type, arg(1)), as(type, arg(2))});
  }

  i32 of_floats(Op op) {
    for (int index = 0; index < node_->num_args; ++index) want_number(index);
    const Type type = common(0) == Type::kUnknown ? Type::kUnknown : Type::kFloat;
    if (node_->num_args == 1) return builder_.add(op, type, {as(Type::kFloat, arg(0))});
    return builder_.add(op, type, {as(Type::kFloat, arg(0)), as(Type::kFloat, arg(1))});
  }

  i32 of_ints(Op op) {
    const char* const why = "// and % want integers: floor(a / b) makes one";
    want_int(0, why);
    want_int(1, why);
    const Step& divisor = program_.step(arg(1));
    if (divisor.op == Op::kConstant && divisor.type == Type::kInt && divisor.integer == 0) {
      fail("divides an integer by 0");
    }
    return builder_.add(op, common(0), {arg(0), arg(1)});
  }

  i32 comparison(Op op) {
    const bool are_bools = arg_type(0) == Type::kBool && arg_type(1) == Type::kBool;
    const bool is_equality = op == Op::kEqual || op == Op::kNotEqual;
    if (are_bools && is_equality) return builder_.add(op, Type::kBool, {arg(0), arg(1)});
    want_number(0);
    want_number(1);
    const Type type = common(0);
    return builder_.add(op, Type::kBool, {as(type, arg(0)), as(type, arg(1))});
  }

  i32 selection() {
    want_bool(0);
    if (arg_type(1) == Type::kBool && arg_type(2) == Type::kBool) {
      return builder_.add(Op::kSelect, Type::kBool, {arg(0), arg(1), arg(2)});
    }
    want_number(1);
    want_number(2);
    const Type type = common(1);
    return builder_.add(Op::kSelect, type, {arg(0), as(type, arg(1)), as(type, arg(2))});
  }

  i32 read() {
    std::vector<i32> indices;
    u8 on = 0;
    for (int index = 0; index < node_->num_args; ++index) {
      want_int(index, "an index is an integer: floor(x) makes one");
      indices.push_back(arg(index));
      on |= program_.step(arg(index)).on;
    }
    const auto capture = static_cast<size_t>(node_->index);
    const DType dtype = capture < dtypes_.size() ? dtypes_[capture] : DType::kNone;
    return builder_.leaf(Op::kRead, type_of(dtype), on, node_->index, indices);
  }

  i32 leaf() {
    switch (node_->op) {
      case Op::kConstant:
        return node_->type == Type::kFloat ? builder_.constant(node_->real)
                                           : builder_.constant(node_->type, node_->integer);
      case Op::kScalar:
        return builder_.leaf(Op::kScalar, Type::kFloat, 0, node_->index);
      default: {
        const auto variable = static_cast<Variable>(node_->index);
        return variable == Variable::kS ? s_ : builder_.variable(variable);
      }
    }
  }

  i32 step_of(const Node& node) {
    switch (node.op) {
      case Op::kConstant:
      case Op::kVariable:
      case Op::kScalar:
        return leaf();
      case Op::kRead:
        return read();
      case Op::kDivide:
      case Op::kExp:
      case Op::kLog:
      case Op::kTanh:
      case Op::kSqrt:
        return of_floats(node.op);
      case Op::kFloor:
        want_number(0);
        return arg_type(0) == Type::kInt ? arg(0) : builder_.add(node.op, Type::kInt, {arg(0)});
      case Op::kFloorDivide:
      case Op::kModulo:
        return of_ints(node.op);
      case Op::kLess:
      case Op::kLessEqual:
      case Op::kEqual:
      case Op::kNotEqual:
        return comparison(node.op);
      case Op::kAnd:
      case Op::kOr:
        want_bool(0);
        want_bool(1);
        return builder_.add(node.op, Type::kBool, {arg(0), arg(1)});
      case Op::kNot:
        want_bool(0);
        return builder_.add(node.op, Type::kBool, {arg(0)});
      case Op::kSelect:
        return selection();
      default:
        return arithmetic(node.op);
    }
  }

  Program& program_;
  Builder builder_;
  const Text& text_;
  std::span<const DType> dtypes_;
  i32 s_;
  std::vector<i32> steps_;
  const Node* node_ = nullptr;
};

// A score that is s is none of the user's.
bool is_score_itself(const Step& step) {
  return step.op == Op::kVariable && static_cast<Variable>(step.index) == Variable::kS;
}

bool is_constant(const Step& step, double real) {
  return step.op == Op::kConstant && step.type == Type::kFloat && step.real == real;
}

}  // namespace

Type type_of(DType dtype) {
  if (dtype == DType::kNone) return Type::kUnknown;
  if (dtype == DType::kBool) return Type::kBool;
  return is_float(dtype) ? Type::kFloat : Type::kInt;
}

i32 Builder::find_or_add(const Step& step) {
  for (size_t index = 0; index < program_.steps.size(); ++index) {
    if (program_.steps[index] == step) return static_cast<i32>(index);
  }
  if (program_.steps.size() >= kMaxSteps) {
    refuse(sentence("the derivatives of score take more than ", kMaxSteps,
                    " operations; fewer reads of arrays take less"));
  }
  program_.steps.push_back(step);
  return static_cast<i32>(program_.steps.size() - 1);
}

i32 Builder::constant(double real) {
  return find_or_add({Op::kConstant, Type::kFloat, Type::kUnknown, 0, 0, {}, 0, 0, real});
}

i32 Builder::constant(Type type, i64 integer) {
  return find_or_add({Op::kConstant, type, Type::kUnknown, 0, 0, {}, 0, integer, 0});
}

i32 Builder::leaf(Op op, Type type, u8 on, i32 index, std::span<const i32> indices) {
  Step step{op, type, Type::kUnknown, on, static_cast<u8>(indices.size()), {}, index, 0, 0};
  std::copy(indices.begin(), indices.end(), step.args);
  return find_or_add(step);
}

// Beside segments rows and keys are positions; those that none has are hidden, wherever they are.
i32 Builder::variable(Variable variable) {
  const bool is_row = variable == Variable::kI || variable == Variable::kP;
  const bool is_key = variable == Variable::kJ;
  if ((is_row && program_.segments.of_rows) || (is_key && program_.segments.of_keys)) {
    const i32 position = this->variable(is_row ? Variable::kQPosition : Variable::kKvPosition);
    return add(Op::kMax, Type::kInt, {position, constant(Type::kInt, 0)});
  }
  const Type type = variable == Variable::kS ? Type::kFloat : Type::kInt;
  const bool is_position = variable == Variable::kQPosition || variable == Variable::kKvPosition;
  const i32 of_sequence[] = {is_position ? this->variable(Variable::kB) : 0};
  return leaf(Op::kVariable, type, dependence_of(variable), static_cast<i32>(variable),
              std::span(of_sequence, is_position ? 1u : 0u));
}

i32 Builder::to_float(i32 value) { return add(Op::kToFloat, Type::kFloat, {value}); }

i32 Builder::add(Op op, Type type, std::initializer_list<i32> args) {
  const Type operand = program_.step(*(args.end() - 1)).type;
  Step step{op, type, operand, 0, static_cast<u8>(args.size()), {}, 0, 0, 0};
  std::copy(args.begin(), args.end(), step.args);
  bool folds = type != Type::kUnknown;
  for (const i32 arg : args) {
    const Step& taken = program_.step(arg);
    step.on |= taken.on;
    folds = folds && taken.op == Op::kConstant;
  }
  if (op == Op::kMultiply && is_constant(program_.step(step.args[0]), 1)) return step.args[1];
  if (op == Op::kMultiply && is_constant(program_.step(step.args[1]), 1)) return step.args[0];
  if (!folds) return find_or_add(step);
  Value taken[kMaxIndices];
  for (int index = 0; index < step.num_args; ++index) {
    const Step& constant = program_.step(step.args[index]);
    taken[index] = {constant.real, constant.integer};
    step.args[index] = static_cast<i32>(index);
  }
  const Value value = evaluate(step, taken, {});
  return type == Type::kFloat ? constant(value.real) : constant(type, value.integer);
}

namespace {

bool is_arithmetic_of_floats(const Step& step) {
  constexpr Op kArithmetic[] = {Op::kAdd,    Op::kSubtract, Op::kMultiply, Op::kDivide,
                                Op::kNegate, Op::kMin,      Op::kMax,      Op::kAbs};
  return step.type == Type::kFloat && step.operand == Type::kFloat &&
         std::ranges::find(kArithmetic, step.op) != std::end(kArithmetic);
}

i64 num_uses(const Step& by, i32 value) {
  return std::count(by.args, by.args + by.num_args, value);
}

std::vector<u8> flow_of(const Program& program, const std::vector<i32>& list,
                        std::span<const i32> values) {
  std::vector<u8> flow(list.size());
  for (size_t at = 0; at + 1 < list.size(); ++at) {
    const Step &step = program.step(list[at]), &next = program.step(list[at + 1]);
    if (!is_arithmetic_of_floats(step) || !is_arithmetic_of_floats(next)) continue;
    if (num_uses(next, list[at]) != 1) continue;
    i64 uses = std::ranges::count(values, list[at]);
    for (const i32 other : list) uses += num_uses(program.step(other), list[at]);
    flow[at] = Goal::kPassed | (uses == 1 ? Goal::kAlone : 0);
  }
  return flow;
}

}  // namespace

Goal goal_of(const Program& program, std::span<const i32> values) {
  std::vector<char> is_needed(program.steps.size());
  for (const i32 value : values) {
    if (value >= 0) is_needed[static_cast<size_t>(value)] = 1;
  }
  for (size_t index = program.steps.size(); index-- > 0;) {
    if (!is_needed[index]) continue;
    const Step& step = program.steps[index];
    for (int arg = 0; arg < step.num_args; ++arg) {
      is_needed[static_cast<size_t>(step.args[arg])] = 1;
    }
  }
  Goal goal;
  for (size_t index = 0; index < program.steps.size(); ++index) {
    if (!is_needed[index]) continue;
    const u8 on = program.steps[index].on;
    std::vector<i32>& list = on == 0           ? goal.constant
                             : on == kOnRow    ? goal.row
                             : on == kOnColumn ? goal.column
                                               : goal.pair;
    list.push_back(static_cast<i32>(index));
  }
  goal.flow = flow_of(program, goal.pair, values);
  return goal;
}

std::shared_ptr<const Program> compile(std::shared_ptr<const Expression> of,
                                       std::span<const DType> dtypes,
                                       const SegmentTerms& segments) {
  static const Expression kNone;
  const Expression& texts = of == nullptr ? kNone : *of;
  auto program = std::make_shared<Program>();
  program->expression = std::move(of);
  program->segments = segments;
  const bool is_known = dtypes.size() >= texts.names.captures.size();
  i32 s = -1;
  if (segments.alibi) s = program->score = position_alibi(*program, segments.slopes);
  if (texts.score.present()) {
    if (s < 0) s = Builder(*program).variable(Variable::kS);
    program->score = Compiler(*program, texts.score, dtypes, s).run(Type::kFloat);
    if (is_score_itself(program->step(program->score))) program->score = -1;
  }
  if (program->score >= 0) program->score_goal = goal_of(*program, {program->score});
  if (texts.mask.present()) {
    program->mask = Compiler(*program, texts.mask, dtypes, -1).run(Type::kBool);
  }
  if (segments.of_rows) {
    const i32 shown = position_mask(*program, segments.mask, segments.of_keys);
    program->mask = program->mask < 0
                        ? shown
                        : Builder(*program).add(Op::kAnd, Type::kBool, {shown, program->mask});
  }
  if (program->mask >= 0) program->mask_goal = goal_of(*program, {program->mask});
  if (is_known && program->score >= 0) differentiate(*program);
  return program;
}

}  // namespace fulmen::expression
