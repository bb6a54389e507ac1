// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Keys as words, compared as a whole.

#include "core/request_key.h"

#include <bit>

namespace fulmen {
namespace {

u64 word_of(double value) { return std::bit_cast<u64>(value); }
u64 word_of(const char*) { return 0; }
template <class T>
u64 word_of(const T& value) {
  return static_cast<u64>(value);
}

u64 pointer_bits(const Tensor& tensor) {
  return tensor.empty() ? 0 : reinterpret_cast<u64>(tensor.data) & (kMaxPointerAlignment - 1);
}

// What validation says of rng without looking at the numbers themselves.
u64 rng_kind(const Options& options) {
  const bool is_zero = options.rng_seed == 0 && options.rng_offset == 0;
  const bool is_word = options.rng_offset <= 0xffffffffu;
  return (is_zero ? 0u : 1u) | (is_word ? 0u : 2u);
}

}  // namespace

RequestKey::RequestKey(const Request& request, i64 num_threads) {
  const auto put = [this](u64 value) { word[size++] = value; };
  const auto put_signed = [&put](i64 value) { put(static_cast<u64>(value)); };
  for_each_option(request.options, [&put](const auto& row, const auto& value) {
    if (row.use == OptionUse::kPlan) put(word_of(value));
  });
  put_signed(num_threads);
  put(static_cast<u64>(request.operation) | rng_kind(request.options) << 1);
  u64 pointers = 0;
  for (int index = 0; index < kNumArrays; ++index) {
    const Tensor& tensor = request.arrays.tensors[static_cast<std::size_t>(index)];
    if (!tensor.present()) continue;
    put(static_cast<u64>(index) | static_cast<u64>(tensor.dtype) << 8 |
        static_cast<u64>(tensor.rank) << 16);
    const int rank = min(tensor.rank, kMaxRank);  // a larger one is refused
    for (int axis = 0; axis < rank; ++axis) put_signed(tensor.shape[axis]);
    for (int axis = 0; axis < rank; ++axis) put_signed(tensor.strides[axis]);
    pointers |= pointer_bits(tensor);
  }
  put(pointers & (~pointers + 1));
  u64 factor = 0x9E3779B97F4A7C15u;
  for (const u64 value : words()) {  // no product waits for the one before it
    hash += value * factor;
    factor += 0x3C6EF372FE94F82Au;  // stays odd
  }
  hash ^= hash >> 32;
}

}  // namespace fulmen
