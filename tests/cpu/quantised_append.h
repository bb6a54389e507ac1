// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// An append into caches of 8 bits, made from one that was drawn, beside the same append in float32:
// what a cache of float32 then holds, divided by the scale of its place and rounded, is what the
// other must hold.
#pragma once

#include <string>

#include "drawn_append.h"

namespace fulmen::test {

class QuantisedAppend {
 public:
  // drawn: with caches, not of float64.
  QuantisedAppend(unsigned seed, const AppendProblem& drawn, DType stored);

  AppendProblem given;  // into caches of 8 bits
  AppendProblem wide;   // into caches of float32, from the same numbers

  // The same append into other caches, as they are made.
  AppendProblem with_fresh_caches();

  // Empty, or what the caches of `after` hold where those of `wide` say otherwise, after both ran.
  std::string wrong(const AppendProblem& after) const;

 private:
  Tensor float32_copy(const Tensor& tensor);

  RandomProblem random_;
};

}  // namespace fulmen::test
