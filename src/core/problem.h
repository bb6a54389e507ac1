// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One attention problem, from the caller to the kernel: options, arrays and sizes.
//
// A Request is what the caller said, array by array. validate() (validate.h) turns it into a
// Problem, in which everything is checked and normal: every array has four axes in the order given
// below, defaults are filled in, broadcast axes have stride 0. Backends read Problems only.
// Packed sequences are one tensor batch; Problem::sequence says which rows belong to which entry.
#pragma once

#include <array>
#include <memory>

#include "core/options.h"
#include "core/tensor.h"
#include "kernels/attention/dropout.cuh"
#include "kernels/attention/mask.cuh"
#include "kernels/attention/mla_record.cuh"
#include "kernels/attention/score_mod.cuh"
#include "kernels/attention/segments.cuh"
#include "kernels/attention/sequence.cuh"

namespace fulmen {

namespace expression {
struct Program;
}

// The arrays of a call. Their axes in a Problem:
//
//   q, dq            (batch, head, q_row, dim_qk)
//   k, dk            (batch, kv_head, kv_row, dim_qk)    pools: (page, kv_head, row of the page,
//   dim_qk) v, dv            (batch, kv_head, kv_row, dim_v)    likewise o, dout          (batch,
//   head, q_row, dim_v) lse, dlse        (batch, head, q_row, 1) stats            (batch, head,
//   q_row, 2) bias, mask       (batch, head, q_row, kv_row)    broadcast: stride 0 dbias the same,
//   extents as given: 1 where reduced alibi_slopes     (batch, head, 1, 1)    broadcast: stride 0
//   sinks, dsinks    (1, head, 1, 1)
//   lengths          (1, 1, 1, sequence)    of kv_shared broadcast: stride 0
//   offsets (cu_)    (1, 1, 1, sequence + 1)
//   ids, positions, tree    (batch, 1, 1, row)    broadcast: stride 0
//   q_segments, kv_segments    (sequence, 1, segment, 3)    broadcast: stride 0
//   page_table       (batch, 1, 1, page or slot)    the batch broadcast where there is page_indptr
//   rng              (1, 1, 1, 2)    seed, offset
//   q_scale, k_scale, v_scale    as q, k and v, but dim 1, or of v one for each dim    broadcast:
//   stride 0
//   captures, their gradients    axes as given, missing leading ones 1
//   blocks           (batch, head or kv_head or 1, q_block, entry)    the batch broadcast
enum class Array : int {
#define FULMEN_ARRAY(name, ...) name,
#include "fulmen/arrays.def"
  kCount
};

inline constexpr int kNumArrays = static_cast<int>(Array::kCount);

// As members of fulmen_tensors, and as Python calls them.
inline constexpr const char* kArrayMembers[] = {
#define FULMEN_ARRAY(name, member, ...) #member,
#include "fulmen/arrays.def"
};
inline constexpr const char* kArrayWords[] = {
#define FULMEN_ARRAY(name, member, word, ...) word,
#include "fulmen/arrays.def"
};

// Those that only calls over caches, drafts and left-padded batches have.
inline constexpr Array kCacheArrays[] = {Array::kPageTable, Array::kPageIndptr, Array::kKvStart,
                                         Array::kKvShared,  Array::kPositions,  Array::kTree};

constexpr bool is_cache_array(Array array) {
  for (const Array one : kCacheArrays) {
    if (one == array) return true;
  }
  return false;
}

// Those that quantised q, k and v have, in this order.
inline constexpr Array kScaleArrays[] = {Array::kQScale, Array::kKScale, Array::kVScale};
constexpr bool is_scale_array(Array array) {
  return array == Array::kQScale || array == Array::kKScale || array == Array::kVScale;
}

// What an expression reads, in the order of its names, and their gradients.
inline constexpr int kNumCaptures =
    static_cast<int>(Array::kO) - static_cast<int>(Array::kCapture0);
inline constexpr int kAlibiRead = kNumCaptures;  // beside segments steps read the slopes, too
constexpr Array capture(int index) {
  return static_cast<Array>(static_cast<int>(Array::kCapture0) + index);
}
// What a step reads.
constexpr Array array_read(int index) {
  return index == kAlibiRead ? Array::kAlibiSlopes : capture(index);
}
constexpr Array capture_gradient(int index) {
  return static_cast<Array>(static_cast<int>(Array::kDCapture0) + index);
}

// Whether only forward calls take it.
constexpr bool is_forward_only(Array array) {
  return is_cache_array(array) || is_scale_array(array);
}

constexpr const char* name(Array array) { return kArrayMembers[static_cast<int>(array)]; }

struct Arrays {
  std::array<Tensor, kNumArrays> tensors;

  Tensor& operator[](Array array) { return tensors[static_cast<size_t>(array)]; }
  const Tensor& operator[](Array array) const { return tensors[static_cast<size_t>(array)]; }
};

enum class Operation { kForward, kBackward };

constexpr const char* name(Operation operation) {
  return operation == Operation::kForward ? "forward" : "backward";
}

struct Request {
  Operation operation = Operation::kForward;
  Options options;
  Arrays arrays;
  Experiment experiment;
};

// More than any kernel asks for.
inline constexpr i64 kMaxPointerAlignment = 128;

struct Problem : OwnOptions {
  Operation operation = Operation::kForward;
  Arrays arrays;

  // Sizes. num_sequences is the batch; on a packed side tensor extents of batch are 1.
  i64 num_sequences = 0;
  i64 heads_q = 0;
  i64 heads_kv = 0;
  i64 q_rows = 0;   // extent of the q_row axis: total rows when packed
  i64 kv_rows = 0;  // likewise; with a page table the most keys of a request
  i64 dim_qk = 0;
  i64 dim_v = 0;
  Packed packed;

  // Of pools of pages; 0 without a page table.
  i64 num_pages = 0;
  i64 page_rows = 0;

  // Upper bounds of a sequence's lengths; the extents themselves where nothing better is known.
  i64 max_q = 0;
  i64 max_kv = 0;

  DType dtype = DType::kNone;    // of q, k and v that are not quantised; else of o
  ScoreMap<double> score_map{};  // scale, softcap
  IntervalMask mask;
  std::shared_ptr<const expression::Program> program;  // null: no expression
  std::array<double, kNumScalars> scalars{};           // of the expression
  Dropout dropout;
  Backend backend = Backend::kCpu;  // kCpu or kCuda
  u32 without = 0;                  // of Optimisation
  TileChoice tile;                  // of a search; plans of other calls name none

  // What every pointer is a multiple of, as far as it is known and up to kMaxPointerAlignment.
  i64 pointer_alignment = kMaxPointerAlignment;

  // 1 without heads, so that an empty problem divides by nothing.
  i64 group_size() const { return heads_kv == 0 ? 1 : heads_q / heads_kv; }
  i64 kv_head(i64 head) const { return head / group_size(); }
  bool has(Array array) const { return arrays[array].present(); }

  DType kv_dtype() const { return arrays[Array::kK].dtype; }
  DType q_dtype() const { return arrays[Array::kQ].dtype; }
  bool has_records() const { return is_record(kv_dtype()); }
  i64 dims(Array array) const { return array == Array::kK ? dim_qk : dim_v; }  // of k or v
  bool is_quantised() const { return fulmen::is_quantised(kv_dtype()); }
  bool has_quantised_q() const { return fulmen::is_quantised(q_dtype()); }
  // Whether v has a scale for each dim.
  bool has_channel_scales() const { return arrays[Array::kVScale].strides[3] != 0; }

  bool has_score_expression() const;
  bool has_mask_expression() const;
  bool wants_captures() const;  // whether a gradient of what it reads is asked for
  // Whether the mask of the expression shows row i of a head key j.
  bool expression_shows(const CacheSequence& sequence, i64 index, i64 head, i64 i, i64 j) const;

  // Whether there are lists of blocks or the mask of an expression, which know blocks as a whole.
  bool has_kinds() const { return has(Array::kBlocks) || has_mask_expression(); }
  // Whether the lists name a block of keys for a block of rows, of this sequence and head.
  bool lists_block(i64 index, i64 head, i64 q_block, i64 kv_block) const;
  // Whether row i of a head sees key j, which are there: by every mask.
  bool shows(const CacheSequence& sequence, i64 index, i64 head, i64 i, i64 j) const;

  bool is_paged() const { return page_rows > 0; }
  i64 entry_keys() const { return slots ? 1 : page_rows; }  // of an entry of page_table
  bool misses_slots(const CacheSequence& sequence) const;   // whether some key of it has none
  // Whether there is one of kCacheArrays; which; kCount: none.
  bool has_caches() const { return cache_array() != Array::kCount; }
  Array cache_array() const;
  i64 batch_extent() const {
    return packed.q ? 1 : num_sequences;
  }  // of q, o and what is like them

  // Whether a plan may depend on lengths, which other batch entries decide too.
  bool may_plan_by_lengths() const { return !batch_invariant; }
  // Whether sums are added up in one order, whatever else runs.
  bool has_ordered_sums() const { return deterministic || batch_invariant; }

  // Reads lengths and offsets from memory. Entries that are out of range count as empty, exactly as
  // on a device; hosts that can see them check them first (check_lengths).
  CacheSequence sequence(i64 index) const;

  CacheLayout cache_layout() const;
  // Where key j of a sequence lies in k, v and what is like them. The id of its page was checked.
  KeyRow key(const CacheSequence& sequence, i64 j) const;

  // What element d of k or v at such a place is multiplied by, and q; 1 where they have no scales.
  double kv_scale(Array array, const KeyRow& at, i64 kv_head, i64 d) const;
  double q_scale(i64 batch, i64 head, i64 row) const;
  // Of records.
  RecordRow<const u8> record(Array array, const KeyRow& at, i64 kv_head) const;

  // Where row i of a sequence stands, and key j, for causal, window, chunk and ALiBi.
  i64 position(const CacheSequence& sequence, i64 i) const;
  i64 key_position(const CacheSequence& sequence, i64 j) const;
  // Whether causal, window, prefix, chunk and tree let row i see key j.
  bool sees(const CacheSequence& sequence, i64 i, i64 j) const;

  // Segments of rows or keys. Their positions take the place of rows and keys in what options say.
  bool has_segments() const { return has(Array::kQSegments); }
  i64 num_segments(Array array) const;
  Segment segment(Array array, i64 index, i64 n) const;
  // Where row i and key j of a sequence stand by them; kNoPosition: nowhere. Keys without segments
  // stand at their number.
  i64 q_position(i64 index, i64 i) const;
  i64 kv_position(i64 index, i64 j) const;
  // Whether slopes are added to scores by themselves; beside segments by the program.
  bool adds_alibi() const { return has(Array::kAlibiSlopes) && !has_segments(); }

  // The Philox counter word of a head of a sequence.
  u32 batch_head(i64 sequence, i64 head) const {
    return static_cast<u32>(sequence * heads_q + head);
  }
};

// Contents of q_lengths, kv_lengths, cu_q, cu_kv, kv_start, positions and page_indptr, and bias and
// mask extents against the longest sequence: for arrays in host memory, before each run. Throws
// Error.
void check_lengths(const Problem& problem);

// Contents of q_segments and kv_segments likewise; after check_lengths. Throws Error.
void check_segments(const Problem& problem);

// The ids of a page table that requests use; after check_lengths. Throws Error.
void check_pages(const Problem& problem);

// The entries of the lists of blocks; before each run, where they are in host memory. Throws Error.
void check_blocks(const Problem& problem);

// The seed and offset of the array rng, where one is given and in host memory, before each run.
// Throws Error.
void read_rng(Problem& problem);

// The largest difference of neighbouring offsets, for a packed problem whose offsets were checked.
i64 longest_sequence(const Problem& problem, Array offsets);

}  // namespace fulmen
