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

// ---- Gradients in the workspace ----------------------------------------------------------------

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

// The plan of a problem some of whose gradients lie in the workspace: those that is_own(array)
// says.
class OwnGradientsPlan : public GpuPlan {
 public:
  template <class IsOwn>
  OwnGradientsPlan(std::unique_ptr<GpuPlan> made, const Problem& all, IsOwn is_own)
      : made_(std::move(made)) {
    tile = made_->tile;
    zeroed_bytes = made_->zeroed_bytes;
    alignment_bytes = made_->alignment_bytes;
    launches = made_->launches;
    compared = std::move(made_->compared);
    note = made_->note;
    workspace_bytes = made_->workspace_bytes;
    for (const Array gradient : kGradients) {
      if (!is_own(gradient)) continue;
      const Tensor& tensor = all.arrays[gradient];
      const size_t at = aligned(workspace_bytes);
      own_.push_back({gradient, tensor, at});
      workspace_bytes = at + static_cast<size_t>(span_bytes(tensor));
    }
  }

  void run(const Call& call) const override {
    const Problem problem = with_own(call);
    made_->run({problem, call.driver, call.kernels, call.workspace, call.faults, call.stream,
                call.capture_sums});
  }

 protected:
  Problem with_own(const Call& call) const {
    Problem problem = call.problem;
    for (const Own& own : own_) {
      problem.arrays[own.array] = own.tensor;
      problem.arrays[own.array].data = call.workspace + own.at;
    }
    return problem;
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

// ---- Gradients that are added to what is there -------------------------------------------------

AddedGradients added_gradients(const Problem& asked, const Problem& own) {
  AddedGradients all{};
  for (const Array gradient : kGradients) {
    if (!asked.has(gradient)) continue;
    const Tensor& sums = asked.arrays[gradient];
    const i64 vectors = ceil_div(sums.shape[3], kAddedElements);
    all.gradients[all.count++] = {
        view_of(sums),
        view_of(own.arrays[gradient]),
        static_cast<u32>(sums.shape[1]),
        static_cast<u32>(sums.shape[2]),
        static_cast<u32>(sums.shape[3]),
        static_cast<u32>(vectors),
        static_cast<u32>(sums.shape[0] * sums.shape[1] * sums.shape[2] * vectors)};
  }
  return all;
}

class AddedGradientsPlan final : public OwnGradientsPlan {
 public:
  AddedGradientsPlan(std::unique_ptr<GpuPlan> made, const Problem& asked, const Problem& own)
      : OwnGradientsPlan(std::move(made), own, [&](Array array) { return asked.has(array); }) {
    const AddedGradients all = added_gradients(asked, own);
    i64 vectors = 0;
    for (u32 n = 0; n < all.count; ++n) vectors += all.gradients[n].num_vectors;
    launches.push_back(add_gradients(own.dtype, vectors));
  }

  void run(const Call& call) const override {
    Call before = call;
    before.kernels = call.kernels.first(call.kernels.size() - 1);
    OwnGradientsPlan::run(before);
    Call last = call;
    last.kernels = call.kernels.last(1);
    last.launch(0, added_gradients(call.problem, with_own(call)));
  }
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
  return std::make_unique<OwnGradientsPlan>(std::move(made.plan), all,
                                            [&](Array array) { return !asked.has(array); });
}

bool adds_gradients(const Problem& problem) {
  return problem.operation == Operation::kBackward && problem.accumulate;
}

Problem with_own_gradients(const Problem& problem) {
  Problem own = problem;
  own.accumulate = false;
  for (const Array gradient : kGradients) {
    if (!problem.has(gradient)) continue;
    own.arrays[gradient] = gradient_like(problem.arrays[rule_of(gradient).param]);
  }
  return own;
}

PlanOrRefusal added(PlanOrRefusal made, const Problem& asked, const Problem& own) {
  if (made.plan == nullptr) return made;
  return std::make_unique<AddedGradientsPlan>(std::move(made.plan), asked, own);
}

KernelLaunch add_gradients(DType dtype, i64 vectors) {
  FmaConfig config{.dtype = dtype};
  config.num_threads = 256;
  KernelSpec spec =
      spec_of<AddedGradients>("simt/add_gradients", "add_gradients", name(dtype), config);
  spec.num_threads = config.num_threads;
  return fma_launch(spec, vectors);
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
