// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From PyTorch's stack to the words of fulmen.h.

#include "ffi/torch_arguments.h"

#include <bit>

#include "ffi/arrays.h"

namespace fulmen::ffi {
TorchValue TorchArguments::optional(TorchValue otherwise) {
  const auto* held = reinterpret_cast<const TorchValue*>(*next_++);
  if (held == nullptr) return otherwise;
  const TorchValue value = *held;
  delete held;
  return value;
}

double TorchArguments::real() { return std::bit_cast<double>(*next_++); }

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

void TorchCall::add(ArrayIndex index, const DLTensor& array) {
  if (index <= kV && array.ndim != layout_.rank) {
    throw Refusal{FULMEN_ERROR_SHAPE,
                  std::string(kArrays[index].word) + " has " + std::to_string(array.ndim) +
                      " axes; the layout of the call names " + std::to_string(layout_.rank)};
  }
  arrays_.add(index, array, {layout_.rows_before_heads, false});
}

void TorchCall::run(fulmen_status (*function)(const fulmen_problem*, const fulmen_tensors*,
                                              void*)) {
  arrays_.resolve_device(&problem_);
  void* stream = nullptr;
  if (arrays_.space.on_gpu()) torch_abi()->get_cuda_stream(arrays_.space.device(), &stream);
  check(function(&problem_, &arrays_.tensors, stream));
}

fulmen_problem TorchArguments::options() {
  constexpr size_t kWords = sizeof(fulmen_problem) / sizeof(int64_t);
  const auto list = reinterpret_cast<TorchList>(*next_++);
  TorchValue words[kWords] = {};
  size_t size = 0;
  torch_abi()->list_size(list, &size);
  for (size_t i = 0; i < kWords && i < size; ++i) torch_abi()->list_get_item(list, i, &words[i]);
  torch_abi()->delete_list(list);
  return problem_of(words, size * sizeof(int64_t));
}

TorchOperands::TorchOperands(TorchArguments* in) {
  arrays_.reserve(kNumInputs);
  for (size_t index = 0; index < kNumInputs; ++index) {
    arrays_.push_back(index <= kV ? in->array() : in->optional_array());
  }
  options_ = in->options();
  layout_ = Layout::of(in->integer());
  out_dtype_ = static_cast<int32_t>(in->optional(static_cast<TorchValue>(kSameDtype)));
}

TorchCall TorchOperands::call() const {
  TorchCall result(options_, layout_);
  for (size_t index = 0; index < kNumInputs; ++index) {
    if (index == kRng || !arrays_[index].is_given()) continue;
    result.add(static_cast<ArrayIndex>(index), arrays_[index].dlpack());
  }
  if (arrays_[kQIds].is_given() && !arrays_[kKvIds].is_given()) {
    result.add(kKvIds, arrays_[kQIds].dlpack());
  }
  add_rng(&result);
  return result;
}

// Seed and offset: an array on a GPU, numbers in host memory.
void TorchOperands::add_rng(TorchCall* call) const {
  if (!arrays_[kRng].is_given()) {
    if (options_.dropout_p <= 0) return;
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

}  // namespace fulmen::ffi
