// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Tiles of the simt kernels.

#include "gpu/simt/plan.h"

#include <iterator>

#include "core/error.h"

namespace fulmen {
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

std::optional<FmaConfig> config_of(const Problem& problem, const Gpu& gpu) {
  return simt_config(problem.dtype, problem.dim_qk, problem.dim_v,
                     problem.operation == Operation::kBackward, gpu.shared_bytes_per_block);
}

}  // namespace

std::optional<FmaConfig> simt_config(DType dtype, i64 dim_qk, i64 dim_v, bool backward,
                                     size_t shared_bytes) {
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
         !problem.deterministic && !problem.batch_invariant &&
         problem.pointer_alignment >= size_bytes(problem.dtype);
}

size_t simt_workspace_bytes(DType dtype, i64 rows) {
  return static_cast<size_t>(rows * 4 * (dtype == DType::kFloat64 ? 8 : 4));
}

std::string simt_refusal(const Problem& problem, const Gpu& gpu) {
  if (config_of(problem, gpu)) return "";
  return sentence("its narrowest tiles need more than the ", gpu.shared_bytes_per_block,
                  " bytes of shared memory of a block for head dimensions ", problem.dim_qk,
                  " and ", problem.dim_v, " of ", name(problem.dtype));
}

GpuNeeds simt_needs(const Problem& problem, const Gpu& gpu) {
  const std::optional<FmaConfig> config = config_of(problem, gpu);
  if (!config) throw Error(Status::kInternal, "simt was planned for a problem that it refuses");
  const i64 rows = (problem.packed ? 1 : problem.num_sequences) * problem.heads_q * problem.q_rows;
  const bool backward = problem.operation == Operation::kBackward;
  return {.tile = {config->rows, config->columns},
          .workspace_bytes = backward ? simt_workspace_bytes(config->dtype, rows) : 0,
          .alignment_bytes = simt_adds_dq(problem) ? size_bytes(problem.dtype) : 1};
}

}  // namespace fulmen
