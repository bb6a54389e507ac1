// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Calls that name a GPU, in a process that has none, and what needs none; and rng, which a device
// array exists for, in host memory. Calls on devices are tested in tests/gpu.
#include <dlfcn.h>

#include "api/refusal.h"

namespace fulmen::test {
namespace {

bool has_driver() { return ::dlopen("libcuda.so.1", RTLD_NOW) != nullptr; }

bool is_loaded(const char* name) { return ::dlopen(name, RTLD_NOW | RTLD_NOLOAD) != nullptr; }

TEST(NoGpu, CallsOnTheCpuLoadNoDriver) {
  TestCall call;
  ASSERT_EQ(call.forward(), FULMEN_OK);
  EXPECT_FALSE(is_loaded("libcuda.so.1"));
  EXPECT_FALSE(is_loaded("libnvrtc.so.13") || is_loaded("libnvrtc.so.12"));
}

TEST(NoGpu, IsSaidWithTheWayOut) {
  if (has_driver()) GTEST_SKIP() << "this machine has a driver";
  for (const bool by_name : {false, true}) {
    TestCall call;
    if (by_name) {
      call.problem.implementation = FULMEN_SIMT;
    } else {
      call.problem.backend = FULMEN_BACKEND_CUDA;
    }
    const Refusal row{"no driver",
                      nullptr,
                      FULMEN_ERROR_NOT_FOUND,
                      {"libcuda.so.1", "install the NVIDIA driver", "backend='cpu'"}};
    expect_refused(call, row, call.forward());
    fulmen_plan* plan = nullptr;
    expect_refused(
        call, row,
        fulmen_plan_create(&call.problem, &call.tensors, FULMEN_OPERATION_FORWARD, &plan));
    EXPECT_EQ(plan, nullptr);
  }
}

TEST(NoGpu, InfoIsAnAnswer) {
  std::string text(1 << 14, '\0');
  ASSERT_EQ(fulmen_gpu_info(text.data(), text.size(), nullptr), FULMEN_OK);
  for (const char* key : {"\"driver\": ", "\"devices\": [", "\"nvrtc\": ", "\"cache\": {\"folder\"",
                          "\"device_names\": [\"t4\", "}) {
    EXPECT_NE(text.find(key), std::string::npos) << key;
  }
}

TEST(Rng, InHostMemoryIsReadWhenTheCallRuns) {
  for (const fulmen_implementation implementation : {FULMEN_SCALAR, FULMEN_TILED}) {
    TestCall by_options;
    by_options.problem.implementation = implementation;
    by_options.problem.dropout_p = 0.5;
    by_options.problem.rng_seed = uint64_t{1} << 63;
    by_options.problem.rng_offset = 4294967295;
    ASSERT_EQ(by_options.forward(), FULMEN_OK);

    TestCall by_array;
    by_array.problem.implementation = implementation;
    by_array.problem.dropout_p = 0.5;
    fulmen_tensor& rng = by_array.indices(&fulmen_tensors::rng, {0, 0});
    fulmen_plan* plan = nullptr;
    ASSERT_EQ(
        fulmen_plan_create(&by_array.problem, &by_array.tensors, FULMEN_OPERATION_FORWARD, &plan),
        FULMEN_OK);
    std::vector<char> workspace(fulmen_plan_workspace_bytes(plan));
    const auto run = [&] {
      return fulmen_forward(plan, &by_array.tensors, workspace.data(), workspace.size(), nullptr);
    };
    EXPECT_EQ(run(), FULMEN_OK);
    EXPECT_NE(by_array.bytes(&fulmen_tensors::o), by_options.bytes(&fulmen_tensors::o));
    auto* const numbers = static_cast<int64_t*>(rng.data);
    numbers[0] = INT64_MIN;
    numbers[1] = 4294967295;
    EXPECT_EQ(run(), FULMEN_OK);
    EXPECT_EQ(by_array.bytes(&fulmen_tensors::o), by_options.bytes(&fulmen_tensors::o));
    for (const int64_t offset : {int64_t{-1}, int64_t{1} << 32}) {
      numbers[1] = offset;
      EXPECT_EQ(run(), FULMEN_ERROR_ARGUMENT);
      EXPECT_NE(std::string(fulmen_last_error()).find("rng[1], the offset"), std::string::npos);
    }
    fulmen_plan_destroy(plan);
  }
}

}  // namespace
}  // namespace fulmen::test
