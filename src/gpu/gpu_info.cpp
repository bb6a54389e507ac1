// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen_gpu_info: what there is of driver, devices, compiler, cache and bundle, as JSON.

#include <vector>

#include "gpu/backend.h"
#include "plan/json.h"

namespace fulmen::gpu {
namespace {

using json::list;
using json::quoted;

// What one part says of itself, or why it is not there.
struct Part {
  std::string text = "null";
  std::string reason;
};

template <class Describe>
Part part_of(const Describe& describe) {
  try {
    return {describe(), ""};
  } catch (const Error& error) {
    return {"null", error.what()};
  }
}

std::string driver_text() {
  const Driver& loaded = driver();
  return sentence("{\"version\": ", quoted(cuda_version_name(loaded.version())),
                  ", \"path\": ", quoted(loaded.path()), "}");
}

std::string device_text(int index) {
  const DeviceFacts& facts = device(index).facts();
  return sentence("{\"index\": ", std::to_string(index), ", \"name\": ", quoted(facts.name),
                  ", \"arch\": ", quoted(device(index).arch()),
                  ", \"multiprocessors\": ", std::to_string(facts.num_multiprocessors),
                  ", \"memory_bytes\": ", std::to_string(facts.memory_bytes),
                  ", \"shared_bytes\": ", std::to_string(facts.shared_bytes_per_block), "}");
}

// Those that cannot be opened are left out.
std::string devices_text() {
  std::vector<std::string> devices;
  const Part count = part_of([] { return std::to_string(driver().num_devices()); });
  const int num_devices = count.reason.empty() ? std::stoi(count.text) : 0;
  for (int index = 0; index < num_devices; ++index) {
    const Part one = part_of([index] { return device_text(index); });
    if (one.reason.empty()) devices.push_back(one.text);
  }
  return list(devices);
}

std::string nvrtc_text() {
  const Nvrtc& compiler = nvrtc();
  std::vector<std::string> archs;
  for (const int arch : compiler.archs()) archs.push_back(std::to_string(arch));
  return sentence("{\"version\": ", quoted(cuda_version_name(compiler.version())),
                  ", \"path\": ", quoted(compiler.path()), ", \"archs\": ", list(archs), "}");
}

std::string cache_text() {
  const KernelCache& cache = kernel_cache();
  return sentence("{\"folder\": ", quoted(cache.folder().settings().folder),
                  ", \"bytes\": ", std::to_string(cache.folder().bytes()),
                  ", \"entries\": ", std::to_string(cache.folder().num_entries()),
                  ", \"limit_bytes\": ", std::to_string(cache.folder().settings().limit_bytes),
                  ", \"note\": ", quoted(cache.note()), "}");
}

std::string bundle_text() {
  const BundleInfo bundle = bundle_info();
  if (bundle.path.empty()) return "null";
  return sentence("{\"path\": ", quoted(bundle.path),
                  ", \"kernels\": ", std::to_string(bundle.num_kernels), "}");
}

}  // namespace

std::string gpu_info() {
  const Part of_driver = part_of(driver_text);
  const Part of_nvrtc = part_of(nvrtc_text);
  std::vector<std::string> names;
  for (const Gpu& gpu : known_gpus()) names.push_back(quoted(gpu.name));
  return sentence("{\"driver\": ", of_driver.text,
                  ", \"driver_reason\": ", quoted(of_driver.reason),
                  ", \"devices\": ", devices_text(), ", \"nvrtc\": ", of_nvrtc.text,
                  ", \"nvrtc_reason\": ", quoted(of_nvrtc.reason), ", \"cache\": ", cache_text(),
                  ", \"bundle\": ", bundle_text(), ", \"device_names\": ", list(names), "}");
}

}  // namespace fulmen::gpu
