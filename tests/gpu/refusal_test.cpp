// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What GPU calls of the C ABI refuse, and what they say of faults of driver, compiler and device.
#include <unistd.h>

#include "device_call.h"
#include "kernels/params.h"

namespace fulmen::gpu {
namespace {

TEST(Refusal, AHostPointerInACallOnTheGpu) {
  DeviceCall call;
  std::vector<float> host(2 * 4 * 96 * 64);
  call.tensors.k.data = host.data();
  const int before = num_launches();
  expect_refused(call.forward(), FULMEN_ERROR_ARGUMENT,
                 {"k is in ordinary host memory", "device 0", "backend='cpu'"});
  call.tensors.q.data = host.data();
  call.problem.backend = FULMEN_BACKEND_CUDA;
  expect_refused(call.forward(), FULMEN_ERROR_ARGUMENT, {"q is in ordinary host memory"});
  EXPECT_EQ(num_launches(), before);
}

TEST(Refusal, ADevicePointerInACallOnTheCpu) {
  DeviceCall call;
  call.problem.backend = FULMEN_BACKEND_CPU;
  expect_refused(call.forward(), FULMEN_ERROR_ARGUMENT,
                 {"q is in the memory of device 0", "runs on the CPU", "backend='cuda'"});
  call.problem.backend = FULMEN_BACKEND_AUTO;
  call.problem.implementation = FULMEN_SCALAR;
  expect_refused(call.forward(), FULMEN_ERROR_ARGUMENT, {"q is in the memory of device 0"});
}

TEST(Refusal, PlansForTheCpuDoNotRunOnDeviceArrays) {
  DeviceCall call;
  call.problem.backend = FULMEN_BACKEND_CPU;
  const fulmen_tensors arrays = call.tensors;
  for (const Member member : {&fulmen_tensors::q, &fulmen_tensors::k, &fulmen_tensors::v,
                              &fulmen_tensors::o, &fulmen_tensors::lse, &fulmen_tensors::stats}) {
    (call.tensors.*member).data = nullptr;
  }
  fulmen_plan* const plan = call.plan();
  ASSERT_NE(plan, nullptr) << fulmen_last_error();
  std::vector<char> workspace(fulmen_plan_workspace_bytes(plan));
  expect_refused(fulmen_forward(plan, &arrays, workspace.data(), workspace.size(), nullptr),
                 FULMEN_ERROR_UNSUPPORTED, {"q is in device memory", "copy it to the host"});
  fulmen_plan_destroy(plan);
}

TEST(Refusal, ArraysOfTwoDevices) {
  DeviceCall call(1);
  call.add(&fulmen_tensors::bias, FULMEN_FLOAT32, {96, 96}, 0);
  expect_refused(call.forward(), FULMEN_ERROR_ARGUMENT,
                 {"bias is on device 0", "runs on device 1", "one device"});
}

TEST(Refusal, DevicesThatDoNotExist) {
  DeviceCall call;
  call.problem.device = 7;
  expect_refused(call.forward(), FULMEN_ERROR_DEVICE, {"no device 7", "sees 2"});
  call.problem.device = -2;
  expect_refused(call.forward(), FULMEN_ERROR_ARGUMENT, {"device is -2", "-1"});
  call.problem.device = 0;
  call.problem.device_name = "h100";
  expect_refused(call.forward(), FULMEN_ERROR_ARGUMENT, {"device is 0 and device_name h100"});
}

TEST(Refusal, OptionsThatContradictEachOther) {
  DeviceCall call;
  call.problem.backend = FULMEN_BACKEND_CUDA;
  call.problem.implementation = FULMEN_TILED;
  expect_refused(call.forward(), FULMEN_ERROR_ARGUMENT,
                 {"implementation tiled computes on cpu", "backend is cuda"});
  call.problem.backend = FULMEN_BACKEND_CPU;
  call.problem.implementation = FULMEN_NAIVE;
  expect_refused(
      fulmen_explain(&call.problem, &call.tensors, FULMEN_OPERATION_FORWARD, nullptr, 0, nullptr),
      FULMEN_ERROR_ARGUMENT, {"q is in the memory of device 0"});
  DeviceCall host;
  host.tensors.q.data = host.tensors.k.data = host.tensors.v.data = host.tensors.o.data = nullptr;
  host.tensors.lse.data = host.tensors.stats.data = nullptr;
  host.problem.backend = FULMEN_BACKEND_CPU;
  host.problem.device_name = "h100";
  EXPECT_EQ(host.plan(), nullptr);
  expect_refused(FULMEN_ERROR_ARGUMENT, FULMEN_ERROR_ARGUMENT,
                 {"device_name names a GPU", "for the CPU"});
}

TEST(Refusal, MergeOfArraysInTwoPlaces) {
  DeviceCall call;
  fulmen_merge_part part;
  fulmen_merge_part_init(&part);
  part.o = call.tensors.o;
  part.lse = call.tensors.lse;
  std::vector<float> host(2 * 4 * 96 * 64);
  const int64_t shape[4] = {2, 4, 96, 64};
  fulmen_tensor o;
  fulmen_tensor_init(&o, host.data(), FULMEN_FLOAT32, 4, shape);
  expect_refused(fulmen_merge(&part, 1, nullptr, &o, nullptr, nullptr), FULMEN_ERROR_UNSUPPORTED,
                 {"fulmen_merge", "the o of a part", "copy it"});
  part.o = o;
  expect_refused(fulmen_merge(&part, 1, nullptr, &call.tensors.o, nullptr, nullptr),
                 FULMEN_ERROR_ARGUMENT, {"the o of a part is in ordinary host memory"});
  DeviceCall there(1);
  part.o = there.tensors.o;
  expect_refused(fulmen_merge(&part, 1, nullptr, &call.tensors.o, nullptr, nullptr),
                 FULMEN_ERROR_ARGUMENT, {"the o of a part", "device 1", "device 0"});
}

TEST(Refusal, MoreMergedPartsThanAKernelTakes) {
  DeviceCall call;
  fulmen_merge_part part;
  fulmen_merge_part_init(&part);
  part.o = call.tensors.q;
  part.lse = call.tensors.lse;
  const std::vector<fulmen_merge_part> parts(33, part);
  expect_refused(
      fulmen_merge(parts.data(), parts.size(), nullptr, &call.tensors.o, nullptr, nullptr),
      FULMEN_ERROR_UNSUPPORTED, {"num_parts is 33", "at most 32", "in groups"});
}

TEST(Refusal, DenseMaskOfDeviceArrays) {
  DeviceCall call;
  fulmen_tensor visible;
  std::vector<char> host(2 * 4 * 96 * 96);
  const int64_t shape[4] = {2, 4, 96, 96};
  fulmen_tensor_init(&visible, host.data(), FULMEN_BOOL, 4, shape);
  // Of q only extents are read.
  EXPECT_EQ(fulmen_dense_mask(&call.problem, &call.tensors, &visible), FULMEN_OK)
      << fulmen_last_error();
  EXPECT_EQ(host[0], 1);
  call.add(&fulmen_tensors::mask, FULMEN_BOOL, {2, 4, 96, 96});
  expect_refused(fulmen_dense_mask(&call.problem, &call.tensors, &visible),
                 FULMEN_ERROR_UNSUPPORTED,
                 {"fulmen_dense_mask", "mask is in device memory", "copy it to the host"});
}

TEST(Fault, OutOfMemoryInTheSimpleCall) {
  DeviceCall call;
  const ScopedVariable full("FAKE_CUDA_cuLaunchKernelEx", "2");
  expect_refused(call.forward(), FULMEN_ERROR_OUT_OF_MEMORY, {"CUDA_ERROR_OUT_OF_MEMORY", "free"});
}

TEST(Fault, AStreamOfAnotherDevice) {
  DeviceCall call;
  const ScopedVariable invalid("FAKE_CUDA_cuLaunchKernelEx", "400");
  expect_refused(call.forward(), FULMEN_ERROR_ARGUMENT,
                 {"launch forward_simt", "stream must belong to the device"});
}

TEST(Fault, AnEarlierKernelFailed) {
  DeviceCall call;
  const ScopedVariable broken("FAKE_CUDA_cuLaunchKernelEx", "700");
  expect_refused(call.forward(), FULMEN_ERROR_DEVICE, {"earlier kernel", "restarted"});
}

TEST(Fault, AKernelThatDoesNotCompile) {
  DeviceCall call(0, FULMEN_FLOAT64);
  call.tensors.lse.dtype = call.tensors.stats.dtype = FULMEN_FLOAT64;
  const ScopedVariable fail("FAKE_NVRTC_FAIL", "1");
  expect_refused(call.forward(), FULMEN_ERROR_COMPILE,
                 {"forward_simt_float64", "sm_90a", "error: planted"});
}

TEST(Fault, ForkedProcessesAreTold) {
  DeviceCall call;
  ASSERT_EQ(call.forward(), FULMEN_OK);
  fulmen_plan* const plan = call.plan();
  EXPECT_TRUE(holds_in_child([&] {
    const bool call_refused =
        call.forward() == FULMEN_ERROR_DEVICE && holds(fulmen_last_error(), "'spawn'");
    const bool run_refused =
        fulmen_forward(plan, &call.tensors, nullptr, 0, nullptr) == FULMEN_ERROR_DEVICE &&
        holds(fulmen_last_error(), "'spawn'");
    return call_refused && run_refused;
  }));
  fulmen_plan_destroy(plan);
}

TEST(Fault, TheBytesOfADeviceAreReadAndCleared) {
  DeviceCall call(1);
  std::vector<std::string> logged;
  fulmen_set_log(
      [](fulmen_log_level level, const char* message, void* user) {
        if (level == FULMEN_LOG_WARNING) {
          static_cast<std::vector<std::string>*>(user)->push_back(message);
        }
      },
      &logged);
  device(1).faults()->met[3] = device(1).faults()->met[4] = 1;
  EXPECT_EQ(call.forward(), FULMEN_OK);
  EXPECT_EQ(call.forward(), FULMEN_OK);
  fulmen_set_log(nullptr, nullptr);
  ASSERT_EQ(logged.size(), 1u);
  EXPECT_TRUE(holds(logged[0], "fulmen_device_faults")) << logged[0];
  uint32_t faults = 0;
  EXPECT_EQ(fulmen_device_faults(1, &faults), FULMEN_OK);
  EXPECT_EQ(faults, unsigned{FULMEN_FAULT_KV_LENGTHS | FULMEN_FAULT_RNG});
  EXPECT_EQ(fulmen_device_faults(1, &faults), FULMEN_OK);
  EXPECT_EQ(faults, 0u);
  expect_refused(fulmen_device_faults(2, &faults), FULMEN_ERROR_DEVICE, {"no device 2"});
  expect_refused(fulmen_device_faults(0, nullptr), FULMEN_ERROR_ARGUMENT, {"faults is null"});
}

}  // namespace
}  // namespace fulmen::gpu
