// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a request to a problem: the order of the checks, and those that need more than one array.
// The preconditions of fulmen_merge.

#include "core/validate.h"

#include <algorithm>

#include "core/arrays.h"
#include "core/error.h"

namespace fulmen {
namespace {

void require(const Arrays& arrays, Array array, const char* why) {
  if (!arrays[array].present()) refuse(sentence(name(array), " is missing; ", why));
}

void require_both(const Arrays& arrays, Array a, Array b, const char* why) {
  if (arrays[a].present() == arrays[b].present()) return;
  const Array given = arrays[a].present() ? a : b;
  const Array missing = arrays[a].present() ? b : a;
  refuse(sentence(name(given), " is given without ", name(missing), "; ", why));
}

void check_backward_presence(const Arrays& arrays) {
  require(arrays, Array::kO, "backward reads the o that forward wrote");
  require(arrays, Array::kDOut, "backward starts from the gradient of o");
  if (!arrays[Array::kStats].present()) {
    require(arrays, Array::kLse, "backward needs stats (exact for all scores) or lse of forward");
  }
  const auto needs = [&arrays](Array gradient, Array parameter) {
    if (arrays[gradient].present()) require_both(arrays, gradient, parameter, "pass both or none");
  };
  needs(Array::kDBias, Array::kBias);
  needs(Array::kDSinks, Array::kSinks);
  for (int n = 0; n < kNumCaptures; ++n) needs(capture_gradient(n), capture(n));
  for (const ArrayRule& rule : rules::kTable) {
    if (rule.param != rule.array && arrays[rule.array].present()) return;
  }
  refuse("no gradient is asked for; pass at least one of dq, dk, dv, dbias, dsinks, dcapture0 ..");
}

// The arrays of caches, beside each other and beside packed sequences.
void check_cache_presence(const Arrays& arrays, Call call) {
  const auto has = [&arrays](Array array) { return arrays[array].present(); };
  if (!has(Array::kPageTable)) {
    require_both(arrays, Array::kCuQ, Array::kCuKv,
                 "packed sequences need both, or cu_q and a page_table");
  } else if (has(Array::kCuKv)) {
    refuse(
        "cu_kv is given beside page_table; the keys of a request are those of its pages: leave "
        "cu_kv out, and pass their number in kv_lengths");
  } else {
    require(arrays, Array::kKvLengths, "with page_table it holds how many keys each request has");
  }
  if (has(Array::kPageIndptr)) {
    require(arrays, Array::kPageTable, "page_indptr says which of its entries are whose");
  }
  if (has(Array::kKvShared)) {
    require(arrays, Array::kPageTable, "kv_shared says which of its pages all requests have");
  }
  if (call != Call::kBackward) return;
  for (const Array array : kCacheArrays) {
    if (!has(array)) continue;
    throw Error(
        Status::kUnsupported,
        sentence("backward does not take ", name(array),
                 "; gradients are of calls over whole arrays: gather the keys into k and v, "
                 "and use lengths, offsets or a mask"));
  }
}

void check_presence(const Arrays& arrays, Call call) {
  require(arrays, Array::kQ, "an array (batch, head, q_row, dim_qk) is needed");
  require(arrays, Array::kK, "an array (batch, kv_head, kv_row, dim_qk) is needed");
  if (call != Call::kDenseMask) {
    require(arrays, Array::kV, "an array (batch, kv_head, kv_row, dim_v) is needed");
  }
  check_cache_presence(arrays, call);
  check_segment_presence(arrays);
  check_quantised(arrays, call);
  require_both(arrays, Array::kQIds, Array::kKvIds, "documents need both");
  if (call == Call::kForward) {
    require(arrays, Array::kO, "forward writes an array (batch, head, q_row, dim_v)");
  }
  if (call == Call::kBackward) check_backward_presence(arrays);
}

void check_dims(const Problem& problem) {
  if (problem.dim_qk > kMaxDimQk) {
    throw Error(Status::kShape,
                sentence("q has head dim ", problem.dim_qk, "; allowed is 0 to ", kMaxDimQk));
  }
  if (problem.dim_v < 1 || problem.dim_v > kMaxDimV) {
    throw Error(Status::kShape,
                sentence("v has head dim ", problem.dim_v, "; allowed is 1 to ", kMaxDimV));
  }
}

void check_heads(const Problem& problem) {
  const i64 heads = problem.heads_q;
  const i64 heads_kv = problem.heads_kv;
  if (heads_kv == 0 ? heads == 0 : heads % heads_kv == 0) return;
  std::string nearest;
  if (heads_kv > 0) {
    const i64 below = heads / heads_kv * heads_kv;
    nearest = below > 0 ? sentence("; nearest are ", below, " and ", below + heads_kv)
                        : sentence("; nearest is ", heads_kv);
  }
  throw Error(Status::kShape,
              sentence("q has ", heads, " heads and k ", heads_kv,
                       "; query heads must be a multiple of key/value heads", nearest));
}

// Of a page table and pools of pages.
void measure_pages(Problem& problem, const Arrays& arrays, const Tensor& k, bool slots) {
  const Tensor& table = arrays[Array::kPageTable];
  const bool ragged = arrays[Array::kPageIndptr].present();
  problem.num_pages = k.shape[0];
  problem.page_rows = k.shape[2];
  if (problem.page_rows < 1) {
    throw Error(
        Status::kShape,
        sentence("k has pages of 0 rows, shape ", shape_text(arrays[Array::kK]),
                 "; with page_table it is (page, kv_head, row of the page, dim_qk), with at "
                 "least 1 row"));
  }
  if (ragged ? table.rank != 1 : table.rank != 2 && problem.num_sequences != 1) {
    throw Error(Status::kShape,
                sentence("page_table has rank ", table.rank, ragged ? " beside page_indptr" : "",
                         "; allowed is ",
                         ragged ? "1: the pages of all requests, one behind the other"
                                : "2: (batch, page); page_indptr goes with rank 1"));
  }
  const i64 entries = table.shape[table.rank - 1];
  problem.kv_rows = min(entries * (slots ? 1 : problem.page_rows), kMaxExtent);
  if (slots && problem.num_pages == 0) problem.kv_rows = 0;
}

// The sizes that q, k, v and cu_q define; what disagrees with them is found by check_shape.
void measure(Problem& problem, const Request& request, Call call) {
  const Arrays& arrays = request.arrays;
  const auto normal = [&arrays](Array array) {
    return normal_form(arrays[array], rule_of(array).list);
  };
  const Tensor q = normal(Array::kQ);
  const Tensor k = normal(Array::kK);
  problem.num_sequences = problem.packed.q ? arrays[Array::kCuQ].shape[0] - 1 : q.shape[0];
  problem.heads_q = q.shape[1];
  problem.heads_kv = k.shape[1];
  problem.q_rows = q.shape[2];
  problem.kv_rows = k.shape[2];
  if (arrays[Array::kPageTable].present()) {
    measure_pages(problem, arrays, k, request.options.slots);
  }
  problem.dim_qk = q.shape[3];
  problem.dim_v = call == Call::kDenseMask ? 1 : normal(Array::kV).shape[3];
  if (problem.num_sequences < 0) {
    throw Error(Status::kShape, "cu_q has no element; n sequences have n + 1 offsets");
  }
  check_dims(problem);
  check_heads(problem);
}

// Of records: v lies in k.
void check_values_in_records(const Problem& problem) {
  const Tensor& k = problem.arrays[Array::kK];
  const Tensor& v = problem.arrays[Array::kV];
  if (!v.present() || std::equal(std::begin(k.strides), std::end(k.strides), v.strides)) return;
  refuse("v has other strides than k; of records it is a view of k: the first bytes of its rows");
}

void check_gradient_shape(const Arrays& arrays, const ArrayRule& rule, const Tensor& normal) {
  const Tensor parameter = normal_form(arrays[rule.param], rule_of(rule.param).list);
  for (int axis = 0; axis < kMaxRank; ++axis) {
    if (normal.shape[axis] == parameter.shape[axis]) continue;
    throw Error(
        Status::kShape,
        sentence(name(rule.array), " has shape ", shape_text(arrays[rule.array]), " where that of ",
                 name(rule.param), ", ", shape_text(arrays[rule.param]), ", is needed"));
  }
}

void normalize(Problem& problem, const Arrays& arrays, Call call) {
  const Sizes sizes = sizes_of(problem);
  for_each_used(arrays, call, [&](const ArrayRule& rule, const Tensor& given) {
    Tensor& normal = problem.arrays[rule.array];
    normal = normal_form(given, rule.list);
    const bool has_records = rule.array == Array::kK && is_record(given.dtype);
    check_shape(given, normal, name(rule.array), rule.list,
                has_records ? with_records(sizes, problem.dim_qk, "q", "k") : sizes);
    if (rule.param != rule.array) check_gradient_shape(arrays, rule, normal);
  });
}

void broadcast_inputs(Problem& problem, Call call) {
  for (const ArrayRule& rule : rules::kTable) {
    Tensor& tensor = problem.arrays[rule.array];
    if (rule.list.num_broadcast == 0 || !tensor.present() || use_of(rule, call) == Use::kOutput)
      continue;
    broadcast(tensor, rule.list, problem);
  }
}

// What has a column for each key must have one for each that a request may have.
void check_key_extents(const Problem& problem) {
  for (const Array array : {Array::kBias, Array::kMask, Array::kKvIds}) {
    const i64 extent = problem.arrays[array].shape[3];
    if (!problem.has(array) || extent >= problem.max_kv) continue;
    if (extent == 1 && array != Array::kKvIds) continue;
    throw Error(
        Status::kShape,
        sentence(name(array), " has ", extent, " key columns, but a request may have ",
                 problem.max_kv, " keys; allowed is ", array == Array::kKvIds ? "" : "1, or ",
                 problem.max_kv, " or more: max_kv lowers the bound"));
  }
}

void check_tree_rows(const Problem& problem) {
  if (problem.max_q <= kMaxTreeRows) return;
  throw Error(Status::kShape,
              sentence("tree is given with up to ", problem.max_q,
                       " query rows a request; allowed is 0 to ", kMaxTreeRows, ", one bit each",
                       problem.packed.q ? ": pass max_q" : ": a boolean mask takes more"));
}

void check_slots(const Request& request, Call call) {
  if (!request.options.slots) return;
  require(request.arrays, Array::kPageTable, "with slots = 1 it holds one for each key");
  if (call != Call::kDenseMask) return;
  throw Error(Status::kUnsupported,
              "slots is 1; a dense mask has the keys that options hide, not those without a slot: "
              "leave it 0, and hide columns where page_table is -1");
}

Problem checked(const Request& request, Call call, Pointers pointers) {
  const Arrays& arrays = request.arrays;
  check_presence(arrays, call);
  Problem problem;
  problem.operation = request.operation;
  problem.packed = {arrays[Array::kCuQ].present(), arrays[Array::kCuKv].present()};
  problem.dtype = computed_dtype(arrays);
  check_layouts(arrays, call, problem.packed, pointers);
  for_each_used(arrays, call, [&](const ArrayRule& rule, const Tensor& tensor) {
    // A mask is read from where a bias is -inf, whatever its dtype is beside that of q.
    const bool only_masks = call == Call::kDenseMask && rule.array == Array::kBias;
    if (is_accumulated(request, rule.array)) return;  // below
    if (!only_masks || !is_float(tensor.dtype)) {
      check_dtype(rule, arrays);
    }
  });
  check_slots(request, call);
  if (call != Call::kDenseMask) check_accumulate(request);
  measure(problem, request, call);
  normalize(problem, arrays, call);
  if (problem.has_records()) {
    check_records(problem.arrays[Array::kK], "k", problem.dim_qk);
    check_values_in_records(problem);
  }
  apply_options(problem, request.options, request.experiment);
  apply_expression(problem, request);
  apply_blocks(problem, request);
  if (problem.is_paged()) check_key_extents(problem);
  if (problem.has(Array::kTree)) check_tree_rows(problem);
  broadcast_inputs(problem, call);
  check_channel_scales(problem);
  check_outputs_nest(problem, call);
  if (pointers == Pointers::kChecked) check_pointers(problem, call);
  return problem;
}

}  // namespace

Problem validate(const Request& request, Pointers pointers) {
  return checked(request, call_of(request.operation), pointers);
}

Problem validate_dense_mask(const Request& request) {
  return checked(request, Call::kDenseMask, Pointers::kChecked);
}

namespace {

using rules::kLseAxes;
using rules::kOAxes;
using rules::kSinkAxes;

std::string part_name(size_t index, const char* member) {
  return sentence("parts[", index, "].", member);
}

void require_dtype(const Tensor& tensor, const std::string& subject, bool is_allowed,
                   const char* allowed) {
  if (is_allowed) return;
  throw Error(Status::kDType,
              sentence(subject, " is ", name(tensor.dtype), "; allowed is ", allowed));
}

void require_float(const Tensor& tensor, const std::string& subject) {
  require_dtype(tensor, subject, is_float(tensor.dtype), "float64, float32, float16 or bfloat16");
}

void require_lse_dtype(const Tensor& tensor, const std::string& subject) {
  require_dtype(tensor, subject,
                is_float(tensor.dtype) && tensor.dtype == accumulator(tensor.dtype),
                "float32 or float64");
}

// Layout and shape of one array; brings it to normal form.
void normalize(Tensor& tensor, const std::string& subject, const AxisList& list,
               const Sizes& sizes) {
  if (!tensor.present()) throw Error(Status::kArgument, sentence(subject, " is missing"));
  check_layout(tensor, subject.c_str(), list, {}, Pointers::kChecked);
  check_span(tensor, subject.c_str());
  const Tensor normal = normal_form(tensor, list);
  check_shape(tensor, normal, subject.c_str(), list, sizes);
  tensor = normal;
}

Sizes sizes_of_output(const Tensor& o) {
  if (!o.present()) throw Error(Status::kArgument, "o is missing; it is the array to write");
  check_layout(o, "o", kOAxes, {}, Pointers::kChecked);
  const Tensor normal = normal_form(o, kOAxes);
  Sizes sizes{};
  sizes[Axis::kBatch] = normal.shape[0];
  sizes[Axis::kHead] = normal.shape[1];
  sizes[Axis::kQRow] = normal.shape[2];
  sizes[Axis::kDimV] = normal.shape[3];
  return sizes;
}

void require_disjoint(const Tensor& out, const char* subject, const Tensor& other,
                      const std::string& other_subject, bool may_be_same) {
  if (!other.present() || !may_overlap(out, other)) return;
  if (may_be_same && is_same(out, other)) return;
  throw Error(Status::kArgument,
              sentence(subject, " overlaps ", other_subject, " in memory; allowed is ",
                       may_be_same ? "the same array, with equal dtype and strides, or another"
                                   : "another array"));
}

void check_output(const MergeProblem& merge, const Tensor& out, const char* subject) {
  if (may_overlap_itself(out)) {
    throw Error(Status::kArgument,
                sentence(subject, " has strides by which two of its elements are one"));
  }
  const bool is_o = &out == &merge.o;
  for (size_t index = 0; index < merge.parts.size(); ++index) {
    const MergePart& part = merge.parts[index];
    require_disjoint(out, subject, part.o, part_name(index, "o"), is_o);
    require_disjoint(out, subject, part.lse, part_name(index, "lse"), !is_o);
  }
  require_disjoint(out, subject, merge.sinks, "sinks", false);
}

}  // namespace

MergeProblem validate_merge(MergeProblem given) {
  if (given.parts.empty()) {
    throw Error(Status::kArgument, "num_parts is 0; a merge needs at least one part");
  }
  const Sizes sizes = sizes_of_output(given.o);
  require_float(given.o, "o");
  normalize(given.o, "o", kOAxes, sizes);
  for (size_t index = 0; index < given.parts.size(); ++index) {
    MergePart& part = given.parts[index];
    normalize(part.o, part_name(index, "o"), kOAxes, sizes);
    require_float(part.o, part_name(index, "o"));
    normalize(part.lse, part_name(index, "lse"), kLseAxes, sizes);
    require_lse_dtype(part.lse, part_name(index, "lse"));
  }
  if (given.sinks.present()) {
    normalize(given.sinks, "sinks", kSinkAxes, sizes);
    require_float(given.sinks, "sinks");
  }
  if (given.lse.present()) {
    normalize(given.lse, "lse", kLseAxes, sizes);
    require_lse_dtype(given.lse, "lse");
    check_output(given, given.lse, "lse");
    require_disjoint(given.lse, "lse", given.o, "o", false);
  }
  check_output(given, given.o, "o");
  return given;
}

}  // namespace fulmen
