// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Specs and launches of simt.

#include "gpu/simt/run.h"

#include "core/error.h"
#include "gpu/fma.h"
#include "gpu/jit/config_text.h"
#include "gpu/params.h"
#include "kernels/common/tile_tasks.cuh"

namespace fulmen::gpu {
namespace {

// The config of a pass that plans have found to fit.
FmaConfig config_of(DType dtype, i64 dim_qk, i64 dim_v, bool backward, std::size_t shared_bytes) {
  const std::optional<FmaConfig> config = simt_config(dtype, dim_qk, dim_v, backward, shared_bytes);
  if (config) return *config;
  throw Error(Status::kUnsupported,
              sentence("simt needs more than the device's ", shared_bytes,
                       " bytes of shared memory for head dimensions ", dim_qk, " and ", dim_v,
                       " of ", name(dtype), "; implementation naive takes them"));
}

// A kernel over tiles. entry: "forward_simt", which is defined in the file of that name.
KernelSpec tiled_spec(const std::string& entry, const FmaConfig& config) {
  const bool backward = entry != "forward_simt";
  KernelSpec spec = fma_spec("simt/" + entry, entry, config.dtype);
  spec.name = sentence(entry, "_", name(config.dtype), "_", config.rows, "x", config.columns, "_d",
                       config.max_dim_qk, "_", config.max_dim_v);
  spec.num_threads = config.num_threads;
  spec.config = {FULMEN_FIELD(dtype),   FULMEN_FIELD(num_threads), FULMEN_FIELD(rows),
                 FULMEN_FIELD(columns), FULMEN_FIELD(max_dim_qk),  FULMEN_FIELD(max_dim_v)};
  spec.shared_bytes = static_cast<std::size_t>(backward ? config.backward_shared_bytes()
                                                        : config.forward_shared_bytes());
  spec.shared_bytes_text =
      backward ? "kConfig.backward_shared_bytes()" : "kConfig.forward_shared_bytes()";
  return spec;
}

KernelSpec rows_spec(DType dtype) {
  return fma_spec("simt/backward_simt_rows", "backward_simt_rows", dtype);
}

KernelSpec dsinks_spec(DType dtype) {
  KernelSpec spec = fma_spec("simt/backward_simt_dsinks", "backward_simt_dsinks", dtype);
  spec.num_threads = 1024;
  spec.config[1].value = text(spec.num_threads);
  spec.shared_bytes =
      static_cast<std::size_t>(spec.num_threads) * (dtype == DType::kFloat64 ? 8 : 4);
  return spec;
}

// The same of a kernel that makes dQ by atomics.
KernelSpec adding_dq(KernelSpec spec) {
  spec.name += "_adds_dq";
  spec.config.push_back({"adds_dq", "true"});
  return spec;
}

}  // namespace

std::vector<KernelLaunch> simt_forward(const AttentionParams& params, std::size_t shared_bytes) {
  const FmaConfig config =
      config_of(params.q.dtype, params.dim_qk, params.dim_v, false, shared_bytes);
  return {{tiled_spec("forward_simt", config), num_q_tiles(params, config.rows)}};
}

std::vector<KernelLaunch> simt_backward(const AttentionParams& params, std::size_t shared_bytes,
                                        bool adds_dq) {
  const FmaConfig config =
      config_of(params.q.dtype, params.dim_qk, params.dim_v, true, shared_bytes);
  const auto chosen = [&](KernelSpec spec) { return adds_dq ? adding_dq(std::move(spec)) : spec; };
  const bool makes_dkdv = params.dk.present() || params.dv.present();
  std::vector<KernelLaunch> launches;
  if (params.dq.present() || makes_dkdv || params.dbias.present()) {
    launches.push_back(fma_launch(chosen(rows_spec(config.dtype)),
                                  params.batch_extent() * params.heads_q * params.q_rows));
  }
  if (params.dq.present() && !adds_dq) {
    launches.push_back({tiled_spec("backward_simt_dq", config), num_q_tiles(params, config.rows)});
  }
  if (makes_dkdv) {
    launches.push_back(
        {chosen(tiled_spec("backward_simt_dkdv", config)), num_kv_tiles(params, config.rows)});
  }
  if (params.dbias.present()) {
    launches.push_back({tiled_spec("backward_simt_dbias", config),
                        dbias_tiles(params, config.rows, config.columns)});
  }
  if (params.dsinks.present()) launches.push_back({dsinks_spec(config.dtype), params.heads_q});
  return launches;
}

std::vector<KernelLaunch> simt_launches(const Problem& problem, const Gpu& gpu) {
  const AttentionParams params = attention_params(problem);
  return problem.operation == Operation::kForward
             ? simt_forward(params, gpu.shared_bytes_per_block)
             : simt_backward(params, gpu.shared_bytes_per_block, simt_adds_dq(problem));
}

std::vector<std::vector<KernelSpec>> simt_specs(std::size_t shared_bytes) {
  constexpr i64 kDims[][2] = {{64, 64}, {128, 128}, {256, 256}, {192, 128}, {576, 512}};
  std::vector<std::vector<KernelSpec>> entries;
  for (const auto& [dim_qk, dim_v] : kDims) {
    std::vector<KernelSpec> forward, dq, dkdv, dbias;
    for (const DType dtype : kFloatTypes) {
      const auto front = simt_config(dtype, dim_qk, dim_v, false, shared_bytes);
      const auto back = simt_config(dtype, dim_qk, dim_v, true, shared_bytes);
      if (front) forward.push_back(tiled_spec("forward_simt", *front));
      if (!back) continue;  // more than the shared memory even in the narrowest tiles
      dq.push_back(tiled_spec("backward_simt_dq", *back));
      dkdv.push_back(tiled_spec("backward_simt_dkdv", *back));
      if (size_bytes(dtype) >= 4) dkdv.push_back(adding_dq(dkdv.back()));
      dbias.push_back(tiled_spec("backward_simt_dbias", *back));
    }
    for (const auto& specs : {forward, dq, dkdv, dbias}) {
      if (!specs.empty()) entries.push_back(specs);
    }
  }
  std::vector<KernelSpec> rows, dsinks;
  for (const DType dtype : kFloatTypes) {
    rows.push_back(rows_spec(dtype));
    if (size_bytes(dtype) >= 4) rows.push_back(adding_dq(rows.back()));
    dsinks.push_back(dsinks_spec(dtype));
  }
  entries.insert(entries.end(), {rows, dsinks});
  return entries;
}

}  // namespace fulmen::gpu
