// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The scratch memory of the tiled CPU implementation: what it consists of, buffer by buffer. The
// same constructors measure it for a plan and lay it out over the caller's workspace in a run, so
// the two cannot differ. Pure.
#pragma once

#include "plan/plan.h"

namespace fulmen {

// Rows of q and of k, v worked on at once. Depends on the problem and the instruction set alone, so
// that results do not depend on the processor's thread count.
Tile tiled_tile(const Problem& problem, const CpuDevice& device);

// Bytes that a run takes: linear in the rows, for each thread a constant.
size_t tiled_workspace_bytes(const Problem& problem, Tile tile, const CpuDevice& device);

// Hands out consecutive pieces of a workspace; of none (null), only counts.
class Arena {
 public:
  static constexpr size_t kAlignment = 64;  // a cache line, the widest vector

  explicit Arena(void* workspace);

  template <class T>
  T* take(i64 count) {
    used_ = (used_ + kAlignment - 1) / kAlignment * kAlignment;
    T* const piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += static_cast<size_t>(count) * sizeof(T);
    return piece;
  }

  // Alignment of the base included.
  size_t bytes() const { return used_ + kAlignment; }

 private:
  char* base_;
  size_t used_ = 0;
};

inline constexpr i64 kMostLanes = 32;  // of any instruction set: float32 with AVX-512

// Sizes of a tile's buffers. Padded sizes are multiples of the most lanes.
struct TileSizes {
  TileSizes(const Problem& problem, Tile tile);

  i64 rows;
  i64 columns;
  i64 padded_rows;
  i64 padded_columns;
  i64 padded_dim_qk;
  i64 padded_dim_v;
  i64 transposed_rows;   // whole strips of rows whose outputs are turned
  i64 transposed_pairs;  // pairs of keys of a column of V
};

// The most blocks of `block_rows` rows that the sequences of one side can make.
i64 most_blocks(const Problem& problem, i64 side_rows, i64 block_rows);

// Rows of a strip where outputs are transposed (cpu/forward_pairs.h).
inline constexpr i64 kTransposedStripRows = 32;

// One slot's scratch in the forward pass. Layouts are those of cpu/kernels.h.
template <class Real>
struct ForwardScratch {
  ForwardScratch(Arena& arena, const Problem& problem, const TileSizes& sizes);

  Real* Q;            // (rows, dim_qk)
  Real* Q_lanes;      // (dim_qk, rows) in panels
  Real* K;            // (columns, dim_qk)
  Real* V;            // (columns, dim_v)
  Real* scores;       // (columns, rows)
  Real* O;            // (rows, dim_v), not yet divided by row_sum
  Real* row_max;      // (rows)
  Real* row_sum;      // (rows)
  Real* rescale;      // (rows)
  Real* pair_rows;    // (rows, columns): terms of a block before they are turned
  Real* addend;       // (columns, rows)
  Real* keep;         // (columns, rows); null without dropout
  Count<Real>* seen;  // (2, rows): the first key that a row sees, and how many
  Real* finite_rows;  // (columns, dim_v)
  char* steps;        // of an expression; null without one

  // Of types of 16 bits, null for others: keys of several pages, one behind the other, null without
  // pages; and two numbers of bf16 in 32 bits, of f16 twice as many (cpu/kernels.h).
  u16* K_copies;       // (columns, dim_qk)
  u16* V_copies;       // (columns, dim_v)
  u32* Q_rows;         // (rows, dim_qk / 2)
  u32* Q_pairs;        // (dim_qk / 2, rows) in panels
  u32* K_pairs;        // (columns, dim_qk / 2)
  u32* V_pairs;        // (columns / 2, dim_v)
  u32* V_transposed;   // (dim_v, columns / 2)
  Real* O_transposed;  // (rows / kTransposedStripRows, dim_v, kTransposedStripRows)
};

// What all slots share in the forward pass.
template <class Real>
struct ForwardShared {
  ForwardShared(Arena& arena, const Problem& problem, const TileSizes& sizes);

  i64* q_blocks;  // (num_sequences + 1): sequence s owns q blocks [q_blocks[s], q_blocks[s + 1])
};

// Rows that share K and V: up to one vector's lanes.
inline constexpr i64 kMostSplitRows = 16;

// Whether a forward pass has so few rows on a key/value head that reading keys is its cost: such
// passes split the keys, and a tile is all rows by the keys of a split. Depends on no page, and of
// batch-invariant problems on nothing that another request may decide.
bool splits_keys(const Problem& problem);

// How many neighbouring key/value heads a task takes at most: those that lie beside each other in a
// token, so that memory is read in order.
i64 most_heads_together(const Problem& problem);

// One slot's scratch where keys are split. Rows: (key/value head, head of the group, q_row).
template <class Real>
struct SplitScratch {
  SplitScratch(Arena& arena, const Problem& problem, const TileSizes& sizes);

  static constexpr i64 kLoadedKeys = 64;

  i64 stride;  // of rows of scores: whole vectors, and no power of 2, whose rows would share sets

  Real* Q;                // (rows of a head, dim_qk)
  Real* Q_lanes;          // (heads, rows up to a power of 2, dim_qk), as dot takes it
  u32* Q_pairs;           // (rows of a head, dim_qk / 2); null for other types than bf16
  u32* Q_pair_lanes;      // as Q_lanes
  Real* scores;           // (rows, columns)
  Real* addend;           // (rows of a head, columns)
  Real* keep;             // (rows of a head, columns); null without dropout
  const void** key_rows;  // (columns): where keys or values of the first head lie
  Real* loaded;           // (kLoadedKeys, dim_qk or dim_v): of those that are not read there
  Real* finite_rows;      // (kLoadedKeys, dim_v)
  char* steps;            // of an expression; null without one
};

// What all slots share where keys are split: the parts, (split, kv_head, row).
template <class Real>
struct SplitShared {
  SplitShared(Arena& arena, const Problem& problem, const TileSizes& sizes);

  i64* splits;    // (num_sequences + 1): sequence s owns splits [splits[s], splits[s + 1])
  Real* row_max;  // (part)
  Real* row_sum;  // (part)
  Real* O;        // (part, dim_v); of parts that saw keys
};

// One slot's scratch in the backward pass.
template <class Real>
struct BackwardScratch {
  BackwardScratch(Arena& arena, const Problem& problem, const TileSizes& sizes);

  Real* Q;            // (rows, dim_qk)
  Real* dO;           // (rows, dim_v)
  Real* O;            // (rows, dim_v)
  Real* K;            // (columns, dim_qk)
  Real* V;            // (columns, dim_v)
  Real* K_lanes;      // (dim_qk, columns) in panels
  Real* V_lanes;      // (dim_v, columns) in panels
  Real* P;            // (rows, columns): scores, then weights
  Real* dS;           // (rows, columns): dP, then dS
  Real* dK;           // (columns, dim_qk)
  Real* dV;           // (columns, dim_v)
  Real* addend;       // (rows, columns)
  Real* keep;         // (rows, columns); null without dropout
  Count<Real>* seen;  // (2, rows): the first key that a row sees, and how many
  Real* dbias;        // (rows, columns); null where dbias is not wanted
  Real* finite_rows;  // (rows or columns, dim_qk or dim_v)
  char* steps;        // of an expression; null without one
  Real* slope;        // (rows, columns): d s' / d dot, or s; null without a score of the user's
  i64* elements;      // (rows, columns): what pairs read; null where no such gradient is wanted

  // Of bf16, two numbers in 32 bits; null for other types. x_columns: pairs of columns, (row,
  // dim / 2); x_rows: pairs of rows, (row / 2, dim).
  u32* K_columns;
  u32* V_columns;
  u32* Q_columns;
  u32* dO_columns;
  u32* K_rows;
  u32* Q_rows;
  u32* dO_rows;
  u32* K_pairs;   // (dim_qk / 2, columns) in panels
  u32* V_pairs;   // (dim_v / 2, columns) in panels
  u32* dS_pairs;  // (rows, columns / 2)
};

// What all slots share in the backward pass. Rows are numbered (batch, head, q_row).
template <class Real>
struct BackwardShared {
  BackwardShared(Arena& arena, const Problem& problem, const TileSizes& sizes);

  i64* q_blocks;      // (num_sequences + 1), as in the forward pass
  i64* kv_blocks;     // likewise of keys
  Real* row_max;      // (row)
  Real* normalizer;   // (row)
  Real* delta;        // (row)
  Real* lse_term;     // (row); null without dlse
  double* sink_term;  // (row); null where dsinks is not wanted
  Real* dQ;           // (row, dim_qk); null where dq is not wanted
  i64* sums_of_dQ;    // (q block, head): key blocks that have added to dQ

  // Of gradients of what an expression reads; null where none is wanted.
  double* captures[kNumCaptures];  // one element behind the other
  i64* tiles;                      // (num_sequences + 1): sequence s owns tiles [tiles[s], ..)
  i64* captures_order;             // (derivative): tiles that have added
};

// Shared and slots, one after the other.
template <class Shared, class Scratch>
class TiledWorkspace {
 public:
  TiledWorkspace(void* workspace, const Problem& problem, Tile tile, int num_slots)
      : problem_(problem),
        sizes_(problem, tile),
        arena_(workspace),
        shared_(arena_, problem, sizes_) {
    Arena one(nullptr);
    Scratch(one, problem, sizes_);
    slot_bytes_ = one.bytes();
    slots_ = arena_.take<char>(num_slots * static_cast<i64>(slot_bytes_));
  }

  const TileSizes& sizes() const { return sizes_; }
  const Shared& shared() const { return shared_; }
  size_t bytes() const { return arena_.bytes(); }

  Scratch scratch(int slot) const {
    Arena arena(slots_ + static_cast<size_t>(slot) * slot_bytes_);
    return Scratch(arena, problem_, sizes_);
  }

 private:
  const Problem& problem_;
  TileSizes sizes_;
  Arena arena_;
  Shared shared_;
  size_t slot_bytes_;
  char* slots_;
};

template <class Real>
using ForwardWorkspace = TiledWorkspace<ForwardShared<Real>, ForwardScratch<Real>>;

template <class Real>
using SplitWorkspace = TiledWorkspace<SplitShared<Real>, SplitScratch<Real>>;

template <class Real>
using BackwardWorkspace = TiledWorkspace<BackwardShared<Real>, BackwardScratch<Real>>;

}  // namespace fulmen
