// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// V of e4m3 for the forward kernel of Hopper: the kernel that transposes it, what it takes of the
// workspace, and how the copy engine reads it.

#include "gpu/forward_sm90/plan.h"
#include "gpu/params.h"

namespace fulmen::gpu {

void add_transposed_values(ForwardSm90Plan& plan, const Problem& problem) {
  plan.value_blocks = static_cast<i64>(num_key_ranges(problem, plan.config));
  const i64 blocks = plan.value_blocks * problem.heads_kv;
  plan.workspace_bytes =
      ForwardSm90Plan::kKeyRangesOffset + static_cast<size_t>(blocks * plan.config.v_bytes());
  KernelLaunch launch{sm90_values_spec(plan.config), blocks};
  launch.overlap_previous = true;
  plan.launches.push_back(std::move(launch));
}

TensorBox value_box(const ForwardSm90Plan& plan, u8* values) {
  const u64 keys = static_cast<u64>(plan.config.row_bytes(plan.config.kv_rows));
  const u64 dims = static_cast<u64>(plan.config.d_v);
  const u64 heads = static_cast<u64>(plan.params.heads_kv);
  const u64 blocks = static_cast<u64>(plan.value_blocks);
  TensorBox box{values,
                {keys, dims, heads, blocks},
                {keys, keys * dims, keys * dims * heads},
                static_cast<u32>(dims)};
  box.box_dims = static_cast<u32>(keys);
  box.dtype = plan.config.dtype;
  return box;
}

}  // namespace fulmen::gpu
