// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a checked merge to a launch.

#include <map>
#include <mutex>

#include "gpu/backend.h"
#include "gpu/driver/device.h"
#include "gpu/driver/launch.h"
#include "gpu/jit/kernel_spec.h"
#include "gpu/jit/module.h"
#include "gpu/params.h"
#include "kernels/simt/config.h"

namespace fulmen::gpu {
namespace {

KernelSpec merge_spec(DType real) {
  const FmaConfig config{.dtype = real};
  KernelSpec spec = spec_of<MergeParams>("merge/merge", "merge", name(real), config);
  spec.num_threads = config.num_threads;
  return spec;
}

// float64 where any array is, as on the CPU; else float32.
DType real_of(const MergeProblem& problem) {
  bool is_wide = problem.o.dtype == DType::kFloat64 || problem.lse.dtype == DType::kFloat64;
  for (const MergePart& part : problem.parts) {
    is_wide |= part.o.dtype == DType::kFloat64 || part.lse.dtype == DType::kFloat64;
  }
  return is_wide ? DType::kFloat64 : DType::kFloat32;
}

// Loaded kernels live as long as the process, so each is looked up once.
const LoadedKernel& kernel_for(const Device& device, DType real) {
  static std::mutex mutex;
  static std::map<std::pair<const Device*, DType>, const LoadedKernel*> kernels;
  const std::lock_guard lock(mutex);
  const LoadedKernel*& kernel = kernels[{&device, real}];
  if (kernel == nullptr) kernel = &prepare(device, merge_spec(real));
  return *kernel;
}

void check_arrays(const Device& device, const MergeProblem& problem) {
  const auto check = [&device](const Tensor& tensor, const char* subject) {
    if (tensor.present() && !tensor.empty()) check_pointer(device, tensor.data, subject);
  };
  for (const MergePart& part : problem.parts) {
    check(part.o, "the o of a part");
    check(part.lse, "the lse of a part");
  }
  check(problem.sinks, "sinks");
  check(problem.o, "o");
  check(problem.lse, "lse");
}

}  // namespace

MergeParams merge_params(const MergeProblem& problem) {
  MergeParams params{};
  for (const MergePart& part : problem.parts) {
    params.parts[params.num_parts++] = {view_of(part.o), view_of(part.lse)};
  }
  const i64* const extents = problem.o.shape;
  params.sinks = view_of(problem.sinks);
  params.o = view_of(problem.o);
  params.lse = view_of(problem.lse);
  params.heads = extents[1];
  params.rows = extents[2];
  params.num_rows = extents[0] * extents[1] * extents[2];
  params.dim = extents[3];
  return params;
}

int device_of(const MergeProblem& problem) {
  const auto is_there = [](const Tensor& tensor) { return tensor.present() && !tensor.empty(); };
  const Tensor* first = is_there(problem.o) ? &problem.o : nullptr;
  for (const MergePart& part : problem.parts) {
    if (first == nullptr && is_there(part.o)) first = &part.o;
  }
  if (first == nullptr) return -1;
  const MemorySpace space = memory_space_of(first->data);
  return space.kind == MemorySpace::kDevice ? space.device : -1;
}

void merge(const MergeProblem& problem, int ordinal, void* stream) {
  if (problem.parts.size() > MergeParams::kMaxParts) {
    throw Error(Status::kUnsupported,
                sentence("num_parts is ", problem.parts.size(), "; on a GPU at most ",
                         MergeParams::kMaxParts, " are merged at once: merge in groups"));
  }
  const Device& device = fulmen::gpu::device(ordinal);
  device.driver().check_not_forked();
  check_arrays(device, problem);
  const LoadedKernel& kernel = kernel_for(device, real_of(problem));
  const MergeParams params = merge_params(problem);
  const i64 rows_per_block = kernel.spec.num_threads / 32;
  launch(kernel, {ceil_div(params.num_rows, rows_per_block)}, &params,
         static_cast<CUstream>(stream));
}

std::vector<KernelSpec> merge_specs() {
  return {merge_spec(DType::kFloat32), merge_spec(DType::kFloat64)};
}

}  // namespace fulmen::gpu
