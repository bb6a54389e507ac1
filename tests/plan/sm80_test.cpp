// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which problems the sm80 implementation takes, and that its tiles fit every card.
#include <gmock/gmock.h>

#include "gpu/backward_sm80/plan.h"
#include "gpu/forward_sm80/plan.h"
#include "gpu/implementations.h"

namespace fulmen {
namespace {

using gpu::backward_sm80_config;
using gpu::forward_sm80_config;
using gpu::plan_backward_sm80;
using gpu::plan_forward_sm80;
using testing::HasSubstr;

Problem problem_of(DType dtype, i64 dim_qk, i64 dim_v) {
  Problem problem;
  problem.backend = Backend::kCuda;
  problem.dtype = dtype;
  problem.num_sequences = problem.heads_q = problem.heads_kv = 1;
  problem.q_rows = problem.kv_rows = problem.max_q = problem.max_kv = 100;
  problem.dim_qk = dim_qk;
  problem.dim_v = dim_v;
  problem.score_map.scale = 1;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    problem.arrays[array].dtype = dtype;
    problem.arrays[array].strides[3] = 1;
  }
  return problem;
}

Problem float32_problem(Precision precision, i64 dim_qk, i64 dim_v) {
  Problem problem = problem_of(DType::kFloat32, dim_qk, dim_v);
  problem.precision = precision;
  return problem;
}

Implementation chosen(const Problem& problem, const Gpu& gpu) {
  for (const gpu::GpuImplementation& row : gpu::gpu_implementations()) {
    if (gpu::plan_with(row, problem, gpu).plan != nullptr) return row.implementation;
  }
  return Implementation::kAuto;
}

Problem backward_problem(Precision precision, i64 dim) {
  Problem problem = float32_problem(precision, dim, dim);
  problem.operation = Operation::kBackward;
  for (const Array array : {Array::kDOut, Array::kDQ, Array::kDK, Array::kDV}) {
    problem.arrays[array].dtype = DType::kFloat32;
  }
  return problem;
}

std::string field_of(const gpu::KernelSpec& spec, const std::string& name) {
  for (const gpu::ConfigField& field : spec.config) {
    if (field.name == name) return field.value;
  }
  return "";
}

// Kernels before and after the main one have fewer fields than it, but those that say how much
// larger P and dS are kept.
TEST(Sm80Backward, KernelsAgreeOnHowMuchLargerWeightsAre) {
  int with_dbias = 0, with_roles = 0;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const i64 dim : {64, 128, 256}) {
      for (const bool has_bias : {false, true}) {
        Problem problem = problem_of(dtype, dim, dim);
        problem.operation = Operation::kBackward;
        for (const Array array : {Array::kDOut, Array::kDQ, Array::kDK, Array::kDV}) {
          problem.arrays[array].dtype = dtype;
          problem.arrays[array].strides[3] = 1;
        }
        for (const Array array : {Array::kBias, Array::kDBias}) {
          if (has_bias)
            problem.arrays[array] = {nullptr, dtype, 4, {1, 1, 100, 100}, {0, 0, 100, 1}};
        }
        const auto made = plan_backward_sm80(problem, gpu_named("h200"));
        ASSERT_NE(made.plan, nullptr) << made.refusal;
        std::string dbias, roles;
        for (const gpu::KernelLaunch& launch : made.plan->launches) {
          if (launch.spec.function != "fulmen::backward_sm80") continue;
          dbias = field_of(launch.spec, "dbias");
          roles = field_of(launch.spec, "split_roles");
        }
        with_dbias += dbias == "true";
        with_roles += roles == "true";
        for (const gpu::KernelLaunch& launch : made.plan->launches) {
          const std::string& function = launch.spec.function;
          const bool before = function == "fulmen::backward_preprocess_sm80";
          if (!before && function != "fulmen::backward_postprocess_sm80") continue;
          EXPECT_EQ(field_of(launch.spec, "dbias"), dbias) << launch.spec.name;
          if (before && dtype == DType::kFloat16) {
            EXPECT_EQ(field_of(launch.spec, "split_roles"), roles) << launch.spec.name;
          }
        }
      }
    }
  }
  EXPECT_EQ(with_dbias, 6);
  EXPECT_GT(with_roles, 0);
}

TEST(Sm80Float32, IsComputedWherePrecisionPermits) {
  const Gpu& gpu = gpu_named("h100");
  const Problem exact = float32_problem(Precision::kFloat32, 64, 64);
  EXPECT_EQ(chosen(exact, gpu), Implementation::kSimt);
  EXPECT_THAT(plan_forward_sm80(exact, gpu).refusal,
              HasSubstr("only with precision tf32 or 3xtf32"));
  for (const Precision precision : {Precision::kTf32, Precision::k3xTf32}) {
    EXPECT_EQ(chosen(float32_problem(precision, 64, 64), gpu), Implementation::kSm80);
    EXPECT_EQ(forward_sm80_config(float32_problem(precision, 64, 64), gpu)->precision, precision);
    EXPECT_EQ(chosen(float32_problem(precision, 64, 64), gpu_named("t4")), Implementation::kSimt);
    const Problem wide = float32_problem(precision, 64, 257);
    EXPECT_EQ(chosen(wide, gpu), Implementation::kSimt);
    EXPECT_THAT(plan_forward_sm80(wide, gpu).refusal, HasSubstr("up to 256; the widest is 257"));
    const Problem backward = backward_problem(precision, 64);
    EXPECT_EQ(chosen(backward, gpu), Implementation::kSm80);
    EXPECT_EQ(backward_sm80_config(backward, gpu)->precision, precision);
  }
}

// With and without the options that take the most shared memory.
TEST(Sm80Tiles, FitEveryCard) {
  for (const Gpu& gpu : known_gpus()) {
    if (gpu.compute_capability < 80) continue;
    for (i64 dim = 1; dim <= 256; dim += dim < 16 ? 1 : 15) {
      for (const i64 dim_v : {dim, i64{256}}) {
        for (const bool options : {false, true}) {
          for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
            Problem problem = problem_of(dtype, dim, dim_v);
            problem.precision = dtype == DType::kFloat32 ? Precision::k3xTf32 : Precision::kFloat32;
            if (options) {
              problem.arrays[Array::kMask].dtype = DType::kBool;
              problem.arrays[Array::kBias].dtype = DType::kFloat32;
              problem.arrays[Array::kQIds].dtype = DType::kInt32;
            }
            ASSERT_EQ(plan_forward_sm80(problem, gpu).refusal, "")
                << gpu.name << " " << dim << " " << dim_v;
            const ForwardSm80Config config = forward_sm80_config(problem, gpu).value();
            EXPECT_STREQ(config.why_invalid(), "") << gpu.name << " " << dim << " " << dim_v;
            EXPECT_LE(static_cast<size_t>(config.shared_bytes()), gpu.shared_bytes_per_block);
            EXPECT_GE(config.d_qk, dim);
          }
        }
      }
    }
  }
}

// Rows of O up to 576 wide stay in one block, whose scores are computed once; where options need
// the registers, a warp has its rows alone.
TEST(Sm80Tiles, WideRowsBelongToTeams) {
  const Gpu& gpu = gpu_named("h100");
  for (const i64 dim : {208, 256, 320, 512, 576}) {
    Problem problem = problem_of(DType::kBFloat16, dim, dim);
    problem.max_kv = 4096;
    const ForwardSm80Config config = forward_sm80_config(problem, gpu).value();
    EXPECT_EQ(config.warps_n, dim == 512 ? 4 : 2) << dim;
    EXPECT_GE(config.d_v, dim) << dim;
    problem.score_map.softcap = 30;
    problem.dropout.threshold = 1;
    const ForwardSm80Config with_options = forward_sm80_config(problem, gpu).value();
    EXPECT_EQ(with_options.warps_n, 1) << dim;
    EXPECT_STREQ(with_options.why_invalid(), "") << dim;
  }
}

// At d 256 few keys a query are met by small blocks, two on a multiprocessor.
TEST(Sm80Tiles, ShortSequencesTakeSmallBlocks) {
  Problem problem = problem_of(DType::kBFloat16, 256, 256);
  problem.max_kv = 1024;
  EXPECT_EQ(forward_sm80_config(problem, gpu_named("h100"))->q_rows(), 128);
  problem.mask.causal = true;
  EXPECT_EQ(forward_sm80_config(problem, gpu_named("h100"))->q_rows(), 64);
  EXPECT_TRUE(forward_sm80_config(problem, gpu_named("h100"))->predicates_copies);
  EXPECT_TRUE(forward_sm80_config(problem, gpu_named("h100"))->fixed_length);
  problem.max_kv = 4096;
  problem.mask.window_left = 7;
  EXPECT_EQ(forward_sm80_config(problem, gpu_named("h100"))->q_rows(), 128);
  EXPECT_FALSE(forward_sm80_config(problem, gpu_named("h100"))->fixed_length);
}

// Nothing fills up rows that are as long as the kernel computes with.
TEST(Sm80Tiles, WholeRows) {
  const Gpu& gpu = gpu_named("h100");
  EXPECT_TRUE(forward_sm80_config(problem_of(DType::kBFloat16, 128, 64), gpu)->even_k);
  EXPECT_FALSE(forward_sm80_config(problem_of(DType::kBFloat16, 120, 64), gpu)->even_k);
  EXPECT_FALSE(forward_sm80_config(problem_of(DType::kBFloat16, 128, 72), gpu)->even_k);
}

TEST(Sm80BackwardTiles, OfFloat32FitEveryCard) {
  for (const Gpu& gpu : known_gpus()) {
    if (gpu.compute_capability < 80) continue;
    for (i64 dim = 1; dim <= 256; dim += dim < 16 ? 1 : 15) {
      for (const bool options : {false, true}) {
        Problem problem = backward_problem(Precision::k3xTf32, dim);
        if (options) problem.arrays[Array::kBias].dtype = DType::kFloat32;
        ASSERT_EQ(plan_backward_sm80(problem, gpu).refusal, "") << gpu.name << " " << dim;
        const BackwardSm80Config config = backward_sm80_config(problem, gpu).value();
        EXPECT_STREQ(config.why_invalid(), "") << gpu.name << " " << dim;
        EXPECT_LE(static_cast<size_t>(config.shared_bytes()), gpu.shared_bytes_per_block);
        EXPECT_GE(config.d_qk, dim);
      }
    }
  }
}

}  // namespace
}  // namespace fulmen
