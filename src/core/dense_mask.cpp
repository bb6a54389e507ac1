// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The definition, one sentence of it a line.

#include <limits>

#include "core/arrays.h"
#include "core/error.h"
#include "core/validate.h"

namespace fulmen {
namespace {

constexpr const char* kSubject = "visible";
constexpr AxisList kVisibleAxes{
    4, 1, 0, {Axis::kSequence, Axis::kHead, Axis::kMaskQRow, Axis::kMaskKvRow}, {0, 1, 2, 3}};

Tensor checked_output(const Problem& problem, const Tensor& visible) {
  if (!visible.present()) {
    throw Error(Status::kArgument, "visible is missing; it is the bool array to write");
  }
  check_layout(visible, kSubject, kVisibleAxes, {}, Pointers::kChecked);
  if (visible.dtype != DType::kBool) {
    throw Error(Status::kDType,
                sentence(kSubject, " is ", name(visible.dtype), "; allowed is bool"));
  }
  check_span(visible, kSubject);
  const Tensor normal = normal_form(visible, kVisibleAxes);
  Sizes sizes = sizes_of(problem);
  if (problem.packed.q) sizes[Axis::kMaskQRow] = longest_sequence(problem, Array::kCuQ);
  if (problem.packed.kv) sizes[Axis::kMaskKvRow] = longest_sequence(problem, Array::kCuKv);
  if (problem.is_paged()) sizes[Axis::kMaskKvRow] = problem.max_kv;
  check_shape(visible, normal, kSubject, kVisibleAxes, sizes);
  if (may_overlap_itself(normal)) {
    throw Error(Status::kArgument,
                sentence(kSubject, " has strides by which two of its elements are one"));
  }
  for (int index = 0; index < kNumArrays; ++index) {
    const Tensor& tensor = problem.arrays.tensors[static_cast<size_t>(index)];
    const bool is_read = use_of(rules::kTable[index], Call::kDenseMask) == Use::kInput;
    if (!is_read || !tensor.present() || !may_overlap(normal, tensor)) continue;
    throw Error(Status::kArgument,
                sentence(kSubject, " overlaps ", name(static_cast<Array>(index)), " in memory"));
  }
  return normal;
}

}  // namespace

bool Problem::shows(const CacheSequence& sequence, i64 index, i64 head, i64 i, i64 j) const {
  const i64 column = sequence.first_key + j;  // of what has one for each key, hidden ones included
  if (!sees(sequence, i, j)) return false;
  if (has(Array::kMask) && !arrays[Array::kMask].boolean(index, head, i, column)) return false;
  if (has(Array::kQIds)) {
    const i64 q_id = arrays[Array::kQIds].index(sequence.batch, 0, 0, sequence.q_begin + i);
    const i64 kv_id = arrays[Array::kKvIds].index(sequence.kv_batch, 0, 0, sequence.kv_begin + j);
    if (q_id != kv_id) return false;
  }
  if (has(Array::kBias)) {
    const double bias = arrays[Array::kBias].real(index, head, i, column);
    if (bias == -std::numeric_limits<double>::infinity()) return false;
  }
  if (has(Array::kBlocks) && !lists_block(index, head, i / block_q, j / block_kv)) return false;
  return expression_shows(sequence, index, head, i, j);
}

void dense_mask(const Problem& problem, const Tensor& visible) {
  check_lengths(problem);
  check_blocks(problem);
  check_segments(problem);
  const Tensor out = checked_output(problem, visible);
  for (i64 index = 0; index < out.shape[0]; ++index) {
    const CacheSequence sequence = problem.sequence(index);
    for (i64 head = 0; head < out.shape[1]; ++head) {
      for (i64 i = 0; i < out.shape[2]; ++i) {
        for (i64 column = 0; column < out.shape[3]; ++column) {
          const i64 j = column - sequence.first_key;
          const bool exists = i < sequence.shape.q_len && 0 <= j && j < sequence.shape.kv_len;
          const bool sees = exists && problem.shows(sequence, index, head, i, j);
          store_bytes<u8>(out.address(index, head, i, column), sees ? 1 : 0);
        }
      }
    }
  }
}

}  // namespace fulmen
