// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen::attention_kernel and fulmen::attention_backward_kernel, which run any call: what compiled
// programs, modes and autograd functions end in. Results are made by PyTorch; one call of the
// library.

#include <utility>

#include "ffi/export.h"
#include "ffi/torch_abi.h"

namespace fulmen::ffi {
namespace {

// `outputs` of the forward operator, as python/fulmen/_torch/ops.py numbers them.
enum Outputs : int64_t { kWithLse = 2, kWithStats = 3, kStatsOnly = 4 };

TorchArray added(TorchCall* call, ArrayIndex index, TorchArray array) {
  call->add(index, array.dlpack());
  return array;
}

// The gradient of o; zeros where none arrives.
TorchArray add_dout(TorchCall* call, TorchArray dout, const DLTensor& o) {
  if (dout.is_given()) return added(call, kDOut, std::move(dout));
  TorchArray zero = zero_beside(o);
  DLTensor zeros = zero.dlpack();
  int64_t strides[FULMEN_MAX_RANK] = {};
  zeros.ndim = o.ndim;
  zeros.shape = o.shape;
  zeros.strides = strides;
  call->add(kDOut, zeros);
  return zero;
}

// (inputs, options, layout, out_dtype, outputs) -> (o, lse or None, stats or None)
void forward(TorchValue* stack) {
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

// (do, dlse, o, stats or lse, inputs, options, layout, out_dtype, need) -> a gradient or None for
// each array that has one
void backward(TorchValue* stack) {
  TorchArguments in(stack);
  TorchArray dout = in.optional_array();
  const TorchArray dlse = in.optional_array(), o = in.array(), sums = in.array();
  const TorchOperands operands(&in);
  const TorchValue need = in.bits(kNumGradients);
  TorchCall call = operands.call();
  const DLTensor o_array = o.dlpack(), sums_array = sums.dlpack();
  call.add(kO, o_array);
  call.add(sums_array.ndim == o_array.ndim ? kStats : kLse, sums_array);
  if (dlse.is_given()) call.add(kDLse, dlse.dlpack());
  const TorchArray arrived = add_dout(&call, std::move(dout), o_array);
  TorchArray gradients[kNumGradients];
  for (size_t i = 0; i < kNumGradients; ++i) {
    const auto index = static_cast<ArrayIndex>(kFirstGradient + i);
    const TorchArray& parameter = operands[kArrays[index].parameter];
    if (((need >> i) & 1) == 0 || !parameter.is_given()) continue;
    gradients[i] = added(&call, index, empty_like(parameter.dlpack()));
  }
  if (need != 0) call.run(fulmen_attention_backward);
  for (size_t i = 0; i < kNumGradients; ++i) stack[i] = optional_result(std::move(gradients[i]));
}

bool add_kernels(const char* key, const char* autograd_key) {
  return add_kernel("fulmen", key, "attention_kernel", boxed<forward>) &&
         add_kernel("fulmen", key, "attention_backward_kernel", boxed<backward>) &&
         add_sdpa_node(key, autograd_key);
}

// () -> 1, or 0 where the process has loaded no PyTorch with a stable ABI; once in a process
int64_t add_torch_kernels(Arguments) {
  if (torch_abi() == nullptr || !add_kernels("CPU", "AutogradCPU")) return 0;
  const bool has_cuda = torch_abi()->get_cuda_stream != nullptr;
  return !has_cuda || add_kernels("CUDA", "AutogradCUDA") ? 1 : 0;
}

// () -> 0; raises why the last kernel on this thread failed, where one did
int64_t raise_refusal(Arguments) {
  const Refusal refusal = std::exchange(last_refusal, {});
  if (refusal.status != FULMEN_OK) throw refusal;
  return 0;
}

}  // namespace

bool add_kernel(const char* name_space, const char* key, const char* name, TorchKernel kernel) {
  TorchLibrary library = nullptr;  // never destroyed: its end would take the kernel away
  const TorchAbi& torch = *torch_abi();
  return torch.library_init_impl(name_space, key, "fulmen", 0, &library) == 0 &&
         torch.library_impl(library, name, kernel, kTorchVersion) == 0;
}

}  // namespace fulmen::ffi

FULMEN_FFI_EXPORT(add_torch_kernels)
FULMEN_FFI_EXPORT(raise_refusal)
