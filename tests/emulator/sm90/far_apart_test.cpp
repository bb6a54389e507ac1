// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The Hopper backward keeps gradients of bfloat16 that are subnormal: 64 dims, and 192, where two
// warpgroups divide the products and one hands its weights to the other.
#include "emulator/far_apart.h"

#include "emulator/launch.h"
#include "gpu/backward_sm90/plan.h"
#include "kernels/backward_sm90/backward_sm90.cuh"
#include "kernels/backward_sm90/preprocess.cuh"
#include "tensor_map.h"

namespace fulmen::test {
namespace {

constexpr BackwardSm90Config kNarrow{
    .dims = 64, .q_rows = 128, .dq = false, .score = {.stats = true}};
constexpr BackwardSm90Config kWide{
    .dims = 192, .dq = false, .register_dims = 128, .score = {.stats = true}};

// dK and dV; dQ of so few rows has a kernel of its own.
template <BackwardSm90Config kConfig>
void run(const Problem& problem) {
  const gpu::PlanOrRefusal made = gpu::plan_backward_sm90(problem, gpu_named("h100"));
  ASSERT_NE(made.plan, nullptr) << made.refusal;
  const auto& plan = static_cast<const gpu::BackwardSm90Plan&>(*made.plan);
  ASSERT_EQ(plan.configs.main->dims, kConfig.dims);
  ASSERT_EQ(plan.configs.main->kv_rows(), kConfig.kv_rows());
  std::vector<char> memory(static_cast<size_t>(plan.workspace_bytes) + 256, '\xff');
  char* const workspace = memory.data() + (256 - reinterpret_cast<u64>(memory.data()) % 256);
  constexpr BackwardPreprocessConfig kPrepare{.dims = kConfig.dims > 128 ? 256 : kConfig.dims,
                                              .score = {.stats = true}};
  const BackwardPreprocessParams prepare = plan.preprocess_of(problem, workspace, nullptr);
  emulator::launch({2, kPrepare.kThreads, 0, 1, false, "backward_preprocess_sm90"},
                   [&] { backward_preprocess_sm90<kPrepare>(prepare); });
  BackwardParams params = plan.main_of(problem, workspace);
  const Arrays& arrays = problem.arrays;
  params.maps = {map_of(arrays[Array::kQ], kConfig.q_rows),
                 map_of(arrays[Array::kK], kConfig.kv_rows()),
                 map_of(arrays[Array::kV], kConfig.kv_rows()),
                 map_of(arrays[Array::kDOut], kConfig.q_rows),
                 map_of(arrays[Array::kDK], 64),
                 map_of(arrays[Array::kDV], 64)};
  emulator::launch({1, kConfig.threads(), kConfig.shared_bytes(), 1, false, "backward_sm90"},
                   [&] { backward_sm90<kConfig>(params); });
}

TEST(Sm90BackwardFarApart, SubnormalGradientsAreKept) {
  expect_subnormal_gradients(64, run<kNarrow>);
}
TEST(Sm90BackwardFarApart, SubnormalGradientsOfWideHeadsAreKept) {
  expect_subnormal_gradients(192, run<kWide>);
}

}  // namespace
}  // namespace fulmen::test
