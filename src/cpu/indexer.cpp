// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The indexer of sparse latent attention on the CPU. A task has a query row, whose heads meet the
// keys tile by tile in the products of the tiled backend; what a tile ranks is kept as long as it
// may be among the topk, so that memory does not grow with the number of keys.

#include "core/indexer.h"

#include <algorithm>
#include <vector>

#include "cpu/backend.h"
#include "cpu/kernels.h"
#include "cpu/thread_pool.h"

namespace fulmen::cpu {
namespace {

constexpr i64 kTileKeys = 256;

i64 rounded_up(i64 count, i64 unit) { return ceil_div(count, unit) * unit; }

// The ranked keys of a row: the best topk of all that came, and some more.
class Ranked {
 public:
  explicit Ranked(i64 topk) : topk_(static_cast<size_t>(topk)) { keys_.reserve(2 * topk_); }

  void add(u64 key) {
    if (key <= least_) return;
    keys_.push_back(key);
    if (keys_.size() >= 2 * topk_ + static_cast<size_t>(kTileKeys)) keep_best();
  }

  // The numbers of the best, rising. Empties it.
  const std::vector<u64>& take() {
    keep_best();
    for (u64& key : keys_) key = static_cast<u64>(number_of(key));
    std::sort(keys_.begin(), keys_.end());
    return keys_;
  }

  void clear() {
    keys_.clear();
    least_ = 0;
  }

 private:
  void keep_best() {
    if (keys_.size() <= topk_) return;
    const auto end = keys_.begin() + static_cast<i64>(topk_);
    std::nth_element(keys_.begin(), end - 1, keys_.end(), std::greater<>());
    keys_.resize(topk_);
    least_ = topk_ == 0 ? ~u64{0} : keys_.back();
  }

  size_t topk_;
  std::vector<u64> keys_;
  u64 least_ = 0;  // what comes is kept where it is larger
};

// What a thread works with.
struct IndexerScratch {
  IndexerScratch(const IndexerExtents& extents, const Kernels<float>& kernels)
      : stride(rounded_up(max<i64>(extents.dim, 1), kernels.lanes)),
        q(static_cast<size_t>(extents.heads * stride)),
        k(static_cast<size_t>(kTileKeys * stride)),
        panels(static_cast<size_t>(rounded_up(kTileKeys, kernels.lanes) * stride)),
        S(static_cast<size_t>(extents.heads * rounded_up(kTileKeys, kernels.lanes))),
        ranked(extents.topk) {}

  i64 stride;
  std::vector<float> q, k, panels, S;
  Ranked ranked;
};

// Keys [begin, begin + count), wherever their pages lie.
void load_keys(const IndexerProblem& problem, const Kernels<float>& kernels, i64 batch, i64 begin,
               i64 count, IndexerScratch& scratch) {
  const i64 page_size = problem.extents.page_size;
  for (i64 key = begin; key < begin + count;) {
    const i64 page = page_of(problem, batch, key);
    const i64 row = key % page_size;
    const i64 rows = min(page_size - row, begin + count - key);
    Source source{problem.k.address(page, 0, row, 0), problem.k.dtype, problem.k.strides[2],
                  problem.k.strides[3]};
    if (problem.k_scale.present()) {
      source.scales = problem.k_scale.address(page, 0, row, 0);
      source.scale_stride = problem.k_scale.strides[2];
    }
    kernels.load_rows(source, rows, problem.extents.dim,
                      scratch.k.data() + (key - begin) * scratch.stride, scratch.stride);
    key += rows;
  }
}

void rank_tile(const IndexerProblem& problem, const Kernels<float>& kernels, i64 batch, i64 row,
               i64 begin, i64 count, IndexerScratch& scratch) {
  const IndexerExtents& extents = problem.extents;
  const i64 lanes = kernels.lanes, columns = rounded_up(count, lanes);
  load_keys(problem, kernels, batch, begin, count, scratch);
  kernels.transpose({scratch.k.data(), scratch.stride}, count, extents.dim, scratch.panels.data(),
                    extents.dim * lanes, lanes);
  Product<float> product{};
  product.rows = extents.heads;
  product.columns = columns;
  product.depth = extents.dim;
  product.A = scratch.q.data();
  product.A_row_stride = scratch.stride;
  product.A_depth_stride = 1;
  product.B = scratch.panels.data();
  product.B_depth_stride = lanes;
  product.B_panel_stride = extents.dim * lanes;
  product.C = scratch.S.data();
  product.C_row_stride = columns;
  kernels.multiply(product);
  float scores[kTileKeys] = {};
  for (i64 head = 0; head < extents.heads; ++head) {
    const float weight = static_cast<float>(problem.weights.real(batch, head, row, 0));
    const float* const S = scratch.S.data() + head * columns;
    for (i64 j = 0; j < count; ++j) scores[j] += weight * rectified(S[j]);
  }
  for (i64 j = 0; j < count; ++j) scratch.ranked.add(ranked(scores[j], begin + j));
}

void index_row(const IndexerProblem& problem, const Kernels<float>& kernels, i64 batch, i64 row,
               IndexerScratch& scratch) {
  const IndexerExtents& extents = problem.extents;
  const i64 keys = keys_of_row(keys_of(problem, batch), extents.rows, row, extents.causal);
  scratch.ranked.clear();
  if (keys <= extents.topk) {  // all of them
    for (i64 key = 0; key < keys; ++key) scratch.ranked.add(ranked(0, key));
  } else {
    const Source source{problem.q.address(batch, 0, row, 0), problem.q.dtype, problem.q.strides[1],
                        problem.q.strides[3]};
    kernels.load_rows(source, extents.heads, extents.dim, scratch.q.data(), scratch.stride);
    for (i64 begin = 0; begin < keys; begin += kTileKeys) {
      const i64 count = min(kTileKeys, keys - begin);
      rank_tile(problem, kernels, batch, row, begin, count, scratch);
    }
  }
  const std::vector<u64>& chosen = scratch.ranked.take();
  for (i64 i = 0; i < extents.topk; ++i) {
    i64 slot = -1;
    if (i < static_cast<i64>(chosen.size())) {
      const i64 key = static_cast<i64>(chosen[static_cast<size_t>(i)]);
      slot = page_of(problem, batch, key) * extents.page_size + key % extents.page_size;
    }
    char* const to = problem.indices.address(batch, 0, row, i);
    if (problem.indices.dtype == DType::kInt64) {
      store_bytes(to, slot);
    } else {
      store_bytes(to, static_cast<i32>(slot));
    }
  }
}

}  // namespace

void index_keys(const IndexerProblem& problem) {
  check_contents(problem);
  const Kernels<float>& kernels = fulmen::cpu::kernels<float>();
  const int slots = num_threads();
  std::vector<IndexerScratch> scratch(static_cast<size_t>(slots),
                                      IndexerScratch(problem.extents, kernels));
  const i64 rows = problem.extents.rows;
  for_each_task(slots, problem.extents.batch * rows, [&](int slot, i64 task) {
    index_row(problem, kernels, task / rows, task % rows, scratch[static_cast<size_t>(slot)]);
  });
}

}  // namespace fulmen::cpu
