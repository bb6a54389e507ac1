// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Attention of q, k and v alone as kernels of PyTorch's dispatcher, so that a call from Python is
// one step and its backward pass none: PyTorch's own node of
// aten::_scaled_dot_product_fused_attention_overrideable, which has no kernel on CPU and CUDA,
// keeps the tensors and calls us without the interpreter. Options are kept here under a number,
// which travels as dropout_p; stats as logsumexp. python/fulmen/_torch/plain.py is the other half.

#include <array>
#include <bit>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ffi/arguments.h"
#include "ffi/export.h"
#include "ffi/kept_options.h"
#include "ffi/refusal.h"
#include "ffi/torch_abi.h"
#include "ffi/torch_array.h"
#include "ffi/torch_call.h"

namespace fulmen::ffi {
namespace {

KeptOptions kept_options;
thread_local std::string last_refusal;  // the dispatcher says that a call failed, not why

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
  call.name_inputs(q_array, k.dlpack(), v_array);
  TorchArray o = empty_like(q_array, v_array.shape[v_array.ndim - 1]);
  call.name("o", &fulmen_tensors::o, o.dlpack());
  TorchArray stats = stats_place == nullptr ? TorchArray(TorchTensor{})
                                            : empty_stats(q_array, call.rows_before_heads());
  if (stats_place != nullptr) call.name_stats(stats.dlpack());
  call.run(fulmen_attention);
  stack[0] = o.released();
  if (stats_place != nullptr) *stats_place = stats.released();
}

// fulmen::plain(Tensor q, Tensor k, Tensor v, int options) -> Tensor
void plain(TorchValue* stack) {
  attend(stack, static_cast<double>(static_cast<int64_t>(stack[3])), nullptr);
}

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
  const TorchArray dout(stack[0]), q(stack[1]), k(stack[2]), v(stack[3]), o(stack[4]);
  const TorchArray stats(stack[5]);
  TorchCall call(kept_options.at(static_cast<double>(static_cast<int64_t>(stack[6]))));
  const TorchValue need = stack[7];
  const DLTensor inputs[] = {q.dlpack(), k.dlpack(), v.dlpack()};
  call.name_inputs(inputs[0], inputs[1], inputs[2]);
  call.name("o", &fulmen_tensors::o, o.dlpack());
  call.name_stats(stats.dlpack());
  call.name("do", &fulmen_tensors::dout, dout.dlpack());
  constexpr std::array<std::pair<const char*, fulmen_tensor fulmen_tensors::*>, 3> kNames = {
      {{"dq", &fulmen_tensors::dq}, {"dk", &fulmen_tensors::dk}, {"dv", &fulmen_tensors::dv}}};
  std::vector<TorchArray> results;
  for (size_t i = 0; i < kNames.size(); ++i) {
    const bool is_needed = ((need >> i) & 1) != 0;
    const int64_t dim = inputs[i].shape[inputs[i].ndim - 1];
    results.push_back(empty_like(inputs[i], is_needed ? dim : 0));
    if (is_needed) call.name(kNames[i].first, kNames[i].second, results[i].dlpack());
  }
  call.run(fulmen_attention_backward);
  for (size_t i = 0; i < results.size(); ++i) stack[i] = results[i].released();
}

TorchValue bits_of(TorchList mask) {
  TorchValue bits = 0;
  for (size_t i = 0; i < 3; ++i) {
    TorchValue wanted = 0;
    torch_abi()->list_get_item(mask, i, &wanted);
    bits |= TorchValue{wanted != 0} << i;
  }
  torch_abi()->delete_list(mask);
  return bits;
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
  const TorchValue need = bits_of(reinterpret_cast<TorchList>(stack[5]));
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
  last_refusal = "the backward pass of fulmen.attention failed";
  if (torch_abi()->call_dispatcher(name, "", stack, kTorchVersion) != 0) {
    throw Refusal{FULMEN_ERROR_INTERNAL, last_refusal};
  }
  stack[3] = undefined().released();
}

// PyTorch turns these exceptions into Python's RuntimeError.
template <void (*kKernel)(TorchValue* stack)>
void boxed(TorchValue* stack, uint64_t, uint64_t) {
  try {
    kKernel(stack);
  } catch (const Refusal& refusal) {
    last_refusal = refusal.sentence;
    throw std::runtime_error(refusal.sentence);
  }
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
         add("aten", key, kForward, boxed<recorded>) &&
         add("aten", autograd_key, kBackward, boxed<node_backward>);
}

// () -> 1, or 0 where the process has loaded no PyTorch with a stable ABI; once in a process
int64_t add_torch_kernels(Arguments) {
  if (torch_abi() == nullptr || !add_kernels("CPU", "AutogradCPU")) return 0;
  const bool has_cuda = torch_abi()->get_cuda_stream != nullptr;
  return !has_cuda || add_kernels("CUDA", "AutogradCUDA") ? 1 : 0;
}

}  // namespace
}  // namespace fulmen::ffi

FULMEN_FFI_EXPORT(keep_options)
FULMEN_FFI_EXPORT(add_torch_kernels)
