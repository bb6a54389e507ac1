// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The library's kernels in PyTorch's dispatcher: those of torch_operators.cpp, and attention of q,
// k and v alone, so that such a call from Python is one step and its backward pass none: PyTorch's
// own node of aten::_scaled_dot_product_fused_attention_overrideable, which has no kernel on CPU
// and CUDA, keeps the tensors and calls us without the interpreter. Options are kept here under a
// number, which travels as dropout_p; stats as logsumexp. python/fulmen/_torch/plain.py is the
// other half.

#include <bit>
#include <iterator>
#include <utility>
#include <vector>

#include "ffi/arguments.h"
#include "ffi/export.h"
#include "ffi/kept_options.h"
#include "ffi/refusal.h"
#include "ffi/torch_abi.h"
#include "ffi/torch_arguments.h"
#include "ffi/torch_array.h"
#include "ffi/torch_boxed.h"
#include "ffi/torch_call.h"
#include "ffi/torch_operators.h"

namespace fulmen::ffi {
namespace {

KeptOptions kept_options;

// (options, rows_before_heads, rank) -> their number, or 0
int64_t keep_options(Arguments in) {
  const fulmen_problem options = in.options();
  const bool rows_before_heads = in.integer("rows_before_heads") != 0;
  return kept_options.add({options, rows_before_heads, in.integer("rank")});
}

// Of q, k and v at the head of the stack, o in the place of q, and stats where it is wanted.
void attend(TorchValue* stack, double number, TorchValue* stats_place) {
  const TorchArray q(stack[0]), k(stack[1]), v(stack[2]);
  TorchCall call(kept_options.at(number));
  const DLTensor q_array = q.dlpack(), v_array = v.dlpack();
  call.add(kQ, q_array);
  call.add(kK, k.dlpack());
  call.add(kV, v_array);
  TorchArray o = empty_like(q_array, v_array.shape[v_array.ndim - 1]);
  call.add(kO, o.dlpack());
  TorchArray stats = stats_place == nullptr
                         ? TorchArray()
                         : empty_sums(q_array, call.rows_before_heads(), Sums::kStats);
  if (stats.is_given()) call.add(kStats, stats.dlpack());
  call.run(fulmen_attention);
  stack[0] = o.released();
  if (stats_place != nullptr) *stats_place = stats.released();
}

double number_of(TorchValue integer) { return static_cast<double>(static_cast<int64_t>(integer)); }

// fulmen::plain(Tensor q, Tensor k, Tensor v, int options) -> Tensor
void plain(TorchValue* stack) { attend(stack, number_of(stack[3]), nullptr); }

// (query, key, value, attn_bias, dropout_p, is_causal, return_debug_mask, scale) -> (output,
// logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, philox_seed, philox_offset, debug_attn_mask)
void recorded(TorchValue* stack) {
  attend(stack, std::bit_cast<double>(stack[4]), &stack[1]);
  for (const int place : {2, 3, 6, 7, 8}) stack[place] = undefined().released();
  stack[4] = stack[5] = 0;
}

// fulmen::plain_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor stats,
// int options, int need) -> (Tensor dq, Tensor dk, Tensor dv); need has a bit for each
void plain_backward(TorchValue* stack) {
  constexpr ArrayPlace kPlaces[] = {kDout, kQ, kK, kV, kO, kStats};
  std::vector<TorchArray> arrays;
  for (size_t i = 0; i < std::size(kPlaces); ++i) arrays.emplace_back(stack[i]);
  TorchCall call(kept_options.at(number_of(stack[6])));
  const TorchValue need = stack[7];
  for (size_t i = 0; i < std::size(kPlaces); ++i) call.add(kPlaces[i], arrays[i].dlpack());
  std::vector<TorchArray> results;
  for (size_t i = 0; i < 3; ++i) {
    const DLTensor input = arrays[1 + i].dlpack();
    const bool is_needed = ((need >> i) & 1) != 0;
    results.push_back(is_needed ? empty_like(input) : empty_like(input, 0));
    if (is_needed) call.add(static_cast<ArrayPlace>(kDq + i), results[i].dlpack());
  }
  call.run(fulmen_attention_backward);
  for (size_t i = 0; i < results.size(); ++i) stack[i] = results[i].released();
}

// (grad_out, query, key, value, attn_bias, grad_input_mask, out, logsumexp, cum_seq_q, cum_seq_k,
// max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset, scale) -> (grad_query, grad_key,
// grad_value, grad_attn_bias). In the place of Autograd: hands the gradients to an operator, so
// that all that watches below Autograd sees it; where derivatives of them are wanted, to one in
// Python.
void node_backward(TorchValue* stack) {
  TorchArray arrays[] = {TorchArray(stack[0]), TorchArray(stack[1]), TorchArray(stack[2]),
                         TorchArray(stack[3]), TorchArray(stack[6]), TorchArray(stack[7])};
  for (const int place : {4, 8, 9, 14, 15}) TorchArray unused(stack[place]);
  const TorchValue need = TorchArguments(&stack[5]).bits(3);
  const double number = std::bit_cast<double>(stack[12]);
  if (!arrays[0].is_defined()) {
    for (int place = 0; place < 4; ++place) stack[place] = undefined().released();
    return;
  }
  for (size_t i = 0; i < std::size(arrays); ++i) stack[i] = arrays[i].released();
  stack[6] = static_cast<TorchValue>(static_cast<int64_t>(number));
  stack[7] = need;
  const char* name =
      torch_abi()->is_grad_enabled() ? "fulmen::plain_derivable" : "fulmen::plain_backward";
  last_refusal = {FULMEN_ERROR_INTERNAL, "the backward pass of fulmen.attention failed"};
  if (torch_abi()->call_dispatcher(name, "", stack, kTorchVersion) != 0) throw last_refusal;
  stack[3] = undefined().released();
}

constexpr char kForward[] = "_scaled_dot_product_fused_attention_overrideable";
constexpr char kBackward[] = "_scaled_dot_product_fused_attention_overrideable_backward";

bool add(const char* name_space, const char* key, const char* name, TorchKernel kernel) {
  TorchLibrary library = nullptr;  // never destroyed: its end would take the kernel away
  const TorchAbi& torch = *torch_abi();
  return torch.library_init_impl(name_space, key, "fulmen", 0, &library) == 0 &&
         torch.library_impl(library, name, kernel, kTorchVersion) == 0;
}

bool add_kernels(const char* key, const char* autograd_key) {
  return add("fulmen", key, "plain", boxed<plain>) &&
         add("fulmen", key, "plain_backward", boxed<plain_backward>) &&
         add("fulmen", key, "attention_kernel", boxed<attention_kernel>) &&
         add("fulmen", key, "attention_backward_kernel", boxed<attention_backward_kernel>) &&
         add("aten", key, kForward, boxed<recorded>) &&
         add("aten", autograd_key, kBackward, boxed<node_backward>);
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
}  // namespace fulmen::ffi

FULMEN_FFI_EXPORT(keep_options)
FULMEN_FFI_EXPORT(add_torch_kernels)
FULMEN_FFI_EXPORT(raise_refusal)
