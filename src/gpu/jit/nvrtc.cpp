// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The search for libnvrtc, and loading it with its companion: NVRTC opens libnvrtc-builtins by
// plain name while it compiles, which fails for a copy outside the loader's path unless that file
// is already in the process. So it is opened first, from the same folder.

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <mutex>

#include "gpu/driver/driver.h"
#include "gpu/jit/compiler.h"

namespace fulmen::gpu {
namespace {

namespace fs = std::filesystem;

// Sonames by which another library may have loaded NVRTC, newest first.
constexpr const char* kSonames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};

bool begins_with(const std::string& text, const std::string& prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
}

// Files of `folder` whose names begin with `prefix`, later names first.
std::vector<std::string> files_in(const fs::path& folder, const std::string& prefix) {
  std::vector<std::string> files;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    if (begins_with(entry.path().filename().string(), prefix)) files.push_back(entry.path());
  }
  std::sort(files.rbegin(), files.rend());
  return files;
}

// A candidate as the files that it means: itself, or the libraries in a folder.
std::vector<std::string> files_of(const std::string& candidate) {
  std::error_code ignored;
  if (!fs::is_directory(candidate, ignored)) return {candidate};
  return files_in(candidate, "libnvrtc.so.");
}

bool bind_all(const SharedLibrary& library, NvrtcTable& t) {
  return library.bind(t.nvrtcVersion, "nvrtcVersion") &&
         library.bind(t.nvrtcGetErrorString, "nvrtcGetErrorString") &&
         library.bind(t.nvrtcGetNumSupportedArchs, "nvrtcGetNumSupportedArchs") &&
         library.bind(t.nvrtcGetSupportedArchs, "nvrtcGetSupportedArchs") &&
         library.bind(t.nvrtcCreateProgram, "nvrtcCreateProgram") &&
         library.bind(t.nvrtcDestroyProgram, "nvrtcDestroyProgram") &&
         library.bind(t.nvrtcCompileProgram, "nvrtcCompileProgram") &&
         library.bind(t.nvrtcGetProgramLogSize, "nvrtcGetProgramLogSize") &&
         library.bind(t.nvrtcGetProgramLog, "nvrtcGetProgramLog") &&
         library.bind(t.nvrtcGetCUBINSize, "nvrtcGetCUBINSize") &&
         library.bind(t.nvrtcGetCUBIN, "nvrtcGetCUBIN");
}

[[noreturn]] void refuse(const std::string& file, const std::string& reason) {
  throw Error(Status::kNotFound, sentence(file, ": ", reason));
}

// Why a compiler cannot serve this driver; "" when it can.
std::string misfit(int version, int driver_version) {
  if (driver_version == 0 || version / 1000 <= driver_version / 1000) return "";
  return sentence("is CUDA ", cuda_version_name(version), ", newer than the driver's CUDA ",
                  cuda_version_name(driver_version));
}

// Tries compilers one after the other and keeps what was wrong with each.
class Attempts {
 public:
  explicit Attempts(int driver_version) : driver_version_(driver_version) {}

  template <class Load>
  bool try_one(const Load& load, Nvrtc& found) {
    try {
      Nvrtc nvrtc = load();
      const std::string reason = misfit(nvrtc.version(), driver_version_);
      if (!reason.empty()) refuse(nvrtc.path(), reason);
      found = std::move(nvrtc);
      return true;
    } catch (const Error& error) {
      if (!tried_.empty()) tried_ += "; ";
      tried_ += error.what();
      return false;
    }
  }

  bool try_candidate(const std::string& candidate, Nvrtc& found) {
    const std::vector<std::string> files = files_of(candidate);
    return std::any_of(files.begin(), files.end(), [&](const std::string& file) {
      return try_one([&] { return Nvrtc::load(file); }, found);
    });
  }

  const std::string& tried() const { return tried_; }

 private:
  int driver_version_;
  std::string tried_;
};

// Steps 3 to 6 of the search, as names to open.
std::vector<std::string> names_to_open(const NvrtcSearch& search) {
  std::vector<std::string> names = search.candidates;
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"}) {
    const char* root = std::getenv(variable);
    if (root != nullptr && *root != '\0') names.push_back(std::string(root) + "/lib64");
  }
  names.insert(names.end(), std::begin(kSonames), std::end(kSonames));
  names.push_back(search.toolkit + "/lib64");
  return names;
}

std::mutex candidates_mutex;

std::vector<std::string>& process_candidates() {
  static std::vector<std::string> candidates;
  return candidates;
}

// The driver's version, or 0 when there is no usable driver: compiling needs none.
int driver_version_or_zero() {
  try {
    return driver().version();
  } catch (const Error&) {
    return 0;
  }
}

Nvrtc find_for_process() {
  NvrtcSearch search;
  search.driver_version = driver_version_or_zero();
  const std::lock_guard lock(candidates_mutex);
  search.candidates = process_candidates();
  return find_nvrtc(search);
}

}  // namespace

bool Nvrtc::knows(int arch) const {
  return std::find(archs_.begin(), archs_.end(), arch) != archs_.end();
}

Nvrtc Nvrtc::from(SharedLibrary library) {
  Nvrtc nvrtc;
  if (!library) refuse(library.name(), library.error());
  if (!bind_all(library, nvrtc.table_)) refuse(library.name(), "is no NVRTC, or a very old one");
  library.keep();
  int major = 0;
  int minor = 0;
  nvrtc.table_.nvrtcVersion(&major, &minor);
  nvrtc.version_ = 1000 * major + 10 * minor;
  if (nvrtc.version_ < kMinNvrtcVersion) {
    refuse(library.name(), sentence("is CUDA ", cuda_version_name(nvrtc.version_), ", older than ",
                                    cuda_version_name(kMinNvrtcVersion)));
  }
  int count = 0;
  nvrtc.table_.nvrtcGetNumSupportedArchs(&count);
  nvrtc.archs_.resize(static_cast<std::size_t>(count));
  if (count > 0) nvrtc.table_.nvrtcGetSupportedArchs(nvrtc.archs_.data());
  nvrtc.library_ = std::move(library);
  return nvrtc;
}

Nvrtc Nvrtc::load(const std::string& file) {
  std::vector<SharedLibrary> builtins;
  const fs::path folder = fs::path(file).parent_path();
  if (!folder.empty()) {
    for (const std::string& name : files_in(folder, "libnvrtc-builtins.so.")) {
      builtins.push_back(SharedLibrary::open(name));
    }
  }
  Nvrtc nvrtc = from(SharedLibrary::open(file));
  for (SharedLibrary& library : builtins) library.keep();
  return nvrtc;
}

Nvrtc Nvrtc::find_loaded(const std::string& name) { return from(SharedLibrary::find_loaded(name)); }

Nvrtc find_nvrtc(const NvrtcSearch& search) {
  Nvrtc found;
  Attempts attempts(search.driver_version);
  const char* named = std::getenv("FULMEN_NVRTC");
  if (named != nullptr && *named != '\0') {
    if (attempts.try_candidate(named, found)) return found;
    throw Error(Status::kNotFound,
                sentence("FULMEN_NVRTC names no usable NVRTC (",
                         attempts.tried().empty() ? named : attempts.tried(),
                         "); unset it or name libnvrtc.so of CUDA 12.4 or later"));
  }
  for (const char* name : kSonames) {
    if (attempts.try_one([&] { return Nvrtc::find_loaded(name); }, found)) return found;
  }
  for (const std::string& name : names_to_open(search)) {
    if (attempts.try_candidate(name, found)) return found;
  }
  throw Error(Status::kNotFound,
              sentence("GPU kernels are compiled when first needed, and no usable NVRTC was found; "
                       "pip install nvidia-cuda-nvrtc (CUDA 12: nvidia-cuda-nvrtc-cu12), or set "
                       "FULMEN_NVRTC; tried: ",
                       attempts.tried()));
}

void set_nvrtc_candidates(std::vector<std::string> candidates) {
  const std::lock_guard lock(candidates_mutex);
  process_candidates() = std::move(candidates);
}

Nvrtc& nvrtc() {
  static Nvrtc instance = find_for_process();
  return instance;
}

}  // namespace fulmen::gpu
