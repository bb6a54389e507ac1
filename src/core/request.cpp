// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Keys as words, compared as a whole; the arrays of a run against those of the plan.

#include "core/request.h"

#include <algorithm>
#include <bit>

#include "core/arrays.h"

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

// What validation says of the scalars of an expression: which are there, and which are no numbers.
u64 scalar_kinds(const Options& options) {
  u64 kinds = 0;
  for (const double value : scalars_of(options)) {
    kinds = kinds << 2 | (value != 0 ? 1u : 0u) | (value - value != 0 ? 2u : 0u);
  }
  return kinds;
}

constexpr Array array_at(int index) { return static_cast<Array>(index); }

// An array of a run against the same array of the plan.
void check_same(const Tensor& now, const Tensor& planned, const Tensor& given, Array array) {
  const char* const subject = name(array);
  if (now.dtype != planned.dtype) {
    throw Error(Status::kDType, sentence(subject, " is ", name(now.dtype), " but was ",
                                         name(planned.dtype), " when the plan was made"));
  }
  if (!std::equal(now.shape, now.shape + kMaxRank, planned.shape)) {
    throw Error(Status::kShape,
                sentence(subject, " has shape ", shape_text(given), ", not that of the plan, ",
                         shape_text(planned), " with all axes: make a plan for it"));
  }
  for (int axis = 0; axis < kMaxRank; ++axis) {
    if (now.strides[axis] == planned.strides[axis]) continue;
    refuse(sentence(subject, " has stride ", now.strides[axis], " on axis ", axis, " of ",
                    shape_text(planned), " but had ", planned.strides[axis],
                    " when the plan was made: make a plan for it"));
  }
}

}  // namespace

RequestKey::RequestKey(const Request& request, i64 num_threads) {
  const auto put = [this](u64 value) { word[size++] = value; };
  const auto put_signed = [&put](i64 value) { put(static_cast<u64>(value)); };
#define FULMEN_OPTION(kind, type, name, initial, least, most, allowed, use, ...) \
  if constexpr (OptionUse::use == OptionUse::kPlan) put(word_of(request.options.name));
#include "fulmen/options.def"
  put_signed(num_threads);
  put(static_cast<u64>(request.operation) | rng_kind(request.options) << 1 |
      scalar_kinds(request.options) << 8);
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

Problem rebind(const Problem& problem, const Arrays& arrays) {
  const Call call = call_of(problem.operation);
  check_layouts(arrays, call, problem.packed, Pointers::kChecked);
  Problem bound = problem;
  for (int index = 0; index < kNumArrays; ++index) {
    const Array array = array_at(index);
    const ArrayRule& rule = rule_of(array);
    if (use_of(rule, call) == Use::kIgnored) continue;
    const Tensor& given = arrays[array];
    if (given.present() != problem.has(array)) {
      refuse(sentence(name(array),
                      given.present() ? " is given, but was absent" : " is missing, but was given",
                      " when the plan was made: make a plan for it"));
    }
    if (!given.present()) continue;
    Tensor now = normal_form(given, rule.list);
    if (use_of(rule, call) != Use::kOutput) broadcast(now, rule.list, problem);
    check_same(now, problem.arrays[array], given, array);
    bound.arrays[array] = now;
  }
  check_pointers(bound, call);
  return bound;
}

Problem bind(const Problem& problem, const Arrays& arrays) {
  Problem bound = problem;
  for (int index = 0; index < kNumArrays; ++index) {
    Tensor& tensor = bound.arrays.tensors[static_cast<std::size_t>(index)];
    if (!tensor.present()) continue;
    const Array array = array_at(index);
    const Tensor& given = arrays[array];
    tensor.data = given.data;
    if (given.data != nullptr) continue;
    check_layout(given, name(array), rule_of(array).list, problem.packed, Pointers::kChecked);
  }
  check_pointers(bound, call_of(problem.operation));
  return bound;
}

Problem bind(const Problem& problem, const Request& request) {
  Problem bound = bind(problem, request.arrays);
  if (bound.dropout.enabled()) {
    bound.dropout.seed = request.options.rng_seed;
    bound.dropout.offset = static_cast<u32>(request.options.rng_offset);
  }
  if (bound.program != nullptr) bound.scalars = scalars_of(request.options);
  return bound;
}

bool same_layout(const Arrays& a, const Arrays& b) {
  return std::ranges::equal(a.tensors, b.tensors, [](const Tensor& x, const Tensor& y) {
    if (x.dtype != y.dtype || x.rank != y.rank) return false;
    const int rank = min(x.rank, kMaxRank);
    return std::equal(x.shape, x.shape + rank, y.shape) &&
           std::equal(x.strides, x.strides + rank, y.strides);
  });
}

}  // namespace fulmen
