// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which blocks of keys there are, and which of them a block of the grid has. Lengths are read here,
// by the kernel: no metadata, and a graph may replay with others.
//
// Chunks of keys are numbered head by head and in a head sequence by sequence, so that the blocks
// of the grid that run together read all heads of the same keys: heads of a token lie side by side.
#pragma once

#include "kernels/common/caches.cuh"
#include "kernels/common/warp_mma_sm80.cuh"
#include "kernels/decode_sm80/config.h"
#include "kernels/ptx/grid.cuh"

namespace fulmen {

// Which block of the cluster.
template <DecodeSm80Config kConfig>
i32 cluster_rank() {
  if constexpr (kConfig.cluster == 1) return 0;
  return static_cast<i32>(ptx::cluster_rank());
}

// Keys [begin, end) of a sequence.
struct Keys {
  i32 begin;
  i32 end;

  constexpr bool contains(i32 key) const { return begin <= key && key < end; }
  constexpr bool meets(const Keys& keys) const { return begin < keys.end && keys.begin < end; }
};

// One sequence: where it is in arrays of q; its first row of q and of k, v, with a page table its
// first entry and the number of its first key; its lengths; what is wrong with it.
struct DecodeSequence {
  i32 batch;
  i32 q_begin;
  i32 kv_begin;
  i32 first_page;
  SequenceShape shape;
  u32 faults;
};

// Of arrays that may all be there.
template <DecodeSm80Config kConfig>
__attribute__((noinline)) DecodeSequence load_ragged_sequence(const AttentionParams& p, i64 index) {
  const CacheSequence sequence = load_cache_sequence<AlignedIndex>(p, index);
  return {static_cast<i32>(sequence.batch),
          static_cast<i32>(sequence.q_begin),
          static_cast<i32>(sequence.kv_begin),
          static_cast<i32>(sequence.first_page),
          sequence.shape,
          sequence.faults};
}

inline DecodeSequence sequence_of_length(const AttentionParams& p, i32 index, i32 kv_len,
                                         u32 faults) {
  const i32 q_len = static_cast<i32>(p.q_rows);
  return {index, 0, 0, 0, {q_len, kv_len, p.bottom_right ? kv_len - q_len : 0}, faults};
}

// Of kv_lengths alone: a few instructions. At the start of a kernel each is fetched from memory.
inline DecodeSequence load_sequence_of_length(const AttentionParams& p, i64 index) {
  const i64 length = AlignedIndex::load(p.kv_lengths, index * p.kv_lengths.strides[3]);
  const bool is_bad = length < 0 || length > p.kv_rows;
  return sequence_of_length(p, static_cast<i32>(index), is_bad ? 0 : static_cast<i32>(length),
                            is_bad ? u32{kFaultKvLengths} : 0);
}

// Sequence number `index`, of no rows behind the last.
template <DecodeSm80Config kConfig>
DecodeSequence decode_sequence(const AttentionParams& p, i64 index) {
  if (index >= p.num_sequences) return {};
  if constexpr (kConfig.mixed) {
    DecodeSequence sequence = load_ragged_sequence<kConfig>(p, index);
    if (!has_few_rows(p, sequence.shape.q_len)) sequence.shape.q_len = 0;
    return sequence;
  }
  if constexpr (kConfig.ragged) return load_ragged_sequence<kConfig>(p, index);
  if constexpr (kConfig.score.varlen) return load_sequence_of_length(p, index);
  return sequence_of_length(p, static_cast<i32>(index), static_cast<i32>(p.kv_rows), 0);
}

// Where rows of q and keys stand: that of caches.cuh, which is not even asked where a kernel is
// compiled for no such arrays.
template <DecodeSm80Config kConfig>
i32 row_position(const AttentionParams& p, const DecodeSequence& sequence, i32 i) {
  if constexpr (!kConfig.placed) return static_cast<i32>(sequence.shape.position(i));
  return static_cast<i32>(row_position<AlignedIndex>(p, sequence, i));
}
template <DecodeSm80Config kConfig>
i32 key_position(const AttentionParams& p, const DecodeSequence& sequence, i32 j) {
  if constexpr (!kConfig.placed || !kConfig.tree) return j;
  return static_cast<i32>(key_position<AlignedIndex>(p, sequence, j));
}

// The keys that row i sees, but for a tree mask.
template <DecodeSm80Config kConfig>
Keys keys_seen_by(const AttentionParams& p, const DecodeSequence& sequence, i32 i) {
  const i64 position = row_position<kConfig>(p, sequence, i);
  const Interval keys = visible_columns_at(p.mask_options, sequence.shape.kv_len, position);
  return {static_cast<i32>(keys.begin), static_cast<i32>(keys.end)};
}

// What query rows `first` to `last` of a sequence see: some of them, all of them. Nothing where
// there are no such rows. With a tree mask all see what lies before the keys that it has bits of.
struct SeenKeys {
  Keys some;
  Keys all;
};

template <DecodeSm80Config kConfig>
SeenKeys seen_keys(const AttentionParams& p, const DecodeSequence& sequence, i32 first, i32 last) {
  const SequenceShape& shape = sequence.shape;
  if (first > last) return {};
  SeenKeys seen{{0, shape.kv_len}, {0, shape.kv_len}};
  if constexpr (kConfig.score.mask_kind != MaskKind::kNone) {
    seen.some = seen.all = keys_seen_by<kConfig>(p, sequence, first);
    const i32 step = kConfig.placed ? 1 : max(1, last - first);  // ends never decrease by row
    for (i32 i = first + step; i <= last; i += step) {
      const Keys keys = keys_seen_by<kConfig>(p, sequence, i);
      seen.some = {min(seen.some.begin, keys.begin), max(seen.some.end, keys.end)};
      seen.all = {max(seen.all.begin, keys.begin), min(seen.all.end, keys.end)};
    }
    if (seen.some.begin >= seen.some.end) seen.some = {0, 0};
  }
  if constexpr (kConfig.tree) {
    const i32 drafted = static_cast<i32>(max<i64>(0, first_drafted(shape)));
    seen.some = {min(seen.some.begin, drafted), shape.kv_len};
    seen.all.end = min(seen.all.end, drafted);
  }
  return seen;
}

// The query rows that are in a row tile of every sequence that has them.
struct QueryRows {
  i32 first;
  i32 last;
};

// The blocks of keys that some of these rows of a sequence see, in chunks that begin at multiples
// of kChunk blocks.
template <i32 kChunk>
struct ChunkedBlocks {
  Keys keys;
  i32 first;
  i32 count;

  constexpr i32 num_chunks() const {
    return count == 0 ? 0 : (first + count - 1) / kChunk - first / kChunk + 1;
  }
  // Block number `block` of these is the first of a chunk, or behind the last.
  constexpr bool begins_chunk(i32 block) const {
    return block == count || (first + block) % kChunk == 0;
  }
  // The first of chunk number `chunk`.
  constexpr i32 block_of(i32 chunk) const {
    return max(0, (first / kChunk + chunk) * kChunk - first);
  }
};

template <DecodeSm80Config kConfig>
ChunkedBlocks<kConfig.chunk_blocks> chunked_blocks(const AttentionParams& p,
                                                   const DecodeSequence& sequence,
                                                   const QueryRows& rows) {
  constexpr i32 kKeys = kConfig.block_keys();
  const i32 last = min(rows.last, sequence.shape.q_len - 1);
  const Keys keys = seen_keys<kConfig>(p, sequence, rows.first, last).some;
  const i32 first = keys.begin / kKeys;
  return {keys, first, keys.begin < keys.end ? (keys.end + kKeys - 1) / kKeys - first : 0};
}

// Sequences, as a warp walks along them: a lane holds one of 32 neighbours. All lanes together.
template <DecodeSm80Config kConfig>
class SequenceWindow {
 public:
  DecodeSequence at(const AttentionParams& p, i32 index) {
    if constexpr (!kConfig.score.varlen) return decode_sequence<kConfig>(p, index);
    if (index / 32 != number_) {
      number_ = index / 32;
      own_ = decode_sequence<kConfig>(p, i64{number_} * 32 + lane_index());
    }
    const u32 lane = static_cast<u32>(index) % 32;
    const SequenceShape& shape = own_.shape;
    if constexpr (!kConfig.ragged) {
      return sequence_of_length(p, index, ptx::shuffle(shape.kv_len, lane), 0);
    }
    return {p.packed.q ? 0 : index,
            ptx::shuffle(own_.q_begin, lane),
            ptx::shuffle(own_.kv_begin, lane),
            ptx::shuffle(own_.first_page, lane),
            {ptx::shuffle(shape.q_len, lane), ptx::shuffle(shape.kv_len, lane),
             ptx::shuffle(shape.shift, lane)},
            0};
  }

 private:
  i32 number_ = -1;  // of the window
  DecodeSequence own_{};
};

// A block of keys of the heads of k and v of a row tile in one sequence, and the way to the next.
template <DecodeSm80Config kConfig>
struct KeyCursor {
  const AttentionParams* p;
  QueryRows rows;
  SequenceWindow<kConfig> window;
  i32 kv_head;  // in units of kConfig.heads: number of the row tile's
  i32 index;    // of the sequence
  i32 block;    // of those that it sees, from 0 on
  DecodeSequence sequence;
  ChunkedBlocks<kConfig.chunk_blocks> blocks;

  void enter() {
    sequence = window.at(*p, index);
    blocks = chunked_blocks<kConfig>(*p, sequence, rows);
  }
  // The first block of the next sequence that has any; there must be one.
  void next_tile() {
    block = 0;
    do {
      if (++index == p->num_sequences) {
        index = 0;
        ++kv_head;
      }
      sequence.batch = index;  // lengths are all the same
      if constexpr (kConfig.score.varlen) enter();
    } while (blocks.count == 0);
  }
  i64 kv_batch() const { return p->packed.kv ? 0 : index; }
  i64 first_head() const { return i64{kv_head} * kConfig.heads; }
  // Of the keys that a split takes, in its sequence.
  i32 first_key(i32 split) const {
    return (blocks.first + block) * kConfig.block_keys() + split * kConfig.kv_rows;
  }
};

// The counts of chunks that a block of the grid makes at its start, a thread a sequence, with words
// of shared memory. All threads of the block together.
template <DecodeSm80Config kConfig, i32 kThreads>
class KeyCounts {
 public:
  // words: 32 for warps, 2 for what is found.
  KeyCounts(const AttentionParams& p, const QueryRows& rows, u32 words)
      : p_(p), rows_(rows), words_(words) {
    if constexpr (!kConfig.score.varlen) {
      of_head_ = static_cast<i32>(p.num_sequences) * count_of(0);
      has_empty_ = of_head_ == 0;
    } else {
      count_round(0);
      i32 more = 0;
      for (i64 index = kThreads + ptx::thread_index(); index < p.num_sequences; index += kThreads) {
        more += counted(index);
      }
      of_head_ = of_round_;
      if (p.num_sequences > kThreads) {
        before_own(more, more);
        of_head_ += more;
      }
      if (ptx::block_index() == 0) report(p.faults, faults_);
    }
  }

  // Of a sequence; of all, for one head of k and v.
  i32 count_of(i32 index) const {
    const DecodeSequence sequence = decode_sequence<kConfig>(p_, index);
    return chunked_blocks<kConfig>(p_, sequence, rows_).num_chunks();
  }
  i32 of_head() const { return of_head_; }
  bool has_empty() const { return has_empty_; }  // sequences

  // Whether all sequences have as many chunks, if they are few. Before seek().
  bool is_even() {
    if constexpr (!kConfig.score.varlen) return true;
    constexpr i32 kFew = 256;
    static_assert(kThreads >= kFew);
    if (p_.num_sequences > kFew) return false;
    const bool differs = static_cast<i32>(ptx::thread_index()) < p_.num_sequences &&
                         i64{own_} * p_.num_sequences != of_head_;
    const bool any_differs = ptx::any(differs);
    ptx::block_sync();  // words of the round were read
    if (lane_index() == 0) ptx::store_shared(words_ + warp_index() * 4, any_differs);
    ptx::block_sync();  // warps -> what they found
    u32 all = 0;
#pragma unroll
    for (i32 warp = 0; warp < kFew / 32; ++warp) all |= ptx::load_shared(words_ + warp * 4);
    return all == 0;
  }

  // Number of the first chunk of a sequence, one of the first kThreads, among those of a head.
  // Before seek().
  i32 begin_of(i32 index) {
    if constexpr (!kConfig.score.varlen) return index * count_of(0);
    if (index == static_cast<i32>(ptx::thread_index())) {
      ptx::store_shared(words_ + 33 * 4, static_cast<u32>(before_own_));
    }
    ptx::block_sync();  // one thread -> what it found
    return static_cast<i32>(ptx::load_shared(words_ + 33 * 4));
  }

  // The cursor goes to chunk number `wanted` of a head's, below of_head(). Returns the number of
  // the sequence's first chunk.
  i32 seek(KeyCursor<kConfig>& cursor, i32 wanted) {
    i32 first = 0;
    if constexpr (!kConfig.score.varlen) {
      cursor.index = wanted / count_of(0);
      first = cursor.index * count_of(0);
    } else {
      i32 before = 0;  // chunks of the sequences before this round's
      for (i32 round = 0;; ++round) {
        if (round > 0) count_round(round);
        const i32 own = wanted - before - before_own_;
        if (0 <= own && own < own_) {
          const i32 index = round * kThreads + static_cast<i32>(ptx::thread_index());
          ptx::store_shared(words_ + 32 * 4, static_cast<u32>(index));
          ptx::store_shared(words_ + 33 * 4, static_cast<u32>(before + before_own_));
        }
        before += of_round_;
        if (before > wanted) break;
      }
      ptx::block_sync();  // one thread -> what it found
      cursor.index = static_cast<i32>(ptx::load_shared(words_ + 32 * 4));
      first = static_cast<i32>(ptx::load_shared(words_ + 33 * 4));
    }
    cursor.enter();
    cursor.block = cursor.blocks.block_of(wanted - first);
    return first;
  }

 private:
  i32 counted(i64 index) {
    const DecodeSequence sequence = decode_sequence<kConfig>(p_, index);
    faults_ |= sequence.faults;
    const i32 count = chunked_blocks<kConfig>(p_, sequence, rows_).num_chunks();
    has_empty_ |= count == 0 && index < p_.num_sequences;
    return count;
  }
  void count_round(i32 round) {
    own_ = counted(i64{round} * kThreads + ptx::thread_index());
    before_own_ = before_own(own_, of_round_);
  }

  // The sum of `count` over the threads before this one, and over all. has_empty_ becomes that of
  // any thread.
  i32 before_own(i32 count, i32& of_all) {
    constexpr u32 kEmpty = 0x80000000;  // beside a sum of 31 bits
    const u32 lane = lane_index();
    i32 upto = count;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
      const i32 other = ptx::shuffle(upto, lane >= step ? lane - step : lane);
      if (lane >= step) upto += other;
    }
    const u32 mark = ptx::any(has_empty_) ? kEmpty : 0;
    ptx::block_sync();  // words of the last round were read
    if (lane == 31) {
      ptx::store_shared(words_ + warp_index() * 4, static_cast<u32>(upto) | mark);
    }
    ptx::block_sync();  // warps -> their sums
    i32 before = 0;
    of_all = 0;
#pragma unroll
    for (i32 warp = 0; warp < kThreads / 32; ++warp) {
      const u32 word = ptx::load_shared(words_ + warp * 4);
      const i32 sum = static_cast<i32>(word & ~kEmpty);
      has_empty_ |= (word & kEmpty) != 0;
      if (warp < static_cast<i32>(warp_index())) before += sum;
      of_all += sum;
    }
    return before + upto - count;
  }

  const AttentionParams& p_;
  QueryRows rows_;
  u32 words_;
  i32 of_head_ = 0;
  bool has_empty_ = false;
  u32 faults_ = 0;      // of this thread's sequences
  i32 own_ = 0;         // chunks of this thread's sequence of the round,
  i32 before_own_ = 0;  // of the threads before it,
  i32 of_round_ = 0;    // and of all
};

}  // namespace fulmen
