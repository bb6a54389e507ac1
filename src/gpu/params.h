// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a validated Problem to what kernels get: the parameters of the general ones; what kernels
// are compiled to know of scores and masks, and from that to the end of a kernel's name. Pure.
#pragma once

#include <string>

#include "core/problem.h"
#include "kernels/params.h"
#include "kernels/score_options.h"

namespace fulmen::gpu {

inline ArrayView view_of(const Tensor& tensor) {
  if (!tensor.present()) return {};
  const auto& strides = tensor.strides;
  return {static_cast<u8*>(tensor.data),
          {strides[0], strides[1], strides[2], strides[3]},
          tensor.dtype};
}

// Pointers and strides are those of the problem's arrays. faults: where kernels report them,
// or null.
AttentionParams attention_params(const Problem& problem, FaultBytes* faults = nullptr);

// What changes from run to run of a plan: pointers of the arrays that `params` has, numbers of
// dropout, and faults.
void bind_params(AttentionParams& params, const Problem& problem, FaultBytes* faults);

// attention_params() without dq, dk and dv: for the general kernels of dbias and dsinks beside a
// faster one of those three.
AttentionParams side_gradient_params(const Problem& problem, FaultBytes* faults = nullptr);

// Every option that the problem has. A family whose kernels look one up at run time, or have no
// need of it, sets it back, so that fewer kernels are compiled.
ScoreOptions score_options_of(const Problem& problem);

// What there is of a user's expression; whether a kernel sums gradients of what its score reads.
UserTerms user_terms_of(const Problem& problem);
bool sums_captures(const Problem& problem);

// "_right_bias_float32_score_mod": every option that is on.
std::string name_suffix(const ScoreOptions& score);
std::string name_suffix(UserTerms user);  // "_own_score_own_mask"

// Whether rows of q, k, v and `last` are 16-byte vectors at multiples of 16 bytes, `last` of the
// dtype of the problem.
bool has_aligned_rows(const Problem& problem, Array last);

// Whether rows of mask and bias, where there are any, are 16-byte vectors at multiples of 16 bytes.
bool has_aligned_pairs(const Problem& problem);

}  // namespace fulmen::gpu
