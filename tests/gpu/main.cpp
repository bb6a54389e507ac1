// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Puts the fake driver and compiler where the library will find them: the loader answers
// "libcuda.so.1" with a library of that name that is loaded already, so that even a machine with a
// GPU tests the fake one.
#include "support.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (::dlopen(FAKE_DRIVER_FILE, RTLD_NOW | RTLD_LOCAL) == nullptr) {
    std::fprintf(stderr, "%s\n", ::dlerror());
    return 1;
  }
  const fulmen::gpu::TemporaryFolder cache;
  const fulmen::gpu::ScopedVariable folder("FULMEN_CACHE_DIR", cache.path());
  const fulmen::gpu::ScopedVariable limit("FULMEN_CACHE_LIMIT", std::nullopt);
  const fulmen::gpu::ScopedVariable compiler("FULMEN_NVRTC", FAKE_NVRTC_FILE);
  return RUN_ALL_TESTS();
}
