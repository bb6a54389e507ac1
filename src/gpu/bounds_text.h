// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A user's mask over a box of pairs as C++: what its steps can be there, by the arithmetic of
// kernels/attention/between.cuh, from what they read of the rows and of the keys. Steps of which
// nothing is said there, such as reads by a pair, may be anything. Pure.
#pragma once

#include <string>
#include <vector>

#include "core/program.h"
#include "gpu/expression_ranges.h"
#include "gpu/expression_steps.h"

namespace fulmen::gpu {

class BoundsText {
 public:
  BoundsText(const Problem& problem, const StepText& steps);

  // What the mask takes of a row, or of a key, in the order of the steps.
  std::vector<i32> of_row, of_column;

  // A line for each step of a pair of which something is said, and the value of the mask.
  const std::vector<std::string>& lines() const { return lines_; }
  std::string mask() const;

 private:
  using Step = expression::Step;

  void add(i32 index);
  void take(i32 index);
  bool is_known(i32 index) const { return known_[static_cast<size_t>(index)]; }
  std::string value(i32 index) const;
  std::string anything(i32 index) const;
  std::string right_side(i32 index) const;
  std::string called(const char* function, const Step& step) const;

  const expression::Program& program_;
  const StepText& steps_;
  std::vector<Range> ranges_;
  std::vector<bool> known_;  // of each step
  std::vector<std::string> lines_;
};

}  // namespace fulmen::gpu
