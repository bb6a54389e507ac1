// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What Python calls beside attention: GPUs, the cache of kernels, bundles.

#include <cstring>
#include <string>
#include <vector>

#include "ffi/arguments.h"
#include "ffi/export.h"
#include "ffi/refusal.h"

namespace fulmen::ffi {
namespace {

// (text) -> bytes that the whole text takes
int64_t gpu_info(Arguments in) {
  const Bytes text = in.host_bytes("text");
  size_t needed = 0;
  check(fulmen_gpu_info(text.data, text.size, &needed));
  return static_cast<int64_t>(needed);
}

// (paths: with a zero byte between them)
int64_t set_nvrtc_candidates(Arguments in) {
  const std::string text = in.text("paths");
  std::vector<const char*> paths;
  for (size_t start = 0; start < text.size(); start += std::strlen(text.c_str() + start) + 1) {
    paths.push_back(text.c_str() + start);
  }
  check(fulmen_set_nvrtc_candidates(paths.data(), paths.size()));
  return 0;
}

// ()
int64_t cache_clear(Arguments) {
  check(fulmen_cache_clear());
  return 0;
}

// (path, plans...)
int64_t bundle_write(Arguments in) {
  const std::string path = in.text("path");
  std::vector<const fulmen_plan*> plans;
  while (!in.empty()) plans.push_back(in.plan());
  check(fulmen_bundle_write(plans.data(), plans.size(), path.c_str()));
  return 0;
}

// (path)
int64_t bundle_load(Arguments in) {
  const std::string path = in.text("path");
  check(fulmen_bundle_load(path.c_str()));
  return 0;
}

// (device) -> the faults, as bits
int64_t device_faults(Arguments in) {
  uint32_t faults = 0;
  check(fulmen_device_faults(static_cast<int32_t>(in.integer("device")), &faults));
  return faults;
}

}  // namespace
}  // namespace fulmen::ffi

FULMEN_FFI_EXPORT(gpu_info)
FULMEN_FFI_EXPORT(set_nvrtc_candidates)
FULMEN_FFI_EXPORT(cache_clear)
FULMEN_FFI_EXPORT(bundle_write)
FULMEN_FFI_EXPORT(bundle_load)
FULMEN_FFI_EXPORT(device_faults)
