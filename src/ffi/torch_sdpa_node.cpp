// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// =================================================================================================
//  WARNING: dropout_p IS NO PROBABILITY HERE. Options travel through PyTorch's own attention node
//  as a number of 2 or more in its argument dropout_p; stats travel as its logsumexp.
// =================================================================================================
//
// Attention of q, k and v alone, so that such a call from Python is one step and its backward pass
// none: PyTorch's own node of aten::_scaled_dot_product_fused_attention_overrideable, which has no
// kernel on CPU and CUDA, keeps the tensors and calls us without the interpreter. It has no room
// for our options, so they are kept here, each combination once, for the life of the process: a
// graph of PyTorch's may outlive whoever made it. python/fulmen/_torch is the other half.

#include <array>
#include <atomic>
#include <bit>
#include <iterator>
#include <mutex>
#include <vector>

#include "ffi/export.h"
#include "ffi/torch_abi.h"

namespace fulmen::ffi {
namespace {

// Any thread may add and read.
class KeptOptions {
 public:
  // Their number; 0 where there is no more room.
  int64_t add(const TorchOptions& kept) {
    const std::lock_guard lock(adding_);
    const size_t index = size_.load(std::memory_order_relaxed);
    if (index == all_.size()) return 0;
    all_[index] = kept;
    size_.store(index + 1, std::memory_order_release);
    return kFirst + static_cast<int64_t>(index);
  }

  const TorchOptions& at(double number) const {
    const double index = number - static_cast<double>(kFirst);
    if (index >= 0 && index < static_cast<double>(size_.load(std::memory_order_acquire))) {
      return all_[static_cast<size_t>(index)];
    }
    throw Refusal{FULMEN_ERROR_ARGUMENT,
                  "this operator runs for fulmen.attention alone; call that one"};
  }

 private:
  static constexpr int64_t kFirst = 2;  // above every probability

  std::mutex adding_;
  std::array<TorchOptions, 1024> all_ = {};
  std::atomic<size_t> size_ = 0;
};

KeptOptions kept_options;

// (options, layout) -> their number, or 0
int64_t keep_options(Arguments in) {
  const fulmen_problem problem = in.options();
  return kept_options.add({problem, Layout::of(in.integer("layout")), kSameDtype});
}

// Of q, k and v at the head of the stack, o instead of q, and stats where it is wanted.
void attend(TorchValue* stack, double number, TorchValue* stats_result) {
  const TorchArray q(stack[0]), k(stack[1]), v(stack[2]);
  const TorchOptions& kept = kept_options.at(number);
  TorchCall call(kept.problem, kept.layout);
  const DLTensor q_array = q.dlpack(), v_array = v.dlpack();
  call.add(kQ, q_array);
  call.add(kK, k.dlpack());
  call.add(kV, v_array);
  TorchArray o = empty_like(q_array, v_array.shape[v_array.ndim - 1]);
  call.add(kO, o.dlpack());
  TorchArray stats = stats_result == nullptr
                         ? TorchArray()
                         : empty_sums(q_array, call.rows_before_heads(), Sums::kStats);
  if (stats.is_given()) call.add(kStats, stats.dlpack());
  call.run(fulmen_attention);
  stack[0] = o.released();
  if (stats_result != nullptr) *stats_result = stats.released();
}

double number_of(TorchValue integer) { return static_cast<double>(static_cast<int64_t>(integer)); }

// fulmen::plain(Tensor q, Tensor k, Tensor v, int options) -> Tensor
void plain(TorchValue* stack) { attend(stack, number_of(stack[3]), nullptr); }

// (query, key, value, attn_bias, dropout_p, is_causal, return_debug_mask, scale) -> (output,
// logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, philox_seed, philox_offset, debug_attn_mask)
void recorded(TorchValue* stack) {
  attend(stack, std::bit_cast<double>(stack[4]), &stack[1]);
  for (const int result : {2, 3, 6, 7, 8}) stack[result] = undefined().released();
  stack[4] = stack[5] = 0;
}

// fulmen::plain_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor stats,
// int options, int need) -> (Tensor dq, Tensor dk, Tensor dv); need has a bit for each
void plain_backward(TorchValue* stack) {
  constexpr ArrayIndex kIndices[] = {kDOut, kQ, kK, kV, kO, kStats};
  std::vector<TorchArray> arrays;
  for (size_t i = 0; i < std::size(kIndices); ++i) arrays.emplace_back(stack[i]);
  const TorchOptions& kept = kept_options.at(number_of(stack[6]));
  TorchCall call(kept.problem, kept.layout);
  const TorchValue need = stack[7];
  for (size_t i = 0; i < std::size(kIndices); ++i) call.add(kIndices[i], arrays[i].dlpack());
  std::vector<TorchArray> results;
  for (size_t i = 0; i < 3; ++i) {
    const DLTensor input = arrays[1 + i].dlpack();
    const bool is_needed = ((need >> i) & 1) != 0;
    results.push_back(is_needed ? empty_like(input) : empty_like(input, 0));
    if (is_needed) call.add(static_cast<ArrayIndex>(kDQ + i), results[i].dlpack());
  }
  call.run(fulmen_attention_backward);
  for (size_t i = 0; i < results.size(); ++i) stack[i] = results[i].released();
}

// (grad_out, query, key, value, attn_bias, grad_input_mask, out, logsumexp, cum_seq_q, cum_seq_k,
// max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset, scale) -> (grad_query, grad_key,
// grad_value, grad_attn_bias). Takes the key of Autograd: hands the gradients to an operator, so
// that all that watches below Autograd sees it; where derivatives of them are wanted, to one in
// Python.
void node_backward(TorchValue* stack) {
  TorchArray arrays[] = {TorchArray(stack[0]), TorchArray(stack[1]), TorchArray(stack[2]),
                         TorchArray(stack[3]), TorchArray(stack[6]), TorchArray(stack[7])};
  for (const int unused_at : {4, 8, 9, 14, 15}) TorchArray unused(stack[unused_at]);
  const TorchValue need = TorchArguments(&stack[5]).bits(3);
  const double number = std::bit_cast<double>(stack[12]);
  if (!arrays[0].is_defined()) {
    for (int i = 0; i < 4; ++i) stack[i] = undefined().released();
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

}  // namespace

const TorchOptions& TorchOptions::kept(double number) { return kept_options.at(number); }

bool add_sdpa_node(const char* key, const char* autograd_key) {
  return add_kernel("fulmen", key, "plain", boxed<plain>) &&
         add_kernel("fulmen", key, "plain_backward", boxed<plain_backward>) &&
         add_kernel("aten", key, kForward, boxed<recorded>) &&
         add_kernel("aten", autograd_key, kBackward, boxed<node_backward>);
}

}  // namespace fulmen::ffi

FULMEN_FFI_EXPORT(keep_options)
