// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Specs and grid sizes of the naive and simt kernels.

#include "cuda/fma_kernels.h"

#include "core/error.h"
#include "cuda/config_text.h"
#include "cuda/params.h"
#include "kernels/naive_tasks.cuh"
#include "kernels/tile_tasks.cuh"

namespace fulmen::cuda {
namespace {

constexpr DType kFloatTypes[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16,
                                 DType::kBFloat16};

// entry: "forward_naive", defined in kernels/<file>.cuh.
KernelSpec naive_spec(const std::string& file, const std::string& entry, DType dtype) {
  KernelSpec spec;
  spec.name = sentence(entry, "_", name(dtype));
  spec.include = sentence("kernels/", file, ".cuh");
  spec.function = "fulmen::" + entry;
  spec.config_type = "fulmen::FmaConfig";
  spec.num_threads = FmaConfig{}.num_threads;
  spec.config = {{"dtype", text(dtype)}, {"num_threads", text(spec.num_threads)}};
  spec.params_type = "fulmen::AttentionParams";
  spec.params_bytes = sizeof(AttentionParams);
  return spec;
}

KernelLaunch naive_launch(const std::string& file, const std::string& entry, DType dtype,
                          i64 num_tasks) {
  KernelLaunch launch{naive_spec(file, entry, dtype)};
  launch.num_blocks = ceil_div(num_tasks, launch.spec.num_threads);
  return launch;
}

std::size_t shared_bytes_of(const FmaConfig& config, bool backward) {
  return static_cast<std::size_t>(backward ? config.backward_shared_bytes()
                                           : config.forward_shared_bytes());
}

// The config of a pass that plans have found to fit.
FmaConfig config_of(DType dtype, i64 dim_qk, i64 dim_v, bool backward, std::size_t shared_bytes) {
  const std::optional<FmaConfig> config = simt_config(dtype, dim_qk, dim_v, backward, shared_bytes);
  if (config) return *config;
  throw Error(Status::kUnsupported,
              sentence("simt needs more than the device's ", shared_bytes,
                       " bytes of shared memory for head dimensions ", dim_qk, " and ", dim_v,
                       " of ", name(dtype), "; implementation naive takes them"));
}

KernelSpec simt_spec(const std::string& file, const std::string& entry, const FmaConfig& config) {
  const bool backward = file != "forward_simt";
  KernelSpec spec = naive_spec(file, entry, config.dtype);
  spec.name = sentence(entry, "_", name(config.dtype), "_", config.rows, "x", config.columns, "_d",
                       config.max_dim_qk, "_", config.max_dim_v);
  spec.num_threads = config.num_threads;
  spec.config = {{"dtype", text(config.dtype)},
                 {"num_threads", text(config.num_threads)},
                 {"rows", text(config.rows)},
                 {"columns", text(config.columns)},
                 {"max_dim_qk", text(config.max_dim_qk)},
                 {"max_dim_v", text(config.max_dim_v)}};
  spec.shared_bytes = shared_bytes_of(config, backward);
  spec.shared_bytes_text =
      backward ? "kConfig.backward_shared_bytes()" : "kConfig.forward_shared_bytes()";
  return spec;
}

// The same of a kernel that makes dQ by atomics.
KernelSpec adding_dq(KernelSpec spec) {
  spec.name += "_adds_dq";
  spec.config.push_back({"adds_dq", "true"});
  return spec;
}

KernelSpec dsinks_spec(DType dtype) {
  KernelSpec spec = naive_spec("backward_simt_dsinks", "backward_simt_dsinks", dtype);
  spec.num_threads = 1024;
  spec.config[1].value = text(spec.num_threads);
  spec.shared_bytes =
      static_cast<std::size_t>(spec.num_threads) * (dtype == DType::kFloat64 ? 8 : 4);
  return spec;
}

}  // namespace

void set_row_terms(AttentionParams& params, u8* workspace) {
  const i64 rows = params.q_rows;
  const DType real = params.q.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  params.row_terms = {workspace, {params.heads_q * rows * 4, rows * 4, 4, 1}, real};
}

std::vector<KernelLaunch> naive_forward(const AttentionParams& params) {
  return {
      naive_launch("forward_naive", "forward_naive", params.q.dtype, forward_naive_tasks(params))};
}

std::vector<KernelLaunch> naive_backward(const AttentionParams& params) {
  std::vector<KernelLaunch> launches;
  const auto add = [&](const char* entry, i64 num_tasks) {
    launches.push_back(naive_launch("backward_naive", entry, params.q.dtype, num_tasks));
  };
  if (params.dq.present()) add("backward_naive_dq", backward_naive_dq_tasks(params));
  if (dkdv_chunks(params) > 0) add("backward_naive_dkdv", backward_naive_dkdv_tasks(params));
  if (params.dbias.present()) add("backward_naive_dbias", backward_naive_dbias_tasks(params));
  if (params.dsinks.present()) add("backward_naive_dsinks", params.heads_q);
  return launches;
}

std::vector<KernelLaunch> simt_forward(const AttentionParams& params, std::size_t shared_bytes) {
  const FmaConfig config =
      config_of(params.q.dtype, params.dim_qk, params.dim_v, false, shared_bytes);
  return {{simt_spec("forward_simt", "forward_simt", config), num_q_tiles(params, config.rows)}};
}

std::vector<KernelLaunch> simt_backward(const AttentionParams& params, std::size_t shared_bytes,
                                        bool adds_dq) {
  const auto chosen = [&](KernelSpec spec) { return adds_dq ? adding_dq(std::move(spec)) : spec; };
  const FmaConfig config =
      config_of(params.q.dtype, params.dim_qk, params.dim_v, true, shared_bytes);
  std::vector<KernelLaunch> launches;
  const bool needs_pairs =
      params.dq.present() || params.dk.present() || params.dv.present() || params.dbias.present();
  if (needs_pairs) {
    launches.push_back(naive_launch("backward_simt_rows", "backward_simt_rows", config.dtype,
                                    params.batch_extent() * params.heads_q * params.q_rows));
    launches.back().spec = chosen(launches.back().spec);
  }
  if (params.dq.present() && !adds_dq) {
    launches.push_back({simt_spec("backward_simt_dq", "backward_simt_dq", config),
                        num_q_tiles(params, config.rows)});
  }
  if (params.dk.present() || params.dv.present()) {
    launches.push_back({chosen(simt_spec("backward_simt_dkdv", "backward_simt_dkdv", config)),
                        num_kv_tiles(params, config.rows)});
  }
  if (params.dbias.present()) {
    launches.push_back({simt_spec("backward_simt_dbias", "backward_simt_dbias", config),
                        dbias_tiles(params, config.rows, config.columns)});
  }
  if (params.dsinks.present()) launches.push_back({dsinks_spec(config.dtype), params.heads_q});
  return launches;
}

std::vector<KernelLaunch> naive_launches(const Problem& problem, const Gpu&) {
  const AttentionParams params = attention_params(problem);
  return problem.operation == Operation::kForward ? naive_forward(params) : naive_backward(params);
}

std::vector<KernelLaunch> simt_launches(const Problem& problem, const Gpu& gpu) {
  const AttentionParams params = attention_params(problem);
  return problem.operation == Operation::kForward
             ? simt_forward(params, gpu.shared_bytes_per_block)
             : simt_backward(params, gpu.shared_bytes_per_block, simt_adds_dq(problem));
}

void fma_run(const Call& call) {
  AttentionParams params = attention_params(call.problem, call.faults);
  if (call.workspace != nullptr) set_row_terms(params, reinterpret_cast<u8*>(call.workspace));
  for (std::size_t i = 0; i < call.kernels.size(); ++i) call.launch(i, params);
}

std::vector<std::vector<KernelSpec>> naive_specs() {
  const auto of_all_dtypes = [](const char* file, const char* entry) {
    std::vector<KernelSpec> specs;
    for (const DType dtype : kFloatTypes) specs.push_back(naive_spec(file, entry, dtype));
    return specs;
  };
  return {of_all_dtypes("forward_naive", "forward_naive"),
          of_all_dtypes("backward_naive", "backward_naive_dq"),
          of_all_dtypes("backward_naive", "backward_naive_dkdv"),
          of_all_dtypes("backward_naive", "backward_naive_dbias"),
          of_all_dtypes("backward_naive", "backward_naive_dsinks")};
}

std::vector<std::vector<KernelSpec>> simt_specs(std::size_t shared_bytes) {
  constexpr i64 kDims[][2] = {{64, 64}, {128, 128}, {256, 256}, {192, 128}, {576, 512}};
  std::vector<std::vector<KernelSpec>> entries;
  for (const auto& [dim_qk, dim_v] : kDims) {
    std::vector<KernelSpec> forward, dq, dkdv, dbias;
    for (const DType dtype : kFloatTypes) {
      const auto front = simt_config(dtype, dim_qk, dim_v, false, shared_bytes);
      const auto back = simt_config(dtype, dim_qk, dim_v, true, shared_bytes);
      if (front) forward.push_back(simt_spec("forward_simt", "forward_simt", *front));
      if (!back) continue;  // more than the shared memory even in the narrowest tiles
      dq.push_back(simt_spec("backward_simt_dq", "backward_simt_dq", *back));
      dkdv.push_back(simt_spec("backward_simt_dkdv", "backward_simt_dkdv", *back));
      if (size_bytes(dtype) >= 4) dkdv.push_back(adding_dq(dkdv.back()));
      dbias.push_back(simt_spec("backward_simt_dbias", "backward_simt_dbias", *back));
    }
    for (const auto& specs : {forward, dq, dkdv, dbias}) {
      if (!specs.empty()) entries.push_back(specs);
    }
  }
  std::vector<KernelSpec> rows, dsinks;
  for (const DType dtype : kFloatTypes) {
    rows.push_back(naive_spec("backward_simt_rows", "backward_simt_rows", dtype));
    if (size_bytes(dtype) >= 4) rows.push_back(adding_dq(rows.back()));
    dsinks.push_back(dsinks_spec(dtype));
  }
  entries.insert(entries.end(), {rows, dsinks});
  return entries;
}

}  // namespace fulmen::cuda
