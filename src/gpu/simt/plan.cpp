// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Specs and launches of naive, one kernel a gradient; tiles of the simt kernels, their specs, and
// plans of both passes.

#include "gpu/simt/plan.h"

#include <iterator>

#include "core/error.h"
#include "gpu/call.h"
#include "gpu/jit/kernel_spec.h"
#include "gpu/params.h"
#include "kernels/common/tile_tasks.cuh"

namespace fulmen::gpu {

KernelSpec fma_spec(const std::string& file, const std::string& entry, const FmaConfig& config) {
  std::string distinction = name(config.dtype);
  if (config.rows > 0) {
    distinction += sentence("_", config.rows, "x", config.columns, "_d", config.max_dim_qk, "_",
                            config.max_dim_v);
  }
  if (config.adds_dq) distinction += "_adds_dq";
  if (config.caches) distinction += "_caches";
  if (config.quantised != DType::kNone) distinction += sentence("_", name(config.quantised));
  if (config.quantised_q) distinction += "_q";
  distinction += name_suffix(config.user);
  KernelSpec spec = spec_of<AttentionParams>(file, entry, distinction, config);
  spec.num_threads = config.num_threads;
  return spec;
}

KernelLaunch fma_launch(const KernelSpec& spec, i64 num_tasks) {
  return {spec, ceil_div(num_tasks, spec.num_threads)};
}

FmaPlan::FmaPlan(const Problem& problem) : params(attention_params(problem)) {}

void FmaPlan::run(const Call& call) const {
  AttentionParams bound = params;
  bind_params(bound, call.problem, call.faults);
  if (call.workspace != nullptr) set_row_terms(bound, reinterpret_cast<u8*>(call.workspace));
  for (std::size_t i = 0; i < call.kernels.size(); ++i) call.launch(i, bound);
}

void set_row_terms(AttentionParams& params, u8* workspace) {
  const i64 rows = params.q_rows;
  const DType real = params.q.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  params.row_terms = {workspace, {params.heads_q * rows * 4, rows * 4, 4, 1}, real};
}

namespace {

// What the kernels of the forward pass are compiled to know of q, k and v.
void set_operands(FmaConfig& config, const AttentionParams& params) {
  config.caches = params.has_caches();
  if (is_quantised(params.k.dtype)) config.quantised = params.k.dtype;
  config.quantised_q = is_quantised(params.q.dtype);
  config.dtype = config.quantised_q ? DType::kFloat32 : params.q.dtype;
}

// Each type of quantised keys once, beside the types of q that go with them.
constexpr DType kQuantisedPairs[][2] = {{DType::kFloat32, DType::kFloat8E4M3},
                                        {DType::kFloat16, DType::kFloat8E5M2},
                                        {DType::kBFloat16, DType::kInt8},
                                        {DType::kBFloat16, DType::kUint8}};

}  // namespace

std::vector<KernelLaunch> naive_forward(const AttentionParams& params, UserTerms user) {
  FmaConfig config;
  config.user = user;
  set_operands(config, params);
  return {
      fma_launch(fma_spec("naive/naive", "forward_naive", config), forward_naive_tasks(params))};
}

std::vector<KernelLaunch> naive_backward(const AttentionParams& params, UserTerms user,
                                         bool captures) {
  std::vector<KernelLaunch> launches;
  const FmaConfig config{.dtype = params.q.dtype, .user = user};
  const FmaConfig of_rows{.dtype = params.q.dtype};  // looks at no pair
  const auto add = [&](const char* entry, i64 num_tasks, const FmaConfig& known) {
    launches.push_back(fma_launch(fma_spec("naive/naive", entry, known), num_tasks));
  };
  if (params.dq.present()) add("backward_naive_dq", backward_naive_dq_tasks(params), config);
  if (dkdv_chunks(params) > 0) {
    add("backward_naive_dkdv", backward_naive_dkdv_tasks(params), config);
  }
  if (params.dbias.present()) {
    add("backward_naive_dbias", backward_naive_dbias_tasks(params), config);
  }
  if (params.dsinks.present()) add("backward_naive_dsinks", params.heads_q, of_rows);
  if (captures) add("backward_naive_captures", backward_naive_captures_tasks(params), config);
  return launches;
}

KernelLaunch store_captures(DType dtype, i64 count) {
  const FmaConfig config{.dtype = dtype};
  KernelSpec spec =
      spec_of<CaptureGradients>("simt/store_captures", "store_captures", name(dtype), config);
  spec.num_threads = config.num_threads;
  return fma_launch(spec, count);
}

PlanOrRefusal plan_naive(const Problem& problem, const Gpu&) {
  auto plan = std::make_unique<FmaPlan>(problem);
  const UserTerms user = user_terms_of(problem);
  plan->launches = problem.operation == Operation::kForward
                       ? naive_forward(plan->params, user)
                       : naive_backward(plan->params, user, sums_captures(problem));
  return plan;
}

std::vector<std::vector<KernelSpec>> naive_specs() {
  const auto of_all_dtypes = [](const char* file, const char* entry, bool caches = false) {
    std::vector<KernelSpec> specs;
    for (const DType dtype : kFloatTypes) {
      specs.push_back(fma_spec(file, entry, {.dtype = dtype, .caches = caches}));
    }
    return specs;
  };
  std::vector<KernelSpec> quantised;
  for (const auto& [dtype, kv_dtype] : kQuantisedPairs) {
    quantised.push_back(fma_spec("naive/naive", "forward_naive",
                                 {.dtype = dtype, .caches = true, .quantised = kv_dtype}));
    if (is_record(kv_dtype)) continue;
    quantised.push_back(
        fma_spec("naive/naive", "forward_naive", {.quantised = kv_dtype, .quantised_q = true}));
  }
  return {of_all_dtypes("naive/naive", "forward_naive"),
          of_all_dtypes("naive/naive", "backward_naive_dq"),
          of_all_dtypes("naive/naive", "backward_naive_dkdv"),
          of_all_dtypes("naive/naive", "backward_naive_dbias"),
          of_all_dtypes("naive/naive", "backward_naive_dsinks"),
          of_all_dtypes("naive/naive", "forward_naive", true),
          quantised};
}

namespace {

// Shapes of a block, widest first. Rows of a thread times vectors of O bound the registers.
struct TileShape {
  i32 num_threads, rows, columns;
};
constexpr TileShape kForwardShapes[] = {{128, 64, 64}, {128, 64, 32}, {128, 32, 32},
                                        {64, 16, 16},  {64, 8, 16},   {64, 8, 8}};
constexpr TileShape kBackwardShapes[] = {{256, 128, 64}, {128, 64, 64}, {128, 64, 32},
                                         {128, 32, 32},  {128, 16, 32}, {64, 8, 16},
                                         {64, 8, 8}};

// What comes first where two blocks of it fit: one computes while the other waits. H100, D64,
// 2026-11-28, ms: backward in float32, S 4096, 64x64 44.7, 128x64 46.0; forward in float64, S 2048,
// 64x32 2.24, 64x64 3.60.
constexpr TileShape pair_shape(DType dtype, bool backward) {
  return {128, 64, dtype == DType::kFloat64 && !backward ? 32 : 64};
}

// 32-bit registers that a thread may hold results in; beyond it they spill.
constexpr i64 kMaxResults = 128;

FmaConfig config_with(const TileShape& shape, DType dtype, i64 dim_qk, i64 dim_v) {
  FmaConfig config;
  config.dtype = dtype;
  config.num_threads = shape.num_threads;
  config.rows = shape.rows;
  config.columns = shape.columns;
  const i64 unit = config.dim_unit();
  config.max_dim_qk = static_cast<i32>(unit * max<i64>(ceil_div(dim_qk, unit), 1));
  config.max_dim_v = static_cast<i32>(unit * max<i64>(ceil_div(dim_v, unit), 1));
  return config;
}

size_t shared_bytes_of(const FmaConfig& config, bool backward) {
  return static_cast<size_t>(backward ? config.backward_shared_bytes()
                                      : config.forward_shared_bytes());
}

}  // namespace

std::optional<FmaConfig> simt_config(DType dtype, i64 dim_qk, i64 dim_v, bool backward,
                                     size_t shared_bytes, i64 most_rows) {
  ++config_derivations();
  const auto fits = [&](const FmaConfig& config, size_t num_blocks) {
    return num_blocks * shared_bytes_of(config, backward) <= shared_bytes;
  };
  const auto has_registers = [&](const FmaConfig& config) {
    const i64 dims = backward ? config.max_dim_qk + config.max_dim_v : config.max_dim_v;
    return dims / 8 * config.rows_of_thread() * (config.real_bytes() / 4) <= kMaxResults;
  };
  const FmaConfig pair = config_with(pair_shape(dtype, backward), dtype, dim_qk, dim_v);
  if (fits(pair, 2) && has_registers(pair)) return pair;
  const auto choose = [&](const auto& shapes) -> std::optional<FmaConfig> {
    for (const TileShape& shape : shapes) {
      const FmaConfig config = config_with(shape, dtype, dim_qk, dim_v);
      if (shape.rows > most_rows) continue;
      const bool is_last = shape.rows == std::end(shapes)[-1].rows;
      if (fits(config, 1) && (is_last || has_registers(config))) return config;
    }
    return std::nullopt;
  };
  return backward ? choose(kBackwardShapes) : choose(kForwardShapes);
}

bool simt_adds_dq(const Problem& problem) {
  return problem.operation == Operation::kBackward && problem.has(Array::kDQ) &&
         (problem.has(Array::kDK) || problem.has(Array::kDV)) && size_bytes(problem.dtype) >= 4 &&
         !problem.has_ordered_sums() && problem.pointer_alignment >= size_bytes(problem.dtype);
}

size_t simt_workspace_bytes(DType dtype, i64 rows) {
  return static_cast<size_t>(rows * 4 * (dtype == DType::kFloat64 ? 8 : 4));
}

namespace {

// A tile lies in one block of lists, whose sizes are multiples of 64.
constexpr i64 kRowsOfAny = 128, kRowsOfLists = 64;
i64 most_rows_of(const Problem& problem) {
  return problem.has(Array::kBlocks) ? kRowsOfLists : kRowsOfAny;
}
i64 most_rows_of(const AttentionParams& params) {
  return params.blocks.present() ? kRowsOfLists : kRowsOfAny;
}

// Throws Error kUnsupported where there is none.
FmaConfig existing_config(const AttentionParams& params, bool backward, std::size_t shared_bytes) {
  const std::optional<FmaConfig> config = simt_config(params.q.dtype, params.dim_qk, params.dim_v,
                                                      backward, shared_bytes, most_rows_of(params));
  if (config) return *config;
  throw Error(
      Status::kUnsupported,
      sentence("simt needs more than the device's ", shared_bytes,
               " bytes of shared memory for head dimensions ", params.dim_qk, " and ", params.dim_v,
               " of ", name(params.q.dtype), "; implementation naive takes them"));
}

// A kernel over tiles, defined in kernels/simt/<file>.cuh.
KernelSpec tiled_spec(const std::string& file, const std::string& entry, const FmaConfig& config) {
  const bool backward = entry != "forward_simt";
  KernelSpec spec = fma_spec("simt/" + file, entry, config);
  spec.shared_bytes = shared_bytes_of(config, backward);
  spec.shared_bytes_text =
      backward ? "kConfig.backward_shared_bytes()" : "kConfig.forward_shared_bytes()";
  return spec;
}

KernelSpec rows_spec(DType dtype, bool adds_dq) {
  return fma_spec("simt/backward_simt_rows", "backward_simt_rows",
                  {.dtype = dtype, .adds_dq = adds_dq});
}

KernelSpec dkdv_spec(FmaConfig config, bool adds_dq) {
  config.adds_dq = adds_dq;
  return tiled_spec("backward_simt_dkdv", "backward_simt_dkdv", config);
}

KernelSpec dsinks_spec(DType dtype) {
  const FmaConfig config{.dtype = dtype, .num_threads = 1024};
  KernelSpec spec = fma_spec("simt/backward_simt_rows", "backward_simt_dsinks", config);
  spec.shared_bytes = static_cast<size_t>(config.num_threads * config.real_bytes());
  return spec;
}

std::vector<KernelLaunch> forward_launches(const AttentionParams& params, FmaConfig config,
                                           UserTerms user) {
  set_operands(config, params);
  config.user = user;
  return {{tiled_spec("forward_simt", "forward_simt", config), num_q_tiles(params, config.rows)}};
}

std::vector<KernelLaunch> backward_launches(const AttentionParams& params, FmaConfig config,
                                            bool adds_dq, UserTerms user, bool captures) {
  const bool makes_dkdv = params.dk.present() || params.dv.present();
  config.user = user;
  std::vector<KernelLaunch> launches;
  if (params.dq.present() || makes_dkdv || params.dbias.present() || captures) {
    launches.push_back(fma_launch(rows_spec(config.dtype, adds_dq),
                                  params.batch_extent() * params.heads_q * params.q_rows));
  }
  if (params.dq.present() && !adds_dq) {
    launches.push_back({tiled_spec("backward_simt_rows", "backward_simt_dq", config),
                        num_q_tiles(params, config.rows)});
  }
  if (makes_dkdv) {
    launches.push_back({dkdv_spec(config, adds_dq), num_kv_tiles(params, config.rows)});
  }
  if (params.dbias.present()) {
    launches.push_back({tiled_spec("backward_simt_rows", "backward_simt_dbias", config),
                        dbias_tiles(params, config.rows, config.columns)});
  }
  if (params.dsinks.present()) launches.push_back({dsinks_spec(config.dtype), params.heads_q});
  if (captures) {
    launches.push_back({tiled_spec("backward_simt_captures", "backward_simt_captures", config),
                        num_q_tiles(params, config.rows)});
  }
  return launches;
}

}  // namespace

std::vector<KernelLaunch> simt_forward(const AttentionParams& params, size_t shared_bytes,
                                       UserTerms user) {
  return forward_launches(params, existing_config(params, false, shared_bytes), user);
}

std::vector<KernelLaunch> simt_backward(const AttentionParams& params, size_t shared_bytes,
                                        bool adds_dq, UserTerms user, bool captures) {
  return backward_launches(params, existing_config(params, true, shared_bytes), adds_dq, user,
                           captures);
}

std::string simt_refusal(const Problem& problem, const Gpu& gpu) {
  const bool backward = problem.operation == Operation::kBackward;
  if (simt_config(problem.dtype, problem.dim_qk, problem.dim_v, backward,
                  gpu.shared_bytes_per_block, most_rows_of(problem))) {
    return "";
  }
  return sentence("its narrowest tiles need more than the ", gpu.shared_bytes_per_block,
                  " bytes of shared memory of a block for head dimensions ", problem.dim_qk,
                  " and ", problem.dim_v, " of ", name(problem.dtype));
}

PlanOrRefusal plan_simt(const Problem& problem, const Gpu& gpu) {
  const bool backward = problem.operation == Operation::kBackward;
  const std::optional<FmaConfig> config =
      simt_config(problem.dtype, problem.dim_qk, problem.dim_v, backward,
                  gpu.shared_bytes_per_block, most_rows_of(problem));
  if (!config) return simt_refusal(problem, gpu);
  auto plan = std::make_unique<FmaPlan>(problem);
  plan->params.lists_by_pair = false;
  plan->tile = {config->rows, config->columns};
  if (!backward) {
    plan->launches = forward_launches(plan->params, *config, user_terms_of(problem));
    return plan;
  }
  const bool adds_dq = simt_adds_dq(problem);
  const AttentionParams& params = plan->params;
  plan->launches =
      backward_launches(params, *config, adds_dq, user_terms_of(problem), sums_captures(problem));
  plan->workspace_bytes =
      simt_workspace_bytes(config->dtype, params.batch_extent() * params.heads_q * params.q_rows);
  if (adds_dq) plan->alignment_bytes = size_bytes(problem.dtype);
  return plan;
}

std::vector<std::vector<KernelSpec>> simt_specs(std::size_t shared_bytes) {
  constexpr i64 kDims[][2] = {{64, 64}, {128, 128}, {256, 256}, {192, 128}, {576, 512}};
  std::vector<std::vector<KernelSpec>> entries;
  for (const auto& [dim_qk, dim_v] : kDims) {
    std::vector<KernelSpec> forward, dq, dkdv, dbias;
    for (const DType dtype : kFloatTypes) {
      const auto front = simt_config(dtype, dim_qk, dim_v, false, shared_bytes);
      const auto back = simt_config(dtype, dim_qk, dim_v, true, shared_bytes);
      if (front) forward.push_back(tiled_spec("forward_simt", "forward_simt", *front));
      if (!back) continue;  // more than the shared memory even in the narrowest tiles
      dq.push_back(tiled_spec("backward_simt_rows", "backward_simt_dq", *back));
      dkdv.push_back(dkdv_spec(*back, false));
      if (size_bytes(dtype) >= 4) dkdv.push_back(dkdv_spec(*back, true));
      dbias.push_back(tiled_spec("backward_simt_rows", "backward_simt_dbias", *back));
    }
    for (const auto& specs : {forward, dq, dkdv, dbias}) {
      if (!specs.empty()) entries.push_back(specs);
    }
  }
  std::vector<KernelSpec> rows, dsinks, caches;
  for (const DType dtype : kFloatTypes) {
    rows.push_back(rows_spec(dtype, false));
    if (size_bytes(dtype) >= 4) rows.push_back(rows_spec(dtype, true));
    dsinks.push_back(dsinks_spec(dtype));
    auto over_caches = simt_config(dtype, 128, 128, false, shared_bytes);
    if (!over_caches) continue;
    over_caches->caches = true;
    caches.push_back(tiled_spec("forward_simt", "forward_simt", *over_caches));
  }
  std::vector<KernelSpec> quantised;
  for (const auto& [dtype, kv_dtype] : kQuantisedPairs) {
    auto config = simt_config(dtype, 128, 128, false, shared_bytes);
    if (!config) continue;
    config->caches = dtype == DType::kBFloat16;
    config->quantised = kv_dtype;
    quantised.push_back(tiled_spec("forward_simt", "forward_simt", *config));
    if (is_record(kv_dtype)) continue;
    config->caches = false;
    config->dtype = DType::kFloat32;
    config->quantised_q = true;
    quantised.push_back(tiled_spec("forward_simt", "forward_simt", *config));
  }
  entries.insert(entries.end(), {rows, dsinks, caches, quantised});
  return entries;
}

}  // namespace fulmen::gpu
