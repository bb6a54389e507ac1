// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the libraries of the tests that answer as NVRTC have in common: a program, and the functions
// that ask for what is in it. It defines them, so one file of such a library includes it and adds
// nvrtcVersion, nvrtcGetErrorString, nvrtcCreateProgram and nvrtcCompileProgram.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#define FULMEN_NVRTC extern "C" __attribute__((visibility("default")))

struct _nvrtcProgram {
  std::string text;
  std::vector<std::pair<std::string, std::string>> headers;  // name, text
  std::string log;
  std::string image;  // called a CUBIN
};

namespace nvrtc {

constexpr int kSuccess = 0;
constexpr int kCompilation = 6;
constexpr int kArchs[] = {75, 80, 86, 89, 90, 100, 120};

}  // namespace nvrtc

FULMEN_NVRTC int nvrtcGetNumSupportedArchs(int* count) {
  *count = static_cast<int>(std::size(nvrtc::kArchs));
  return nvrtc::kSuccess;
}
FULMEN_NVRTC int nvrtcGetSupportedArchs(int* archs) {
  std::copy(std::begin(nvrtc::kArchs), std::end(nvrtc::kArchs), archs);
  return nvrtc::kSuccess;
}
FULMEN_NVRTC int nvrtcDestroyProgram(_nvrtcProgram** program) {
  delete *program;
  *program = nullptr;
  return nvrtc::kSuccess;
}
FULMEN_NVRTC int nvrtcGetProgramLogSize(_nvrtcProgram* program, std::size_t* bytes) {
  *bytes = program->log.size();
  return nvrtc::kSuccess;
}
FULMEN_NVRTC int nvrtcGetProgramLog(_nvrtcProgram* program, char* log) {
  std::copy(program->log.begin(), program->log.end(), log);
  return nvrtc::kSuccess;
}
FULMEN_NVRTC int nvrtcGetCUBINSize(_nvrtcProgram* program, std::size_t* bytes) {
  *bytes = program->image.size();
  return nvrtc::kSuccess;
}
FULMEN_NVRTC int nvrtcGetCUBIN(_nvrtcProgram* program, char* image) {
  std::copy(program->image.begin(), program->image.end(), image);
  return nvrtc::kSuccess;
}
