// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen_quantise as every backend takes it: arrays in normal form, and sizes.
#pragma once

#include "core/tensor.h"
#include "kernels/attention/quantisation.cuh"

namespace fulmen {

struct QuantiseProblem : QuantiseArrays<Tensor> {
  QuantiseExtents extents;
  double headroom = 1;  // as given
};

template <class Array>
struct QuantiseArrayOf {
  const char* name;
  Array QuantiseArrays<Array>::* member;
};
template <class Array>
inline constexpr QuantiseArrayOf<Array> kQuantiseArraysOf[] = {
    {"x", &QuantiseArrays<Array>::x},
    {"values", &QuantiseArrays<Array>::values},
    {"constant", &QuantiseArrays<Array>::constant},
    {"scale", &QuantiseArrays<Array>::scale},
    {"lengths", &QuantiseArrays<Array>::lengths},
};
using QuantiseArray = QuantiseArrayOf<Tensor>;
inline constexpr auto& kQuantiseArrays = kQuantiseArraysOf<Tensor>;

// Rows of x have at most so many numbers.
inline constexpr i64 kMaxQuantisedDim = 512;

// Checks arrays as the caller gave them, and brings them to normal form. given: the arrays, the
// headroom, and of the extents what to find and whether to rotate. Throws Error.
QuantiseProblem validate_quantise(QuantiseProblem given);

// Contents of lengths, where they are in host memory, before anything is written. Throws Error.
void check_contents(const QuantiseProblem& problem);

}  // namespace fulmen
