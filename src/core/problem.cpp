// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Lengths, offsets and rng where the host can read them: read, and checked before each run. What
// lengths and offsets mean is in sequence.cuh.

#include "core/problem.h"

#include "core/error.h"

namespace fulmen {
namespace {

AxisEntry entry_of(const Tensor& offsets, const Tensor& lengths, i64 index) {
  AxisEntry entry{offsets.present(), lengths.present(), 0, 0, 0};
  if (entry.packed) {
    entry.begin = offsets.index(0, 0, 0, index);
    entry.end = offsets.index(0, 0, 0, index + 1);
  }
  if (entry.has_length) entry.length = lengths.index(0, 0, 0, index);
  return entry;
}

// One side of a problem: query rows or keys.
struct Side {
  Array offsets;
  Array lengths;
  Array rows_of;  // the array whose rows are counted
  i64 rows;
  i64 longest_allowed;
  const char* bound;
};

i64 entry(const Problem& problem, Array array, i64 index) {
  return problem.arrays[array].index(0, 0, 0, index);
}

void check_offsets(const Problem& problem, const Side& side) {
  if (!problem.has(side.offsets)) return;
  const char* const array = name(side.offsets);
  i64 previous = 0;
  for (i64 index = 0; index <= problem.num_sequences; ++index) {
    const i64 offset = entry(problem, side.offsets, index);
    if (index == 0 && offset != 0) {
      refuse(sentence(array, "[0] is ", offset, "; the first offset is 0"));
    }
    if (offset < previous) {
      refuse(sentence(array, "[", index, "] is ", offset, " after ", previous,
                      "; offsets may stay equal but not decrease"));
    }
    if (offset > side.rows) {
      refuse(sentence(array, "[", index, "] is ", offset, ", but ", name(side.rows_of), " has ",
                      side.rows, " rows; allowed is 0 to ", side.rows));
    }
    if (offset - previous > side.longest_allowed) {
      refuse(sentence(array, " gives sequence ", index - 1, " ", offset - previous,
                      " rows, more than ", side.bound, " = ", side.longest_allowed,
                      "; raise it, or leave it 0"));
    }
    previous = offset;
  }
  if (problem.num_sequences == 0 && side.rows > 0) {
    refuse(sentence(array, " names no sequence, but ", name(side.rows_of), " has ", side.rows,
                    " rows; they need at least one sequence, of any length"));
  }
}

void check_counts(const Problem& problem, const Side& side) {
  if (!problem.has(side.lengths)) return;
  for (i64 index = 0; index < problem.num_sequences; ++index) {
    const i64 rows = problem.packed ? entry(problem, side.offsets, index + 1) -
                                          entry(problem, side.offsets, index)
                                    : side.rows;
    const i64 length = entry(problem, side.lengths, index);
    if (length < 0 || length > rows) {
      refuse(sentence(name(side.lengths), "[", index, "] is ", length, ", but sequence ", index,
                      " has ", rows, " rows of ", name(side.rows_of), "; allowed is 0 to ", rows));
    }
  }
}

void check_mask_extent(const Problem& problem, Array array, int axis, i64 longest) {
  const i64 extent = problem.arrays[array].shape[axis];  // where broadcast: max_q or max_kv
  if (extent < longest) {
    throw Error(Status::kShape,
                sentence(name(array), " has ", extent, axis == 2 ? " query" : " key",
                         " rows, but the longest sequence has ", longest, "; allowed is 1, or ",
                         longest, " or more"));
  }
}

}  // namespace

Sequence Problem::sequence(i64 index) const {
  const bool is_last = index + 1 == num_sequences;
  const AxisEntry q = entry_of(arrays[Array::kCuQ], arrays[Array::kQLengths], index);
  const AxisEntry kv = entry_of(arrays[Array::kCuKv], arrays[Array::kKvLengths], index);
  return sequence_of(packed ? 0 : index, rows_of(q, q_rows, is_last), rows_of(kv, kv_rows, is_last),
                     alignment == Alignment::kBottomRight);
}

i64 longest_sequence(const Problem& problem, Array offsets) {
  i64 longest = 0;
  for (i64 index = 0; index < problem.num_sequences; ++index) {
    longest = max(longest, entry(problem, offsets, index + 1) - entry(problem, offsets, index));
  }
  return longest;
}

void read_rng(Problem& problem) {
  if (!problem.has(Array::kRng)) return;
  const i64 offset = entry(problem, Array::kRng, 1);
  if (offset < 0 || offset > i64{0xffffffff}) {
    refuse(sentence("rng[1], the offset, is ", offset, "; allowed is 0 to 4294967295"));
  }
  problem.dropout.seed = static_cast<u64>(entry(problem, Array::kRng, 0));
  problem.dropout.offset = static_cast<u32>(offset);
}

void check_lengths(const Problem& problem) {
  const Side q{Array::kCuQ, Array::kQLengths, Array::kQ, problem.q_rows, problem.max_q, "max_q"};
  const Side kv{Array::kCuKv,    Array::kKvLengths, Array::kK,
                problem.kv_rows, problem.max_kv,    "max_kv"};
  check_offsets(problem, q);
  check_offsets(problem, kv);
  check_counts(problem, q);
  check_counts(problem, kv);
  if (!problem.packed) return;
  for (const Array array : {Array::kBias, Array::kMask}) {
    if (!problem.has(array)) continue;
    check_mask_extent(problem, array, 2, longest_sequence(problem, Array::kCuQ));
    check_mask_extent(problem, array, 3, longest_sequence(problem, Array::kCuKv));
  }
}

}  // namespace fulmen
