// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The arrays of a run against those of the plan.

#include "core/bind.h"

#include <algorithm>

#include "core/check_arrays.h"
#include "core/check_pointers.h"
#include "core/refuse.h"

namespace fulmen {
namespace {

constexpr Array array_at(int index) { return static_cast<Array>(index); }

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
                      " when the plan was made: make a plan for it"));
    }
    if (!given.present()) continue;
    check_layout(given, name(array), rule.list, problem.packed, Pointers::kChecked);
    Tensor now = normal_form(given, rule.list);
    if (use_of(rule, call) != Use::kOutput) broadcast(now, rule.list, problem);
    check_same(now, problem.arrays[array], given, array);
    bound.arrays[array] = now;
  }
  check_pointers(bound, call);
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
  check_pointers(bound, call_of(problem.operation));
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
