// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One step of a user's expression as C++. Pure.
#pragma once

#include <string>
#include <vector>

#include "core/program.h"
#include "gpu/expression_ranges.h"

namespace fulmen::gpu {

// Where a text stands: what makes the values of a row, or of a key, or what computes a pair.
enum class Scope { kRow, kColumn, kPair };

class StepText {
 public:
  explicit StepText(const Problem& problem)
      : problem_(problem),
        program_(*problem.program),
        ordinary_(is_ordinary(problem)),
        ranges_(integer_ranges(problem)) {}

  Scope scope = Scope::kRow;
  std::vector<char> along;  // of each step, whether it is a member of a pair's diagonal

  // The type of a step's value, what computes it, and its value where it is used.
  const char* type_of(i32 index) const;
  std::string right_side(i32 index) const;
  std::string value(i32 index) const;

  // Number `index` of the indices of a read, moved inside; the type of offsets into arrays.
  std::string index_text(const expression::Step& read, int index) const;
  const char* offset() const { return ordinary_ ? "i32" : "i64"; }

 private:
  using Step = expression::Step;

  const Range& range_at(i32 index) const { return ranges_[static_cast<size_t>(index)]; }
  const char* width(i32 index, const Step& step) const;
  const char* owner(const Step& step) const;
  bool is_along(i32 index) const;
  std::string arg(const Step& step, int index) const { return value(step.args[index]); }
  std::string arg_as(const char* type, const Step& step, int index) const;
  std::string called(const char* function, const Step& step) const;
  std::string variable_text(i32 index, expression::Variable variable) const;
  std::string read_text(const Step& step) const;
  std::string float_text(const Step& step) const;
  std::string bool_text(i32 index, const Step& step) const;
  std::string integer_text(i32 index, const Step& step) const;
  std::string wrapping(i32 index, const Step& step, const char* type, const char* sign) const;
  std::string division(const Step& step, const char* type, const std::string& a,
                       const std::string& b) const;

  const Problem& problem_;
  const expression::Program& program_;
  bool ordinary_;
  std::vector<Range> ranges_;
};

}  // namespace fulmen::gpu
