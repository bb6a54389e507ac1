// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The part of validation that looks at one array at a time: presence, rank, extents, strides,
// pointer, dtype, and its way into the normal form of problem.h. Each function throws Error with
// one sentence. Called by validate.cpp, in the order of this file.
#pragma once

#include <string>

#include "core/array_rules.h"
#include "core/validate.h"

namespace fulmen {

// The extent of each axis; kAnyExtent where only the contents of the offsets decide.
inline constexpr i64 kAnyExtent = -1;

struct Sizes {
  i64 extent[kNumAxes];

  i64& operator[](Axis axis) { return extent[static_cast<int>(axis)]; }
  i64 operator[](Axis axis) const { return extent[static_cast<int>(axis)]; }
};

Sizes sizes_of(const Problem& problem);

std::string shape_text(const Tensor& tensor);  // "(2, 8, 5, 64)"

// Below, subject is what sentences call the array.

// Rank, extents, strides; the pointer where `pointers` says so.
void check_layout(const Tensor& tensor, const char* subject, const AxisList& list, bool packed,
                  Pointers pointers);

// That no address of it leaves 64-bit arithmetic.
void check_span(const Tensor& tensor, const char* subject);

// `operand`: the dtype of q; `param`: that of the parameter, for gradients.
void check_dtype(const Tensor& tensor, const ArrayRule& rule, DType operand, DType param);

// Four axes, in the places of problem.h. Axes of extent 1 get stride 0, but dim axes stride 1, so
// that a single column counts as contiguous. Extents stay as given.
Tensor normal_form(const Tensor& given, const AxisList& list);

// The extents of a tensor in normal form against those of the problem.
void check_shape(const Tensor& given, const Tensor& normal, const char* subject,
                 const AxisList& list, const Sizes& sizes);

// Gives broadcast axes of an input their full extent (their stride is 0 already).
void broadcast(Tensor& normal, const AxisList& list, const Problem& problem);

}  // namespace fulmen
