// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Every output against itself and against every other array; where arrays begin.

#include "core/check_pointers.h"

#include "core/overlap.h"
#include "core/refuse.h"

namespace fulmen {
namespace {

struct AddressRange {
  const ArrayRule* rule;
  const Tensor* tensor;
  u64 begin;
  u64 end;
};

// Ranges of addresses tell nearly all arrays apart; may_overlap looks closer.
bool share_bytes(const AddressRange& a, const AddressRange& b) {
  return a.begin < b.end && b.begin < a.end && may_overlap(*a.tensor, *b.tensor);
}

void check_overlaps(const Problem& problem, Call call) {
  AddressRange ranges[kNumArrays];
  int num_ranges = 0;
  for_each_used(problem.arrays, call, [&](const ArrayRule& rule, const Tensor& tensor) {
    const u64 begin = reinterpret_cast<u64>(tensor.data);
    const u64 bytes = static_cast<u64>(span_bytes(tensor));
    ranges[num_ranges++] = {&rule, &tensor, begin, begin + bytes};
  });
  for (int i = 0; i < num_ranges; ++i) {
    const ArrayRule& out = *ranges[i].rule;
    if (use_of(out, call) != Use::kOutput) continue;
    for (int j = 0; j < num_ranges; ++j) {
      const ArrayRule& other = *ranges[j].rule;
      const bool was_seen = use_of(other, call) == Use::kOutput && j <= i;
      if (was_seen || !share_bytes(ranges[i], ranges[j])) continue;
      refuse(sentence(name(out.array), " overlaps ", name(other.array),
                      " in memory; an output may share no byte with any other array"));
    }
  }
}

// Numbers of a sequence or a head, which kernels read one by one.
bool is_read_singly(Array array) {
  switch (array) {
    case Array::kAlibiSlopes:
    case Array::kSinks:
    case Array::kQLengths:
    case Array::kKvLengths:
    case Array::kCuQ:
    case Array::kCuKv:
    case Array::kRng:
      return true;
    default:
      return false;
  }
}

// What all pointers are multiples of. Empty arrays are never read, and a slice of lengths makes no
// tile of q slower to copy.
i64 pointer_alignment(const Problem& problem) {
  u64 bits = kMaxPointerAlignment;
  for (int i = 0; i < kNumArrays; ++i) {
    const auto array = static_cast<Array>(i);
    const Tensor& tensor = problem.arrays[array];
    const u64 address = reinterpret_cast<u64>(tensor.data);
    if (address == 0 || tensor.empty()) continue;
    const bool is_aligned = address % static_cast<u64>(size_bytes(tensor.dtype)) == 0;
    if (!is_aligned || !is_read_singly(array)) bits |= address;
  }
  return static_cast<i64>(bits & (~bits + 1));
}

}  // namespace

void check_outputs_nest(const Problem& problem, Call call) {
  for_each_used(problem.arrays, call, [&](const ArrayRule& rule, const Tensor& tensor) {
    if (use_of(rule, call) == Use::kOutput && may_overlap_itself(tensor)) {
      refuse(sentence(name(rule.array),
                      " has strides by which two of its elements are one; an "
                      "output needs a place of its own for each element"));
    }
  });
}

void check_pointers(Problem& problem, Call call) {
  check_overlaps(problem, call);
  problem.pointer_alignment = pointer_alignment(problem);
}

}  // namespace fulmen
