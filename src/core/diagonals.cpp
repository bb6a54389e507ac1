// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Steps that depend on the key less the row alone.

#include <algorithm>
#include <optional>

#include "core/program.h"

namespace fulmen::expression {
namespace {

// An integer that is row i + column j and something that is the same for the head.
struct Linear {
  i64 row = 0;
  i64 column = 0;
};

constexpr i64 kMostFactor = 1 << 20;

std::optional<Linear> scaled(const std::optional<Linear>& x, i64 factor) {
  const auto fits = [&](i64 of) { return -kMostFactor < of && of < kMostFactor; };
  if (!x || !fits(factor) || !fits(x->row) || !fits(x->column)) return std::nullopt;
  return Linear{factor * x->row, factor * x->column};
}

std::optional<Linear> sum(const std::optional<Linear>& x, const std::optional<Linear>& y) {
  if (!x || !y) return std::nullopt;
  return Linear{x->row + y->row, x->column + y->column};
}

class Diagonals {
 public:
  explicit Diagonals(const Program& program) : program_(program) {
    for (const Step& step : program.steps) {
      linear_.push_back(step.type == Type::kInt ? linear_of(step) : std::nullopt);
      is_diagonal_.push_back(is_diagonal(step));
    }
  }

  std::vector<char> take() { return std::move(is_diagonal_); }

 private:
  static std::optional<Linear> of_variable(Variable variable) {
    switch (variable) {
      case Variable::kI:
      case Variable::kP:
        return Linear{1, 0};
      case Variable::kJ:
        return Linear{0, 1};
      default:  // positions by segments
        return std::nullopt;
    }
  }

  std::optional<Linear> linear_of(const Step& step) const {
    if (step.on == 0) return Linear{};
    const auto arg = [&](int index) { return linear_[static_cast<size_t>(step.args[index])]; };
    const auto factor = [&](int index) {
      const Step& taken = program_.step(step.args[index]);
      return taken.op == Op::kConstant ? taken.integer : kMostFactor;
    };
    switch (step.op) {
      case Op::kVariable:
        return of_variable(static_cast<Variable>(step.index));
      case Op::kAdd:
        return sum(arg(0), arg(1));
      case Op::kSubtract:
        return sum(arg(0), scaled(arg(1), -1));
      case Op::kNegate:
        return scaled(arg(0), -1);
      case Op::kMultiply:
        return factor(1) < kMostFactor ? scaled(arg(0), factor(1)) : scaled(arg(1), factor(0));
      default:
        return std::nullopt;
    }
  }

  bool is_diagonal(const Step& step) const {
    if (step.on != (kOnRow | kOnColumn)) return false;
    if (const auto& linear = linear_.back(); linear && linear->row == -linear->column) return true;
    return std::all_of(step.args, step.args + step.num_args, [&](i32 index) {
      return program_.step(index).on == 0 || is_diagonal_[static_cast<size_t>(index)] != 0;
    });
  }

  const Program& program_;
  std::vector<std::optional<Linear>> linear_;
  std::vector<char> is_diagonal_;
};

}  // namespace

std::vector<char> diagonal_steps(const Program& program) { return Diagonals(program).take(); }

}  // namespace fulmen::expression
