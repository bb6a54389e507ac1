// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Planned runs on arrays in device memory, against the fake driver: a run allocates, compiles and
// waits for nothing.
#include <algorithm>

#include "device_call.h"

namespace fulmen::gpu {
namespace {

// Every function that a run may call, and how often it was called.
std::vector<int> counts() {
  std::vector<int> numbers;
  for (const char* function :
       {"cuMemAlloc_v2", "cuMemFree_v2", "cuMemAllocFromPoolAsync", "cuMemFreeAsync",
        "cuMemHostAlloc", "cuCtxSynchronize", "cuModuleLoadData", "cuModuleGetFunction",
        "cuFuncSetAttribute", "cuInit", "cuDevicePrimaryCtxRetain"}) {
    numbers.push_back(num_calls(function));
  }
  numbers.push_back(num_compilations());
  return numbers;
}

TEST(PlannedRun, AllocatesCompilesAndWaitsForNothing) {
  for (const fulmen_implementation implementation : {FULMEN_NAIVE, FULMEN_SIMT, FULMEN_SM90}) {
    const fulmen_dtype dtype = implementation == FULMEN_SM90 ? FULMEN_BFLOAT16 : FULMEN_FLOAT32;
    DeviceCall call(0, dtype);
    call.add_backward();
    call.problem.implementation = implementation;
    fulmen_plan* const forward = call.plan();
    call.problem.implementation = FULMEN_IMPLEMENTATION_AUTO;
    fulmen_plan* const backward = call.plan(FULMEN_OPERATION_BACKWARD);
    ASSERT_NE(forward, nullptr) << fulmen_last_error();
    ASSERT_NE(backward, nullptr) << fulmen_last_error();
    DeviceCall other(0, dtype);  // arrays of its own
    other.add_backward();
    const std::size_t bytes =
        std::max(fulmen_plan_workspace_bytes(forward), fulmen_plan_workspace_bytes(backward));
    void* const workspace = other.allocate(bytes + 1, 0);
    const std::vector<int> before = counts();
    const int launches = num_launches();
    EXPECT_EQ(fulmen_forward(forward, &other.tensors, workspace,
                             fulmen_plan_workspace_bytes(forward), nullptr),
              FULMEN_OK)
        << fulmen_last_error();
    EXPECT_EQ(fulmen_backward(backward, &other.tensors, workspace,
                              fulmen_plan_workspace_bytes(backward), nullptr),
              FULMEN_OK)
        << fulmen_last_error();
    EXPECT_GE(num_launches(), launches + 2);
    EXPECT_EQ(counts(), before);
    fulmen_plan_destroy(forward);
    fulmen_plan_destroy(backward);
  }
}

TEST(PlannedRun, PlansNeedNoPointersWhereTheDeviceIsNamed) {
  DeviceCall call(1);
  const fulmen_tensors arrays = call.tensors;
  for (const Member member :
       {&fulmen_tensors::q, &fulmen_tensors::k, &fulmen_tensors::v, &fulmen_tensors::o}) {
    (call.tensors.*member).data = nullptr;
  }
  call.problem.device = 1;
  fulmen_plan* const plan = call.plan();
  ASSERT_NE(plan, nullptr) << fulmen_last_error();
  EXPECT_EQ(fulmen_forward(plan, &arrays, nullptr, fulmen_plan_workspace_bytes(plan), nullptr),
            FULMEN_OK)
      << fulmen_last_error();
  EXPECT_EQ(last_launch().device, 1);
  const DeviceCall elsewhere(0);
  expect_refused(fulmen_forward(plan, &elsewhere.tensors, nullptr, 0, nullptr),
                 FULMEN_ERROR_ARGUMENT, {"q is on device 0", "runs on device 1"});
  fulmen_plan_destroy(plan);
}

}  // namespace
}  // namespace fulmen::gpu
