// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A run of the Hopper backward: tensor maps and launches.

#include "gpu/backward_sm90/plan.h"
#include "gpu/call.h"
#include "gpu/params.h"

namespace fulmen::gpu {
namespace {

void map(const Call& call, Array array, i32 box_rows, TensorMap& map) {
  const Tensor& tensor = call.problem.arrays[array];
  if (tensor.present()) encode(call.driver, tensor_box(tensor, box_rows), map);
}

}  // namespace

void BackwardSm90Plan::run(const Call& call) const {
  const Problem& problem = call.problem;
  std::size_t next = 0;
  BackwardDqParams of_dq{};
  if (configs.dq) of_dq = dq_of(problem, call.workspace);
  if (layout.num_key_ranges > 0) call.launch(next++, ForwardArguments{{}, of_dq.forward});
  if (layout.num_query_ranges > 0) {
    call.launch(next++, query_ranges_of(problem, call.workspace));
  }
  call.launch(next++, preprocess_of(problem, call.workspace, call.faults));
  if (configs.main) {
    BackwardParams params = main_of(problem, call.workspace);
    map(call, Array::kQ, configs.main->q_rows, params.maps.q);
    map(call, Array::kK, configs.main->kv_rows(), params.maps.k);
    map(call, Array::kV, configs.main->kv_rows(), params.maps.v);
    map(call, Array::kDOut, configs.main->q_rows, params.maps.dout);
    map(call, Array::kDK, 64, params.maps.dk);
    map(call, Array::kDV, 64, params.maps.dv);
    call.launch(next++, params);
  }
  if (configs.dq) {
    map(call, Array::kQ, 64, of_dq.maps.q);
    map(call, Array::kK, configs.dq->kv_rows, of_dq.maps.k);
    map(call, Array::kV, configs.dq->kv_rows, of_dq.maps.v);
    map(call, Array::kDOut, 64, of_dq.maps.dout);
    call.launch(next++, of_dq);
  }
  if (configs.has_fallback) call.launch(next++, fallback_of(problem, call.workspace));
  if (next < call.kernels.size()) {
    AttentionParams params = side;
    bind_params(params, problem, call.faults);
    call.launch(next, params);
  }
}

}  // namespace fulmen::gpu
