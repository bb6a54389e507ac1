// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Masks of backward_sm80: which pairs of a warp's tile the structured masks (their intervals, row
// by row, come from backward_preprocess_sm80) and documents hide, so that a tile without hidden
// pairs does no mask arithmetic; and which m_blocks the keys of a block iterate over. A user's
// mask: lists of tiles say which it leaves, and which it shows whole.
#pragma once

#include "kernels/attention/block_range.cuh"
#include "kernels/backward_sm80/storage.cuh"
#include "kernels/common/documents_sm80.cuh"
#include "kernels/common/fragments.cuh"
#include "kernels/common/head.cuh"
#include "kernels/common/warp_scores_sm80.cuh"
#include "kernels/tile_lists/config.h"

namespace fulmen {

// Where a warp's tile of S begins in an iteration.
struct BackwardPartSm80 {
  i32 row, column;
};

// The m_blocks of a head that a user's mask leaves to the keys of a block.
template <BackwardSm80Config kConfig>
struct ListedQueriesSm80 {
  static constexpr bool kHas = kConfig.score.mask_tiles;

  TileLine<kConfig.kv_rows / kPartRows, true> line;

  ListedQueriesSm80(const TileLists& lists, i64 index, i64 head, i64 heads_q, i32 first_key) {
    if constexpr (kHas) {
      line = {lists, lists.line_number(index, head, heads_q, first_key / kConfig.kv_rows)};
    }
  }

  // [begin, end) grows to those of the lane's groups of `all` that are met.
  void join(i32& begin, i32& end, const Interval& all) const {
    const i32 first = static_cast<i32>(all.begin), last = static_cast<i32>(all.end);
#pragma unroll 1
    for (i32 group = first / 32 + static_cast<i32>(lane_index()); 32 * group < last; group += 32) {
      const u32 met = line.met(group, first, last);
      if (met == 0) continue;
      begin = min(begin, 32 * group + 31 - ptx::leading_zeros(met & (0 - met)));
      end = max(end, 32 * group + 32 - ptx::leading_zeros(met));
    }
  }
  // Whether the mask hides none of an m_block's pairs with the keys around `column` of the block.
  bool is_full(i32 block, i32 column) const {
    return !kHas || line.is_whole(block, column / kPartRows);
  }
};

// One iteration: an m_block with the block's keys.
template <BackwardSm80Config kConfig>
struct BackwardStepSm80 {
  // A warp's tile of S, and where its numbers lie in a thread.
  using Part = BackwardPartSm80;
  using Fragments = WarpScores<kConfig.scores()>;
  static constexpr i32 kTiles = kConfig.s_rows / 16;
  static constexpr i32 kFloats = kConfig.s_columns / 2;
  using Scores = float[kTiles][kFloats];

  const BackwardHeadOf<kConfig>& head;
  const ListedQueriesSm80<kConfig>& listed;
  i32 first_row, first_key;
  bool is_full;  // every row sees every key
  i32 stage, pair_stage;
};

template <BackwardSm80Config kConfig>
struct BackwardDocumentsSm80 {
  using Step = BackwardStepSm80<kConfig>;
  using Part = BackwardPartSm80;

  BackwardStorageSm80<kConfig> storage;

  // Whether what this lane looks at of a part is one document, that of its first key.
  bool are_one(const Step& step, const Part& part) const {
    const i64 id = key_id(part.column);
    const i32 lane = static_cast<i32>(lane_index());
    bool one = true;
#pragma unroll
    for (i32 row = 0; row < kConfig.s_rows; row += 32) {
      one = one && row_id(step, part.row + min(row + lane, kConfig.s_rows - 1)) == id;
    }
#pragma unroll
    for (i32 column = 0; column < kConfig.s_columns; column += 32) {
      one = one && key_id(part.column + min(column + lane, kConfig.s_columns - 1)) == id;
    }
    return one;
  }

  // Scores of pairs of two documents become -inf.
  void hide(typename Step::Scores& S, const Step& step, const Part& part) const {
    i64 own[Step::kTiles][2];
#pragma unroll
    for (i32 t = 0; t < Step::kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) own[t][h] = row_id(step, part.row + Step::Fragments::row(t, h));
    }
    hide_other_documents(S, own,
                         [&](i32 f) { return key_id(part.column + Step::Fragments::column(f)); });
  }

 private:
  i64 row_id(const Step& step, i32 row) const {
    return load_id(storage.row_ids_at(step.stage) + row * 8);
  }
  i64 key_id(i32 column) const { return load_id(storage.key_ids() + column * 8); }
};

// Whether a warp's rows see all of its keys, and whether some row's interval begins after the
// first.
struct PartMask {
  bool all, begins;
};

// Whether every number met is finite: 0 times it is 0.
class FiniteCheck {
 public:
  void meet(float x) {
    sums_[next_] = ptx::fma(x, 0.f, sums_[next_]);
    next_ = (next_ + 1) % kSums;
  }
  template <i32 kTiles, i32 kFloats>
  void meet(const float (&S)[kTiles][kFloats]) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kFloats; ++i) meet(S[t][i]);
    }
  }
  bool fails() const { return sums_[0] + sums_[1] + sums_[2] + sums_[3] != 0; }

 private:
  static constexpr i32 kSums = 4;  // side by side, so that none waits for the one before
  float sums_[kSums] = {};
  i32 next_ = 0;  // known when compiled, in loops that are unrolled
};

template <BackwardSm80Config kConfig>
struct BackwardMaskSm80 {
  using Step = BackwardStepSm80<kConfig>;
  using Part = BackwardPartSm80;

  BackwardStorageSm80<kConfig> storage;
  BackwardDocumentsSm80<kConfig> documents{storage};

  // Keys of the step that a row of it sees.
  KeyRangeSm80 columns(const Step& step, i32 row) const {
    const u32 from = storage.columns_at(step.stage) + static_cast<u32>(row) * 8;
    return {static_cast<i32>(ptx::load_shared(from)) - step.first_key,
            static_cast<i32>(ptx::load_shared(from + 4)) - step.first_key};
  }

  // Whether no row's maximum is so large that a product with it would not be exact enough.
  bool has_moderate_max(const Step& step) const {
    float largest = 0;
#pragma unroll
    for (i32 at = 0; at < kConfig.q_rows; at += 32) {
      const i32 row = min(at + static_cast<i32>(lane_index()), kConfig.q_rows - 1);
      const u32 row_max =
          ptx::load_shared(storage.rows_at(step.stage) + static_cast<u32>(row) * 16);
      largest = ptx::max(largest, ptx::abs(__builtin_bit_cast(float, row_max)));
    }
    return !ptx::any(largest * kLog2E<float> > 1024);
  }

  PartMask of(const Step& step, const Part& part) const {
    if (step.is_full) return {true, false};
    const i32 first = part.column, end = first + kConfig.s_columns;
    const i32 lane = static_cast<i32>(lane_index());
    bool all = true, begins = false;
#pragma unroll
    for (i32 row = 0; row < kConfig.s_rows; row += 32) {
      const KeyRangeSm80 seen = columns(step, part.row + min(row + lane, kConfig.s_rows - 1));
      all = all && seen.begin <= first && end <= seen.end;
      begins = begins || seen.begin > first;
    }
    if constexpr (kConfig.score.documents) all = all && documents.are_one(step, part);
    all = all && step.listed.is_full(step.first_row / kConfig.q_rows, part.column);
    return {!ptx::any(!all), ptx::any(begins)};
  }

  // What is hidden becomes -inf.
  void hide(typename Step::Scores& S, const Step& step, const Part& part,
            const PartMask& mask) const {
    if (mask.all) return;
    if (mask.begins) {
      hide_unseen_keys<true>(S, step, part);
    } else {
      hide_unseen_keys<false>(S, step, part);
    }
    if constexpr (kConfig.score.documents) documents.hide(S, step, part);
  }

 private:
  template <bool kBegins>
  void hide_unseen_keys(typename Step::Scores& S, const Step& step, const Part& part) const {
    const i32 own = part.column + Step::Fragments::column(0);
#pragma unroll
    for (i32 t = 0; t < Step::kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const KeyRangeSm80 seen = columns(step, part.row + Step::Fragments::row(t, h));
        hide_outside<kBegins>(S[t], h, seen.begin - own, seen.end - own);
      }
    }
  }
};

template <BackwardSm80Config kConfig>
struct BackwardMBlocksSm80 {
  const BackwardSm80Params& params;
  const AttentionParams& p;
  KeyBlockSm80 keys;
  i32 index;   // of the sequence
  i32 q_slot;  // of the first tile of queries, among num_slots of a head
  i32 num_slots;

  BackwardMBlocksSm80(const BackwardSm80Params& params_, const KeyBlockSm80& keys_, i32 index_)
      : params(params_),
        p(params_.attention),
        keys(keys_),
        index(index_),
        q_slot(p.packed.q
                   ? static_cast<i32>(first_slot(keys.sequence.q_begin, index, kConfig.q_rows))
                   : 0),
        num_slots(static_cast<i32>(num_q_slots(p, kConfig.q_rows))) {}

  // The plan counts tiles in 31 bits.
  i32 tile_number(i32 head, i32 block) const {
    return static_cast<i32>(
        row_tile_number(p, keys.sequence.batch, head, q_slot + block, num_slots));
  }

  // How many blocks of keys before this one add to a tile of queries.
  u32 semaphore_value(i64 block) const {
    const i64 own = keys.first_key / kConfig.kv_rows;
    i64 low = 0, high = own;
    while (low < high) {  // the first that does; from there to this one all do
      const i64 middle = (low + high) / 2;
      if (m_block_range(middle * kConfig.kv_rows).visible.end > block) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return static_cast<u32>(own - low);
  }

  BlockRange m_block_range(i64 key) const {
    const SequenceShape& shape = keys.sequence.shape;
    const i64 end = key + kConfig.kv_rows;
    BlockRange found = visible_row_blocks(p.mask_options, shape, {key, min<i64>(end, shape.kv_len)},
                                          kConfig.q_rows);
    if (end > shape.kv_len) found.full = {0, 0};  // no row sees the keys past the end
    return found;
  }

  // Leaves out tiles at both ends that see no document of the block, or that a user's mask hides.
  // Where a semaphore orders dQ, all must come.
  void narrow(BlockRange& range) const {
    range.full = {0, 0};
    if constexpr (kConfig.deterministic) return;
    if constexpr (kConfig.score.documents) narrow_to_documents(range);
    if constexpr (kConfig.score.mask_tiles) narrow_to_listed(range);
  }

 private:
  void narrow_to_documents(BlockRange& range) const {
    const i32 head = keys.kv_head * static_cast<i32>(p.group_size());
    const i32 last = static_cast<i32>(range.visible.end);
    i32 begin = last, end = 0;
    for (i32 block = static_cast<i32>(range.visible.begin + lane_index()); block < last;
         block += 32) {
      const KeyRangeSm80 bounds = params.key_bounds[tile_number(head, block)];
      if (bounds.begin >= keys.first_key + kConfig.kv_rows || bounds.end <= keys.first_key)
        continue;
      begin = min(begin, block);
      end = block + 1;
    }
    join_lanes(begin, end);
    range.visible = {begin, max(begin, end)};
  }

  void narrow_to_listed(BlockRange& range) const {
    const i32 first_head = keys.kv_head * static_cast<i32>(p.group_size());
    i32 begin = static_cast<i32>(range.visible.end), end = 0;
    for (i32 head = first_head; head < first_head + p.group_size(); ++head) {
      ListedQueriesSm80<kConfig>(params.tile_lists, index, head, p.heads_q, keys.first_key)
          .join(begin, end, range.visible);
    }
    join_lanes(begin, end);
    range.visible = {begin, max(begin, end)};
  }
};

}  // namespace fulmen
