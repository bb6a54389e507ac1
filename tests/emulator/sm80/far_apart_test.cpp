// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The backward kernels of sm80 keep gradients of bfloat16 that are subnormal.
#include "emulator/far_apart.h"

#include "emulator/sm80/launch_backward.h"
#include "gpu/params.h"

namespace fulmen::test {
namespace {

constexpr BackwardSm80Config one_role() {
  BackwardSm80Config config;
  config.d_qk = config.d_v = 64;
  config.warps = 2;
  config.q_rows = config.kv_rows = 32;
  config.s_rows = config.s_columns = config.dkv_rows = config.dq_rows = config.dq_dims = 16;
  return config;
}

constexpr BackwardSm80Config keys_as_rows() {
  BackwardSm80Config config = one_role();
  config.warps = 4;
  config.split_roles = config.swap_ab = true;
  config.pair_stages = 2;
  return config;
}

template <BackwardSm80Config kConfig>
void run(const Problem& problem) {
  launch<kConfig>(gpu::attention_params(problem), 1);
}

TEST(BackwardSm80FarApart, SubnormalGradientsAreKept) {
  expect_subnormal_gradients(64, run<one_role()>);
  expect_subnormal_gradients(64, run<keys_as_rows()>);
}

}  // namespace
}  // namespace fulmen::test
