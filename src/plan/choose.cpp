// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The choice: implementations in order of preference, each with what it refuses. And what a problem
// costs in arithmetic and in bytes: the two sides of its roofline.

#include <algorithm>
#include <array>

#include "core/error.h"
#include "plan/plan.h"
#include "plan/tiled_workspace.h"

namespace fulmen {
namespace {

constexpr std::array kPreference{Implementation::kTiled, Implementation::kScalar};

// Both CPU implementations compute every problem that validate lets through.
const char* merit(Implementation implementation) {
  return implementation == Implementation::kTiled
             ? "SIMD tiles on all threads, memory linear in the sequence"
             : "the oracle: float64 in the order of the equations, one thread";
}

bool is_forced(const Problem& problem) { return problem.implementation != Implementation::kAuto; }

Implementation chosen_for(const Problem& problem) {
  return is_forced(problem) ? problem.implementation : kPreference.front();
}

}  // namespace

std::vector<Candidate> candidates(const Problem& problem) {
  const Implementation chosen = chosen_for(problem);
  std::vector<Candidate> list;
  for (const Implementation implementation : kPreference) {
    const bool accepted = implementation == chosen;
    std::string reason = accepted && is_forced(problem) ? "asked for by name; " : "";
    if (!accepted) reason = sentence(is_forced(problem) ? "not the one asked for" : "slower", "; ");
    list.push_back({implementation, accepted, reason + merit(implementation)});
  }
  return list;
}

Plan choose(const Problem& problem, const CpuDevice& device) {
  Plan plan;
  plan.problem = problem;
  plan.device = device;
  plan.implementation = chosen_for(problem);
  if (plan.implementation == Implementation::kTiled) {
    plan.tile = tiled_tile(problem, device);
    plan.workspace_bytes = tiled_workspace_bytes(problem, plan.tile, device);
  }
  return plan;
}

namespace {

// Sum over rows of the size of the visible interval.
double visible_pairs(const IntervalMask& mask, const SequenceShape& shape) {
  const bool all = !mask.causal && mask.window_left == kNoLimit && mask.window_right == kNoLimit &&
                   mask.chunk == 0;
  if (all) return static_cast<double>(shape.q_len) * static_cast<double>(shape.kv_len);
  double pairs = 0;
  for (i64 i = 0; i < shape.q_len; ++i) {
    pairs += static_cast<double>(visible_columns(mask, shape, i).size());
  }
  return pairs;
}

// Bytes that an array spans, counting a broadcast axis once.
double distinct_bytes(const Tensor& tensor) {
  if (!tensor.present()) return 0;
  double count = static_cast<double>(size_bytes(tensor.dtype));
  for (int axis = 0; axis < tensor.rank; ++axis) {
    if (tensor.strides[axis] != 0 || tensor.shape[axis] == 0) {
      count *= static_cast<double>(tensor.shape[axis]);
    }
  }
  return count;
}

// Of pools, the rows of as many keys as requests may have at most: what is moved of them.
double moved_bytes(const Problem& problem, Array array) {
  const Tensor& tensor = problem.arrays[array];
  const double all = distinct_bytes(tensor);
  if (!problem.is_paged() || (array != Array::kK && array != Array::kV)) return all;
  const double keys =
      static_cast<double>(problem.num_sequences) * static_cast<double>(problem.max_kv);
  const double row = static_cast<double>(tensor.shape[1] * tensor.shape[3]) *
                     static_cast<double>(size_bytes(tensor.dtype));
  return std::min(all, keys * row);
}

}  // namespace

Cost cost(const Problem& problem) {
  const i64 shift =
      problem.alignment == Alignment::kBottomRight ? problem.max_kv - problem.max_q : 0;
  const SequenceShape longest{static_cast<i32>(problem.max_q), static_cast<i32>(problem.max_kv),
                              static_cast<i32>(shift)};
  double pairs = visible_pairs(problem.mask, longest) * static_cast<double>(problem.heads_q);
  if (!problem.packed.q) {
    pairs *= static_cast<double>(problem.num_sequences);
  } else if (problem.max_q > 0) {  // as many longest sequences as the rows hold
    pairs *= static_cast<double>(problem.q_rows) / static_cast<double>(problem.max_q);
  }
  Cost total;
  total.pairs = pairs;
  const double passes = problem.operation == Operation::kForward ? 1.0 : 2.5;
  total.flops = passes * 2.0 * pairs * static_cast<double>(problem.dim_qk + problem.dim_v);
  for (int index = 0; index < kNumArrays; ++index) {
    total.bytes += moved_bytes(problem, static_cast<Array>(index));
  }
  return total;
}

}  // namespace fulmen
