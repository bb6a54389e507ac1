// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The operators of before the options crossed as one value. They go when Python has switched.

#include <array>
#include <bit>
#include <cmath>
#include <iterator>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ffi/torch_arguments.h"
#include "ffi/torch_array.h"
#include "ffi/torch_operators.h"

namespace fulmen::ffi {
namespace {

std::string text(TorchArguments* in) {
  const auto handle = reinterpret_cast<TorchString>(in->integer());
  const char* data = nullptr;
  size_t size = 0;
  torch_abi()->string_c_str(handle, &data);
  torch_abi()->string_length(handle, &size);
  std::string result(data, size);
  torch_abi()->delete_string(handle);
  return result;
}

constexpr const char* kAlignments[] = {"bottom_right", "top_left"};
constexpr const char* kBackends[] = {"auto", "cpu", "cuda"};
constexpr const char* kImplementations[] = {"auto", "scalar", "tiled", "naive",
                                            "simt", "sm80",   "sm90"};
constexpr const char* kPrecisions[] = {"float32", "tf32", "3xtf32"};
constexpr const char* kLayouts[] = {"bhsd", "bshd", "hsd", "shd", "sd"};
constexpr int64_t kRanks[] = {4, 4, 3, 3, 2};

// The number that fulmen.h gives a name: its place among all of its kind.
int number_of(const char* option, const std::string& name, std::span<const char* const> names) {
  std::string allowed;
  for (size_t i = 0; i < names.size(); ++i) {
    if (name == names[i]) return static_cast<int>(i);
    allowed += (i == 0 ? "'" : ", '") + std::string(names[i]) + "'";
  }
  throw Refusal{FULMEN_ERROR_ARGUMENT,
                std::string(option) + " is '" + name + "'; allowed are " + allowed};
}

// Arrays and options as such an operator has them.
class OldOperands {
 public:
  explicit OldOperands(TorchArguments* in);

  const TorchArray& operator[](ArrayIndex place) const { return arrays_[place]; }
  // Throws Refusal: a name or an array that is not allowed.
  TorchCall call() const;
  int32_t out_dtype() const { return out_dtype_; }  // PyTorch's number, or kSameDtype

 private:
  TorchCall kept() const;
  void add_rng(TorchCall* call) const;

  std::vector<TorchArray> arrays_;
  fulmen_problem options_;
  std::string alignment_, layout_, backend_, implementation_, precision_;
  int32_t out_dtype_;
};

OldOperands::OldOperands(TorchArguments* in) {
  fulmen_problem_init(&options_);
  arrays_.reserve(kNumInputs);
  for (size_t place = 0; place < kNumInputs; ++place) {
    arrays_.push_back(place <= kV ? in->array() : in->optional_array());
  }
  options_.scale = std::bit_cast<double>(in->optional(std::bit_cast<TorchValue>(std::nan(""))));
  options_.softcap = in->real();
  options_.causal = in->flag();
  alignment_ = text(in);
  options_.window_left = in->integer();
  options_.window_right = in->integer();
  options_.prefix = in->integer();
  options_.chunk = in->integer();
  options_.dropout_p = in->real();
  options_.max_q = in->integer();
  options_.max_kv = in->integer();
  layout_ = text(in);
  backend_ = text(in);
  implementation_ = text(in);
  options_.deterministic = in->flag();
  options_.batch_invariant = in->flag();
  out_dtype_ = static_cast<int32_t>(in->optional(static_cast<TorchValue>(kSameDtype)));
  precision_ = text(in);
}

TorchCall OldOperands::kept() const {
  const int layout = number_of("layout", layout_, kLayouts);
  fulmen_problem options = options_;
  options.alignment =
      static_cast<fulmen_alignment>(number_of("alignment", alignment_, kAlignments));
  options.backend = static_cast<fulmen_backend>(number_of("backend", backend_, kBackends));
  options.implementation = static_cast<fulmen_implementation>(
      number_of("implementation", implementation_, kImplementations));
  options.precision =
      static_cast<fulmen_precision>(number_of("precision", precision_, kPrecisions));
  return TorchCall(options, {kRanks[layout], layout_ == "bshd" || layout_ == "shd"});
}

TorchCall OldOperands::call() const {
  TorchCall result = kept();
  for (size_t place = 0; place < kRng; ++place) {
    if (arrays_[place].is_given())
      result.add(static_cast<ArrayIndex>(place), arrays_[place].dlpack());
  }
  if (arrays_[kQIds].is_given() && !arrays_[kKvIds].is_given()) {
    result.add(kKvIds, arrays_[kQIds].dlpack());
  }
  add_rng(&result);
  return result;
}

// Seed and offset: an array on a GPU, numbers in host memory.
void OldOperands::add_rng(TorchCall* call) const {
  if (!arrays_[kRng].is_given()) {
    if (options_.dropout_p <= 0) return;
    throw Refusal{FULMEN_ERROR_ARGUMENT, "dropout_p is above 0 and rng is missing"};
  }
  const DLTensor lots = arrays_[kRng].dlpack();
  if (lots.device.device_type == kDLCUDA) return call->add(kRng, lots);
  if (lots.ndim != 1 || lots.shape[0] != 2 || lots.dtype.code != kDLInt || lots.dtype.bits != 64) {
    throw Refusal{FULMEN_ERROR_DTYPE, "rng is not int64[2]: seed and offset"};
  }
  const auto* numbers = static_cast<const int64_t*>(lots.data);
  call->set_philox(static_cast<uint64_t>(numbers[0]),
                   static_cast<uint64_t>(numbers[lots.strides[0]]));
}

// `outputs` of the forward operator, as python/fulmen/_torch/kernels.py numbers them.
enum Outputs : int64_t { kWithLse = 2, kWithStats = 3, kStatsOnly = 4 };

TorchArray added(TorchCall* call, ArrayIndex place, TorchArray array) {
  call->add(place, array.dlpack());
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

void attention_kernel(TorchValue* stack) {
  TorchArguments in(stack);
  const OldOperands operands(&in);
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
  constexpr ArrayIndex kOwners[] = {kQ, kK, kV, kBias, kSinks};
  TorchArguments in(stack);
  TorchArray dout = in.optional_array();
  const TorchArray dlse = in.optional_array(), o = in.array(), sums = in.array();
  const OldOperands operands(&in);
  const TorchValue need = in.bits(std::size(kOwners));
  TorchCall call = operands.call();
  const DLTensor o_array = o.dlpack(), sums_array = sums.dlpack();
  call.add(kO, o_array);
  call.add(sums_array.ndim == o_array.ndim ? kStats : kLse, sums_array);
  if (dlse.is_given()) call.add(kDLse, dlse.dlpack());
  const TorchArray arrived = add_dout(&call, std::move(dout), o_array);
  TorchArray gradients[std::size(kOwners)];
  for (size_t i = 0; i < std::size(kOwners); ++i) {
    const TorchArray& owner = operands[kOwners[i]];
    if (((need >> i) & 1) == 0 || !owner.is_given()) continue;
    gradients[i] = added(&call, static_cast<ArrayIndex>(kDQ + i), empty_like(owner.dlpack()));
  }
  if (need != 0) call.run(fulmen_attention_backward);
  for (size_t i = 0; i < std::size(kOwners); ++i) {
    stack[i] = optional_result(std::move(gradients[i]));
  }
}

}  // namespace

bool add_old_kernels(const char* key) {
  return add_kernel("fulmen", key, "attention_kernel", boxed<attention_kernel>) &&
         add_kernel("fulmen", key, "attention_backward_kernel", boxed<attention_backward_kernel>);
}

}  // namespace fulmen::ffi
