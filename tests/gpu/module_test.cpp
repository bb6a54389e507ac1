// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Devices, modules and launches against the fake driver: what is called, on which context, and what
// is said when something fails.
#include "gpu/jit/module.h"

#include <cstring>
#include <thread>
#include <vector>

#include "gpu/driver/device.h"
#include "gpu/driver/launch.h"
#include "gpu/jit/cache.h"
#include "support.h"

namespace fulmen::gpu {
namespace {

CUcontext current_context() {
  CUcontext context = nullptr;
  driver()->cuCtxGetCurrent(&context);
  return context;
}

TEST(Device, ReadsItsFacts) {
  const Device& gpu = device(1);
  EXPECT_EQ(gpu.facts().name, "Fake GPU 1");
  EXPECT_EQ(gpu.facts().compute_capability, 90);
  EXPECT_EQ(gpu.arch(), "sm_90a");
  EXPECT_EQ(&gpu, &device(1));
}

TEST(Device, NumbersBeyondTheLastAreRefused) {
  for (const int ordinal : {-1, 2}) {
    expect_error(Status::kDevice, {"no device", "sees 2"}, [&] { device(ordinal); });
  }
}

TEST(Device, TooOldIsNamed) {
  const ScopedVariable capability("FAKE_CUDA_CAPABILITY", "70");
  expect_error(Status::kUnsupported, {"Fake GPU 0", "7.0", "7.5 (Turing)"},
               [] { Device(driver(), 0); });
}

TEST(Device, AContextThatDoesNotOpenIsAnError) {
  const ScopedVariable fail("FAKE_CUDA_cuDevicePrimaryCtxRetain", "2");
  expect_error(Status::kOutOfMemory, {"open a context on device 0", "(2,"},
               [] { Device(driver(), 0); });
}

TEST(Device, OneWithoutMemoryPoolsIsUsedWithoutThem) {
  ASSERT_NE(device(0).pool(), nullptr);  // made once, for all tests: before the variable is set
  const ScopedVariable none("FAKE_CUDA_cuMemPoolCreate", "801");
  EXPECT_EQ(Device(driver(), 0).pool(), nullptr);
  EXPECT_NE(device(0).pool(), nullptr);
  const ScopedVariable broken("FAKE_CUDA_cuMemPoolCreate", "2");
  expect_error(Status::kOutOfMemory, {"make a memory pool on device 0"},
               [] { Device(driver(), 0); });
}

TEST(CurrentContext, LeavesTheCallersContextAlone) {
  driver()->cuCtxPushCurrent_v2(device(1).context());
  {
    const CurrentContext current(device(0));
    EXPECT_EQ(current_context(), device(0).context());
    const CurrentContext again(device(0));
  }
  EXPECT_EQ(current_context(), device(1).context());
  CUcontext popped = nullptr;
  driver()->cuCtxPopCurrent_v2(&popped);
  EXPECT_EQ(current_context(), nullptr);
}

TEST(Prepare, CompilesAndLoadsOncePerDevice) {
  const int loads = num_calls("cuModuleLoadData");
  const LoadedKernel& kernel = prepare(device(0), small_spec("once"));
  EXPECT_EQ(&kernel, &prepare(device(0), small_spec("once")));
  EXPECT_EQ(num_calls("cuModuleLoadData"), loads + 1);
  EXPECT_NE(&kernel, &prepare(device(1), small_spec("once")));
  EXPECT_EQ(num_calls("cuModuleLoadData"), loads + 2);
  EXPECT_EQ(kernel.use.registers, 32);
  EXPECT_EQ(kernel.blocks_resident, 4);
  EXPECT_EQ(current_context(), nullptr);
}

TEST(Prepare, SixteenThreadsLoadOnce) {
  const int loads = num_calls("cuModuleLoadData");
  std::vector<std::thread> threads;
  for (int i = 0; i < 16; ++i) {
    threads.emplace_back([] { prepare(device(0), small_spec("threads")); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_calls("cuModuleLoadData"), loads + 1);
}

TEST(Prepare, FailuresAreSaidAndTheNextCallTriesAgain) {
  const auto attempt = [] { prepare(device(0), small_spec("failing")); };
  {
    const ScopedVariable fail("FAKE_NVRTC_FAIL", "1");
    expect_error(Status::kCompile, {"failing", "error: planted"}, attempt);
  }
  {
    const ScopedVariable full("FAKE_CUDA_cuModuleLoadData", "2");
    expect_error(Status::kOutOfMemory, {"load the kernel failing on device 0", "(2,"}, attempt);
  }
  {
    const ScopedVariable wrong("FAKE_CUDA_CAPABILITY", "80");  // the code is of sm_90a
    expect_error(Status::kUnsupported, {"failing", "sm_90a", "another architecture"}, attempt);
  }
  {
    const int unloads = num_calls("cuModuleUnload");
    const ScopedVariable lost("FAKE_CUDA_cuModuleGetFunction", "500");
    expect_error(Status::kDevice, {"find the entry of the kernel failing"}, attempt);
    EXPECT_EQ(num_calls("cuModuleUnload"), unloads + 1);
  }
  EXPECT_NO_THROW(attempt());
  EXPECT_EQ(current_context(), nullptr);
}

// Leaves an entry that is whole and no machine code, as a disk full of yesterday's drivers may.
KernelKey plant_refused_entry(const KernelSpec& spec) {
  const KernelKey key = kernel_key(spec, "sm_90a", nvrtc().version());
  const CompiledKernel code{"not what a driver loads", "ptxas info    : Used 32 registers"};
  EXPECT_EQ(CacheFolder(cache_settings()).store(key, code), "");
  return key;
}

TEST(Prepare, AnEntryThatTheDriverRefusesIsCompiledAgainAndReplaced) {
  const KernelSpec spec = small_spec("refused_entry");
  const KernelKey key = plant_refused_entry(spec);
  const int compilations = num_compilations();
  EXPECT_EQ(prepare(device(0), spec).origin, Origin::kCompiled);
  EXPECT_EQ(num_compilations(), compilations + 1);
  std::string problem;
  const auto entry = CacheFolder(cache_settings()).read(key, problem);
  ASSERT_NE(entry, nullptr) << problem;
  EXPECT_EQ(entry->cubin.rfind("cubin sm_90a", 0), 0u);
}

TEST(Prepare, WhatTheDriverStillRefusesIsCompiledOnce) {
  const KernelSpec spec = small_spec("refused_twice");
  plant_refused_entry(spec);
  const int compilations = num_compilations();
  const ScopedVariable invalid("FAKE_CUDA_cuModuleLoadData", "200");
  expect_error(Status::kDevice, {"load the kernel refused_twice", "(200,"},
               [&] { prepare(device(0), spec); });
  EXPECT_EQ(num_compilations(), compilations + 1);
}

TEST(Prepare, AFullDeviceIsNoReasonToCompileAgain) {
  const KernelSpec spec = small_spec("refused_for_memory");
  plant_refused_entry(spec);
  const int compilations = num_compilations();
  const ScopedVariable full("FAKE_CUDA_cuModuleLoadData", "2");
  expect_error(Status::kOutOfMemory, {"(2,"}, [&] { prepare(device(0), spec); });
  EXPECT_EQ(num_compilations(), compilations);
}

TEST(Prepare, TheGateRejects) {
  const ScopedVariable log("FAKE_NVRTC_LOG", "ptxas info : (C7511) wgmma serialized");
  expect_error(Status::kUnsupported, {"gated is rejected", "C7511: wgmma serialized"},
               [] { prepare(device(0), small_spec("gated")); });
}

TEST(Prepare, SharedMemoryIsOptedInOrRefused) {
  KernelSpec spec = small_spec("shared");
  spec.shared_bytes = 100000;
  launch(prepare(device(0), spec), {1}, nullptr, nullptr);
  EXPECT_EQ(last_launch().dynamic_shared_bytes, 100000);
  spec.shared_bytes = 300000;
  expect_error(Status::kUnsupported, {"shared needs 300000 bytes", "has 232448"},
               [&] { prepare(device(0), spec); });
}

TEST(Launch, PassesItsShapeOnTheCallersStream) {
  const LoadedKernel& kernel = prepare(device(1), small_spec("launched"));
  const int params[3] = {1, 2, 3};
  const auto stream = reinterpret_cast<CUstream>(std::uintptr_t{64});
  launch(kernel, {70000, 2, true}, params, stream);
  const FakeLaunch seen = last_launch();
  EXPECT_EQ(seen.device, 1);
  EXPECT_EQ(seen.config.grid_x, 70000u);
  EXPECT_EQ(seen.config.block_x, 128u);
  EXPECT_EQ(seen.config.stream, stream);
  EXPECT_STREQ(seen.kernel, "launched");
  EXPECT_EQ(std::memcmp(seen.params, params, sizeof(params)), 0);
  ASSERT_EQ(seen.config.num_attributes, 2u);
  EXPECT_EQ(seen.attributes[0].id, kLaunchClusterDimension);
  EXPECT_EQ(seen.attributes[0].value.cluster.x, 2u);
  EXPECT_EQ(seen.attributes[1].id, kLaunchProgrammaticStreamSerialization);
  EXPECT_EQ(current_context(), nullptr);
}

TEST(Launch, ClustersThatNotEveryCardTakes) {
  const LoadedKernel& kernel = prepare(device(0), small_spec("launched"));
  const int launches = num_calls("cuLaunchKernelEx");
  for (const LaunchShape& shape : {LaunchShape{34, 17}, LaunchShape{10, 4}, LaunchShape{8, 0}}) {
    const std::string size = sentence("blocks in clusters of ", shape.cluster_size);
    expect_error(Status::kUnsupported, {size.c_str(), "1 to 8 that divide the blocks work"},
                 [&] { launch(kernel, shape, nullptr, nullptr); });
  }
  EXPECT_EQ(num_calls("cuLaunchKernelEx"), launches);
  const int attributes = num_calls("cuFuncSetAttribute");
  launch(kernel, {32, 16}, nullptr, nullptr);
  EXPECT_EQ(num_calls("cuFuncSetAttribute"), attributes + 1);  // allows what is not portable
}

TEST(Launch, NothingToDoLaunchesNothing) {
  const LoadedKernel& kernel = prepare(device(0), small_spec("launched"));
  const int launches = num_calls("cuLaunchKernelEx");
  launch(kernel, {0}, nullptr, nullptr);
  EXPECT_EQ(num_calls("cuLaunchKernelEx"), launches);
}

TEST(Launch, AllocatesCompilesAndWaitsForNothing) {
  const LoadedKernel& kernel = prepare(device(0), small_spec("launched"));
  const std::vector<const char*> forbidden = {"cuMemAlloc_v2", "cuMemFree_v2", "cuModuleLoadData",
                                              "cuCtxSynchronize", "cuPointerGetAttributes"};
  std::vector<int> before;
  for (const char* function : forbidden) before.push_back(num_calls(function));
  launch(kernel, {5}, nullptr, nullptr);
  for (std::size_t i = 0; i < forbidden.size(); ++i) {
    EXPECT_EQ(num_calls(forbidden[i]), before[i]) << forbidden[i];
  }
}

TEST(Launch, TooManyBlocksAndFailuresAreSaid) {
  const LoadedKernel& kernel = prepare(device(0), small_spec("launched"));
  expect_error(Status::kUnsupported, {"2147483648 blocks", "split"},
               [&] { launch(kernel, {kMaxBlocks + 1}, nullptr, nullptr); });
  const ScopedVariable fail("FAKE_CUDA_cuLaunchKernelEx", "719");
  expect_error(Status::kDevice, {"launch launched on device 0", "719", "earlier kernel"},
               [&] { launch(kernel, {1}, nullptr, nullptr); });
}

TEST(Launch, IsRefusedInAFork) {
  const LoadedKernel& kernel = prepare(device(0), small_spec("launched"));
  EXPECT_TRUE(holds_in_child([&] {
    try {
      launch(kernel, {1}, nullptr, nullptr);
      return false;
    } catch (const Error& error) {
      return error.status() == Status::kDevice;
    }
  }));
}

TEST(CheckPointer, TellsHostMemoryAndOtherDevicesApart) {
  CUdeviceptr memory = 0;
  {
    const CurrentContext current(device(1));
    driver()->cuMemAlloc_v2(&memory, 64);
  }
  const void* pointer = reinterpret_cast<const void*>(memory);
  EXPECT_NO_THROW(check_pointer(device(1), pointer, "q"));
  EXPECT_NO_THROW(check_pointer(device(1), nullptr, "q"));
  EXPECT_EQ(memory_space_of(pointer).device, 1);
  expect_error(Status::kArgument, {"q is on device 1", "runs on device 0"},
               [&] { check_pointer(device(0), pointer, "q"); });
  const int local = 0;
  EXPECT_EQ(memory_space_of(&local).kind, MemorySpace::kHost);
  expect_error(Status::kArgument, {"k is in ordinary host memory", "Fake GPU 0", "backend='cpu'"},
               [&] { check_pointer(device(0), &local, "k"); });
  driver()->cuMemFree_v2(memory);
}

}  // namespace
}  // namespace fulmen::gpu
