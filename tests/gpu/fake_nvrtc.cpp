// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// An NVRTC that compiles nothing: its "machine code" is the text "cubin sm_<arch>" and the source.
// For tests of the search, the cache and the faults, on machines without the real one.
//   FAKE_NVRTC_VERSION=<n>   13000 by default
//   FAKE_NVRTC_FAIL=1        every compilation fails, with the log "error: planted"
//   FAKE_NVRTC_STACK_MIB=<n> a compilation uses so much of its stack
//   FAKE_NVRTC_LOG=<text>    the log of a compilation that works ...
//   FAKE_NVRTC_LOG_OF=<text> ... of programs that contain this; the others get the usual one
#include <atomic>
#include <cstdlib>
#include <string>

#include "nvrtc_program.h"

namespace {

using nvrtc::kCompilation;
using nvrtc::kSuccess;

std::atomic<int> num_compilations{0};

std::string variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

// Touches so many MiB of the stack, a frame of 64 KiB after the other.
int use_stack(int frames) {
  volatile char frame[65536];
  frame[0] = static_cast<char>(frames);
  return frames <= 1 ? frame[0] : use_stack(frames - 1) + frame[0];
}

}  // namespace

FULMEN_NVRTC int nvrtcVersion(int* major, int* minor) {
  const int version = std::atoi(variable("FAKE_NVRTC_VERSION", "13000").c_str());
  *major = version / 1000;
  *minor = version % 1000 / 10;
  return kSuccess;
}
FULMEN_NVRTC const char* nvrtcGetErrorString(int result) {
  return result == kCompilation ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_OTHER";
}
FULMEN_NVRTC int nvrtcCreateProgram(_nvrtcProgram** program, const char* text, const char*, int,
                                    const char* const*, const char* const*) {
  *program = new _nvrtcProgram{text, {}, "", ""};
  return kSuccess;
}
FULMEN_NVRTC int nvrtcCompileProgram(_nvrtcProgram* program, int num_options,
                                     const char* const* options) {
  ++num_compilations;
  const int stack_mib = std::atoi(variable("FAKE_NVRTC_STACK_MIB", "0").c_str());
  if (stack_mib > 0) use_stack(16 * stack_mib);
  if (std::getenv("FAKE_NVRTC_FAIL") != nullptr) {
    program->log = "error: planted";
    return kCompilation;
  }
  const std::string prefix = "--gpu-architecture=";
  for (int i = 0; i < num_options; ++i) {
    const std::string option = options[i];
    if (option.rfind(prefix, 0) == 0)
      program->image = "cubin " + option.substr(prefix.size()) + "\n";
  }
  program->image += program->text;
  const bool is_meant = program->text.find(variable("FAKE_NVRTC_LOG_OF", "")) != std::string::npos;
  constexpr const char* kLog = "ptxas info    : Used 32 registers";
  program->log = is_meant ? variable("FAKE_NVRTC_LOG", kLog) : kLog;
  return kSuccess;
}
FULMEN_NVRTC int fake_num_compilations() { return num_compilations; }
