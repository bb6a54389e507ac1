// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a checked append to a launch: which kernel, how its work divides, how many blocks.

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

// Blocks, as long as there are rows: as many as large GPUs have at once.
constexpr i64 kManyBlocks = 512;

KernelSpec append_spec(const AppendConfig& config) {
  constexpr const char* kRotations[] = {"", "_halves", "_interleaved"};
  const bool has_table = config.rotation != Rotation::kNone && config.table != config.dtype;
  const bool quantises = config.quantised != DType::kNone;
  const std::string distinction = sentence(
      name(config.dtype), quantises ? sentence("_", name(config.quantised)) : "",
      kRotations[static_cast<int>(config.rotation)],
      has_table ? sentence("_table_", name(config.table)) : "", config.vectors ? "" : "_elements");
  KernelSpec spec = spec_of<AppendParams>("append/append", "append", distinction, config);
  spec.num_threads = config.num_threads;
  spec.shared_bytes = kAppendSharedBytes;
  if (config.vectors) spec.min_blocks = 4;  // many bytes on their way
  return spec;
}

bool is_in_vectors(const Tensor& tensor) {
  if (!tensor.present()) return true;
  const i64 size = size_bytes(tensor.dtype);
  i64 bits = static_cast<i64>(reinterpret_cast<u64>(tensor.data));
  for (int axis = 0; axis < 3; ++axis) bits |= tensor.strides[axis] * size;
  return tensor.strides[3] == 1 && bits % 16 == 0;
}

bool is_aligned(const Tensor& tensor) {
  return !tensor.present() ||
         reinterpret_cast<u64>(tensor.data) % static_cast<u64>(size_bytes(tensor.dtype)) == 0;
}

// Of records: into those, whose bytes lie anywhere, and from tables a pair at a time.
bool fits_vectors(const AppendProblem& problem) {
  const i64 lanes = 16 / size_bytes(problem.dtype);
  const i64 rotated = problem.interleaved ? problem.rotary_dim() : problem.rotary_dim() / 2;
  if (problem.dim_qk % lanes != 0 || problem.dim_v % lanes != 0 || rotated % lanes != 0)
    return false;
  for (const auto member :
       {&AppendProblem::k, &AppendProblem::v, &AppendProblem::q, &AppendProblem::q_out}) {
    if (!is_in_vectors(problem.*member)) return false;
  }
  for (const auto member : {&AppendProblem::k_cache, &AppendProblem::v_cache, &AppendProblem::cos,
                            &AppendProblem::sin}) {
    if (!problem.has_records() && !is_in_vectors(problem.*member)) return false;
  }
  for (const auto member :
       {&AppendProblem::cu_new, &AppendProblem::slots, &AppendProblem::page_table,
        &AppendProblem::page_indptr, &AppendProblem::kv_lengths, &AppendProblem::positions}) {
    if (!is_aligned(problem.*member)) return false;
  }
  return true;
}

// Loaded kernels live as long as the process, so each is looked up once.
const LoadedKernel& kernel_for(const Device& device, const AppendConfig& config) {
  using Key = std::tuple<const Device*, DType, DType, DType, Rotation, bool>;
  static std::mutex mutex;
  static std::map<Key, const LoadedKernel*> kernels;
  const std::lock_guard lock(mutex);
  const LoadedKernel*& kernel = kernels[{&device, config.dtype, config.quantised, config.table,
                                         config.rotation, config.vectors}];
  if (kernel == nullptr) kernel = &prepare(device, append_spec(config));
  return *kernel;
}

i32 checked_pieces(i64 pieces) {
  if (pieces <= kMaxExtent) return static_cast<i32>(pieces);
  throw Error(Status::kUnsupported,
              sentence("a row of k, v and q has ", pieces, " pieces; on a GPU at most ", kMaxExtent,
                       " are moved by one kernel: append fewer heads a call"));
}

}  // namespace

AppendConfig append_config(const AppendProblem& problem) {
  AppendConfig config;
  config.dtype = problem.dtype;
  if (problem.quantises()) config.quantised = problem.k_cache.dtype;
  config.table = problem.rotates() ? problem.cos.dtype : problem.dtype;
  config.rotation = !problem.rotates()    ? Rotation::kNone
                    : problem.interleaved ? Rotation::kInterleaved
                                          : Rotation::kHalves;
  config.vectors = fits_vectors(problem);
  return config;
}

namespace {

// A piece is a warp's: a head of k or of q. Some for each warp of a block, where rows have few.
void divide_records(const AppendProblem& problem, const AppendConfig& config,
                    AppendParams& params) {
  constexpr i64 kOfWarp = 8;
  params.record_dims = static_cast<i32>(problem.dim_qk);
  params.pieces = checked_pieces(problem.kv_heads + problem.heads);
  params.kv_pieces = static_cast<i32>(problem.kv_heads);
  const i64 fitting = kOfWarp * config.movers() / 32 / max(params.pieces, 1);
  params.rows_of_block = static_cast<i32>(
      clamp<i64>(params.all_rows / kManyBlocks, 1, clamp<i64>(fitting, 1, kMaxAppendRows)));
}

}  // namespace

AppendParams append_params(const AppendProblem& problem, const AppendConfig& config,
                           FaultBytes* faults) {
  AppendParams params{};
  for (size_t i = 0; i < std::size(kAppendArrays); ++i) {
    params.*kAppendArraysOf<ArrayView>[i].member = view_of(problem.*kAppendArrays[i].member);
  }
  params.extents = problem.extents;
  params.all_rows = problem.batch * problem.extents.rows;
  params.faults = faults;
  if (config.has_records()) {
    divide_records(problem, config, params);
    return params;
  }
  const bool in_one_run = config.rotation == Rotation::kInterleaved && config.lanes() > 1;
  const i64 rotary_dim = problem.rotary_dim();
  const i64 rotated = (in_one_run ? rotary_dim : rotary_dim / 2) / config.lanes();
  const i64 of_head =
      problem.dim_qk / config.lanes() - (in_one_run ? 0 : rotary_dim / 2 / config.lanes());
  const i64 of_v_head = problem.dim_v / config.lanes();
  const i64 kv_pieces = problem.kv_heads * (of_head + of_v_head);
  params.pieces = checked_pieces(kv_pieces + problem.heads * of_head);
  params.kv_pieces = static_cast<i32>(kv_pieces);
  params.k_pieces = static_cast<i32>(problem.kv_heads * of_head);
  params.pieces_of_head = static_cast<i32>(of_head);
  params.pieces_of_v_head = static_cast<i32>(of_v_head);
  params.rotated_of_head = static_cast<i32>(rotated);
  params.rotary_dim = static_cast<i32>(rotary_dim);
  const i64 pieces = max(params.pieces, 1);
  params.threads_of_row = static_cast<i32>(ceil_div(pieces, ceil_div(pieces, config.movers())));
  const i64 fitting = config.movers() / params.threads_of_row * config.rows_of_thread();
  params.rows_of_block = static_cast<i32>(
      clamp<i64>(params.all_rows / kManyBlocks, 1, min<i64>(fitting, kMaxAppendRows)));
  return params;
}

i64 num_blocks(const AppendParams& params) {
  return ceil_div(params.all_rows, params.rows_of_block);
}

int device_of(const AppendProblem& problem) {
  for (const AppendArray& array : kAppendArrays) {
    const Tensor& tensor = problem.*array.member;
    if (!tensor.present() || tensor.empty()) continue;
    const MemorySpace space = memory_space_of(tensor.data);
    return space.kind == MemorySpace::kDevice ? space.device : -1;
  }
  return -1;
}

void append(const AppendProblem& problem, int ordinal, void* stream) {
  const Device& device = fulmen::gpu::device(ordinal);
  device.driver().check_not_forked();
  for (const AppendArray& array : kAppendArrays) {
    const Tensor& tensor = problem.*array.member;
    if (!tensor.present() || tensor.empty()) continue;
    check_pointer(device, tensor.data, name(array, problem.has_caches()));
  }
  const AppendConfig config = append_config(problem);
  const AppendParams params = append_params(problem, config, device.faults());
  const LoadedKernel& kernel = kernel_for(device, config);
  launch(kernel, {num_blocks(params)}, &params, static_cast<CUstream>(stream));
  device.log_faults();
}

namespace {

// What rows may turn by: nothing, or either kind of pairs by a table of either dtype.
template <class Each>
void for_each_rotation(DType dtype, const Each& each) {
  each(Rotation::kNone, dtype);
  for (const Rotation rotation : {Rotation::kHalves, Rotation::kInterleaved}) {
    each(rotation, dtype);
    if (dtype != DType::kFloat32) each(rotation, DType::kFloat32);
  }
}

}  // namespace

std::vector<KernelSpec> append_specs() {
  std::vector<KernelSpec> specs;
  for (size_t number = 1; number < std::size(kDTypeNames); ++number) {
    const DType dtype = static_cast<DType>(number);
    if (!is_float(dtype)) continue;
    for_each_rotation(dtype, [&](Rotation rotation, DType table) {
      const DType only = rotation == Rotation::kHalves ? DType::kFloat32 : dtype;
      if (table != only) return;  // each kind of pairs by one table: half as many to compile
      for (const bool vectors : {true, false}) {
        specs.push_back(append_spec(
            {.dtype = dtype, .table = table, .rotation = rotation, .vectors = vectors}));
      }
    });
  }
  const auto add_quantised = [&specs](DType dtype, DType quantised, Rotation rotation,
                                      bool vectors) {
    specs.push_back(append_spec(
        {.dtype = dtype, .quantised = quantised, .rotation = rotation, .vectors = vectors}));
  };
  add_quantised(DType::kFloat16, DType::kFloat8E4M3, Rotation::kHalves, true);
  add_quantised(DType::kBFloat16, DType::kFloat8E5M2, Rotation::kNone, false);
  add_quantised(DType::kFloat32, DType::kInt8, Rotation::kInterleaved, true);
  add_quantised(DType::kBFloat16, DType::kUint8, Rotation::kInterleaved, true);
  add_quantised(DType::kFloat16, DType::kUint8, Rotation::kHalves, true);
  add_quantised(DType::kFloat32, DType::kUint8, Rotation::kNone, false);
  return specs;
}

std::vector<KernelSpec> append_specs_of(DType dtype, DType cache_dtype) {
  AppendConfig config{.dtype = dtype};
  if (cache_dtype != dtype) config.quantised = cache_dtype;
  std::vector<KernelSpec> specs;
  for_each_rotation(dtype, [&](Rotation rotation, DType table) {
    config.rotation = rotation;
    config.table = table;
    for (const bool vectors : {true, false}) {
      config.vectors = vectors;
      specs.push_back(append_spec(config));
    }
  });
  return specs;
}

}  // namespace fulmen::gpu
