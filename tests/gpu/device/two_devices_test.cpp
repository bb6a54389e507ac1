// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Two GPUs in one process: the same calls on both, in turn, give the same bits where the GPUs are
// of one kind, and the device that the caller has made current stays so. Skipped with fewer.
#include <gtest/gtest.h>

#include <cstring>

#include "device_memory.h"
#include "gpu/backend.h"

namespace fulmen::test {
namespace {

class TwoDevices : public testing::Test {
 protected:
  void SetUp() override {
    for (int ordinal = 0; ordinal < 2; ++ordinal) {
      const FoundDevice found = find_device(ordinal);
      if (found.device == nullptr) GTEST_SKIP() << found.reason;
      devices_[ordinal] = found.device;
    }
  }

  // The results of a forward call on one of them, on the host.
  Request run(const Request& request, DeviceMemory& memory, int ordinal) {
    Request there = memory.copy(request);
    there.options.backend = Backend::kCuda;
    there.options.device = ordinal;
    gpu::run_once(there, {}, nullptr);
    const gpu::CurrentContext current(*devices_[ordinal]);
    devices_[ordinal]->driver().check(devices_[ordinal]->driver()->cuCtxSynchronize(), "finish");
    return memory.fetch(there);
  }

  const gpu::Device* devices_[2] = {};
};

void expect_same_bits(const Tensor& a, const Tensor& b) {
  i64 last = 0;
  for (int axis = 0; axis < a.rank; ++axis) last += (a.shape[axis] - 1) * a.strides[axis];
  if (!a.present() || a.empty()) return;
  const auto bytes = static_cast<std::size_t>((last + 1) * size_bytes(a.dtype));
  EXPECT_EQ(std::memcmp(a.data, b.data, bytes), 0);
}

TEST_F(TwoDevices, GiveTheSameBitsAndLeaveTheCurrentDeviceAlone) {
  const bool are_alike = devices_[0]->facts().name == devices_[1]->facts().name;
  for (unsigned seed = 0; seed < 4; ++seed) {
    RandomProblem random(seed);
    const Request request = random.draw();
    DeviceMemory first_memory(*devices_[0]);
    DeviceMemory second_memory(*devices_[1]);
    const gpu::CurrentContext held(*devices_[0]);
    const Request first = run(request, first_memory, 0);
    const Request second = run(request, second_memory, 1);
    gpu::CUcontext current = nullptr;
    devices_[0]->driver()->cuCtxGetCurrent(&current);
    EXPECT_EQ(current, devices_[0]->context());
    if (!are_alike) continue;
    for (const Array array : {Array::kO, Array::kLse, Array::kStats}) {
      expect_same_bits(first.arrays[array], second.arrays[array]);
    }
  }
}

TEST_F(TwoDevices, AnArrayOfTheOtherIsRefused) {
  RandomProblem random(1);
  const Request request = random.draw();
  DeviceMemory first_memory(*devices_[0]);
  DeviceMemory second_memory(*devices_[1]);
  Request mixed = first_memory.copy(request);
  mixed.arrays[Array::kK] = second_memory.copy(request.arrays[Array::kK]);
  mixed.options.backend = Backend::kCuda;
  mixed.options.device = 0;
  EXPECT_THROW(gpu::run_once(mixed, {}, nullptr), Error);
}

}  // namespace
}  // namespace fulmen::test
