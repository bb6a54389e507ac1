// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Preconditions of fulmen_append_kv and fulmen_rotary: presence, ranks and null pointers, dtypes,
// shapes, overlaps; then contents, where the host can read them.

#include "core/append.h"

#include <algorithm>
#include <string>

#include "core/arrays.h"
#include "core/error.h"

namespace fulmen {
namespace {

using enum Axis;

constexpr AxisList kPoolK{4, 4, 0, {kCachePage, kKvHead, kCacheRow, kDimQk}, {0, 1, 2, 3}};
constexpr AxisList kPoolV{4, 4, 0, {kCachePage, kKvHead, kCacheRow, kDimV}, {0, 1, 2, 3}};
constexpr AxisList kNewK{4, 2, 0, {kBatch, kKvHead, kNewRow, kDimQk}, {0, 1, 2, 3}};
constexpr AxisList kNewV{4, 2, 0, {kBatch, kKvHead, kNewRow, kDimV}, {0, 1, 2, 3}};
constexpr AxisList kNewQ{4, 2, 0, {kBatch, kHead, kNewRow, kDimQk}, {0, 1, 2, 3}};
constexpr AxisList kOffsets{1, 1, 0, {kOffset}, {3}};
constexpr AxisList kLengths{1, 1, 0, {kSequence}, {3}};
constexpr AxisList kSlotAxes{2, 1, 0, {kBatch, kNewRow}, {0, 3}};
constexpr AxisList kPositionAxes{2, 1, 1, {kBatch, kNewRow}, {0, 3}};
constexpr AxisList kTable{2, 2, 0, {kSequence, kTableEntry}, {0, 3}};
constexpr AxisList kFlatTable{1, 1, 0, {kTableEntry}, {3}};
constexpr AxisList kScales{4, 1, 3, {kCachePage, kKvHead, kCacheRow, kOne}, {0, 1, 2, 3}};
constexpr AxisList kRotaryTable{2, 2, 0, {kPosition, kRotaryPair}, {2, 3}};

// In the order of kAppendArrays.
constexpr AxisList kLists[] = {
    kPoolK,   kPoolV,        kNewK,        kNewV,        kOffsets, kSlotAxes, kTable,  kOffsets,
    kLengths, kPositionAxes, kRotaryTable, kRotaryTable, kNewQ,    kNewQ,     kScales, kScales};
static_assert(std::size(kLists) == std::size(kAppendArrays));

// One array of a call, with all that is said of it.
struct Given {
  const char* name;
  Tensor* tensor;
  AxisList list;
  bool is_written;
};

template <class Action>
void for_each_given(AppendProblem& problem, bool has_caches, const Action& action) {
  for (size_t i = 0; i < std::size(kAppendArrays); ++i) {
    const AppendArray& array = kAppendArrays[i];
    Tensor& tensor = problem.*array.member;
    if (!tensor.present()) continue;
    const bool is_flat =
        array.member == &AppendProblem::page_table && problem.page_indptr.present();
    action(Given{name(array, has_caches), &tensor, is_flat ? kFlatTable : kLists[i],
                 array.is_written});
  }
}

void require(const Tensor& tensor, const char* name, const char* why) {
  if (!tensor.present()) refuse(sentence(name, " is missing; ", why));
}

void refuse_without(const Tensor& tensor, const char* name, bool is_usable, const char* why) {
  if (tensor.present() && !is_usable) refuse(sentence(name, " is given without ", why));
}

void check_rotary_presence(const AppendProblem& given) {
  if (given.cos.present() != given.sin.present()) {
    refuse(given.cos.present() ? "cos is given without sin; pass both or none"
                               : "sin is given without cos; pass both or none");
  }
}

void check_append_presence(const AppendProblem& given) {
  require(given.k_cache, "k_cache", "it is an array to write");
  require(given.k, "k", "new rows (batch, kv_head, row, dim_qk) are needed");
  if (given.has_records()) {
    if (given.v.present() || given.v_cache.present()) {
      refuse(
          sentence(given.v.present() ? "v" : "v_cache",
                   " is given where k_cache is uint8, records, which hold keys and values: leave "
                   "v and v_cache out"));
    }
  } else {
    require(given.v_cache, "v_cache", "it is an array to write");
    require(given.v, "v", "new rows (batch, kv_head, row, dim_v) are needed");
  }
  if (given.slots.present() && given.page_table.present()) {
    refuse("slots and page_table are both given; one of them says where rows go");
  }
  if (!given.slots.present()) {
    require(given.page_table, "page_table",
            "pass slots, or page_table and kv_lengths, to say where rows go");
    require(given.kv_lengths, "kv_lengths", "with page_table rows go behind the keys present");
  }
  const bool has_table = given.page_table.present();
  refuse_without(given.page_indptr, "page_indptr", has_table,
                 "page_table, whose entries it divides");
  check_rotary_presence(given);
  const bool rotates = given.rotates();
  refuse_without(given.positions, "positions", rotates, "cos and sin, which alone depend on them");
  refuse_without(given.q, "q", rotates, "cos and sin, by which it is rotated into q_out");
  refuse_without(given.kv_lengths, "kv_lengths", has_table || rotates,
                 "page_table or cos and sin, which alone depend on them");
  if (given.q.present() != given.q_out.present()) {
    refuse(given.q.present() ? "q is given without q_out; pass both (q_out may be q) or none"
                             : "q_out is given without q; pass both (q_out may be q) or none");
  }
  if (given.interleaved && !rotates) refuse("interleaved is 1 without cos and sin; set it to 0");
  if (rotates && !given.positions.present()) {
    require(given.kv_lengths, "positions", "with cos and sin pass positions or kv_lengths");
  }
}

void check_rotary_alone_presence(const AppendProblem& given) {
  require(given.q, "x", "an array (batch, head, row, dim) is needed");
  require(given.q_out, "out", "it is the array to write");
  require(given.cos, "cos", "a table (position, rotary_dim / 2) is needed");
  require(given.sin, "sin", "a table (position, rotary_dim / 2) is needed");
}

void require_dtype(const Given& given, bool is_allowed, const std::string& allowed) {
  if (is_allowed) return;
  throw Error(Status::kDType,
              sentence(given.name, " is ", name(given.tensor->dtype), "; allowed is ", allowed));
}

void check_cache_dtypes(const AppendProblem& problem) {
  const DType dtype = problem.dtype, stored = problem.k_cache.dtype;
  if (stored != dtype && (!is_quantised(stored) || dtype == DType::kFloat64)) {
    throw Error(Status::kDType,
                sentence("k_cache is ", name(stored), " where k is ", name(dtype),
                         "; allowed is the dtype of k, or (with k of 32 or 16 bits) float8_e4m3fn, "
                         "float8_e5m2, int8, or uint8 for records"));
  }
  if (!problem.has_records() && problem.v_cache.dtype != stored) {
    throw Error(Status::kDType, sentence("v_cache is ", name(problem.v_cache.dtype),
                                         "; allowed is the dtype of k_cache, ", name(stored)));
  }
  const bool has_k_scale = problem.k_scale.present();
  if ((is_quantised(stored) && !problem.has_records()) ||
      !(has_k_scale || problem.v_scale.present()))
    return;
  refuse(sentence(has_k_scale ? "k_scale" : "v_scale", " is given where k_cache is ", name(stored),
                  "; scales are of float8_e4m3fn, float8_e5m2 and int8: leave it out"));
}

void check_dtypes(AppendProblem& problem, bool has_caches) {
  const char* const operand = has_caches ? "k" : "x";
  const DType dtype = (has_caches ? problem.k : problem.q).dtype;
  problem.dtype = dtype;
  if (!is_float(dtype)) {
    throw Error(Status::kDType,
                sentence(operand, " is ", name(dtype), "; allowed is a floating-point type"));
  }
  if (has_caches) check_cache_dtypes(problem);
  for_each_given(problem, has_caches, [&](const Given& given) {
    const DType own = given.tensor->dtype;
    const Tensor* const tensor = given.tensor;
    if (tensor == &problem.k_cache || tensor == &problem.v_cache) return;
    if (given.list.axes[given.list.count - 1] == kOne) {
      require_dtype(given, own == DType::kFloat32, "float32");
    } else if (tensor == &problem.cos) {
      const bool is_allowed = own == dtype || own == DType::kFloat32;
      require_dtype(given, is_allowed,
                    sentence("the dtype of ", operand, ", ", name(dtype), ", or float32"));
    } else if (tensor == &problem.sin) {
      require_dtype(given, own == problem.cos.dtype,
                    sentence("that of cos, ", name(problem.cos.dtype)));
    } else if (given.list.axes[given.list.count - 1] == kDimQk ||
               given.list.axes[given.list.count - 1] == kDimV) {
      require_dtype(given, own == dtype, sentence("the dtype of ", operand, ", ", name(dtype)));
    } else {
      require_dtype(given, is_index(own), "int32 or int64");
    }
  });
}

// Extents by the arrays that define them; check_shape finds what disagrees.
Sizes measure(AppendProblem& problem, bool has_caches) {
  const Tensor rows = normal_form(has_caches ? problem.k : problem.q, kNewK);
  AppendExtents& extents = problem.extents;
  problem.batch = rows.shape[0];
  extents.rows = rows.shape[2];
  problem.dim_qk = rows.shape[3];
  problem.heads = problem.q.present() ? normal_form(problem.q, kNewQ).shape[1] : 0;
  const bool packed = problem.cu_new.present();
  extents.sequences = packed ? problem.cu_new.shape[0] - 1 : problem.batch;
  if (extents.sequences < 0) {
    throw Error(Status::kShape, "cu_new has no element; n sequences have n + 1 offsets");
  }
  if (has_caches) {
    problem.kv_heads = rows.shape[1];
    problem.dim_v = problem.v.present() ? normal_form(problem.v, kNewV).shape[3] : 0;
    extents.pages = problem.k_cache.shape[0];
    extents.page_size = problem.k_cache.shape[2];
    if (extents.page_size < 1) {
      throw Error(Status::kShape, "k_cache has pages of 0 rows; a page has at least 1");
    }
  }
  if (problem.page_table.present()) {
    extents.columns = problem.page_table.shape[problem.page_table.rank - 1];
  }
  if (problem.rotates()) extents.positions = problem.cos.shape[0];
  Sizes sizes{};
  sizes[kBatch] = problem.batch;
  sizes[kHead] = problem.heads;
  sizes[kKvHead] = problem.kv_heads;
  sizes[kNewRow] = extents.rows;
  sizes[kDimQk] = problem.dim_qk;
  sizes[kDimV] = problem.dim_v;
  sizes[kSequence] = extents.sequences;
  sizes[kOffset] = extents.sequences + 1;
  sizes[kCachePage] = extents.pages;
  sizes[kCacheRow] = extents.page_size;
  sizes[kTableEntry] = extents.columns;
  sizes[kPosition] = extents.positions;
  sizes[kOne] = 1;
  sizes[kRotaryPair] = problem.rotates() ? problem.cos.shape[1] : 0;
  return sizes;
}

void check_rotary_dim(const AppendProblem& problem, bool has_caches) {
  if (problem.has_records() && problem.rotates() && problem.rotary_dim() != kRecordRotary) {
    throw Error(Status::kShape, sentence("cos has ", problem.rotary_dim() / 2,
                                         " columns; the last 64 numbers of a record rotate: 32"));
  }
  if (problem.rotary_dim() <= problem.dim_qk) return;
  throw Error(Status::kShape,
              sentence("cos has ", problem.rotary_dim() / 2, " columns for ", problem.rotary_dim(),
                       " elements that rotate, where ", has_caches ? "k" : "x", " has head dim ",
                       problem.dim_qk, "; at most ", problem.dim_qk / 2, " columns are allowed"));
}

// Whether two pools are one memory counted from different pages, as caches have it whose tables
// keep the pages of K and V apart: what a call writes is for its slots to say.
bool are_pages_apart(const Tensor& a, const Tensor& b) {
  const bool are_alike = std::equal(a.shape, a.shape + kMaxRank, b.shape) &&
                         std::equal(a.strides, a.strides + kMaxRank, b.strides);
  const i64 page = a.strides[0] * size_bytes(a.dtype);
  const i64 distance =
      static_cast<i64>(reinterpret_cast<u64>(a.data) - reinterpret_cast<u64>(b.data));
  return are_alike && page != 0 && distance != 0 && distance % page == 0;
}

void check_overlaps(AppendProblem& problem, bool has_caches) {
  const auto is_pool = [&problem](const Tensor* tensor) {
    return tensor == &problem.k_cache || tensor == &problem.v_cache;
  };
  for_each_given(problem, has_caches, [&](const Given& out) {
    if (!out.is_written) return;
    if (may_overlap_itself(*out.tensor)) {
      refuse(sentence(out.name, " has strides by which two of its elements are one"));
    }
    for_each_given(problem, has_caches, [&](const Given& other) {
      if (other.tensor == out.tensor || !may_overlap(*out.tensor, *other.tensor)) return;
      const bool may_be_same = out.tensor == &problem.q_out && other.tensor == &problem.q;
      if (may_be_same && is_same(*out.tensor, *other.tensor)) return;
      const bool are_pools = is_pool(out.tensor) && is_pool(other.tensor);
      if (are_pools && are_pages_apart(*out.tensor, *other.tensor)) return;
      refuse(sentence(
          out.name, " overlaps ", other.name, " in memory; allowed is ",
          may_be_same ? "the same array, with equal strides, or another" : "another array"));
    });
  });
}

}  // namespace

const char* name(const AppendArray& array, bool has_caches) {
  if (!has_caches && array.member == &AppendProblem::q) return "x";
  if (!has_caches && array.member == &AppendProblem::q_out) return "out";
  return array.name;
}

AppendProblem validate_append(AppendProblem given, bool has_caches) {
  has_caches ? check_append_presence(given) : check_rotary_alone_presence(given);
  const Packed packed{.q = given.cu_new.present(), .kv = given.cu_new.present()};
  for_each_given(given, has_caches, [&](const Given& array) {
    check_layout(*array.tensor, array.name, array.list, packed, Pointers::kChecked);
    check_span(*array.tensor, array.name);
  });
  check_dtypes(given, has_caches);
  const Sizes sizes = measure(given, has_caches);
  alignas(kMaxPointerAlignment) static char nothing[1];  // an offset may be added to its address
  for_each_given(given, has_caches, [&](const Given& array) {
    const Tensor normal = normal_form(*array.tensor, array.list);
    const bool has_records = given.has_records() && array.tensor == &given.k_cache;
    check_shape(*array.tensor, normal, array.name, array.list,
                has_records ? with_records(sizes, given.dim_qk, "k", "k_cache") : sizes);
    *array.tensor = normal;
    if (normal.data == nullptr) array.tensor->data = nothing;
  });
  if (given.has_records()) check_records(given.k_cache, "k_cache", given.dim_qk);
  check_rotary_dim(given, has_caches);
  check_overlaps(given, has_caches);
  return given;
}

}  // namespace fulmen
