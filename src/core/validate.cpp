// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a request to a problem: the order of the checks, and those that need more than one array.

#include "core/validate.h"

#include <algorithm>

#include "core/check_arrays.h"
#include "core/check_options.h"
#include "core/error.h"
#include "core/overlap.h"

namespace fulmen {
namespace {

constexpr Array array_at(int index) { return static_cast<Array>(index); }

[[noreturn]] void refuse(const std::string& text) { throw Error(Status::kArgument, text); }

// Calls visit(rule, tensor) for each present array that the call looks at.
template <class Visit>
void for_each_used(const Arrays& arrays, Call call, const Visit& visit) {
  for (const ArrayRule& rule : rules::kTable) {
    const Tensor& tensor = arrays[rule.array];
    if (tensor.present() && use_of(rule, call) != Use::kIgnored) visit(rule, tensor);
  }
}

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
  for (const Array gradient : {Array::kDQ, Array::kDK, Array::kDV, Array::kDBias, Array::kDSinks}) {
    if (arrays[gradient].present()) return;
  }
  refuse("no gradient is asked for; pass at least one of dq, dk, dv, dbias, dsinks");
}

void check_presence(const Arrays& arrays, Call call) {
  require(arrays, Array::kQ, "an array (batch, head, q_row, dim_qk) is needed");
  require(arrays, Array::kK, "an array (batch, kv_head, kv_row, dim_qk) is needed");
  if (call != Call::kDenseMask) {
    require(arrays, Array::kV, "an array (batch, kv_head, kv_row, dim_v) is needed");
  }
  require_both(arrays, Array::kCuQ, Array::kCuKv, "packed sequences need both");
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

// The sizes that q, k, v and cu_q define; what disagrees with them is found by check_shape.
void measure(Problem& problem, const Arrays& arrays, Call call) {
  const auto normal = [&arrays](Array array) {
    return normal_form(arrays[array], rule_of(array).list);
  };
  const Tensor q = normal(Array::kQ);
  const Tensor k = normal(Array::kK);
  problem.num_sequences = problem.packed ? arrays[Array::kCuQ].shape[0] - 1 : q.shape[0];
  problem.heads_q = q.shape[1];
  problem.heads_kv = k.shape[1];
  problem.q_rows = q.shape[2];
  problem.kv_rows = k.shape[2];
  problem.dim_qk = q.shape[3];
  problem.dim_v = call == Call::kDenseMask ? 1 : normal(Array::kV).shape[3];
  if (problem.num_sequences < 0) {
    throw Error(Status::kShape, "cu_q has no element; n sequences have n + 1 offsets");
  }
  check_dims(problem);
  check_heads(problem);
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
    check_shape(given, normal, name(rule.array), rule.list, sizes, problem.packed);
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

void check_outputs_nest(const Problem& problem, Call call) {
  for_each_used(problem.arrays, call, [&](const ArrayRule& rule, const Tensor& tensor) {
    if (use_of(rule, call) == Use::kOutput && may_overlap_itself(tensor)) {
      refuse(sentence(name(rule.array),
                      " has strides by which two of its elements are one; an "
                      "output needs a place of its own for each element"));
    }
  });
}

struct AddressRange {
  const ArrayRule* rule;
  const Tensor* tensor;
  u64 begin;
  u64 end;
};

// Ranges of addresses tell nearly all arrays apart; may_overlap looks closer.
bool share_bytes(const AddressRange& a, const AddressRange& b) {
  return a.begin < b.end && b.begin < a.end && may_overlap(*a.tensor, *b.tensor);
}

void check_overlaps(const Problem& problem, Call call) {
  AddressRange ranges[kNumArrays];
  int num_ranges = 0;
  for_each_used(problem.arrays, call, [&](const ArrayRule& rule, const Tensor& tensor) {
    const u64 begin = reinterpret_cast<u64>(tensor.data);
    const u64 bytes = static_cast<u64>(span_bytes(tensor));
    ranges[num_ranges++] = {&rule, &tensor, begin, begin + bytes};
  });
  for (int i = 0; i < num_ranges; ++i) {
    const ArrayRule& out = *ranges[i].rule;
    if (use_of(out, call) != Use::kOutput) continue;
    for (int j = 0; j < num_ranges; ++j) {
      const ArrayRule& other = *ranges[j].rule;
      const bool was_seen = use_of(other, call) == Use::kOutput && j <= i;
      if (was_seen || !share_bytes(ranges[i], ranges[j])) continue;
      refuse(sentence(name(out.array), " overlaps ", name(other.array),
                      " in memory; an output may share no byte with any other array"));
    }
  }
}

Call call_of(Operation operation) {
  return operation == Operation::kForward ? Call::kForward : Call::kBackward;
}

// What all pointers are multiples of. Empty arrays are never read.
i64 pointer_alignment(const Arrays& arrays) {
  u64 bits = kMaxPointerAlignment;
  for (const Tensor& tensor : arrays.tensors) {
    if (tensor.data != nullptr && !tensor.empty()) bits |= reinterpret_cast<u64>(tensor.data);
  }
  return static_cast<i64>(bits & (~bits + 1));
}

Problem checked(const Request& request, Call call, Pointers pointers) {
  const Arrays& arrays = request.arrays;
  check_presence(arrays, call);
  Problem problem;
  problem.operation = request.operation;
  problem.packed = arrays[Array::kCuQ].present();
  problem.dtype = arrays[Array::kQ].dtype;
  for_each_used(arrays, call, [&](const ArrayRule& rule, const Tensor& tensor) {
    const bool is_read = use_of(rule, call) != Use::kShape;
    check_layout(tensor, name(rule.array), rule.list, problem.packed,
                 is_read ? pointers : Pointers::kUnknown);
  });
  for_each_used(arrays, call, [&](const ArrayRule& rule, const Tensor& tensor) {
    // A mask is read from where a bias is -inf, whatever its dtype is beside that of q.
    const bool only_masks = call == Call::kDenseMask && rule.array == Array::kBias;
    if (!only_masks || !is_float(tensor.dtype)) {
      check_dtype(tensor, rule, problem.dtype, arrays[rule.param].dtype);
    }
    check_span(tensor, name(rule.array));
  });
  measure(problem, arrays, call);
  normalize(problem, arrays, call);
  apply_options(problem, request.options);
  broadcast_inputs(problem, call);
  check_outputs_nest(problem, call);
  if (pointers == Pointers::kChecked) {
    check_overlaps(problem, call);
    problem.pointer_alignment = pointer_alignment(problem.arrays);
  }
  return problem;
}

// An array of a run against the same array of the plan.
void check_same(const Tensor& now, const Tensor& planned, const Tensor& given, Array array) {
  const char* const subject = name(array);
  if (now.dtype != planned.dtype) {
    throw Error(Status::kDType, sentence(subject, " is ", name(now.dtype), " but was ",
                                         name(planned.dtype), " when the plan was made"));
  }
  if (!std::equal(now.shape, now.shape + kMaxRank, planned.shape)) {
    throw Error(Status::kShape,
                sentence(subject, " has shape ", shape_text(given), ", not that of the plan, ",
                         shape_text(planned), " with all axes: make a plan for it"));
  }
  for (int axis = 0; axis < kMaxRank; ++axis) {
    if (now.strides[axis] == planned.strides[axis]) continue;
    refuse(sentence(subject, " has stride ", now.strides[axis], " on axis ", axis, " of ",
                    shape_text(planned), " but had ", planned.strides[axis],
                    " when the plan was made: make a plan for it"));
  }
}

}  // namespace

Problem validate(const Request& request, Pointers pointers) {
  return checked(request, call_of(request.operation), pointers);
}

Problem validate_dense_mask(const Request& request) {
  return checked(request, Call::kDenseMask, Pointers::kChecked);
}

Problem rebind(const Problem& problem, const Arrays& arrays) {
  const Call call = call_of(problem.operation);
  Problem bound = problem;
  for (int index = 0; index < kNumArrays; ++index) {
    const Array array = array_at(index);
    const ArrayRule& rule = rule_of(array);
    if (use_of(rule, call) == Use::kIgnored) continue;
    const Tensor& given = arrays[array];
    if (given.present() != problem.has(array)) {
      refuse(sentence(name(array),
                      given.present() ? " is given, but was absent" : " is missing, but was given",
                      " when the plan was made"));
    }
    if (!given.present()) continue;
    check_layout(given, name(array), rule.list, problem.packed, Pointers::kChecked);
    Tensor now = normal_form(given, rule.list);
    if (use_of(rule, call) != Use::kOutput) broadcast(now, rule.list, problem);
    check_same(now, problem.arrays[array], given, array);
    bound.arrays[array] = now;
  }
  check_overlaps(bound, call);
  bound.pointer_alignment = pointer_alignment(bound.arrays);
  return bound;
}

Problem bind(const Problem& problem, const Arrays& arrays) {
  Problem bound = problem;
  for (int index = 0; index < kNumArrays; ++index) {
    Tensor& tensor = bound.arrays.tensors[static_cast<std::size_t>(index)];
    if (!tensor.present()) continue;
    const Array array = array_at(index);
    const Tensor& given = arrays[array];
    tensor.data = given.data;
    if (given.data != nullptr) continue;
    check_layout(given, name(array), rule_of(array).list, problem.packed, Pointers::kChecked);
  }
  check_overlaps(bound, call_of(problem.operation));
  bound.pointer_alignment = pointer_alignment(bound.arrays);
  return bound;
}

Problem bind(const Problem& problem, const Request& request) {
  Problem bound = bind(problem, request.arrays);
  if (bound.dropout.enabled()) {
    bound.dropout.seed = request.options.rng_seed;
    bound.dropout.offset = static_cast<u32>(request.options.rng_offset);
  }
  return bound;
}

bool same_layout(const Arrays& a, const Arrays& b) {
  return std::ranges::equal(a.tensors, b.tensors, [](const Tensor& x, const Tensor& y) {
    if (x.dtype != y.dtype || x.rank != y.rank) return false;
    const int rank = min(x.rank, kMaxRank);
    return std::equal(x.shape, x.shape + rank, y.shape) &&
           std::equal(x.strides, x.strides + rank, y.strides);
  });
}

}  // namespace fulmen
