// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A step of backward_sm80, the parts of it that warps take, and documents in them: a pair is
// visible where query and key carry the same number. Numbers of the block's keys lie in shared
// memory, those of queries come with what backward_rows_sm80 keeps of them.
#pragma once

#include "kernels/backward_sm80/tiles.cuh"
#include "kernels/common/document_hull.cuh"
#include "kernels/common/warp_scores.cuh"

namespace fulmen {

// Where a warp's tile of S begins in a step.
struct BackwardPartSm80 {
  i32 row, column;
};

// A tile of queries met by the block's keys.
template <Sm80BackwardConfig kConfig>
struct BackwardStepSm80 {
  // A warp's tile of S, and where its numbers lie in a thread.
  using Part = BackwardPartSm80;
  using Fragments = WarpScores<kConfig.scores()>;
  static constexpr i32 kTiles = kConfig.s_rows / 16;
  static constexpr i32 kFloats = kConfig.s_columns / 2;
  using Scores = float[kTiles][kFloats];

  const Head<kConfig.dtype>& head;
  i32 first_row, first_key;
  bool is_full;  // every row sees every key
  i32 stage, pair_stage;
};

template <Sm80BackwardConfig kConfig>
struct BackwardDocumentsSm80 {
  using Step = BackwardStepSm80<kConfig>;
  using Part = BackwardPartSm80;

  BackwardTilesSm80<kConfig> tiles;

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
    return load_id(tiles.row_ids_at(step.stage) + row * 8);
  }
  i64 key_id(i32 column) const { return load_id(tiles.key_ids() + column * 8); }
};

}  // namespace fulmen
