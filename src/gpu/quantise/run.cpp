// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a checked fulmen_quantise to its launches.

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

constexpr const char* kQuantiseEntries[] = {"start_quantisation", "find_scales", "quantise_array"};
enum QuantiseEntry { kStart, kFindScales, kQuantiseArray };

KernelSpec quantise_spec(const QuantiseArrayConfig& config, QuantiseEntry entry) {
  const std::string distinction =
      sentence(name(config.dtype), "_", name(config.values), "_d", config.dim,
               config.rotate ? "_rotated" : "", config.vectors ? "" : "_elements");
  KernelSpec spec =
      spec_of<QuantiseArrayParams>("quantise/array", kQuantiseEntries[entry], distinction, config);
  spec.num_threads = entry == kStart ? RowLanes::kSampleThreads : RowLanes::kThreads;
  if (entry == kStart) {
    spec.shared_bytes = static_cast<std::size_t>(RowLanes::sample_bytes(config.dim));
  }
  return spec;
}

// Whether rows lie as lanes take them: `size` bytes of a row at once.
bool has_vectors(const Tensor& tensor, i64 size) {
  i64 bits = static_cast<i64>(reinterpret_cast<u64>(tensor.data));
  for (int axis = 0; axis < 3; ++axis) bits |= tensor.strides[axis] * size_bytes(tensor.dtype);
  return tensor.strides[3] == 1 && bits % size == 0;
}

// Loaded kernels live as long as the process, so each is looked up once.
const LoadedKernel& quantise_kernel(const Device& device, const QuantiseArrayConfig& config,
                                    QuantiseEntry entry) {
  using Key = std::tuple<const Device*, DType, DType, i32, bool, bool, QuantiseEntry>;
  static std::mutex mutex;
  static std::map<Key, const LoadedKernel*> kernels;
  const std::lock_guard lock(mutex);
  const LoadedKernel*& kernel = kernels[{&device, config.dtype, config.values, config.dim,
                                         config.rotate, config.vectors, entry}];
  if (kernel == nullptr) kernel = &prepare(device, quantise_spec(config, entry));
  return *kernel;
}

}  // namespace

QuantiseArrayConfig quantise_config(const QuantiseProblem& problem) {
  const i32 dim = static_cast<i32>(problem.extents.dim);
  return {.dtype = problem.x.dtype,
          .values = problem.values.dtype,
          .dim = dim,
          .rotate = problem.extents.rotate,
          .vectors = dim % RowLanes::elements(dim) == 0 && has_vectors(problem.x, 16) &&
                     has_vectors(problem.values, 8)};
}

QuantiseArrayParams quantise_params(const QuantiseProblem& problem, FaultBytes* faults) {
  QuantiseArrayParams params{};
  for (size_t i = 0; i < std::size(kQuantiseArrays); ++i) {
    params.*kQuantiseArraysOf<ArrayView>[i].member = view_of(problem.*kQuantiseArrays[i].member);
  }
  params.extents = problem.extents;
  params.faults = faults;
  return params;
}

int device_of(const QuantiseProblem& problem) {
  for (const QuantiseArray& array : kQuantiseArrays) {
    const Tensor& tensor = problem.*array.member;
    if (!tensor.present() || tensor.empty()) continue;
    const MemorySpace space = memory_space_of(tensor.data);
    return space.kind == MemorySpace::kDevice ? space.device : -1;
  }
  return -1;
}

void quantise(const QuantiseProblem& problem, int ordinal, void* stream) {
  const Device& device = fulmen::gpu::device(ordinal);
  device.driver().check_not_forked();
  for (const QuantiseArray& array : kQuantiseArrays) {
    const Tensor& tensor = problem.*array.member;
    if (tensor.present() && !tensor.empty()) check_pointer(device, tensor.data, array.name);
  }
  const QuantiseArrayConfig config = quantise_config(problem);
  const QuantiseArrayParams params = quantise_params(problem, device.faults());
  const QuantiseExtents& extents = problem.extents;
  const auto run = [&](QuantiseEntry entry, i64 blocks) {
    launch(quantise_kernel(device, config, entry), {blocks}, &params,
           static_cast<CUstream>(stream));
  };
  const i64 heads = extents.batch * extents.heads;
  const i64 blocks = heads * ceil_div(extents.rows, i64{RowLanes::block_rows(config.dim)});
  const bool finds_shared = extents.find_scale && !extents.scales_rows;
  if (extents.find_constant || finds_shared) run(kStart, heads);
  if (finds_shared) run(kFindScales, blocks);
  run(kQuantiseArray, blocks);
  device.log_faults();
}

std::vector<KernelSpec> quantise_specs() {
  using enum DType;
  std::vector<KernelSpec> specs;
  const auto add = [&](const QuantiseArrayConfig& config) {
    for (const QuantiseEntry entry : {kStart, kFindScales, kQuantiseArray}) {
      specs.push_back(quantise_spec(config, entry));
    }
  };
  add({.dtype = kBFloat16, .values = kFloat8E4M3, .dim = 128, .rotate = true});
  add({.dtype = kFloat16, .values = kFloat16, .dim = 512, .rotate = true});
  add({.dtype = kFloat32, .values = kInt8, .dim = 100, .rotate = true, .vectors = false});
  add({.dtype = kBFloat16, .values = kFloat8E5M2, .dim = 64, .vectors = false});
  return specs;
}

std::vector<KernelSpec> quantise_specs_of(const Problem& problem) {
  std::vector<KernelSpec> specs;
  const DType dtype = problem.dtype, cached = problem.kv_dtype();
  if (!is_quantised(cached) || is_record(cached) || dtype == DType::kFloat64) return specs;
  const auto add = [&](DType values, i64 dim, bool rotate, QuantiseEntry entry) {
    if (dim < 1 || dim > kMaxQuantisedDim) return;
    QuantiseArrayConfig config{
        .dtype = dtype, .values = values, .dim = static_cast<i32>(dim), .rotate = rotate};
    config.vectors = dim % RowLanes::elements(config.dim) == 0;
    specs.push_back(quantise_spec(config, entry));
  };
  for (const QuantiseEntry entry : {kStart, kFindScales, kQuantiseArray}) {
    add(cached, problem.dim_qk, true, entry);
    add(cached, problem.dim_v, false, entry);
  }
  add(dtype, problem.dim_qk, true, kQuantiseArray);
  return specs;
}

}  // namespace fulmen::gpu
