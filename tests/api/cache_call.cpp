// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// How calls over caches are made.
#include "api/cache_call.h"

#include <algorithm>
#include <set>

namespace fulmen::test {
namespace {

using T = fulmen_tensors;

size_t row_bytes(const fulmen_tensor& tensor) {
  return static_cast<size_t>(tensor.shape[3]) * size_of(tensor.dtype);
}

// Row `row` of a contiguous (a, b, row, dim).
char* row_of(const fulmen_tensor& tensor, int64_t a, int64_t b, int64_t row) {
  const int64_t at = a * tensor.strides[0] + b * tensor.strides[1] + row * tensor.strides[2];
  return static_cast<char*>(tensor.data) + static_cast<size_t>(at) * size_of(tensor.dtype);
}

int64_t page_of(const CacheSizes& sizes, size_t request, int64_t key) {
  return sizes.pages[request][static_cast<size_t>(key / sizes.page_rows)];
}

// Rows of no request become NaN.
void poison_unused(const fulmen_tensor& pool, const CacheSizes& sizes) {
  std::set<std::pair<int64_t, int64_t>> used;
  for (size_t b = 0; b < sizes.lengths.size(); ++b) {
    for (int64_t j = 0; j < sizes.lengths[b]; ++j) {
      used.emplace(page_of(sizes, b, j), j % sizes.page_rows);
    }
  }
  for (int64_t page = 0; page < pool.shape[0]; ++page) {
    for (int64_t row = 0; row < pool.shape[2]; ++row) {
      if (used.count({page, row}) != 0) continue;
      for (int64_t head = 0; head < pool.shape[1]; ++head) {
        std::memset(row_of(pool, page, head, row), 0xff, row_bytes(pool));
      }
    }
  }
}

void gather(const fulmen_tensor& pool, const fulmen_tensor& to, const CacheSizes& sizes) {
  std::memset(to.data, 0xff, size_of(to));
  for (size_t b = 0; b < sizes.lengths.size(); ++b) {
    for (int64_t head = 0; head < pool.shape[1]; ++head) {
      for (int64_t j = 0; j < sizes.lengths[b]; ++j) {
        std::memcpy(row_of(to, static_cast<int64_t>(b), head, j),
                    row_of(pool, page_of(sizes, b, j), head, j % sizes.page_rows), row_bytes(pool));
      }
    }
  }
}

}  // namespace

TestCall paged_call(const CacheSizes& sizes, fulmen_dtype dtype) {
  const Sizes& s = sizes.call;
  TestCall call(s, dtype);
  call.input(&T::k, dtype, {sizes.num_pages, s.kv_heads, sizes.page_rows, s.dim_qk});
  call.input(&T::v, dtype, {sizes.num_pages, s.kv_heads, sizes.page_rows, s.dim_v});
  poison_unused(call.tensors.k, sizes);
  poison_unused(call.tensors.v, sizes);
  std::vector<int64_t> table;
  for (const auto& pages : sizes.pages) table.insert(table.end(), pages.begin(), pages.end());
  fulmen_tensor& tensor = call.indices(&T::page_table, table);
  tensor.rank = 2;
  tensor.shape[0] = s.batch;
  tensor.shape[1] = static_cast<int64_t>(sizes.pages[0].size());
  tensor.strides[0] = tensor.shape[1];
  tensor.strides[1] = 1;
  call.indices(&T::kv_lengths, sizes.lengths);
  return call;
}

TestCall gathered_call(const TestCall& paged, const CacheSizes& sizes) {
  Sizes s = sizes.call;
  s.kv_rows = static_cast<int64_t>(sizes.pages[0].size()) * sizes.page_rows;
  TestCall call(s, paged.dtype);
  gather(paged.tensors.k, call.tensors.k, sizes);
  gather(paged.tensors.v, call.tensors.v, sizes);
  call.tensors.q = paged.tensors.q;
  call.indices(&T::kv_lengths, sizes.lengths);
  return call;
}

}  // namespace fulmen::test
