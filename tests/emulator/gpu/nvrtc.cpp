// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// NVRTC's functions, as far as fulmen binds them.
#include <cstring>
#include <exception>
#include <memory>

#include "emulator/gpu/gpu.h"
#include "emulator/gpu/host_compiler.h"
#include "gpu/nvrtc_program.h"

FULMEN_NVRTC int nvrtcVersion(int* major, int* minor) {
  *major = 13;  // of CUDA: what the generated text is written for
  *minor = 0;
  return nvrtc::kSuccess;
}
FULMEN_NVRTC const char* nvrtcGetErrorString(int result) {
  return result == nvrtc::kSuccess ? "NVRTC_SUCCESS" : "NVRTC_ERROR_COMPILATION";
}
FULMEN_NVRTC int nvrtcCreateProgram(_nvrtcProgram** program, const char* text, const char*,
                                    int num_headers, const char* const* headers,
                                    const char* const* names) {
  auto made = std::make_unique<_nvrtcProgram>();
  made->text = text;
  for (int i = 0; i < num_headers; ++i) {
    // The emulator has its own instructions.
    if (std::strncmp(names[i], "kernels/ptx/", 12) == 0) continue;
    made->headers.emplace_back(names[i], headers[i]);
  }
  *program = made.release();
  return nvrtc::kSuccess;
}
FULMEN_NVRTC int nvrtcCompileProgram(_nvrtcProgram* program, int, const char* const*) {
  using namespace fulmen::emulator;  // NOLINT
  try {
    auto [library, log] = compile_for_host(program->text, program->headers);
    program->log = std::move(log);
    if (library.empty()) return nvrtc::kCompilation;
    program->image = kImagePrefix + library + '\0';
    return nvrtc::kSuccess;
  } catch (const std::exception& error) {
    program->log = error.what();
    return nvrtc::kCompilation;
  }
}
