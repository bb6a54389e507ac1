// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A run of forward_sm90: pointers, tensor maps, launches.

#include "gpu/call.h"
#include "gpu/forward_sm90/plan.h"
#include "gpu/params.h"

namespace fulmen::gpu {

void ForwardSm90Plan::run(const Call& call) const {
  if (launches.back().num_blocks == 0) return;
  const Arrays& arrays = call.problem.arrays;
  ForwardArguments arguments{{}, params};
  const auto map = [&](Array array, i32 box_rows, bool swizzle, TensorMap& map) {
    TensorBox box = tensor_box(arrays[array], box_rows);
    box.swizzle = swizzle;
    if (!swizzle) box.box_dims = 8;
    encode(call.driver, box, map);
  };
  map(Array::kQ, config.tile_rows(), config.swizzle, arguments.maps.q);
  map(Array::kK, config.kv_rows, config.swizzle, arguments.maps.k);
  map(Array::kV, config.kv_rows, config.swizzle, arguments.maps.v);
  if (config.stage_output) {
    TensorBox box = tensor_box(arrays[Array::kO], 64);
    box.swizzle = config.swizzle;
    encode(call.driver, box, arguments.maps.o);
  }
  bind_params(arguments.params.attention, call.problem, call.faults);
  arguments.params.kept_scale = static_cast<float>(call.problem.dropout.kept_scale());
  if (counts_tiles) arguments.params.next_block = reinterpret_cast<u32*>(call.workspace);
  if (num_key_ranges > 0) {
    arguments.params.key_ranges = reinterpret_cast<IdRange*>(call.workspace + kKeyRangesOffset);
    call.launch(0, arguments);
  }
  call.launch(call.kernels.size() - 1, arguments);
}

}  // namespace fulmen::gpu
