// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Preconditions of fulmen_mla_indexer: presence, ranks and null pointers, dtypes, shapes, overlaps;
// then contents, where the host can read them.

#include "core/indexer.h"

#include <iterator>
#include <limits>

#include "core/arrays.h"
#include "core/error.h"

namespace fulmen {
namespace {

using enum Axis;

constexpr AxisList kOfQ{4, 2, 0, {kBatch, kHead, kQRow, kDimQk}, {0, 1, 2, 3}};
constexpr AxisList kOfK{4, 2, 0, {kPool, kKvHead, kPoolRow, kDimQk}, {0, 1, 2, 3}};
constexpr AxisList kOfScale{4, 1, 3, {kPool, kKvHead, kPoolRow, kOne}, {0, 1, 2, 3}};
constexpr AxisList kOfWeights{3, 1, 0, {kBatch, kHead, kQRow}, {0, 1, 2}};
constexpr AxisList kOfLengths{1, 1, 0, {kSequence}, {3}};
constexpr AxisList kOfTable{2, 1, 1, {kSequence, kTableEntry}, {0, 3}};
constexpr AxisList kOfIndices{3, 1, 0, {kBatch, kQRow, kChosenKey}, {0, 2, 3}};

// In the order of kIndexerArrays.
constexpr AxisList kIndexerLists[] = {kOfQ,       kOfK,     kOfScale,  kOfWeights,
                                      kOfLengths, kOfTable, kOfIndices};
static_assert(std::size(kIndexerLists) == std::size(kIndexerArrays));

void require_indexed(const Tensor& tensor, const char* array, const char* axes) {
  if (!tensor.present()) refuse(sentence(array, " is missing; ", axes, " is needed"));
}

void check_indexer_dtype(const Tensor& tensor, const char* array, bool is_allowed,
                         const char* allowed) {
  if (!tensor.present() || is_allowed) return;
  throw Error(Status::kDType,
              sentence(array, " is ", name(tensor.dtype), "; allowed is ", allowed));
}

bool is_16_bits_or_float32(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

void check_indexer_dtypes(const IndexerProblem& given) {
  const DType q = given.q.dtype, k = given.k.dtype;
  check_indexer_dtype(given.q, "q", is_16_bits_or_float32(q) || q == DType::kFloat8E4M3,
                      "float32, float16, bfloat16 or float8_e4m3fn");
  check_indexer_dtype(given.k, "k", k == q || k == DType::kFloat8E4M3,
                      "the dtype of q, or float8_e4m3fn");
  check_indexer_dtype(given.weights, "weights", is_16_bits_or_float32(given.weights.dtype),
                      "float32, float16 or bfloat16");
  check_indexer_dtype(given.k_scale, "k_scale", given.k_scale.dtype == DType::kFloat32, "float32");
  check_indexer_dtype(given.kv_lengths, "kv_lengths", is_index(given.kv_lengths.dtype),
                      "int32 or int64");
  check_indexer_dtype(given.page_table, "page_table", is_index(given.page_table.dtype),
                      "int32 or int64");
  check_indexer_dtype(given.indices, "indices", is_index(given.indices.dtype), "int32 or int64");
  if (given.k_scale.present() && k != DType::kFloat8E4M3) {
    refuse(sentence("k_scale is given where k is ", name(k),
                    "; scales are of float8_e4m3fn: leave it out"));
  }
}

Sizes measure_indexer(IndexerProblem& problem) {
  IndexerExtents& extents = problem.extents;
  const Tensor q = normal_form(problem.q, kOfQ), k = normal_form(problem.k, kOfK);
  const Tensor indices = normal_form(problem.indices, kOfIndices);
  const bool is_paged = problem.page_table.present();
  extents.batch = q.shape[0];
  extents.heads = q.shape[1];
  extents.rows = q.shape[2];
  extents.dim = q.shape[3];
  extents.topk = indices.shape[3];
  extents.pages = k.shape[0];
  extents.page_size = k.shape[2];
  const i64 columns = is_paged ? problem.page_table.shape[problem.page_table.rank - 1] : 1;
  if (is_paged && extents.page_size < 1) {
    throw Error(Status::kShape, "k has pages of 0 rows; a page has at least 1");
  }
  extents.keys = columns * extents.page_size;
  if (extents.keys > kMaxExtent) {
    throw Error(Status::kShape,
                sentence("page_table has ", columns, " pages of ", extents.page_size,
                         " rows; at most ", kMaxExtent, " keys of a request are indexed"));
  }
  Sizes sizes{};
  sizes.paged = is_paged;
  sizes[kBatch] = sizes[kSequence] = extents.batch;
  sizes[kHead] = extents.heads;
  sizes[kKvHead] = sizes[kOne] = 1;
  sizes[kQRow] = extents.rows;
  sizes[kDimQk] = extents.dim;
  sizes[kPool] = is_paged ? extents.pages : extents.batch;
  sizes[kPoolRow] = extents.page_size;
  sizes[kTableEntry] = columns;
  sizes[kChosenKey] = extents.topk;
  return sizes;
}

void check_indices(const IndexerProblem& problem) {
  const i64 slots = problem.extents.pages * problem.extents.page_size;
  if (problem.indices.dtype == DType::kInt32 && slots > std::numeric_limits<i32>::max()) {
    throw Error(Status::kDType,
                sentence("indices is int32 where k has ", slots, " rows; allowed is int64"));
  }
  if (may_overlap_itself(problem.indices)) {
    refuse("indices has strides by which two of its elements are one");
  }
  for (const IndexerArray& array : kIndexerArrays) {
    const Tensor& other = problem.*array.member;
    if (!other.present() || array.member == &IndexerProblem::indices) continue;
    if (may_overlap(problem.indices, other)) {
      refuse(sentence("indices overlaps ", array.name, " in memory; allowed is another array"));
    }
  }
}

}  // namespace

IndexerProblem validate_indexer(IndexerProblem given) {
  require_indexed(given.q, "q", "(batch, head, q_row, dim)");
  require_indexed(given.k, "k", "(batch, 1, kv_row, dim), or a pool of pages,");
  require_indexed(given.weights, "weights", "(batch, head, q_row)");
  require_indexed(given.indices, "indices", "(batch, q_row, topk), which is written,");
  for (size_t i = 0; i < std::size(kIndexerArrays); ++i) {
    const Tensor& tensor = given.*kIndexerArrays[i].member;
    if (!tensor.present()) continue;
    check_layout(tensor, kIndexerArrays[i].name, kIndexerLists[i], {}, Pointers::kChecked);
    check_span(tensor, kIndexerArrays[i].name);
  }
  check_indexer_dtypes(given);
  const Sizes sizes = measure_indexer(given);
  alignas(kMaxPointerAlignment) static char nothing[1];  // an offset may be added to its address
  for (size_t i = 0; i < std::size(kIndexerArrays); ++i) {
    Tensor& tensor = given.*kIndexerArrays[i].member;
    if (!tensor.present()) continue;
    const Tensor normal = normal_form(tensor, kIndexerLists[i]);
    check_shape(tensor, normal, kIndexerArrays[i].name, kIndexerLists[i], sizes);
    tensor = normal;
    if (normal.data == nullptr) tensor.data = nothing;
  }
  check_indices(given);
  return given;
}

i64 keys_of(const IndexerProblem& problem, i64 batch) {
  return problem.kv_lengths.present() ? problem.kv_lengths.index(0, 0, 0, batch)
                                      : problem.extents.keys;
}

i64 page_of(const IndexerProblem& problem, i64 batch, i64 key) {
  if (!problem.page_table.present()) return batch;
  return problem.page_table.index(batch, 0, 0, key / problem.extents.page_size);
}

void check_contents(const IndexerProblem& problem) {
  const IndexerExtents& extents = problem.extents;
  for (i64 b = 0; b < extents.batch; ++b) {
    const i64 keys = keys_of(problem, b);
    if (keys < 0 || keys > extents.keys) {
      refuse(sentence("kv_lengths[", b, "] is ", keys, "; allowed is 0 to ", extents.keys));
    }
    for (i64 key = 0; problem.page_table.present() && key < keys; key += extents.page_size) {
      const i64 page = page_of(problem, b, key);
      if (page >= 0 && page < extents.pages) continue;
      refuse(sentence("page_table[", b, ", ", key / extents.page_size, "] is ", page,
                      "; k has pages 0 to ", extents.pages - 1));
    }
  }
}

}  // namespace fulmen
