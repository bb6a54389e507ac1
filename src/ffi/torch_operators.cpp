// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen::attention_kernel and fulmen::attention_backward_kernel, which run any call: what compiled
// programs, modes and autograd functions end in; fulmen::kept and fulmen::planned, the same for
// eager calls whose options are kept here or decided by a plan. Results are made by PyTorch; one
// call of the library.

#include <cstdint>
#include <utility>
#include <vector>

#include "ffi/export.h"
#include "ffi/torch_abi.h"

namespace fulmen::ffi {
namespace {

// The inputs of a call.
class TorchOperands {
 public:
  // One after the other.
  explicit TorchOperands(TorchArguments* in);
  // q, k, v, a list of those behind, and which these are: their indices, 8 bits each, first lowest.
  static TorchOperands listed(TorchArguments* in);

  const TorchArray& operator[](ArrayIndex index) const { return arrays_[index]; }
  // Throws Refusal: an array that is not allowed.
  TorchCall call(const TorchOptions& options) const;

 private:
  TorchOperands() : arrays_(kNumInputs) {}
  void add_rng(TorchCall* call, const fulmen_problem& problem) const;

  std::vector<TorchArray> arrays_;
};

TorchOperands::TorchOperands(TorchArguments* in) {
  arrays_.reserve(kNumInputs);
  for (size_t index = 0; index < kNumInputs; ++index) {
    arrays_.push_back(index <= kV ? in->array() : in->optional_array());
  }
}

TorchOperands TorchOperands::listed(TorchArguments* in) {
  TorchOperands found;
  for (const ArrayIndex index : {kQ, kK, kV}) found.arrays_[index] = in->array();
  std::vector<TorchArray> more = in->arrays();
  auto indices = static_cast<uint64_t>(in->integer());
  for (TorchArray& array : more) {
    const uint64_t index = indices & 0xff;
    if (index <= kV || index >= kNumInputs) {
      throw Refusal{FULMEN_ERROR_ARGUMENT, "a tensor of a list is no input behind v"};
    }
    found.arrays_[index] = std::move(array);
    indices >>= 8;
  }
  return found;
}

TorchCall TorchOperands::call(const TorchOptions& options) const {
  TorchCall result(options.problem, options.layout, arrays_[kPageTable].is_given());
  for (size_t index = 0; index < kNumInputs; ++index) {
    if (index == kRng || !arrays_[index].is_given()) continue;
    result.add(static_cast<ArrayIndex>(index), arrays_[index].dlpack());
  }
  if (arrays_[kQIds].is_given() && !arrays_[kKvIds].is_given()) {
    result.add(kKvIds, arrays_[kQIds].dlpack());
  }
  add_rng(&result, options.problem);
  return result;
}

// Seed and offset: an array on a GPU, numbers in host memory.
void TorchOperands::add_rng(TorchCall* call, const fulmen_problem& problem) const {
  if (!arrays_[kRng].is_given()) {
    if (problem.dropout_p <= 0) return;
    throw Refusal{FULMEN_ERROR_ARGUMENT, "dropout_p is above 0 and rng is missing"};
  }
  const DLTensor rng = arrays_[kRng].dlpack();
  if (rng.device.device_type == kDLCUDA) return call->add(kRng, rng);
  if (rng.ndim != 1 || rng.shape[0] != 2 || rng.dtype.code != kDLInt || rng.dtype.bits != 64) {
    throw Refusal{FULMEN_ERROR_DTYPE, "rng is not int64[2]: seed and offset"};
  }
  const auto* numbers = static_cast<const int64_t*>(rng.data);
  call->set_philox(static_cast<uint64_t>(numbers[0]),
                   static_cast<uint64_t>(numbers[rng.strides[0]]));
}

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

// What a forward call writes; `out`, where it is given, is written instead of an o of ours.
struct Results {
  TorchArray o, lse, stats;

  Results(TorchCall* call, const TorchOperands& operands, int64_t outputs, int32_t out_dtype,
          const TorchArray& out) {
    const DLTensor q = operands[kQ].dlpack(), v = operands[kV].dlpack();
    const bool rows_first = call->rows_before_heads();
    if (out.is_given()) {
      call->add(kO, out.dlpack());
    } else {
      o = added(call, kO, empty_like(q, v.shape[v.ndim - 1], out_dtype));
    }
    if (outputs == kWithLse || outputs == kWithStats) {
      lse = added(call, kLse, empty_sums(q, rows_first, Sums::kLse));
    }
    if (outputs == kWithStats || outputs == kStatsOnly) {
      stats = added(call, kStats, empty_sums(q, rows_first, Sums::kStats));
    }
  }
};

// (inputs, options, layout, out_dtype, outputs) -> (o, lse or None, stats or None)
void forward(TorchValue* stack) {
  TorchArguments in(stack);
  const TorchOperands operands(&in);
  const TorchOptions options = TorchOptions::read(&in);
  TorchCall call = operands.call(options);
  Results made(&call, operands, in.integer(), options.out_dtype, {});
  call.run(fulmen_attention);
  stack[0] = made.o.released();
  stack[1] = optional_result(std::move(made.lse));
  stack[2] = optional_result(std::move(made.stats));
}

// (q, k, v, others, which, number of the options, outputs, out) -> (o, or None with out, lse or
// None)
void kept(TorchValue* stack) {
  TorchArguments in(stack);
  const TorchOperands operands = TorchOperands::listed(&in);
  TorchCall call = operands.call(TorchOptions::kept(static_cast<double>(in.integer())));
  const int64_t outputs = in.integer();
  const TorchArray out = in.optional_array();
  Results made(&call, operands, outputs, kSameDtype, out);
  call.run(fulmen_attention);
  stack[0] = optional_result(std::move(made.o));
  stack[1] = optional_result(std::move(made.lse));
}

// (q, k, v, others, which, plan, layout, outputs, out, workspace) -> (o, or None with out, lse,
// stats or None)
void planned(TorchValue* stack) {
  TorchArguments in(stack);
  const TorchOperands operands = TorchOperands::listed(&in);
  const auto* plan = reinterpret_cast<const fulmen_plan*>(static_cast<intptr_t>(in.integer()));
  TorchOptions options = {};  // the plan has them
  options.layout = Layout::of(in.integer());
  TorchCall call = operands.call(options);
  const int64_t outputs = in.integer();
  const TorchArray out = in.optional_array(), workspace = in.optional_array();
  Results made(&call, operands, outputs, kSameDtype, out);
  call.run(plan, workspace);
  stack[0] = optional_result(std::move(made.o));
  stack[1] = optional_result(std::move(made.lse));
  stack[2] = optional_result(std::move(made.stats));
}

// (do, dlse, o, stats or lse, inputs, options, layout, out_dtype, need) -> a gradient or None for
// each array that has one
void backward(TorchValue* stack) {
  TorchArguments in(stack);
  TorchArray dout = in.optional_array();
  const TorchArray dlse = in.optional_array(), o = in.array(), sums = in.array();
  const TorchOperands operands(&in);
  const TorchOptions options = TorchOptions::read(&in);
  const TorchValue need = in.bits(kNumGradients);
  TorchCall call = operands.call(options);
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
         add_kernel("fulmen", key, "kept", boxed<kept>) &&
         add_kernel("fulmen", key, "planned", boxed<planned>) && add_sdpa_node(key, autograd_key);
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
