// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A request as a call of the C ABI: what a program that links libfulmen would have written.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "core/problem.h"
#include "fulmen/fulmen.h"

namespace fulmen::test {

// By Array.
inline constexpr fulmen_tensor fulmen_tensors::* kMembers[] = {
#define FULMEN_ARRAY(array, member, ...) &fulmen_tensors::member,
#include "fulmen/arrays.def"
};

struct PublicCall {
  fulmen_problem problem;
  fulmen_tensors tensors;
  fulmen_operation operation;

  PublicCall(const Request& request, fulmen_implementation implementation)
      : operation(static_cast<fulmen_operation>(request.operation)) {
    const Options& o = request.options;
    fulmen_problem_init(&problem);
    fulmen_tensors_init(&tensors);
#define FULMEN_OPTION(kind, type, name, ...) problem.name = static_cast<type>(o.name);
#include "fulmen/options.def"
    problem.implementation = implementation;
    for (std::size_t index = 0; index < kNumArrays; ++index) {
      const Tensor& tensor = request.arrays.tensors[index];
      if (!tensor.present()) continue;
      tensors.*kMembers[index] = view(tensor);
    }
  }

  static fulmen_tensor view(const Tensor& tensor) {
    int64_t shape[kMaxRank] = {};
    std::copy(tensor.shape, tensor.shape + tensor.rank, shape);
    fulmen_tensor made;
    fulmen_tensor_init(&made, tensor.data, static_cast<fulmen_dtype>(tensor.dtype), tensor.rank,
                       shape);
    std::copy(tensor.strides, tensor.strides + tensor.rank, made.strides);
    return made;
  }

  fulmen_status run(void* stream = nullptr) const {
    return operation == FULMEN_OPERATION_FORWARD
               ? fulmen_attention(&problem, &tensors, stream)
               : fulmen_attention_backward(&problem, &tensors, stream);
  }

  fulmen_status run(const fulmen_plan* plan, void* workspace) const {
    const std::size_t bytes = fulmen_plan_workspace_bytes(plan);
    return operation == FULMEN_OPERATION_FORWARD
               ? fulmen_forward(plan, &tensors, workspace, bytes, nullptr)
               : fulmen_backward(plan, &tensors, workspace, bytes, nullptr);
  }
};

}  // namespace fulmen::test
