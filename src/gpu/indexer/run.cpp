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

// Whether the rows of q, or of k, are read 8 numbers at a time.
bool is_in_eights(const Tensor& tensor) {
  const i64 size = size_bytes(tensor.dtype);
  i64 bits = static_cast<i64>(reinterpret_cast<u64>(tensor.data));
  for (int axis = 0; axis < 3; ++axis) bits |= tensor.strides[axis] * size;
  return tensor.strides[3] == 1 && bits % (8 * size) == 0;
}

// Dims of the tiles of tensor cores; 0: they do not take the call.
i32 tensor_core_dim(const IndexerProblem& problem) {
  const i64 dim = problem.extents.dim;
  const bool takes = problem.q.dtype != DType::kFloat32 && dim > 0 && dim <= 128 && dim % 8 == 0;
  if (!takes || !is_in_eights(problem.q) || !is_in_eights(problem.k)) return 0;
  return dim > 64 ? 128 : 64;
}

KernelSpec indexer_spec(const IndexerConfig& config) {
  const std::string distinction =
      sentence(name(config.q), config.k == config.q ? "" : sentence("_", name(config.k)), "_",
               config.capacity, config.dim > 0 ? sentence("_mma", config.dim) : "");
  KernelSpec spec = spec_of<IndexerParams>("indexer/indexer", "mla_indexer", distinction, config);
  spec.num_threads = config.num_threads;
  spec.shared_bytes = static_cast<std::size_t>(config.shared_bytes());
  spec.shared_bytes_text = "kConfig.shared_bytes()";
  spec.tensor_cores = config.dim > 0;
  return spec;
}

// Loaded kernels live as long as the process, so each is looked up once.
const LoadedKernel& indexer_kernel(const Device& device, const IndexerConfig& config) {
  using Key = std::tuple<const Device*, DType, DType, i32, i32>;
  static std::mutex mutex;
  static std::map<Key, const LoadedKernel*> kernels;
  const std::lock_guard lock(mutex);
  const LoadedKernel*& kernel = kernels[{&device, config.q, config.k, config.capacity, config.dim}];
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

// Tiles of tensor cores are larger.
bool has_tensor_cores_for(const IndexerConfig& config, const Gpu& gpu) {
  return gpu.compute_capability >= 80 &&
         static_cast<size_t>(config.shared_bytes()) <= gpu.shared_bytes_per_block;
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
          .capacity = indexer_capacity(problem.extents.topk),
          .dim = tensor_core_dim(problem)};
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
  IndexerConfig config = indexer_config(problem);
  if (!has_tensor_cores_for(config, device.facts())) config.dim = 0;
  const LoadedKernel& kernel = indexer_kernel(device, config);
  const IndexerParams params = indexer_params(problem, device.faults());
  launch(kernel, {problem.extents.batch * problem.extents.rows}, &params,
         static_cast<CUstream>(stream));
  device.log_faults();
}

std::vector<KernelSpec> indexer_specs() {
  using enum DType;
  return {indexer_spec({.q = kBFloat16, .k = kBFloat16}),
          indexer_spec({.q = kBFloat16, .k = kBFloat16, .dim = 128}),
          indexer_spec({.q = kBFloat16, .k = kFloat8E4M3, .dim = 128}),
          indexer_spec({.q = kFloat8E4M3, .k = kFloat8E4M3, .dim = 128}),
          indexer_spec({.q = kFloat16, .k = kFloat16, .capacity = 8192, .dim = 64}),
          indexer_spec({.q = kFloat16, .k = kFloat8E4M3, .capacity = 256}),
          indexer_spec({.q = kFloat8E4M3, .k = kFloat8E4M3}),
          indexer_spec({.q = kFloat32, .k = kFloat32, .capacity = 8192})};
}

std::vector<KernelSpec> indexer_specs_of(DType dtype, i64 topk) {
  using enum DType;
  std::vector<KernelSpec> specs;
  if (topk > kMostChosen || dtype == kFloat64) return specs;
  IndexerConfig config{.q = dtype, .k = dtype, .capacity = indexer_capacity(topk)};
  config.dim = dtype == kFloat32 ? 0 : 128;
  specs.push_back(indexer_spec(config));
  if (dtype == kFloat32) return specs;
  config.k = kFloat8E4M3;
  specs.push_back(indexer_spec(config));
  config.q = kFloat8E4M3;
  specs.push_back(indexer_spec(config));
  return specs;
}

}  // namespace fulmen::gpu
