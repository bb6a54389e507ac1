// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Plans around the plan of an implementation.

#include "gpu/gradient_plans.h"

#include "core/arrays.h"
#include "gpu/call.h"
#include "gpu/params.h"
#include "gpu/simt/plan.h"

namespace fulmen::gpu {
namespace {

size_t aligned(size_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

// ---- Deterministic gradients on tensor cores ---------------------------------------------------

constexpr Array kGradients[] = {Array::kDQ, Array::kDK, Array::kDV};

// Like its parameter, in rows that are multiples of 16 bytes.
Tensor gradient_like(const Tensor& parameter) {
  Tensor gradient = parameter;
  gradient.data = nullptr;
  i64 stride = 1;
  for (int axis = kMaxRank; axis-- > 0;) {
    gradient.strides[axis] = stride;
    stride *= axis == kMaxRank - 1 ? ceil_div(gradient.shape[axis], 8) * 8 : gradient.shape[axis];
  }
  return gradient;
}

// The plan of a problem with all gradients, for calls that ask for some of them.
class AllGradientsPlan final : public GpuPlan {
 public:
  AllGradientsPlan(std::unique_ptr<GpuPlan> made, const Problem& asked, const Problem& all)
      : made_(std::move(made)) {
    tile = made_->tile;
    zeroed_bytes = made_->zeroed_bytes;
    alignment_bytes = made_->alignment_bytes;
    launches = made_->launches;
    compared = std::move(made_->compared);
    workspace_bytes = made_->workspace_bytes;
    for (const Array gradient : kGradients) {
      if (asked.has(gradient)) continue;
      const Tensor& tensor = all.arrays[gradient];
      const size_t at = aligned(workspace_bytes);
      own_.push_back({gradient, tensor, at});
      workspace_bytes = at + static_cast<size_t>(span_bytes(tensor));
    }
  }

  void run(const Call& call) const override {
    Problem problem = call.problem;
    for (const Own& own : own_) {
      problem.arrays[own.array] = own.tensor;
      problem.arrays[own.array].data = call.workspace + own.at;
    }
    made_->run({problem, call.driver, call.kernels, call.workspace, call.faults, call.stream});
  }

 private:
  struct Own {
    Array array;
    Tensor tensor;
    size_t at;  // bytes from the first of the workspace
  };

  std::unique_ptr<GpuPlan> made_;
  std::vector<Own> own_;
};

// ---- Gradients of what an expression reads -----------------------------------------------------

// A plan whose kernels add to sums in front of its workspace, zero at first, and the kernel that
// rounds them into arrays.
class CaptureGradientsPlan final : public GpuPlan {
 public:
  CaptureGradientsPlan(std::unique_ptr<GpuPlan> made, const Problem& problem)
      : made_(std::move(made)),
        sums_bytes_(aligned(sizeof(double) * static_cast<size_t>(num_capture_sums(problem)))) {
    tile = made_->tile;
    alignment_bytes = made_->alignment_bytes;
    launches = made_->launches;
    launches.push_back(store_captures(problem.dtype, num_capture_sums(problem)));
    compared = std::move(made_->compared);
    zeroed_bytes = sums_bytes_ + made_->zeroed_bytes;
    workspace_bytes = sums_bytes_ + made_->workspace_bytes;
  }

  void run(const Call& call) const override {
    Call own = call;
    own.capture_sums = reinterpret_cast<double*>(call.workspace);
    own.workspace = call.workspace + sums_bytes_;
    own.kernels = call.kernels.first(call.kernels.size() - 1);
    made_->run(own);
    own.kernels = call.kernels.last(1);
    own.launch(0, capture_gradients(call.problem, own.capture_sums));
  }

 private:
  std::unique_ptr<GpuPlan> made_;
  size_t sums_bytes_;
};

i64 largest_element_bytes(const Problem& problem) {
  i64 bytes = 1;
  for (int index = 0; index < kNumCaptures; ++index) {
    bytes = max(bytes, size_bytes(problem.arrays[capture(index)].dtype));
  }
  if (!problem.has_segments()) return bytes;
  for (const Array array : {Array::kQSegments, Array::kKvSegments, array_read(kAlibiRead)}) {
    bytes = max(bytes, size_bytes(problem.arrays[array].dtype));
  }
  return bytes;
}

}  // namespace

bool misses_gradients(const Problem& problem) {
  return problem.operation == Operation::kBackward && problem.deterministic &&
         !(problem.has(Array::kDQ) && problem.has(Array::kDK) && problem.has(Array::kDV));
}

Problem with_all_gradients(const Problem& problem) {
  Problem all = problem;
  for (const Array gradient : kGradients) {
    if (problem.has(gradient)) continue;
    all.arrays[gradient] = gradient_like(problem.arrays[rule_of(gradient).param]);
  }
  return all;
}

PlanOrRefusal only_asked(PlanOrRefusal made, const Problem& asked, const Problem& all) {
  if (made.plan == nullptr) return made;
  return std::make_unique<AllGradientsPlan>(std::move(made.plan), asked, all);
}

PlanOrRefusal with_expression(PlanOrRefusal made, const Problem& problem) {
  if (problem.program == nullptr || made.plan == nullptr) return made;
  if (problem.wants_captures()) {
    made.plan = std::make_unique<CaptureGradientsPlan>(std::move(made.plan), problem);
  }
  const std::string text = expression_text(problem);
  for (KernelLaunch& launch : made.plan->launches) {
    if (launch.spec.reads_expression) launch.spec.expression = text;
  }
  made.plan->alignment_bytes = max(made.plan->alignment_bytes, largest_element_bytes(problem));
  return made;
}

}  // namespace fulmen::gpu
