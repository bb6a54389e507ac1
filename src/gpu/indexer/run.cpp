// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a checked indexer to a launch.

#include <iterator>
#include <map>
#include <mutex>
#include <tuple>

#include "gpu/backend.h"
#include "gpu/driver/device.h"
#include "gpu/driver/launch.h"
#include "gpu/jit/kernel_spec.h"
#include "gpu/jit/module.h"
#include "gpu/params.h"

namespace fulmen::gpu {
namespace {

KernelSpec indexer_spec(const IndexerConfig& config) {
  const std::string distinction =
      sentence(name(config.q), config.k == config.q ? "" : sentence("_", name(config.k)), "_",
               config.capacity);
  KernelSpec spec = spec_of<IndexerParams>("indexer/indexer", "mla_indexer", distinction, config);
  spec.num_threads = config.num_threads;
  spec.shared_bytes = static_cast<std::size_t>(config.shared_bytes());
  spec.shared_bytes_text = "kConfig.shared_bytes()";
  return spec;
}

// Loaded kernels live as long as the process, so each is looked up once.
const LoadedKernel& indexer_kernel(const Device& device, const IndexerConfig& config) {
  using Key = std::tuple<const Device*, DType, DType, i32>;
  static std::mutex mutex;
  static std::map<Key, const LoadedKernel*> kernels;
  const std::lock_guard lock(mutex);
  const LoadedKernel*& kernel = kernels[{&device, config.q, config.k, config.capacity}];
  if (kernel == nullptr) kernel = &prepare(device, indexer_spec(config));
  return *kernel;
}

// topk, at most, where a block has so much shared memory.
i64 most_chosen(const Gpu& gpu) {
  i64 most = kMostChosen;
  const auto fits = [&] {
    const IndexerConfig config{.capacity = indexer_capacity(most)};
    return static_cast<size_t>(config.shared_bytes()) <= gpu.shared_bytes_per_block;
  };
  while (!fits()) --most;
  return most;
}

void check_topk(const IndexerProblem& problem, const std::string& where, i64 most) {
  if (problem.extents.topk <= most) return;
  throw Error(Status::kUnsupported,
              sentence("topk is ", problem.extents.topk, "; on ", where, " at most ", most,
                       " keys of a row are chosen, on the CPU any number"));
}

}  // namespace

IndexerConfig indexer_config(const IndexerProblem& problem) {
  check_topk(problem, "a GPU", kMostChosen);
  return {.q = problem.q.dtype,
          .k = problem.k.dtype,
          .capacity = indexer_capacity(problem.extents.topk)};
}

IndexerParams indexer_params(const IndexerProblem& problem, FaultBytes* faults) {
  IndexerParams params{};
  for (size_t i = 0; i < std::size(kIndexerArrays); ++i) {
    params.*kIndexerArraysOf<ArrayView>[i].member = view_of(problem.*kIndexerArrays[i].member);
  }
  params.extents = problem.extents;
  params.faults = faults;
  return params;
}

int device_of(const IndexerProblem& problem) {
  for (const IndexerArray& array : kIndexerArrays) {
    const Tensor& tensor = problem.*array.member;
    if (!tensor.present() || tensor.empty()) continue;
    const MemorySpace space = memory_space_of(tensor.data);
    return space.kind == MemorySpace::kDevice ? space.device : -1;
  }
  return -1;
}

void index_keys(const IndexerProblem& problem, int ordinal, void* stream) {
  const Device& device = fulmen::gpu::device(ordinal);
  device.driver().check_not_forked();
  for (const IndexerArray& array : kIndexerArrays) {
    const Tensor& tensor = problem.*array.member;
    if (tensor.present() && !tensor.empty()) check_pointer(device, tensor.data, array.name);
  }
  check_topk(problem, device.facts().name, most_chosen(device.facts()));
  const LoadedKernel& kernel = indexer_kernel(device, indexer_config(problem));
  const IndexerParams params = indexer_params(problem, device.faults());
  launch(kernel, {problem.extents.batch * problem.extents.rows}, &params,
         static_cast<CUstream>(stream));
  device.log_faults();
}

std::vector<KernelSpec> indexer_specs() {
  using enum DType;
  return {indexer_spec({.q = kBFloat16, .k = kBFloat16}),
          indexer_spec({.q = kFloat16, .k = kFloat8E4M3, .capacity = 256}),
          indexer_spec({.q = kFloat8E4M3, .k = kFloat8E4M3}),
          indexer_spec({.q = kFloat32, .k = kFloat32, .capacity = 8192})};
}

}  // namespace fulmen::gpu
