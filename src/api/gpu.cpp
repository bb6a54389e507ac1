// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen.h section 8: what only GPUs have.

#include "api/boundary.h"
#include "api/handle.h"
#include "gpu/backend.h"
#include "kernels/params.h"

namespace fulmen::api {
namespace {

static_assert(int{kFaultQOffsets} == FULMEN_FAULT_Q_OFFSETS);
static_assert(int{kFaultKvOffsets} == FULMEN_FAULT_KV_OFFSETS);
static_assert(int{kFaultQLengths} == FULMEN_FAULT_Q_LENGTHS);
static_assert(int{kFaultKvLengths} == FULMEN_FAULT_KV_LENGTHS);
static_assert(int{kFaultRng} == FULMEN_FAULT_RNG);

void require_path(const char* path, const char* what) {
  if (path == nullptr || *path == '\0') {
    throw Error(Status::kArgument, sentence(what, " is null or empty; pass the path of a file"));
  }
}

std::vector<gpu::BundleEntry> entries_of(const fulmen_plan* plan, size_t index) {
  require_struct(plan, sentence("plans[", index, "]").c_str(), "fulmen_plan_create");
  if (plan->gpu == nullptr) {
    throw Error(Status::kArgument,
                sentence("plans[", index,
                         "] is for the CPU, which compiles nothing; make it with "
                         "device_name, such as sm_90a"));
  }
  return gpu::bundle_entries(*plan->gpu);
}

}  // namespace
}  // namespace fulmen::api

using fulmen::Error;
using fulmen::sentence;
using fulmen::Status;
using fulmen::api::guarded;
using fulmen::api::require_path;

fulmen_status fulmen_device_faults(int32_t device, uint32_t* faults) {
  return guarded([&] {
    fulmen::api::require_pointer(faults, "faults", "the address of a uint32_t");
    *faults = fulmen::gpu::take_faults(device);
  });
}

fulmen_status fulmen_bundle_write(const fulmen_plan* const* plans, size_t num_plans,
                                  const char* path) {
  return guarded([&] {
    require_path(path, "path");
    if (num_plans == 0) {
      throw Error(Status::kArgument, "num_plans is 0; a bundle needs at least one plan");
    }
    fulmen::api::require_pointer(plans, "plans", "an array of plans");
    std::vector<fulmen::gpu::BundleEntry> all;
    for (size_t index = 0; index < num_plans; ++index) {
      for (auto& entry : fulmen::api::entries_of(plans[index], index)) {
        all.push_back(std::move(entry));
      }
    }
    fulmen::gpu::write_bundle(all, path);
  });
}

fulmen_status fulmen_bundle_load(const char* path) {
  return guarded([&] {
    require_path(path, "path");
    fulmen::gpu::load_bundle(path);
  });
}

fulmen_status fulmen_cache_clear(void) {
  return guarded([] { fulmen::gpu::clear_cache(); });
}

fulmen_status fulmen_set_nvrtc_candidates(const char* const* paths, size_t num_paths) {
  return guarded([&] {
    if (num_paths > 0) {
      fulmen::api::require_pointer(paths, "paths", "an array of paths");
    }
    std::vector<std::string> candidates;
    for (size_t index = 0; index < num_paths; ++index) {
      require_path(paths[index], sentence("paths[", index, "]").c_str());
      candidates.emplace_back(paths[index]);
    }
    fulmen::gpu::set_nvrtc_candidates(std::move(candidates));
  });
}
