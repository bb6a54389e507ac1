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
#include <cstring>
#include <string>

struct _nvrtcProgram {
  std::string text;
  std::string log;
  std::string cubin;
};

namespace {

constexpr int kArchs[] = {75, 80, 86, 89, 90, 100, 120};
constexpr int kSuccess = 0;
constexpr int kCompilation = 6;

std::atomic<int> num_compilations{0};

void copy_out(const std::string& from, char* to) { std::memcpy(to, from.data(), from.size()); }

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

#define FAKE extern "C" __attribute__((visibility("default")))

FAKE int nvrtcVersion(int* major, int* minor) {
  const int version = std::atoi(variable("FAKE_NVRTC_VERSION", "13000").c_str());
  *major = version / 1000;
  *minor = version % 1000 / 10;
  return kSuccess;
}
FAKE const char* nvrtcGetErrorString(int result) {
  return result == kCompilation ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_OTHER";
}
FAKE int nvrtcGetNumSupportedArchs(int* count) {
  *count = static_cast<int>(sizeof(kArchs) / sizeof(kArchs[0]));
  return kSuccess;
}
FAKE int nvrtcGetSupportedArchs(int* archs) {
  std::memcpy(archs, kArchs, sizeof(kArchs));
  return kSuccess;
}
FAKE int nvrtcCreateProgram(_nvrtcProgram** program, const char* text, const char*, int,
                            const char* const*, const char* const*) {
  *program = new _nvrtcProgram{text, "", ""};
  return kSuccess;
}
FAKE int nvrtcDestroyProgram(_nvrtcProgram** program) {
  delete *program;
  *program = nullptr;
  return kSuccess;
}
FAKE int nvrtcCompileProgram(_nvrtcProgram* program, int num_options, const char* const* options) {
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
      program->cubin = "cubin " + option.substr(prefix.size()) + "\n";
  }
  program->cubin += program->text;
  const bool is_meant = program->text.find(variable("FAKE_NVRTC_LOG_OF", "")) != std::string::npos;
  constexpr const char* kLog = "ptxas info    : Used 32 registers";
  program->log = is_meant ? variable("FAKE_NVRTC_LOG", kLog) : kLog;
  return kSuccess;
}
FAKE int nvrtcGetProgramLogSize(_nvrtcProgram* program, std::size_t* bytes) {
  *bytes = program->log.size();
  return kSuccess;
}
FAKE int nvrtcGetProgramLog(_nvrtcProgram* program, char* log) {
  copy_out(program->log, log);
  return kSuccess;
}
FAKE int nvrtcGetCUBINSize(_nvrtcProgram* program, std::size_t* bytes) {
  *bytes = program->cubin.size();
  return kSuccess;
}
FAKE int nvrtcGetCUBIN(_nvrtcProgram* program, char* cubin) {
  copy_out(program->cubin, cubin);
  return kSuccess;
}
FAKE int fake_num_compilations() { return num_compilations; }
