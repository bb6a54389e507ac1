// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Whether strided arrays share memory. Pure arithmetic on pointers, extents and strides, which are
// not negative and whose spans stay below 2^62 bytes; no memory is touched.
#pragma once

#include "core/tensor.h"

namespace fulmen {

// Bytes from the first to the last byte of a tensor; 0 when it has no elements.
i64 span_bytes(const Tensor& tensor);

// True when some element of `a` shares a byte with some element of `b`; also true when that could
// not be decided within a bounded search.
bool may_overlap(const Tensor& a, const Tensor& b);

// True when two different indices of `tensor` are the same element; likewise when undecided.
bool may_overlap_itself(const Tensor& tensor);

}  // namespace fulmen
