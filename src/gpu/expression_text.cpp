// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Steps in functions.

#include "gpu/expression_text.h"

#include <algorithm>
#include <vector>

#include "core/arrays.h"
#include "core/error.h"
#include "core/program.h"
#include "gpu/bounds_text.h"
#include "gpu/expression_steps.h"
#include "gpu/params.h"

namespace fulmen::gpu {
namespace {

using expression::Derivative;
using expression::Goal;
using expression::Op;
using expression::Program;
using expression::Step;

class Writer {
 public:
  explicit Writer(const Problem& problem)
      : problem_(problem), program_(*problem.program), steps_(problem) {
    std::vector<i32> values{program_.score, program_.mask, program_.slope};
    for (const Derivative& one : program_.derivatives) {
      values.push_back(one.read);
      values.push_back(one.value);
    }
    all_ = goal_of(program_, values);
    if (!problem.has(Array::kPositions)) find_diagonal();
  }

  std::string run() {
    text_ =
        "\nnamespace fulmen {\n\ntemplate <class Math>\nstruct UserExpression {\n"
        "  using Real = typename Math::Real;\n";
    write_reads();
    write_rows_and_columns();
    write_mask();
    write_bounds();
    write_diagonal();
    write_score();
    write_mapped();
    write_gradients();
    return text_ + "};\n\n}  // namespace fulmen\n";
  }

 private:
  template <class... Parts>
  void line(int depth, const Parts&... parts) {
    text_ += sentence(std::string(static_cast<size_t>(2 * depth), ' '), parts..., "\n");
  }

  // What is the same for a row, or for a key, as a struct and the function that makes it.
  void write_stage(const char* stage, const char* type, const char* params,
                   const std::vector<std::vector<i32>>& lists) {
    line(1, "struct ", type, " {");
    for_each_value(lists, [&](i32 index) { line(2, steps_.type_of(index), " x", index, ";"); });
    line(1, "};");
    line(1, "static ", type, " ", stage, "(", params);
    std::string values;
    for (const std::vector<i32>& list : lists) write_steps(list, 2);
    for_each_value(lists,
                   [&](i32 index) { values += sentence(values.empty() ? "" : ", ", "x", index); });
    line(2, "return {", values, "};");
    line(1, "}");
  }

  void write_rows_and_columns() {
    std::vector<std::vector<i32>> of_row{all_.constant, all_.row};
    steps_.scope = Scope::kRow;
    write_stage("row", "Row",
                "const ExpressionParams& e, const ExpressionPair& at, bool& outside) {", of_row);
    steps_.scope = Scope::kColumn;
    write_stage("column", "Column",
                "const ExpressionParams& e, const Row& row, const ExpressionPair& at,\n"
                "                       bool& outside) {",
                {all_.column});
    steps_.scope = Scope::kPair;
  }

  void write_mask() {
    line(1, "static bool shows(const ExpressionParams& e, const Row& row, const Column& column,");
    line(1, "                  bool& outside) {");
    write_steps(program_.mask_goal.pair, 2);
    line(2, "return ", problem_.has_mask_expression() ? steps_.value(program_.mask) : "true", ";");
    line(1, "}");
  }
  // What the mask can be over a box: its values of rows and of keys from their least to their most,
  // and what it makes of them.
  void write_bounds() {
    if (!problem_.has_mask_expression()) return;
    const BoundsText bounds(problem_, steps_);
    write_bounds_of("Row", "row", bounds.of_row);
    write_bounds_of("Column", "column", bounds.of_column);
    line(1, "static Integers shows_between(const RowBounds& row, const ColumnBounds& column) {");
    for (const std::string& step : bounds.lines()) line(2, step);
    line(2, "return ", bounds.mask(), ";");
    line(1, "}");
  }
  void write_bounds_of(const char* type, const char* name, const std::vector<i32>& values) {
    line(1, "struct ", type, "Bounds {");
    for (const i32 index : values) line(2, "Between<", steps_.type_of(index), "> x", index, ";");
    line(1, "};");
    line(1, "static ", type, "Bounds bounds_of(const ", type, "& ", name, ") {");
    std::string all;
    for (const i32 index : values) {
      all += sentence(all.empty() ? "" : ", ", "between(", name, ".x", index, ")");
    }
    line(2, "return {", all, "};");
    line(1, "}");
    line(1, "template <class Call>");
    line(1, "static void each(", type, "Bounds& a, const ", type, "Bounds& b, const Call& call) {");
    for (const i32 index : values) line(2, "call(a.x", index, ", b.x", index, ");");
    line(1, "}");
  }

  // Which steps of a score are the same along diagonals, and which of them others need: not more
  // than kMostAlong, since a lane exchanges them.
  void find_diagonal() {
    constexpr size_t kMostAlong = 2;
    std::vector<char> same = expression::diagonal_steps(program_);
    std::vector<i32> needed{program_.score, program_.slope};
    for (const i32 index : program_.slope_goal.pair) {
      const Step& step = program_.step(index);
      if (same[static_cast<size_t>(index)] != 0) continue;
      needed.insert(needed.end(), step.args, step.args + step.num_args);
    }
    std::vector<char> along(same.size());
    for (const i32 index : needed) {
      if (index >= 0) along[static_cast<size_t>(index)] = same[static_cast<size_t>(index)];
    }
    for (size_t index = 0; index < along.size(); ++index) {
      if (along[index] != 0) along_.push_back(static_cast<i32>(index));
    }
    const bool is_wide = std::ranges::any_of(
        along_, [&](i32 index) { return std::string_view(steps_.type_of(index)) == "i64"; });
    if (is_wide || along_.size() > kMostAlong) along_.clear();
    if (along_.empty()) return;
    same_along_ = std::move(same);
    is_along_ = std::move(along);
  }

  void write_diagonal() {
    line(1, "struct Diagonal {");
    std::string values;
    for (const i32 index : along_) {
      const bool is_float = program_.step(index).type == expression::Type::kFloat;
      line(2, is_float ? "Real" : "i32", " x", index, ";");
      values += sentence(values.empty() ? "" : ", ", "x", index);
    }
    line(1, "};");
    line(1, "static constexpr i32 kDiagonalWords = ", along_.size(), ";");
    line(1, "static Diagonal diagonal(const ExpressionParams& e, const Row& row,");
    line(1, "                         const Column& column, bool& outside) {");
    if (!along_.empty()) {
      const Goal goal = goal_of(program_, along_);
      write_steps(goal.pair, 2);
    }
    line(2, "return {", values, "};");
    line(1, "}");
  }

  // The steps of a pair that are not the same along its diagonal.
  void write_pair(const std::vector<i32>& list) {
    std::vector<i32> own;
    for (const i32 index : list) {
      if (same_along_.empty() || same_along_[static_cast<size_t>(index)] == 0) own.push_back(index);
    }
    steps_.along = is_along_;
    write_steps(own, 2);
  }
  std::string score() const {
    return problem_.has_score_expression() ? steps_.value(program_.score) : "s";
  }
  void write_score() {
    line(1, "static Real score(const ExpressionParams& e, const Row& row, const Column& column,");
    line(1, "                  const Diagonal& diagonal, Real s, bool& outside) {");
    write_pair(program_.score_goal.pair);
    line(2, "return ", score(), ";");
    line(1, "}");
    steps_.along.clear();
  }
  void write_mapped() {
    line(1, "static MappedScore<Real> mapped(const ExpressionParams& e, const Row& row,");
    line(1, "    const Column& column, const Diagonal& diagonal, Real s, bool& outside) {");
    write_pair(program_.slope_goal.pair);
    line(2, "return {", score(), ", ",
         program_.slope >= 0 ? steps_.value(program_.slope) : "Real(1)", "};");
    line(1, "}");
    steps_.along.clear();
  }
  // What differentiate() adds to.
  void write_reads() {
    line(1, "static constexpr bool kReadsSegments = ", problem_.has_segments(), ";");
    line(1, "static constexpr i32 kNumDerivatives = ", program_.derivatives.size(), ";");
    const std::vector<char> diagonals = expression::diagonal_steps(program_);
    std::string along, arrays;
    for (size_t n = 0; n < program_.derivatives.size(); ++n) {
      const i32 index = program_.derivatives[n].read;
      const Step& read = program_.step(index);
      along +=
          sentence("n == ", n,
                   " ? Along::", along_of(read, diagonals[static_cast<size_t>(index)] != 0), " : ");
      arrays += sentence("n == ", n, " ? ", read.index, " : ");
    }
    line(1, "static constexpr Along along(i32 n) { return ", along, "Along::kPair; }");
    line(1, "static constexpr i32 array_of(i32 n) { return ", arrays, "0; }");
  }
  static const char* along_of(const Step& read, bool is_diagonal) {
    if (read.on == 0) return "kHead";
    if (read.on == expression::kOnRow) return "kRow";
    if (read.on == expression::kOnColumn) return "kKey";
    return is_diagonal ? "kDiagonal" : "kPair";
  }

  void write_gradients() {
    const auto begin = [this](const char* parameters, const char* name) {
      line(1, "template <", parameters, "class Add>");
      line(1, "static void ", name, "(const ExpressionParams& e, const Row& row,");
      line(1, "    const Column& column, Real s, const Add& add) {");
    };
    begin("i32 kRead, ", "differentiate_read");
    line(2, "bool outside = false;");
    for (size_t n = 0; n < program_.derivatives.size(); ++n) write_gradient(n);
    line(1, "}");
    begin("", "differentiate");
    for (size_t n = 0; n < program_.derivatives.size(); ++n) {
      line(2, "if (e.sums[", program_.step(program_.derivatives[n].read).index, "] != nullptr) {");
      line(3, "differentiate_read<", n, ">(e, row, column, s, [&](double* element, Real slope) {");
      line(4, "add(", n, ", element, slope);");
      line(3, "});");
      line(2, "}");
    }
    line(1, "}");
  }

  void write_gradient(size_t n) {
    const Derivative& derivative = program_.derivatives[n];
    const Step& read = program_.step(derivative.read);
    line(2, "if constexpr (kRead == ", n, ") {");
    write_steps(derivative.goal.pair, 3);
    std::string element = "0";  // of an array without gaps
    for (int index = 0; index < read.num_args; ++index) {
      const int axis = kMaxRank - read.num_args + index;
      const std::string inside = steps_.index_text(read, index);
      element = index == 0 ? inside
                           : sentence("(", element, ") * extent<", steps_.offset(), ">(e, ",
                                      read.index, ", ", axis, ") + ", inside);
    }
    line(3, "add(e.sums[", read.index, "] + (", element, "), ", steps_.value(derivative.value),
         ");");
    line(2, "}");
  }

  template <class Action>
  void for_each_value(const std::vector<std::vector<i32>>& lists, const Action& action) const {
    for (const std::vector<i32>& list : lists) {
      for (const i32 index : list) {
        if (program_.step(index).op != Op::kConstant) action(index);
      }
    }
  }

  void write_steps(const std::vector<i32>& list, int depth) {
    for_each_value({list}, [&](i32 index) {
      line(depth, "const ", steps_.type_of(index), " x", index, " = ", steps_.right_side(index),
           ";");
    });
  }

  const Problem& problem_;
  const Program& program_;
  StepText steps_;
  Goal all_;                      // of which row and column are used
  std::vector<i32> along_;        // members of a diagonal
  std::vector<char> is_along_;    // of each step
  std::vector<char> same_along_;  // whether it is the same along diagonals; empty: not looked at
  std::string text_;
};

}  // namespace

std::string expression_text(const Problem& problem) {
  return problem.program == nullptr ? std::string() : Writer(problem).run();
}

i64 num_capture_sums(const Problem& problem) {
  i64 count = 0;
  for (int index = 0; index < kNumCaptures; ++index) {
    const Tensor& gradient = problem.arrays[capture_gradient(index)];
    if (gradient.present()) count += expression::num_elements(gradient);
  }
  return count;
}

ExpressionParams expression_params(const Problem& problem, double* sums, FaultBytes* faults) {
  static_assert(kMaxCaptures == kNumCaptures && kMaxCaptures == kNumScalars);
  static_assert(kAlibiRead < kMaxReads);
  ExpressionParams e{};
  for (int index = 0; index < kNumCaptures; ++index) {
    const Tensor& read = problem.arrays[capture(index)];
    const Tensor& gradient = problem.arrays[capture_gradient(index)];
    e.captures[index] = view_of(read);
    std::copy(std::begin(read.shape), std::end(read.shape), e.extents[index]);
    if (sums != nullptr && gradient.present()) {
      e.sums[index] = sums;
      sums += expression::num_elements(gradient);
    }
    e.scalars[index] = problem.scalars[static_cast<size_t>(index)];
    e.scalars32[index] = static_cast<float>(e.scalars[index]);
  }
  const auto segments = [&problem](Array array) {
    return SegmentsView{view_of(problem.arrays[array]), problem.num_segments(array)};
  };
  if (problem.has_segments()) {
    const Tensor& slopes = problem.arrays[array_read(kAlibiRead)];
    e.captures[kAlibiRead] = view_of(slopes);
    std::copy(std::begin(slopes.shape), std::end(slopes.shape), e.extents[kAlibiRead]);
    e.q_segments = segments(Array::kQSegments);
    e.kv_segments = segments(Array::kKvSegments);
  }
  e.faults = faults;
  return e;
}

CaptureGradients capture_gradients(const Problem& problem, double* sums) {
  CaptureGradients all{};
  const ExpressionParams e = expression_params(problem, sums, nullptr);
  for (int index = 0; index < kNumCaptures; ++index) {
    all.gradients[index] = view_of(problem.arrays[capture_gradient(index)]);
    std::copy(std::begin(e.extents[index]), std::end(e.extents[index]), all.extents[index]);
    all.sums[index] = e.sums[index];
  }
  return all;
}

}  // namespace fulmen::gpu
