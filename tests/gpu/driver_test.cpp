// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Loading the driver, and every way in which that fails.
#include "gpu/driver/driver.h"

#include "support.h"

namespace fulmen::gpu {
namespace {

TEST(Driver, LoadsAndCountsDevices) {
  const Driver driver(FAKE_DRIVER_FILE);
  EXPECT_EQ(driver.version(), 13000);
  EXPECT_EQ(driver.num_devices(), 2);
  EXPECT_EQ(driver.path(), FAKE_DRIVER_FILE);
}

TEST(Driver, IsFoundByItsOwnName) { EXPECT_EQ(driver().path(), FAKE_DRIVER_FILE); }

TEST(Driver, AMissingLibraryIsNamedWithTheWayOut) {
  expect_error(Status::kNotFound, {"libno-such-driver.so.1", "install", "backend='cpu'"},
               [] { Driver("libno-such-driver.so.1"); });
}

TEST(Driver, AnotherLibraryIsNoDriver) {
  expect_error(Status::kUnsupported, {FAKE_NVRTC_FILE, "lacks cuInit"},
               [] { Driver{FAKE_NVRTC_FILE}; });
}

TEST(Driver, TooOldSaysWhichIsNeeded) {
  const ScopedVariable version("FAKE_CUDA_VERSION", "11080");
  expect_error(Status::kUnsupported, {"CUDA 11.8", "CUDA 12.4", "driver 550"},
               [] { Driver{FAKE_DRIVER_FILE}; });
}

TEST(Driver, NoDeviceIsSaidOnce) {
  {
    const ScopedVariable init("FAKE_CUDA_cuInit", "100");
    expect_error(Status::kDevice, {"start the driver", "CUDA_ERROR_NO_DEVICE (100", "nvidia-smi"},
                 [] { Driver{FAKE_DRIVER_FILE}; });
  }
  const ScopedVariable devices("FAKE_CUDA_DEVICES", "0");
  expect_error(Status::kDevice, {"CUDA_VISIBLE_DEVICES"}, [] { Driver{FAKE_DRIVER_FILE}; });
}

TEST(Driver, ResultsBecomeSentences) {
  const Driver driver(FAKE_DRIVER_FILE);
  EXPECT_NO_THROW(driver.check(0, "sleep"));
  expect_error(
      Status::kOutOfMemory,
      {"CUDA could not dream: CUDA_ERROR_OUT_OF_MEMORY (2, text of the fake driver); free"},
      [&] { driver.check(2, "dream"); });
  expect_error(Status::kDevice, {"unknown (12345"}, [&] { driver.check(12345, "dream"); });
}

TEST(Driver, AForkOfAProcessThatUsedItIsRefused) {
  driver();
  EXPECT_TRUE(holds_in_child([] {
    try {
      driver();
      return false;
    } catch (const Error& error) {
      return error.status() == Status::kDevice &&
             std::string(error.what()).find("'spawn'") != std::string::npos;
    }
  }));
  EXPECT_NO_THROW(driver());  // the parent goes on
}

}  // namespace
}  // namespace fulmen::gpu
