// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen::attention_kernel and fulmen::attention_backward_kernel: results made by PyTorch, one call
// of the library.

#include "ffi/torch_operators.h"

#include <iterator>
#include <utility>

#include "ffi/torch_arguments.h"
#include "ffi/torch_array.h"
#include "ffi/torch_call.h"

namespace fulmen::ffi {
namespace {

// `outputs` of the forward operator, as python/fulmen/_torch/kernels.py numbers them.
enum Outputs : int64_t { kWithLse = 2, kWithStats = 3, kStatsOnly = 4 };

TorchArray added(TorchCall* call, ArrayPlace place, TorchArray array) {
  call->add(place, array.dlpack());
  return array;
}

// The gradient of o; zeros where none arrives.
TorchArray add_dout(TorchCall* call, TorchArray dout, const DLTensor& o) {
  if (dout.is_given()) return added(call, kDout, std::move(dout));
  TorchArray zero = zero_beside(o);
  DLTensor zeros = zero.dlpack();
  int64_t strides[FULMEN_MAX_RANK] = {};
  zeros.ndim = o.ndim;
  zeros.shape = o.shape;
  zeros.strides = strides;
  call->add(kDout, zeros);
  return zero;
}

}  // namespace

void attention_kernel(TorchValue* stack) {
  TorchArguments in(stack);
  const TorchOperands operands(&in);
  const int64_t outputs = in.integer();
  TorchCall call = operands.call();
  const DLTensor q = operands[kQ].dlpack(), v = operands[kV].dlpack();
  const bool rows_first = call.rows_before_heads();
  TorchArray o = added(&call, kO, empty_like(q, v.shape[v.ndim - 1], operands.out_dtype()));
  TorchArray lse, stats;
  if (outputs == kWithLse || outputs == kWithStats) {
    lse = added(&call, kLse, empty_sums(q, rows_first, Sums::kLse));
  }
  if (outputs == kWithStats || outputs == kStatsOnly) {
    stats = added(&call, kStats, empty_sums(q, rows_first, Sums::kStats));
  }
  call.run(fulmen_attention);
  stack[0] = o.released();
  stack[1] = optional_result(std::move(lse));
  stack[2] = optional_result(std::move(stats));
}

void attention_backward_kernel(TorchValue* stack) {
  constexpr ArrayPlace kOwners[] = {kQ, kK, kV, kBias, kSinks};
  TorchArguments in(stack);
  TorchArray dout = in.optional_array();
  const TorchArray dlse = in.optional_array(), o = in.array(), sums = in.array();
  const TorchOperands operands(&in);
  const TorchValue need = in.bits(std::size(kOwners));
  TorchCall call = operands.call();
  const DLTensor o_array = o.dlpack(), sums_array = sums.dlpack();
  call.add(kO, o_array);
  call.add(sums_array.ndim == o_array.ndim ? kStats : kLse, sums_array);
  if (dlse.is_given()) call.add(kDlse, dlse.dlpack());
  const TorchArray arrived = add_dout(&call, std::move(dout), o_array);
  TorchArray gradients[std::size(kOwners)];
  for (size_t i = 0; i < std::size(kOwners); ++i) {
    const TorchArray& owner = operands[kOwners[i]];
    if (((need >> i) & 1) == 0 || !owner.is_given()) continue;
    gradients[i] = added(&call, static_cast<ArrayPlace>(kDq + i), empty_like(owner.dlpack()));
  }
  if (need != 0) call.run(fulmen_attention_backward);
  for (size_t i = 0; i < std::size(kOwners); ++i) {
    stack[i] = optional_result(std::move(gradients[i]));
  }
}

}  // namespace fulmen::ffi
