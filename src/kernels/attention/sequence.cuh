// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which rows belong to which batch entry: dense, padded (lengths) or packed (cumulative offsets).
// And of caches: which keys of a page table, and where a key lies.
// Contents of lengths and offsets are never trusted: an entry that is out of range counts as empty.
// The host reads them for CPU problems, kernels read them on the device; both come here.
#pragma once

#include "kernels/attention/mask.cuh"

namespace fulmen {

// Which side's sequences lie one behind the other, without a batch axis.
struct Packed {
  bool q = false;
  bool kv = false;
};

// Entries of lengths, offsets, page tables and rng, and indices, that are out of range, as bits
// with the numbers of fulmen.h.
enum Fault : u32 {
  kFaultQOffsets = 1,
  kFaultKvOffsets = 2,
  kFaultQLengths = 4,
  kFaultKvLengths = 8,
  kFaultRng = 16,
  kFaultPages = 32,
  kFaultSlots = 64,
  kFaultPositions = 128,
  kFaultCaptures = 256,
  kFaultBlocks = 512,
  kFaultSegments = 1024,
};
constexpr i32 kNumFaults = 11;

// Faults that kernels met, in memory which the host reads meanwhile: a byte each, 1 once it was
// met. Stores of bytes disturb no others, and host and device need no atomics in common.
struct FaultBytes {
  u8 met[kNumFaults];

  constexpr u32 bits() const {
    u32 all = 0;
    for (i32 i = 0; i < kNumFaults; ++i) all |= met[i] != 0 ? 1u << i : 0;
    return all;
  }
};

// One batch entry: where its rows start in the arrays, how many there are, and how many count.
struct Sequence {
  i64 batch;     // index into the batch axis of the arrays; 0 when packed
  i64 q_begin;   // its first row in q, o, lse and their gradients
  i64 kv_begin;  // its first row in k, v and their gradients
  i64 q_slot;   // rows it owns from q_begin on; rows [q_len, q_slot) of the results are zero-filled
  i64 kv_slot;  // likewise of k, v
  SequenceShape shape;
};

// What the caller's arrays say of one entry along one axis.
struct AxisEntry {
  bool packed;      // begin and end hold two neighbouring offsets
  bool has_length;  // length holds a length
  i64 begin;
  i64 end;
  i64 length;
};

struct AxisRows {
  i64 begin;
  i64 slot;
  i64 length;
};

// The last entry of a packed axis also owns the rows past the last offset.
constexpr AxisRows rows_of(const AxisEntry& entry, i64 extent, bool is_last) {
  AxisRows rows{0, extent, extent};
  if (entry.packed) {
    const bool valid = 0 <= entry.begin && entry.begin <= entry.end && entry.end <= extent;
    if (!valid) return {0, 0, 0};
    rows = {entry.begin, (is_last ? extent : entry.end) - entry.begin, entry.end - entry.begin};
  }
  if (entry.has_length) {
    rows.length = 0 <= entry.length && entry.length <= rows.length ? entry.length : 0;
  }
  return rows;
}

constexpr u32 axis_faults(const AxisEntry& entry, i64 extent, u32 bad_offsets, u32 bad_length) {
  i64 rows = extent;
  if (entry.packed) {
    if (entry.begin < 0 || entry.begin > entry.end || entry.end > extent) return bad_offsets;
    rows = entry.end - entry.begin;
  }
  return entry.has_length && (entry.length < 0 || entry.length > rows) ? bad_length : 0u;
}

constexpr Sequence sequence_of(i64 batch, const AxisRows& q, const AxisRows& kv,
                               bool bottom_right) {
  const i64 shift = bottom_right ? kv.length - q.length : 0;
  return {
      batch,    q.begin,
      kv.begin, q.slot,
      kv.slot,  {static_cast<i32>(q.length), static_cast<i32>(kv.length), static_cast<i32>(shift)}};
}

// ---- Caches ------------------------------------------------------------------------------------

inline constexpr i64 kMaxPosition = 2147483647;  // positions have 32 bits
constexpr i64 clamped_position(i64 position) {
  return clamp(position, -kMaxPosition - 1, kMaxPosition);
}

inline constexpr i64 kMaxTreeRows = 64;  // query rows of a request with a tree mask

// How the keys of all requests lie.
struct CacheLayout {
  bool paged;       // k and v are pools of pages
  i64 page_rows;    // keys of an entry of page_table: those of a page, or 1 where it holds slots
  i64 table_pages;  // entries of page_table along its last axis
  bool has_tree;
  u32 slot_rows;  // page_table holds slots: rows of a page; else 0
};

inline constexpr i64 kNoSlot = -1;  // of a key that is hidden

// One request. Its keys are counted from kv_start: key 0 is the first that is not hidden as
// padding; kv_begin is that key's row in k and v or, with a page table, its number in the cache.
struct CacheSequence : Sequence {
  i64 kv_batch;    // as batch, of k, v, their ids and the page table
  i64 first_key;   // kv_start: the column of key 0 in mask and bias
  i64 first_page;  // its first entry along the last axis of the page table
  u32 faults;      // what is wrong with its entries, but for ids of pages and positions
};

// What the caller's arrays say of the keys of one request.
struct CacheEntry {
  AxisEntry rows;  // cu_kv, kv_lengths
  i64 page_begin;  // its entries in page_table: [page_begin, page_end)
  i64 page_end;
  i64 start;  // kv_start, or 0
};

// The most keys that the request's pages hold; kv_rows: the most that any request may have.
constexpr i64 capacity_of(const CacheLayout& layout, const CacheEntry& entry, i64 kv_rows) {
  if (!layout.paged) return kv_rows;
  return min(kv_rows, (entry.page_end - entry.page_begin) * layout.page_rows);
}

// What is wrong with an entry; its request counts as empty then. Ids of pages are looked at apart.
constexpr u32 cache_faults(const CacheLayout& layout, const CacheEntry& entry, i64 kv_rows) {
  if (layout.paged && (entry.page_begin < 0 || entry.page_begin > entry.page_end ||
                       entry.page_end > layout.table_pages)) {
    return kFaultKvOffsets;
  }
  const i64 capacity = capacity_of(layout, entry, kv_rows);
  const u32 faults = axis_faults(entry.rows, capacity, kFaultKvOffsets, kFaultKvLengths);
  const i64 length = rows_of(entry.rows, capacity, false).length;
  const bool bad_start = faults == 0 && (entry.start < 0 || entry.start > length);
  return bad_start ? u32{kFaultKvLengths} : faults;
}

// A request whose keys are those of a cache, from kv_start on. q: what is said of its rows; a tree
// mask has bits for 64 of them, a request of more is empty.
constexpr CacheSequence cache_sequence_of(const CacheLayout& layout, const AxisEntry& q, i64 q_rows,
                                          const CacheEntry& entry, i64 kv_rows, i64 batch,
                                          i64 kv_batch, bool is_last, bool bottom_right) {
  u32 faults = axis_faults(q, q_rows, kFaultQOffsets, kFaultQLengths);
  const u32 of_keys = cache_faults(layout, entry, kv_rows);
  AxisRows rows = rows_of(q, q_rows, is_last);
  AxisRows keys{0, 0, 0};
  i64 start = 0;
  if (of_keys == 0) {
    start = entry.start;
    keys = rows_of(entry.rows, capacity_of(layout, entry, kv_rows), is_last);
    keys.begin += start;
    keys.length -= start;
  }
  if (layout.has_tree && rows.length > kMaxTreeRows) {
    rows.length = 0;
    faults |= q.has_length ? kFaultQLengths : kFaultQOffsets;
  }
  return {sequence_of(batch, rows, keys, bottom_right), kv_batch, start,
          layout.paged ? entry.page_begin : 0, faults | of_keys};
}

// Where the rows of a key lie: on the first axis and on the row axis of k, v and what is like them.
struct KeyRow {
  i64 batch;  // or page, of which the table's word is not checked yet
  i64 row;
};

constexpr KeyRow row_at_slot(const CacheLayout& layout, i64 slot) {
  if (slot < 0) return {slot, 0};
  const u64 rows = layout.slot_rows;
  return {static_cast<i64>(static_cast<u64>(slot) / rows),
          static_cast<i64>(static_cast<u64>(slot) % rows)};
}

// Whether there is no slot for a key: it is hidden. It may be read at any other place.
constexpr bool has_no_slot(const CacheLayout& layout, const KeyRow& key) {
  return layout.slot_rows > 0 && key.batch == kNoSlot;
}
constexpr KeyRow readable(const CacheLayout& layout, const KeyRow& key) {
  return has_no_slot(layout, key) ? KeyRow{0, 0} : key;
}

// Key j of a request. page_at(entry): the id in that entry of its page table.
template <class PageAt>
constexpr KeyRow key_row(const CacheLayout& layout, const CacheSequence& sequence, i64 j,
                         const PageAt& page_at) {
  const i64 row = sequence.kv_begin + j;
  if (!layout.paged) return {sequence.kv_batch, row};
  if (layout.slot_rows > 0) return row_at_slot(layout, page_at(sequence.first_page + row));
  const u32 rows = static_cast<u32>(layout.page_rows);  // 64-bit divisions are calls
  return {page_at(sequence.first_page + static_cast<u32>(row) / rows),
          static_cast<u32>(row) % rows};
}

// Whether an id names no page. Of entries [begin, end) of a request, those that hold its keys:
constexpr bool is_bad_page(i64 page, i64 num_pages) { return page < 0 || page >= num_pages; }
constexpr Interval pages_in_use(const CacheLayout& layout, const CacheSequence& sequence) {
  const i64 end = sequence.kv_begin + sequence.shape.kv_len;
  if (!layout.paged || sequence.shape.kv_len == 0) return {0, 0};
  return {sequence.first_page + sequence.kv_begin / layout.page_rows,
          sequence.first_page + ceil_div(end, layout.page_rows)};
}

// The first keys of a request that others have too, where its kv_shared says `shared`: as far as
// all of its query rows stand behind them. Requests without rows or keys say nothing of what is
// shared.
constexpr bool shares_keys(const SequenceShape& shape) {
  return shape.q_len > 0 && shape.kv_len > 0;
}
constexpr i64 shared_keys(const SequenceShape& shape, i64 shared) {
  return max<i64>(0, min<i64>(shared, shape.kv_len - shape.q_len));
}

// The keys whose bits a tree mask has: the last q_len, bit t that of key first_drafted() + t.
// Earlier keys are visible to all rows.
constexpr i64 first_drafted(const SequenceShape& shape) { return shape.kv_len - shape.q_len; }
constexpr bool tree_shows(const SequenceShape& shape, i64 word, i64 j) {
  const i64 bit = j - first_drafted(shape);
  return bit < 0 || (static_cast<u64>(word) >> bit & 1) != 0;
}

// ---- Lists of blocks ---------------------------------------------------------------------------

// Block-sparse attention: a list for each block of query rows names the blocks of keys that those
// rows see. Entries come in any order and may repeat; -1 names none, and what names no block counts
// as that.
//
// The list of a query head, of `lists` ones: its own, that of its key/value head, or the only one.
constexpr i64 list_of_head(i64 head, i64 heads_q, i64 lists) {
  return lists == 1
             ? 0
             : static_cast<u32>(head) / (static_cast<u32>(heads_q) / static_cast<u32>(lists));
}

constexpr bool is_bad_block(i64 id, i64 num_blocks) { return id < -1 || id >= num_blocks; }

}  // namespace fulmen
