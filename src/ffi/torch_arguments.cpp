// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From PyTorch's stack to the words of fulmen.h.

#include "ffi/torch_arguments.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <span>

#include "ffi/named_arrays.h"
#include "ffi/refusal.h"

namespace fulmen::ffi {
namespace {

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

}  // namespace

TorchValue TorchArguments::optional(TorchValue otherwise) {
  const auto* held = reinterpret_cast<const TorchValue*>(*next_++);
  if (held == nullptr) return otherwise;
  const TorchValue value = *held;
  delete held;
  return value;
}

double TorchArguments::real() { return std::bit_cast<double>(*next_++); }

std::string TorchArguments::text() {
  const auto handle = reinterpret_cast<TorchString>(*next_++);
  const char* data = nullptr;
  size_t size = 0;
  torch_abi()->string_c_str(handle, &data);
  torch_abi()->string_length(handle, &size);
  std::string result(data, size);
  torch_abi()->delete_string(handle);
  return result;
}

TorchValue TorchArguments::bits(size_t count) {
  const auto list = reinterpret_cast<TorchList>(*next_++);
  TorchValue result = 0;
  for (size_t i = 0; i < count; ++i) {
    TorchValue wanted = 0;
    torch_abi()->list_get_item(list, i, &wanted);
    result |= TorchValue{wanted != 0} << i;
  }
  torch_abi()->delete_list(list);
  return result;
}

TorchValue optional_result(TorchArray array) {
  if (!array.is_given()) return 0;
  return reinterpret_cast<TorchValue>(new TorchValue(array.released()));
}

TorchOperands::TorchOperands(TorchArguments* in) {
  fulmen_problem_init(&options_);
  arrays_.reserve(kNumInputs);
  for (size_t place = 0; place < kNumInputs; ++place) {
    arrays_.push_back(place <= kV ? in->array() : in->optional_array());
  }
  options_.scale = std::bit_cast<double>(in->optional(std::bit_cast<TorchValue>(std::nan(""))));
  options_.softcap = in->real();
  options_.causal = in->flag();
  alignment_ = in->text();
  options_.window_left = in->integer();
  options_.window_right = in->integer();
  options_.prefix = in->integer();
  options_.chunk = in->integer();
  options_.dropout_p = in->real();
  options_.max_q = in->integer();
  options_.max_kv = in->integer();
  layout_ = in->text();
  backend_ = in->text();
  implementation_ = in->text();
  options_.deterministic = in->flag();
  options_.batch_invariant = in->flag();
  out_dtype_ = static_cast<int32_t>(in->optional(static_cast<TorchValue>(kSameDtype)));
  precision_ = in->text();
}

Kept TorchOperands::kept() const {
  const int layout = number_of("layout", layout_, kLayouts);
  Kept how = {options_, layout_ == "bshd" || layout_ == "shd", kRanks[layout]};
  fulmen_problem& options = how.options;
  options.alignment =
      static_cast<fulmen_alignment>(number_of("alignment", alignment_, kAlignments));
  options.backend = static_cast<fulmen_backend>(number_of("backend", backend_, kBackends));
  options.implementation = static_cast<fulmen_implementation>(
      number_of("implementation", implementation_, kImplementations));
  options.precision =
      static_cast<fulmen_precision>(number_of("precision", precision_, kPrecisions));
  return how;
}

TorchCall TorchOperands::call() const {
  TorchCall result(kept());
  for (size_t place = 0; place < kRng; ++place) {
    if (arrays_[place].is_given())
      result.add(static_cast<ArrayPlace>(place), arrays_[place].dlpack());
  }
  if (arrays_[kQIds].is_given() && !arrays_[kKvIds].is_given()) {
    result.add(kKvIds, arrays_[kQIds].dlpack());
  }
  take_lots(&result);
  return result;
}

// Seed and offset: an array on a GPU, numbers in host memory.
void TorchOperands::take_lots(TorchCall* call) const {
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
  call->set_lots(static_cast<uint64_t>(numbers[0]),
                 static_cast<uint64_t>(numbers[lots.strides[0]]));
}

}  // namespace fulmen::ffi
