// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen.h section 7: explanations, and what this build is. FULMEN_VERSION, FULMEN_COMMIT and
// FULMEN_BUILD_TYPE come from the build (cmake/build_info.cmake).

#include <algorithm>
#include <cstring>
#include <string>

#include "api/boundary.h"
#include "cpu/backend.h"
#include "gpu/jit/bundle.h"

namespace fulmen::api {
namespace {

#if defined(__clang__)
constexpr const char* kCompiler = "clang++ " __clang_version__;
#else
constexpr const char* kCompiler = "g++ " __VERSION__;
#endif

std::string build_info() {
  const CpuDevice device = cpu::cpu_device();
  std::string isas;
  for (const char* isa : cpu::built_isas()) {
    isas += sentence(isas.empty() ? "\"" : ", \"", isa, "\"");
  }
  return sentence("{\"version\": \"", FULMEN_VERSION, "\", \"commit\": \"", FULMEN_COMMIT,
                  "\", \"kernels\": \"", gpu::hex(gpu::digest_of_sources()), "\", \"compiler\": \"",
                  kCompiler, "\", \"build_type\": \"", FULMEN_BUILD_TYPE, "\", \"isas\": [", isas,
                  "], \"isa\": \"", device.isa, "\", \"threads\": ", device.num_threads, "}");
}

}  // namespace

void copy_text(const std::string& text, char* buffer, size_t capacity, size_t* needed) {
  if (buffer == nullptr && capacity > 0) {
    throw Error(Status::kArgument, sentence("buffer is null with capacity ", capacity,
                                            "; pass capacity 0 to ask for the size alone"));
  }
  if (needed != nullptr) *needed = text.size() + 1;
  if (capacity == 0) return;
  size_t size = std::min(text.size(), capacity - 1);
  const auto continues = [&text](size_t at) {
    return at < text.size() && (static_cast<unsigned char>(text[at]) & 0xc0u) == 0x80u;
  };
  while (size > 0 && continues(size)) --size;
  std::memcpy(buffer, text.data(), size);
  buffer[size] = '\0';
}

}  // namespace fulmen::api

using fulmen::api::copy_text;
using fulmen::api::guarded;

fulmen_status fulmen_explain(const fulmen_problem* problem, const fulmen_tensors* tensors,
                             fulmen_operation operation, char* buffer, size_t capacity,
                             size_t* needed) {
  return guarded([&] {
    const fulmen_plan plan = fulmen::api::make_plan(problem, tensors, operation);
    copy_text(fulmen::api::explain(plan), buffer, capacity, needed);
  });
}

fulmen_status fulmen_plan_explain(const fulmen_plan* plan, char* buffer, size_t capacity,
                                  size_t* needed) {
  return guarded([&] {
    fulmen::api::require_struct(plan, "plan", "fulmen_plan_create");
    copy_text(fulmen::api::explain(*plan), buffer, capacity, needed);
  });
}

fulmen_status fulmen_gpu_info(char* buffer, size_t capacity, size_t* needed) {
  return guarded([&] { copy_text(fulmen::gpu::gpu_info(), buffer, capacity, needed); });
}

const char* fulmen_version(void) { return FULMEN_VERSION; }

fulmen_status fulmen_build_info(char* buffer, size_t capacity, size_t* needed) {
  return guarded([&] { copy_text(fulmen::api::build_info(), buffer, capacity, needed); });
}
