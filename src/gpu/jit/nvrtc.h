// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// NVRTC, NVIDIA's run-time compiler, found and loaded at first use. It needs no GPU, no driver and
// no header on disk. Where it is looked for, in this order:
//   1  FULMEN_NVRTC, a file or folder: nothing else is tried when it is set
//   2  a copy that this process has loaded already, so that torch and fulmen share one
//   3  files or folders that the caller names (Python: the nvidia-cuda-nvrtc packages)
//   4  the toolkits of CUDA_HOME and CUDA_PATH
//   5  the loader's own path (ldconfig, LD_LIBRARY_PATH)
//   6  /usr/local/cuda
// The first that loads, is CUDA 12.4 or later and has a major version not above the driver's wins:
// an older driver cannot load what a compiler of the next major version makes.
#pragma once

#include <string>
#include <vector>

#include "gpu/driver/shared_library.h"

namespace fulmen::gpu {

inline constexpr int kMinNvrtcVersion = 12040;

using nvrtcResult = int;
using nvrtcProgram = struct _nvrtcProgram*;

struct NvrtcTable {
  nvrtcResult (*nvrtcVersion)(int* major, int* minor);
  const char* (*nvrtcGetErrorString)(nvrtcResult result);
  nvrtcResult (*nvrtcGetNumSupportedArchs)(int* count);
  nvrtcResult (*nvrtcGetSupportedArchs)(int* archs);
  nvrtcResult (*nvrtcCreateProgram)(nvrtcProgram* program, const char* text, const char* name,
                                    int num_headers, const char* const* headers,
                                    const char* const* include_names);
  nvrtcResult (*nvrtcDestroyProgram)(nvrtcProgram* program);
  nvrtcResult (*nvrtcCompileProgram)(nvrtcProgram program, int num_options,
                                     const char* const* options);
  nvrtcResult (*nvrtcGetProgramLogSize)(nvrtcProgram program, std::size_t* bytes);
  nvrtcResult (*nvrtcGetProgramLog)(nvrtcProgram program, char* log);
  nvrtcResult (*nvrtcGetCUBINSize)(nvrtcProgram program, std::size_t* bytes);
  nvrtcResult (*nvrtcGetCUBIN)(nvrtcProgram program, char* cubin);
};

class Nvrtc {
 public:
  const NvrtcTable* operator->() const { return &table_; }
  int version() const { return version_; }                  // 13000 for 13.0
  std::string path() const { return library_.path(); }      // the file in use
  const std::vector<int>& archs() const { return archs_; }  // 75, 80, ... that it compiles for
  bool knows(int arch) const;

  // One file. Throws Error kNotFound when it does not load, lacks a function or is too old.
  static Nvrtc load(const std::string& file);

  // A copy already in the process, under this name ("libnvrtc.so.13").
  static Nvrtc find_loaded(const std::string& name);

 private:
  static Nvrtc from(SharedLibrary library);

  SharedLibrary library_;
  NvrtcTable table_{};
  int version_ = 0;
  std::vector<int> archs_;
};

struct NvrtcSearch {
  std::vector<std::string> candidates;  // files, or folders that hold libnvrtc.so.*
  int driver_version = 0;               // 0: no driver here, any version will do
  std::string toolkit = "/usr/local/cuda";
};

// Throws Error kNotFound with every path that was tried and what was wrong with it.
Nvrtc find_nvrtc(const NvrtcSearch& search);

// Step 3 of the search, for the whole process; before the first use of nvrtc().
void set_nvrtc_candidates(std::vector<std::string> candidates);

// The compiler of this process. Loaded by the first call; a failed call throws and the next one
// tries again. Thread safe.
Nvrtc& nvrtc();

}  // namespace fulmen::gpu
