// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Lengths, offsets, page tables, positions and rng where the host can read them: read, and checked
// before each run. What they mean is in sequence.cuh.

#include "core/problem.h"

#include "core/error.h"
#include "kernels/attention/kv_scale.cuh"

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
    const i64 rows = problem.has(side.offsets) ? entry(problem, side.offsets, index + 1) -
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

CacheEntry cache_entry(const Problem& problem, i64 index) {
  const Arrays& arrays = problem.arrays;
  const bool ragged = problem.has(Array::kPageIndptr);
  return {.rows = entry_of(arrays[Array::kCuKv], arrays[Array::kKvLengths], index),
          .page_begin = ragged ? entry(problem, Array::kPageIndptr, index) : 0,
          .page_end = ragged ? entry(problem, Array::kPageIndptr, index + 1)
                             : arrays[Array::kPageTable].shape[3],
          .start = problem.has(Array::kKvStart) ? entry(problem, Array::kKvStart, index) : 0};
}

void check_page_offsets(const Problem& problem) {
  if (!problem.has(Array::kPageIndptr)) return;
  const i64 entries = problem.arrays[Array::kPageTable].shape[3];
  i64 previous = 0;
  for (i64 index = 0; index <= problem.num_sequences; ++index) {
    const i64 offset = entry(problem, Array::kPageIndptr, index);
    if (index == 0 && offset < 0) {
      refuse(sentence("page_indptr[0] is ", offset, "; allowed is 0 to ", entries));
    }
    if (index > 0 && offset < previous) {
      refuse(sentence("page_indptr[", index, "] is ", offset, " after ", previous,
                      "; offsets may stay equal but not decrease"));
    }
    if (offset > entries) {
      refuse(sentence("page_indptr[", index, "] is ", offset, ", but page_table has ", entries,
                      " entries; allowed is 0 to ", entries));
    }
    previous = offset;
  }
}

// kv_lengths against the pages of each request, and kv_start against what is there.
void check_cache_lengths(const Problem& problem) {
  const CacheLayout layout = problem.cache_layout();
  for (i64 index = 0; index < problem.num_sequences; ++index) {
    const CacheEntry at = cache_entry(problem, index);
    const i64 capacity = capacity_of(layout, at, problem.kv_rows);
    if (layout.paged && (at.rows.length < 0 || at.rows.length > capacity)) {
      refuse(sentence("kv_lengths[", index, "] is ", at.rows.length, ", but its pages hold ",
                      capacity, " keys", capacity == problem.kv_rows ? " (or max_kv says so)" : "",
                      "; allowed is 0 to ", capacity));
    }
    const i64 length = rows_of(at.rows, capacity, false).length;
    if (at.start < 0 || at.start > length) {
      refuse(sentence("kv_start[", index, "] is ", at.start, ", but request ", index, " has ",
                      length, " keys; allowed is 0 to ", length));
    }
  }
}

void check_tree(const Problem& problem) {
  if (!problem.has(Array::kTree)) return;
  for (i64 index = 0; index < problem.num_sequences; ++index) {
    const AxisEntry q =
        entry_of(problem.arrays[Array::kCuQ], problem.arrays[Array::kQLengths], index);
    const i64 rows = rows_of(q, problem.q_rows, false).length;
    if (rows <= kMaxTreeRows) continue;
    refuse(sentence("request ", index, " has ", rows, " query rows, but tree has bits for ",
                    kMaxTreeRows, "; allowed is 0 to ", kMaxTreeRows,
                    ": a boolean mask takes more"));
  }
}

void check_positions(const Problem& problem) {
  const Tensor& positions = problem.arrays[Array::kPositions];
  if (!positions.present() || positions.dtype == DType::kInt32) return;
  for (i64 batch = 0; batch < positions.shape[0]; ++batch) {
    for (i64 row = 0; row < positions.shape[3]; ++row) {
      const i64 position = positions.index(batch, 0, 0, row);
      if (position == clamped_position(position)) continue;
      refuse(sentence("positions has ", position, " at row ", row,
                      "; allowed is -2147483648 to 2147483647"));
    }
  }
}

}  // namespace

Array Problem::cache_array() const {
  for (const Array array : kCacheArrays) {
    if (has(array)) return array;
  }
  return Array::kCount;
}

CacheLayout Problem::cache_layout() const {
  return {.paged = is_paged(),
          .page_rows = entry_keys(),
          .table_pages = arrays[Array::kPageTable].shape[3],
          .has_tree = has(Array::kTree),
          .slot_rows = slots ? static_cast<u32>(page_rows) : 0};
}

CacheSequence Problem::sequence(i64 index) const {
  const bool is_last = index + 1 == num_sequences;
  const i64 batch = packed.q ? 0 : index;
  const i64 kv_batch = packed.kv ? 0 : index;
  const bool bottom_right = alignment == Alignment::kBottomRight;
  const AxisEntry q = entry_of(arrays[Array::kCuQ], arrays[Array::kQLengths], index);
  if (has_caches()) {
    return cache_sequence_of(cache_layout(), q, q_rows, cache_entry(*this, index), kv_rows, batch,
                             kv_batch, is_last, bottom_right);
  }
  const AxisEntry kv = entry_of(arrays[Array::kCuKv], arrays[Array::kKvLengths], index);
  const AxisRows rows = rows_of(q, q_rows, is_last);
  return {sequence_of(batch, rows, rows_of(kv, kv_rows, is_last), bottom_right), kv_batch, 0, 0, 0};
}

KeyRow Problem::key(const CacheSequence& sequence, i64 j) const {
  return key_row(cache_layout(), sequence, j, [&](i64 page) {
    return arrays[Array::kPageTable].index(sequence.kv_batch, 0, 0, page);
  });
}

double Problem::kv_scale(Array array, const KeyRow& at, i64 kv_head, i64 d) const {
  const Tensor& scale = arrays[array == Array::kK ? Array::kKScale : Array::kVScale];
  if (!scale.present()) return 1;
  return fulmen::kv_scale(scale.real(at.batch, kv_head, at.row, array == Array::kK ? 0 : d));
}

double Problem::q_scale(i64 batch, i64 head, i64 row) const {
  const Tensor& scale = arrays[Array::kQScale];
  return scale.present() ? fulmen::kv_scale(scale.real(batch, head, row, 0)) : 1.0;
}

RecordRow<const u8> Problem::record(Array array, const KeyRow& at, i64 kv_head) const {
  const Tensor& tensor = arrays[array];
  const char* const page = tensor.address(at.batch, kv_head, 0, 0);
  return {dim_qk, reinterpret_cast<const u8*>(page), at.row, tensor.shape[2], tensor.strides[2]};
}

i64 Problem::position(const CacheSequence& sequence, i64 i) const {
  if (!has(Array::kPositions)) return sequence.shape.position(i);
  return clamped_position(
      arrays[Array::kPositions].index(sequence.batch, 0, 0, sequence.q_begin + i));
}

i64 Problem::key_position(const CacheSequence& sequence, i64 j) const {
  const i64 draft = j - first_drafted(sequence.shape);
  const bool is_drafted = has(Array::kTree) && has(Array::kPositions) && draft >= 0;
  return is_drafted ? position(sequence, draft) : j;
}

bool Problem::sees(const CacheSequence& sequence, i64 i, i64 j) const {
  if (has(Array::kTree)) {
    const i64 word = arrays[Array::kTree].index(sequence.batch, 0, 0, sequence.q_begin + i);
    if (!tree_shows(sequence.shape, word, j)) return false;
  }
  if (slots && has_no_slot(cache_layout(), key(sequence, j))) return false;
  return sees_at(mask, position(sequence, i), key_position(sequence, j), j);
}

bool Problem::misses_slots(const CacheSequence& sequence) const {
  for (i64 j = 0; slots && j < sequence.shape.kv_len; ++j) {
    if (has_no_slot(cache_layout(), key(sequence, j))) return true;
  }
  return false;
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
  if (!problem.is_paged()) check_counts(problem, kv);
  if (problem.has_caches()) {
    check_page_offsets(problem);
    check_cache_lengths(problem);
    check_positions(problem);
    check_tree(problem);
  }
  for (const Array array : {Array::kBias, Array::kMask}) {
    if (!problem.has(array)) continue;
    if (problem.packed.q) {
      check_mask_extent(problem, array, 2, longest_sequence(problem, Array::kCuQ));
    }
    if (problem.packed.kv) {
      check_mask_extent(problem, array, 3, longest_sequence(problem, Array::kCuKv));
    }
  }
}

namespace {

// kv_shared: not negative, and that the first pages of all requests are those of the first one that
// has any keys.
void check_shared(const Problem& problem) {
  if (!problem.has(Array::kKvShared)) return;
  const Tensor& table = problem.arrays[Array::kPageTable];
  i64 first = -1;
  for (i64 index = 0; index < problem.num_sequences; ++index) {
    const i64 shared = entry(problem, Array::kKvShared, index);
    if (shared < 0)
      refuse(sentence("kv_shared[", index, "] is ", shared, "; allowed is 0 or more"));
    const CacheSequence sequence = problem.sequence(index);
    if (!shares_keys(sequence.shape)) continue;
    if (first < 0) first = index;
    const CacheSequence other = problem.sequence(first);
    const i64 keys = min(shared_keys(sequence.shape, shared), i64{other.shape.kv_len});
    for (i64 page = 0; page < ceil_div(keys, problem.entry_keys()); ++page) {
      const i64 id = table.index(sequence.kv_batch, 0, 0, sequence.first_page + page);
      const i64 wanted = table.index(other.kv_batch, 0, 0, other.first_page + page);
      if (id == wanted) continue;
      refuse(sentence("kv_shared says that request ", index, " has the first ", keys,
                      " keys of request ", first, ", but its page ", page, " is ", id, ", not ",
                      wanted, "; leave kv_shared out, or say fewer"));
    }
  }
}

}  // namespace

void check_pages(const Problem& problem) {
  if (!problem.is_paged()) return;
  for (i64 index = 0; index < problem.num_sequences; ++index) {
    const CacheSequence sequence = problem.sequence(index);
    const Interval used = pages_in_use(problem.cache_layout(), sequence);
    for (i64 page = used.begin; page < used.end; ++page) {
      const i64 id = problem.arrays[Array::kPageTable].index(sequence.kv_batch, 0, 0, page);
      const i64 entries = problem.num_pages * (problem.slots ? problem.page_rows : 1);
      if (!is_bad_page(id, entries) || (problem.slots && id == kNoSlot)) continue;
      const bool ragged = problem.has(Array::kPageIndptr);
      refuse(sentence("page_table[", ragged ? "" : sentence(index, ", "), page, "] is ", id,
                      ", but k and v have ", entries, problem.slots ? " slots" : " pages",
                      "; allowed is 0 to ", entries - 1,
                      problem.slots ? ", and -1 for a key that is hidden" : ""));
    }
  }
  check_shared(problem);
}

}  // namespace fulmen
