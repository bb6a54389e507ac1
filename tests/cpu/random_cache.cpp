// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// How requests over caches are drawn.
#include <algorithm>

#include "random_problem.h"

namespace fulmen::test {

struct RandomProblem::CacheRequest {
  i64 dim_qk, dim_v, heads_kv;
  std::vector<i64> q_lengths, kv_lengths;
  i64 q_rows;  // extent of q
  bool has_tree;
  bool is_plain;  // q, k, v, o as the copy engine takes them
};

Tensor RandomProblem::draw_array(const CacheRequest& drawn, DType dtype,
                                 const std::vector<i64>& shape) {
  return drawn.is_plain ? contiguous(dtype, shape) : array(dtype, shape);
}

// k, v, page_table (and page_indptr): each key of each request on a page of its own, but that
// requests may share their first pages.
void RandomProblem::draw_pages(Request& request, CacheRequest& drawn) {
  Arrays& arrays = request.arrays;
  const i64 page_rows = one_of<i64>({1, 3, 16, 64});
  const i64 width = ceil_div(longest_kv_, page_rows) + number(0, 2);
  const i64 num_pages = batch_ * width + 3;
  std::vector<i64> free(static_cast<size_t>(num_pages));
  for (i64 page = 0; page < num_pages; ++page) free[static_cast<size_t>(page)] = page;
  std::shuffle(free.begin(), free.end(), random_);
  for (const auto& [array_of, dim] :
       {std::pair{Array::kK, drawn.dim_qk}, std::pair{Array::kV, drawn.dim_v}}) {
    arrays[array_of] = draw_array(drawn, dtype_, {num_pages, drawn.heads_kv, page_rows, dim});
  }
  const auto fill_key = [&](i64 page, i64 row) {
    for (const Array array_of : {Array::kK, Array::kV}) {
      Tensor one = arrays[array_of];
      const i64 at[kMaxRank] = {page, 0, row, 0};
      one.data = address(one, at);
      one.shape[0] = one.shape[2] = 1;
      fill_normal(one);
    }
  };
  std::vector<i64> table, ragged, offsets{0}, first;
  for (i64 b = 0; b < batch_; ++b) {
    const i64 length = drawn.kv_lengths[static_cast<size_t>(b)];
    for (i64 page = 0; page < width; ++page) {
      const bool is_used = page * page_rows < length;
      const bool is_shared = is_used && page < static_cast<i64>(first.size()) && chance(0.5);
      i64 id = one_of<i64>({-1, num_pages, 1 << 30, -(1 << 30)});  // never to be followed
      if (is_used) {
        id = is_shared ? first[static_cast<size_t>(page)] : free.back();
        if (!is_shared) free.pop_back();
        for (i64 row = 0; row < min(page_rows, length - page * page_rows); ++row) fill_key(id, row);
        ragged.push_back(id);
      }
      if (b == 0 && is_used) first.push_back(id);
      table.push_back(id);
    }
    offsets.push_back(static_cast<i64>(ragged.size()));
  }
  const DType type = one_of({DType::kInt32, DType::kInt64});
  if (chance(0.4)) {
    ragged.push_back(-7);
    arrays[Array::kPageTable] = indices(type, ragged);
    arrays[Array::kPageIndptr] = indices(one_of({DType::kInt32, DType::kInt64}), offsets);
    request.options.max_kv = longest_kv_ + 1;
    ++longest_kv_;
    return;
  }
  Tensor& page_table = arrays[Array::kPageTable] = indices(type, table);
  page_table.rank = 2;
  page_table.shape[0] = batch_;
  page_table.shape[1] = page_table.strides[0] = width;
  page_table.strides[1] = 1;
  longest_kv_ = width * page_rows;  // columns of bias and mask
}

void RandomProblem::draw_positions(Request& request, const CacheRequest& drawn) {
  Arrays& arrays = request.arrays;
  const i64 rows = packed_ ? drawn.q_rows : batch_ * drawn.q_rows;
  const auto per_row = [&](Tensor tensor) {
    if (packed_) return tensor;
    tensor.rank = 2;
    tensor.shape[0] = batch_;
    tensor.shape[1] = tensor.strides[0] = drawn.q_rows;
    tensor.strides[1] = 1;
    return tensor;
  };
  if (drawn.has_tree) {
    std::vector<i64> words(static_cast<size_t>(rows));
    for (i64& word : words) word = static_cast<i64>(u64{random_()} << 32 | random_());
    arrays[Array::kTree] = per_row(indices(DType::kInt64, words));
  }
  if (!chance(0.4)) return;
  std::vector<i64> positions(static_cast<size_t>(rows));
  for (i64& position : positions) position = number(-3, longest_kv_ + 3);
  arrays[Array::kPositions] = per_row(indices(one_of({DType::kInt32, DType::kInt64}), positions));
}

Request RandomProblem::draw_cache(bool is_plain) {
  Request request;
  Arrays& arrays = request.arrays;
  dtype_ = one_of({DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64});
  batch_ = number(1, 3);
  packed_ = chance(0.4);
  const auto draw_dim = [&] { return is_plain ? 8 * number(1, 5) : number(1, 40); };
  CacheRequest drawn{draw_dim(), draw_dim(), number(1, 2), {}, {}, 0, chance(0.3), is_plain};
  heads_q_ = drawn.heads_kv * number(1, 3);
  longest_q_ = drawn.has_tree ? number(1, 20) : number(1, 40);
  longest_kv_ = number(0, 140);
  for (i64 b = 0; b < batch_; ++b) {
    drawn.q_lengths.push_back(chance(0.2) ? 0 : number(1, longest_q_));
    drawn.kv_lengths.push_back(chance(0.2) ? 0 : number(0, longest_kv_));
  }
  drawn.q_rows = longest_q_;
  const bool paged = packed_ || chance(0.7);
  if (packed_) {
    std::vector<i64> offsets{0};
    for (const i64 length : drawn.q_lengths) offsets.push_back(offsets.back() + length);
    arrays[Array::kCuQ] = indices(DType::kInt32, offsets);
    drawn.q_rows = offsets.back() + number(0, 2);
    request.options.max_q = max<i64>(longest_q_, 1);
  } else if (chance(0.5)) {
    arrays[Array::kQLengths] = indices(DType::kInt64, drawn.q_lengths);
  }
  if (paged) {
    draw_pages(request, drawn);
  } else {
    for (const auto& [array_of, dim] :
         {std::pair{Array::kK, drawn.dim_qk}, std::pair{Array::kV, drawn.dim_v}}) {
      arrays[array_of] = draw_array(drawn, dtype_, {batch_, drawn.heads_kv, longest_kv_, dim});
    }
    for (const Array input : {Array::kK, Array::kV}) fill_normal(arrays[input]);
  }
  arrays[Array::kKvLengths] = indices(DType::kInt32, drawn.kv_lengths);
  if (!paged || chance(0.3)) {
    std::vector<i64> starts;
    for (const i64 length : drawn.kv_lengths) starts.push_back(chance(0.3) ? 0 : number(0, length));
    arrays[Array::kKvStart] = indices(DType::kInt64, starts);
  }
  draw_positions(request, drawn);
  const auto shape = [&](i64 dim) {
    return packed_ ? std::vector<i64>{heads_q_, drawn.q_rows, dim}
                   : std::vector<i64>{batch_, heads_q_, drawn.q_rows, dim};
  };
  const DType sums = accumulator(dtype_);
  arrays[Array::kQ] = draw_array(drawn, dtype_, shape(drawn.dim_qk));
  fill_normal(arrays[Array::kQ]);
  arrays[Array::kO] = draw_array(drawn, chance(0.2) ? DType::kFloat32 : dtype_, shape(drawn.dim_v));
  std::vector<i64> rows = shape(2);
  arrays[Array::kStats] = array(sums, rows);
  rows.pop_back();
  arrays[Array::kLse] = array(sums, rows);
  draw_masks(request, drawn.q_rows, longest_kv_);
  draw_score_terms(request);
  return request;
}

}  // namespace fulmen::test
