// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Sizes of tiles and buffers of the tiled CPU implementation.

#include "plan/tiled_workspace.h"

#include <cstdint>

#include "core/program.h"

namespace fulmen {
namespace {

// 96 rows are 16 register tiles of 6 rows and 6, 3 or 24 panels of lanes, for every instruction
// set; scores (48 KiB in float32), K and V blocks of dimension 64 (32 KiB each) and one panel at
// work then stay in a second cache of 256 KiB with room to spare. Forward, 128 keys a block let the
// output be loaded, rescaled and stored half as often as 64; the backward pass has four more
// matrices of a block in use.
constexpr i64 kTileRows = 96;

// More rows of passes over 16-bit keys: a block of keys is packed or widened for a task anew, which
// with twice as many rows is 2 to 5 % less of its time. Four times as many where that leaves tasks
// enough for the cores of most machines.
constexpr i64 kWideTileRows = 2 * kTileRows;
constexpr i64 kWidestTileRows = 4 * kTileRows;
constexpr i64 kLeastWideRows = 1024;
constexpr i64 kLeastWidestTasks = 12;
constexpr i64 kLeastWidestTasksOfShort = 32;

constexpr i64 kForwardTileColumns = 128;
// Where tiles multiply 16-bit numbers, loading and storing outputs is a larger share than products.
constexpr i64 kAmxTileColumns = 256;
// A task of the backward pass loads, packs and adds to all rows of q, dO and dQ, so that with four
// times as many keys it reads and writes a quarter; where tasks enough are left.
constexpr i64 kWidestBackwardColumns = 256;
constexpr i64 kBackwardTileColumns = 64;
constexpr i64 kLeastWideBackwardTasks = 12;

// Below so many keys without pages, a tile is faster.
constexpr i64 kLeastSplitKeys = 32;

// Keys of a split: scores of 16 rows are then 64 KiB, and reading the keys takes hundreds of times
// as long as merging a part.
constexpr i64 kSplitColumns = 1024;

i64 padded(i64 size) { return ceil_div(size, kMostLanes) * kMostLanes; }

bool has_16_bits(const Problem& problem) { return size_bytes(problem.kv_dtype()) == sizeof(u16); }

i64 forward_columns(const Problem& problem, const CpuDevice& device) {
  return device.has_tiles && has_16_bits(problem) ? kAmxTileColumns : kForwardTileColumns;
}

i64 forward_rows(const Problem& problem) {
  if (size_bytes(problem.kv_dtype()) > 2) return kTileRows;
  const bool is_long = problem.max_q >= kLeastWideRows;
  const i64 tasks = most_blocks(problem, problem.q_rows, kWidestTileRows) * problem.heads_q;
  if (tasks >= (is_long ? kLeastWidestTasks : kLeastWidestTasksOfShort)) return kWidestTileRows;
  return is_long ? kWideTileRows : kTileRows;
}

i64 backward_columns(const Problem& problem) {
  for (i64 columns = kWidestBackwardColumns; columns > kBackwardTileColumns; columns /= 2) {
    const i64 blocks = problem.packed.kv
                           ? problem.kv_rows / columns + problem.num_sequences
                           : problem.num_sequences * ceil_div(problem.kv_rows, columns);
    if (blocks * problem.heads_kv >= kLeastWideBackwardTasks) return columns;
  }
  return kBackwardTileColumns;
}

i64 num_q_rows(const Problem& problem) {
  return problem.batch_extent() * problem.heads_q * problem.q_rows;
}

u32* take_pairs(Arena& arena, const Problem& problem, i64 elements) {
  return problem.kv_dtype() == DType::kBFloat16 ? arena.take<u32>(elements / 2) : nullptr;
}

// Where f16 is a sum of two of bf16.
u32* take_terms(Arena& arena, const Problem& problem, i64 elements) {
  return problem.kv_dtype() == DType::kFloat16 ? arena.take<u32>(elements)
                                               : take_pairs(arena, problem, elements);
}

u16* take_copies(Arena& arena, const Problem& problem, i64 elements) {
  return problem.is_paged() && has_16_bits(problem) ? arena.take<u16>(elements) : nullptr;
}

char* take_steps(Arena& arena, const Problem& problem) {
  if (problem.program == nullptr) return nullptr;
  return arena.take<char>(expression::scratch_bytes(*problem.program));
}

template <class Real>
size_t workspace_bytes(const Problem& problem, Tile tile, int num_slots) {
  if (splits_keys(problem)) {
    return SplitWorkspace<Real>(nullptr, problem, tile, num_slots).bytes();
  }
  return problem.operation == Operation::kForward
             ? ForwardWorkspace<Real>(nullptr, problem, tile, num_slots).bytes()
             : BackwardWorkspace<Real>(nullptr, problem, tile, num_slots).bytes();
}

}  // namespace

bool splits_keys(const Problem& problem) {
  const i64 rows = problem.max_q * problem.group_size();
  if (problem.operation != Operation::kForward || rows == 0 || rows > kMostSplitRows) return false;
  if (problem.may_plan_by_lengths()) return problem.is_paged() || problem.max_kv >= kLeastSplitKeys;
  return !problem.packed.q && !problem.has(Array::kQLengths);
}

i64 most_heads_together(const Problem& problem) {
  constexpr i64 kBytes = 8192;  // of a token: more than a page is no better
  constexpr i64 kRows = 64;     // whose scores are 256 KiB
  i64 heads = problem.heads_kv;
  for (const Array array : {Array::kK, Array::kV}) {
    const Tensor& tensor = problem.arrays[array];
    if (tensor.strides[1] != tensor.shape[3]) return 1;
    heads = min(heads, kBytes / max<i64>(1, tensor.shape[3] * size_bytes(tensor.dtype)));
  }
  const i64 rows = problem.max_q * problem.group_size();
  return max<i64>(1, min(heads, kRows / max<i64>(1, rows)));
}

Tile tiled_tile(const Problem& problem, const CpuDevice& device) {
  if (splits_keys(problem)) return {problem.max_q * problem.group_size(), kSplitColumns};
  const bool is_forward = problem.operation == Operation::kForward;
  return {
      clamp<i64>(padded(problem.max_q), kMostLanes, is_forward ? forward_rows(problem) : kTileRows),
      clamp<i64>(padded(problem.max_kv), kMostLanes,
                 is_forward ? forward_columns(problem, device) : backward_columns(problem))};
}

size_t tiled_workspace_bytes(const Problem& problem, Tile tile, const CpuDevice& device) {
  return problem.dtype == DType::kFloat64
             ? workspace_bytes<double>(problem, tile, device.num_threads)
             : workspace_bytes<float>(problem, tile, device.num_threads);
}

Arena::Arena(void* workspace) : base_(static_cast<char*>(workspace)) {
  if (!base_) return;
  const auto address = reinterpret_cast<std::uintptr_t>(base_);
  base_ += (kAlignment - address % kAlignment) % kAlignment;
}

TileSizes::TileSizes(const Problem& problem, Tile tile)
    : rows(tile.rows),
      columns(tile.columns),
      padded_rows(padded(tile.rows)),
      padded_columns(padded(tile.columns)),
      padded_dim_qk(padded(problem.dim_qk)),
      padded_dim_v(padded(problem.dim_v)),
      transposed_rows(ceil_div(tile.rows, kTransposedStripRows) * kTransposedStripRows),
      transposed_pairs(padded(ceil_div(tile.columns, i64{2}))) {}

i64 most_blocks(const Problem& problem, i64 side_rows, i64 block_rows) {
  if (!problem.packed.q) return problem.num_sequences * ceil_div(side_rows, block_rows);
  return side_rows / block_rows + problem.num_sequences;
}

template <class Real>
ForwardShared<Real>::ForwardShared(Arena& arena, const Problem& problem, const TileSizes&)
    : q_blocks(arena.take<i64>(problem.num_sequences + 1)) {}

template <class Real>
ForwardScratch<Real>::ForwardScratch(Arena& arena, const Problem& problem, const TileSizes& sizes)
    : Q(arena.take<Real>(sizes.rows * sizes.padded_dim_qk)),
      Q_lanes(arena.take<Real>(problem.dim_qk * sizes.padded_rows)),
      K(arena.take<Real>(sizes.columns * sizes.padded_dim_qk)),
      V(arena.take<Real>(sizes.columns * sizes.padded_dim_v)),
      scores(arena.take<Real>(sizes.columns * sizes.padded_rows)),
      O(arena.take<Real>(sizes.padded_rows * sizes.padded_dim_v)),
      row_max(arena.take<Real>(sizes.padded_rows)),
      row_sum(arena.take<Real>(sizes.padded_rows)),
      rescale(arena.take<Real>(sizes.padded_rows)),
      pair_rows(arena.take<Real>(sizes.rows * sizes.padded_columns)),
      addend(arena.take<Real>(sizes.columns * sizes.padded_rows)),
      keep(problem.dropout.enabled() ? arena.take<Real>(sizes.columns * sizes.padded_rows)
                                     : nullptr),
      seen(arena.take<Count<Real>>(2 * sizes.padded_rows)),
      finite_rows(arena.take<Real>(sizes.columns * sizes.padded_dim_v)),
      steps(take_steps(arena, problem)),
      K_copies(take_copies(arena, problem, sizes.columns * problem.dim_qk)),
      V_copies(take_copies(arena, problem, sizes.columns * problem.dim_v)),
      Q_rows(take_terms(arena, problem, sizes.rows * sizes.padded_dim_qk)),
      Q_pairs(take_terms(arena, problem, sizes.padded_rows * sizes.padded_dim_qk)),
      K_pairs(take_terms(arena, problem, sizes.columns * sizes.padded_dim_qk)),
      V_pairs(take_terms(arena, problem, sizes.padded_columns * sizes.padded_dim_v)),
      V_transposed(take_terms(arena, problem, 2 * sizes.transposed_pairs * problem.dim_v)),
      O_transposed(has_16_bits(problem) ? arena.take<Real>(sizes.transposed_rows * problem.dim_v)
                                        : nullptr) {}

template <class Real>
SplitScratch<Real>::SplitScratch(Arena& arena, const Problem& problem, const TileSizes& sizes)
    : stride(sizes.padded_columns + kMostLanes) {
  const i64 heads = most_heads_together(problem);
  const i64 lanes = kMostSplitRows * sizes.padded_dim_qk;
  Q = arena.take<Real>(sizes.rows * sizes.padded_dim_qk);
  Q_lanes = arena.take<Real>(heads * lanes);
  Q_pairs = take_pairs(arena, problem, sizes.rows * sizes.padded_dim_qk);
  Q_pair_lanes = take_pairs(arena, problem, heads * lanes);
  scores = arena.take<Real>(heads * sizes.rows * stride);
  addend = arena.take<Real>(sizes.rows * stride);
  keep = problem.dropout.enabled() ? arena.take<Real>(sizes.rows * stride) : nullptr;
  key_rows = arena.take<const void*>(sizes.columns);
  loaded = arena.take<Real>(kLoadedKeys * max(sizes.padded_dim_qk, sizes.padded_dim_v));
  finite_rows = arena.take<Real>(kLoadedKeys * sizes.padded_dim_v);
  steps = take_steps(arena, problem);
}

template <class Real>
SplitShared<Real>::SplitShared(Arena& arena, const Problem& problem, const TileSizes& sizes)
    : splits(arena.take<i64>(problem.num_sequences + 1)) {
  const i64 splits = problem.packed.kv
                         ? problem.kv_rows / sizes.columns + problem.num_sequences
                         : problem.num_sequences * ceil_div(problem.max_kv, sizes.columns);
  const i64 parts = splits * problem.heads_kv * sizes.rows;
  row_max = arena.take<Real>(parts);
  row_sum = arena.take<Real>(parts);
  O = arena.take<Real>(parts * sizes.padded_dim_v);
}

template <class Real>
BackwardShared<Real>::BackwardShared(Arena& arena, const Problem& problem, const TileSizes& sizes)
    : q_blocks(arena.take<i64>(problem.num_sequences + 1)),
      kv_blocks(arena.take<i64>(problem.num_sequences + 1)),
      row_max(arena.take<Real>(num_q_rows(problem))),
      normalizer(arena.take<Real>(num_q_rows(problem))),
      delta(arena.take<Real>(num_q_rows(problem))),
      lse_term(problem.has(Array::kDLse) ? arena.take<Real>(num_q_rows(problem)) : nullptr),
      sink_term(problem.has(Array::kDSinks) ? arena.take<double>(num_q_rows(problem)) : nullptr),
      dQ(problem.has(Array::kDQ) ? arena.take<Real>(num_q_rows(problem) * sizes.padded_dim_qk)
                                 : nullptr),
      sums_of_dQ(
          arena.take<i64>(most_blocks(problem, problem.q_rows, sizes.rows) * problem.heads_q)),
      captures(),
      tiles(nullptr),
      captures_order(nullptr) {
  if (!problem.wants_captures()) return;
  tiles = arena.take<i64>(problem.num_sequences + 1);
  captures_order = arena.take<i64>(static_cast<i64>(problem.program->derivatives.size()));
  for (int index = 0; index < kNumCaptures; ++index) {
    const Tensor& gradient = problem.arrays[capture_gradient(index)];
    if (gradient.present())
      captures[index] = arena.take<double>(expression::num_elements(gradient));
  }
}

template <class Real>
BackwardScratch<Real>::BackwardScratch(Arena& arena, const Problem& problem, const TileSizes& sizes)
    : Q(arena.take<Real>(sizes.rows * sizes.padded_dim_qk)),
      dO(arena.take<Real>(sizes.rows * sizes.padded_dim_v)),
      O(arena.take<Real>(sizes.rows * sizes.padded_dim_v)),
      K(arena.take<Real>(sizes.columns * sizes.padded_dim_qk)),
      V(arena.take<Real>(sizes.columns * sizes.padded_dim_v)),
      K_lanes(arena.take<Real>(problem.dim_qk * sizes.padded_columns)),
      V_lanes(arena.take<Real>(problem.dim_v * sizes.padded_columns)),
      P(arena.take<Real>(sizes.rows * sizes.padded_columns)),
      dS(arena.take<Real>(sizes.rows * sizes.padded_columns)),
      dK(arena.take<Real>(sizes.columns * sizes.padded_dim_qk)),
      dV(arena.take<Real>(sizes.columns * sizes.padded_dim_v)),
      addend(arena.take<Real>(sizes.rows * sizes.padded_columns)),
      keep(problem.dropout.enabled() ? arena.take<Real>(sizes.rows * sizes.padded_columns)
                                     : nullptr),
      seen(arena.take<Count<Real>>(2 * sizes.padded_rows)),
      dbias(problem.has(Array::kDBias) ? arena.take<Real>(sizes.rows * sizes.padded_columns)
                                       : nullptr),
      finite_rows(arena.take<Real>(max(sizes.rows, sizes.columns) *
                                   max(sizes.padded_dim_qk, sizes.padded_dim_v))),
      steps(take_steps(arena, problem)),
      slope(problem.has_score_expression() ? arena.take<Real>(sizes.rows * sizes.padded_columns)
                                           : nullptr),
      elements(problem.wants_captures() ? arena.take<i64>(sizes.rows * sizes.padded_columns)
                                        : nullptr),
      K_columns(take_pairs(arena, problem, sizes.padded_columns * sizes.padded_dim_qk)),
      V_columns(take_pairs(arena, problem, sizes.padded_columns * sizes.padded_dim_v)),
      Q_columns(take_pairs(arena, problem, sizes.padded_rows * sizes.padded_dim_qk)),
      dO_columns(take_pairs(arena, problem, sizes.padded_rows * sizes.padded_dim_v)),
      K_rows(take_pairs(arena, problem, sizes.padded_columns * sizes.padded_dim_qk)),
      Q_rows(take_pairs(arena, problem, sizes.padded_rows * sizes.padded_dim_qk)),
      dO_rows(take_pairs(arena, problem, sizes.padded_rows * sizes.padded_dim_v)),
      K_pairs(take_pairs(arena, problem, sizes.padded_columns * sizes.padded_dim_qk)),
      V_pairs(take_pairs(arena, problem, sizes.padded_columns * sizes.padded_dim_v)),
      dS_pairs(take_pairs(arena, problem, sizes.padded_rows * sizes.padded_columns)) {}

template struct ForwardShared<float>;
template struct ForwardShared<double>;
template struct ForwardScratch<float>;
template struct ForwardScratch<double>;
template struct SplitShared<float>;
template struct SplitShared<double>;
template struct SplitScratch<float>;
template struct SplitScratch<double>;
template struct BackwardShared<float>;
template struct BackwardShared<double>;
template struct BackwardScratch<float>;
template struct BackwardScratch<double>;

}  // namespace fulmen
