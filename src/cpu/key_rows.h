// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Where the keys of a sequence lie: the one file in which the tiled backend knows page tables.
// Which of them rows see is core/block_map.h's word.
#pragma once

#include <cstring>

#include "core/block_map.h"
#include "cpu/rows.h"

namespace fulmen::cpu {

// Rows of k or v, with their scales; those of v for each dim are for o (row_results.h).
inline Source key_source(const Problem& problem, Array array, const KeyRow& at, i64 kv_head) {
  const bool by_row = array == Array::kK || !problem.has_channel_scales();
  return source_of(
      problem.arrays[array],
      by_row ? problem.arrays[array == Array::kK ? Array::kKScale : Array::kVScale] : Tensor{},
      at.batch, kv_head, at.row);
}

// The record of a key.
inline RecordRow<const u8> record_of(const Problem& problem, const CacheSequence& sequence,
                                     Array array, i64 kv_head, i64 key) {
  return problem.record(array, readable(problem.cache_layout(), problem.key(sequence, key)),
                        kv_head);
}

// The numbers of a record, then zeros.
template <class Real>
void load_record(const RecordRow<const u8>& record, i64 dims, Real* to, i64 padded_dims) {
  const RecordLayout& layout = record.layout;
  for (i64 first = 0; first < dims && first < layout.stored(); first += layout.group) {
    const Real scale = static_cast<Real>(record_scale(record, first / layout.group));
    const i64 end = min(first + layout.group, dims);
    for (i64 d = first; d < end; ++d) {
      to[d] = static_cast<Real>(to_float(e4m3{record.stored[d]})) * scale;
    }
  }
  for (i64 d = layout.stored(); d < dims; ++d) to[d] = record_number<Real>(record, d);
  std::fill(to + dims, to + padded_dims, Real(0));
}

// Of k or v, keys [keys.begin, keys.end) in runs that lie one row behind the other: call(first key
// of the run, their number, where they lie). A run ends with its page; a key in a slot is one.
// Not of records.
template <class Call>
void for_each_run(const Problem& problem, const CacheSequence& sequence, Array array, i64 kv_head,
                  Interval keys, const Call& call) {
  const CacheLayout layout = problem.cache_layout();
  for (i64 key = keys.begin; key < keys.end;) {
    const KeyRow at = readable(layout, problem.key(sequence, key));
    const i64 left = problem.slots        ? 1
                     : problem.is_paged() ? problem.page_rows - at.row
                                          : keys.size();
    const i64 count = min(left, keys.end - key);
    call(key, count, key_source(problem, array, at, kv_head));
    key += count;
  }
}

// Where keys are loaded to.
template <class Real>
struct LoadedRows {
  Real* rows;
  i64 stride;
};

// Records one by one.
template <class Real>
void load_records(const Problem& problem, const CacheSequence& sequence, Array array, i64 kv_head,
                  Interval keys, const LoadedRows<Real>& to) {
  for (i64 key = keys.begin; key < keys.end; ++key) {
    load_record(record_of(problem, sequence, array, kv_head, key), problem.dims(array),
                to.rows + (key - keys.begin) * to.stride, to.stride);
  }
}

// Keys in the working type, some at a time: call(first key, their number).
template <class Real, class Call>
void for_each_loaded(const Problem& problem, const CacheSequence& sequence,
                     const Kernels<Real>& kernels, Array array, i64 kv_head, Interval keys,
                     i64 at_once, const LoadedRows<Real>& to, const Call& call) {
  if (problem.has_records()) {
    for (i64 first = keys.begin; first < keys.end; first += at_once) {
      const Interval some{first, min(first + at_once, keys.end)};
      load_records(problem, sequence, array, kv_head, some, to);
      call(first, some.size());
    }
    return;
  }
  for_each_run(
      problem, sequence, array, kv_head, keys, [&](i64 key, i64 count, const Source& source) {
        for (i64 done = 0; done < count; done += at_once) {
          const i64 now = min(at_once, count - done);
          kernels.load_rows(rows_from(source, done), now, problem.dims(array), to.rows, to.stride);
          call(key + done, now);
        }
      });
}

// The same keys, which are not quantised, as one source: where they lie, or copied from several
// runs to `copies`, which has room for them.
inline Source keys_in_one(const Problem& problem, const CacheSequence& sequence, Array array,
                          i64 kv_head, Interval keys, void* copies) {
  const Tensor& tensor = problem.arrays[array];
  const i64 dims = tensor.shape[3];
  const i64 size = size_bytes(tensor.dtype);
  Source one{copies, tensor.dtype, dims, 1};
  for_each_run(
      problem, sequence, array, kv_head, keys, [&](i64 key, i64 count, const Source& source) {
        if (count == keys.size()) {
          one = source;
          return;
        }
        char* to = static_cast<char*>(copies) + (key - keys.begin) * dims * size;
        for (i64 row = 0; row < count; ++row) {
          const char* from = static_cast<const char*>(source.data) + row * source.row_stride * size;
          if (source.dim_stride == 1) {
            std::memcpy(to, from, static_cast<size_t>(dims * size));
            to += dims * size;
            continue;
          }
          for (i64 d = 0; d < dims; ++d, to += size) {
            std::memcpy(to, from + d * source.dim_stride * size, static_cast<size_t>(size));
          }
        }
      });
  return one;
}

// A block of keys that a task reads next, asked for while it works on another, a line of every key
// at a time. Nothing of what does not lie in one piece.
class KeysAhead {
 public:
  KeysAhead() = default;
  KeysAhead(const Problem& problem, const CacheSequence& sequence, i64 kv_head, i64 first) {
    if (problem.is_paged() || problem.has_records()) return;
    for (const Array array : {Array::kK, Array::kV}) {
      const KeyRow at = readable(problem.cache_layout(), problem.key(sequence, first));
      const Source source = key_source(problem, array, at, kv_head);
      const i64 size = size_bytes(source.dtype);
      if (source.dim_stride != 1) continue;
      arrays_[array == Array::kV] = {
          {static_cast<const char*>(source.data), source.row_stride * size},
          ceil_div(problem.dims(array) * size, kLine)};
    }
  }

  LinesAhead next() {
    for (Lines& some : arrays_) {
      if (some.left == 0) continue;
      --some.left;
      const LinesAhead now = some.lines;
      some.lines.first += kLine;
      return now;
    }
    return {};
  }

 private:
  static constexpr i64 kLine = 64;
  struct Lines {
    LinesAhead lines;
    i64 left = 0;
  };
  Lines arrays_[2];
};

// Rows of `heads` heads: of head h, those of the first h * head_bytes further on.
struct HeadRows {
  const void* const* rows;  // of the first head
  DType dtype;
  i64 count;
  i64 row_bytes;
  i64 heads;
  i64 head_bytes;
  i64 at_once;      // keys of a step
  i64 bytes_ahead;  // from what is multiplied to what is asked for

  i64 steps_ahead() const { return max<i64>(1, bytes_ahead / (at_once * max<i64>(1, row_bytes))); }

  // What step `step` reads; no rows past the last step.
  KeyList step(i64 step) const {
    const i64 key = min(step / heads * at_once, count);
    return {rows + key, dtype, min(at_once, count - key), step % heads * head_bytes};
  }
};

// How many keys a step has: whole units where it is one head's, or so many inside a token; and how
// far ahead keys are asked for.
struct KeysOfStep {
  i64 unit;
  i64 inside_token;
  i64 bytes_ahead;
};

// Inside a token: a vector of keys, or with so few rows that a core has arithmetic to spare, half
// of one, since tokens that are a multiple of 4 KiB apart share few sets of a first cache, which
// hold 8 to 12 of them. By tiles, the depth of a product, whatever a core has to spare: sums are
// then the same however many heads are read together.
//
// By vectors 8 KiB are asked for ahead, which memory gives a core in the time that it takes to
// answer. Tiles ask for what the second cache is to hold, further ahead.
inline KeysOfStep keys_of_step(bool by_tiles, bool has_few_rows) {
  if (by_tiles) return {32, 32, 65536};
  return {16, has_few_rows ? 8 : 16, 8192};
}

inline void list_rows(const Source& source, i64 count, const void** rows) {
  const i64 bytes = source.row_stride * size_bytes(source.dtype);
  for (i64 key = 0; key < count; ++key) {
    rows[key] = static_cast<const char*>(source.data) + key * bytes;
  }
}

// One head, behind each other: a third of a first cache.
inline i64 keys_at_once(i64 heads, i64 row_bytes, KeysOfStep keys) {
  constexpr i64 kBytes = 16384;
  if (heads > 1) return keys.inside_token;
  return max(kBytes / max<i64>(1, row_bytes) / keys.unit, i64{1}) * keys.unit;
}

// The `count` rows of k or v of each of `heads` neighbouring heads; rows: where those of the first
// lie.
inline HeadRows rows_of_heads(const Tensor& tensor, i64 heads, const void* const* rows, i64 count,
                              KeysOfStep keys) {
  const i64 size = size_bytes(tensor.dtype);
  const i64 row_bytes = tensor.shape[3] * size;
  return {.rows = rows,
          .dtype = tensor.dtype,
          .count = count,
          .row_bytes = row_bytes,
          .heads = heads,
          .head_bytes = tensor.strides[1] * size,
          .at_once = keys_at_once(heads, row_bytes, keys),
          .bytes_ahead = keys.bytes_ahead};
}

// Keys or values of neighbouring heads, read where they lie and nearly in the order of memory: a
// few keys at a time, of those head by head. What a later step reads is asked for meanwhile, in
// that order. Read head by head instead, heads inside a token are pieces of 256 bytes a token
// apart, which no prefetching of a processor follows and which meet in few sets of a first cache.
// call(head, first key, keys)
template <class Call>
void walk(const HeadRows& in, const Call& call) {
  const i64 steps = ceil_div(in.count, in.at_once) * in.heads;
  for (i64 step = 0; step < steps; ++step) {
    KeyList keys = in.step(step);
    const KeyList then = in.step(step + in.steps_ahead());
    keys.ahead = then.rows;
    keys.num_ahead = then.count;
    keys.ahead_offset = then.offset;
    call(step % in.heads, step / in.heads * in.at_once, keys);
  }
}

// Asks for what a step reads, before a walk begins: of the first steps, which a second cache holds.
inline void fetch_step(const HeadRows& in, i64 step) {
  constexpr i64 kLine = 64, kBytes = 65536;
  if (step * in.at_once * in.row_bytes >= kBytes) return;
  const KeyList keys = in.step(step);
  for (i64 key = 0; key < keys.count; ++key) {
    const char* const row = static_cast<const char*>(keys.rows[key]) + keys.offset;
    for (i64 at = 0; at < in.row_bytes; at += kLine) __builtin_prefetch(row + at);
  }
}

}  // namespace fulmen::cpu
