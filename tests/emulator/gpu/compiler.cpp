// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// NVRTC's functions. A program is compiled for the host, with the emulator's instructions before
// the kernel's own, into a shared library that is kept in a folder under a hash of all that it
// depends on: the text, its headers, the emulator, the command and the compiler's version. Any
// number of processes may use the folder at once.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "cuda/sha256.h"
#include "emulator/gpu/gpu.h"

namespace fs = std::filesystem;

struct _nvrtcProgram {
  std::string text;
  std::vector<std::pair<std::string, std::string>> headers;  // name, text
  std::string log;
  std::string image;
};

namespace {

using fulmen::cuda::Sha256;

constexpr int kArchs[] = {75, 80, 86, 89, 90, 100, 120};
constexpr int kSuccess = 0;
constexpr int kCompilation = 6;
constexpr int kVersion = 13;  // of CUDA: what the generated text is written for

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void write_file(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

// What a command prints, and whether it succeeded.
std::pair<std::string, bool> run_command(const std::string& command) {
  FILE* const pipe = ::popen(("(" + command + ") 2>&1").c_str(), "r");
  if (pipe == nullptr) return {"the command could not be started", false};
  std::string said;
  char part[4096];
  while (const std::size_t count = std::fread(part, 1, sizeof(part), pipe))
    said.append(part, count);
  return {said, ::pclose(pipe) == 0};
}

std::string quoted(const std::string& text) { return "'" + text + "'"; }

std::string variable(const char* name, const std::string& otherwise) {
  const char* const value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

fs::path cache_folder() {
  const std::string home = variable("HOME", fs::temp_directory_path());
  return variable("FULMEN_EMULATOR_CACHE",
                  variable("XDG_CACHE_HOME", home + "/.cache") + "/fulmen-emulator");
}

std::string compiler() { return variable("CXX", "g++"); }

// To an object. The instrumentation's functions are the emulator's (src/emulator/instrumented.cpp),
// so the sanitizer is not linked. FULMEN_SOURCE_DIR and the library's file come from CMake.
std::string command() {
  std::string flags = " -c -std=c++20 -O1 -fPIC -ffp-contract=off -w -Wno-psabi";
  if (fulmen::emulator::setting("FULMEN_EMULATOR_CHECK", 1) != 0) flags += " -g1 -fsanitize=thread";
  return compiler() + flags + " -I" + quoted(FULMEN_SOURCE_DIR "/src/emulator");
}

// Of the emulator and the compiler: what all kernels depend on.
const std::string& common_key() {
  static const std::string key = [] {
    Sha256 hash;
    std::vector<fs::path> files;
    for (const auto& entry : fs::recursive_directory_iterator(FULMEN_SOURCE_DIR "/src/emulator")) {
      const fs::path extension = entry.path().extension();
      if (extension == ".h" || extension == ".cuh") files.push_back(entry.path());
    }
    files.push_back(FULMEN_SOURCE_DIR "/tests/emulator/gpu/entry.h");
    std::sort(files.begin(), files.end());
    for (const fs::path& file : files) hash.add_field(read_file(file));
    hash.add_field(command());
    hash.add_field(run_command(compiler() + " --version").first);
    hash.add_field(FULMEN_EMULATOR_LIBRARY);
    return fulmen::cuda::hex(hash.finish());
  }();
  return key;
}

// One process at a time makes what belongs under a name.
class FileLock {
 public:
  explicit FileLock(const fs::path& path)
      : file_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
    if (file_ >= 0) ::flock(file_, LOCK_EX);
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  ~FileLock() {
    if (file_ >= 0) ::close(file_);
  }

 private:
  int file_;
};

// The folder with the headers of a program, and that of its own files.
struct Place {
  fs::path headers;
  fs::path kernel;
};

Place place_of(const _nvrtcProgram& program) {
  Sha256 headers;
  for (const auto& [name, text] : program.headers) {
    headers.add_field(name);
    headers.add_field(text);
  }
  const std::string headers_key = fulmen::cuda::hex(headers.finish());
  Sha256 kernel;
  kernel.add_field(headers_key);
  kernel.add_field(program.text);
  kernel.add_field(common_key());
  const fs::path folder = cache_folder();
  return {folder / "headers" / headers_key.substr(0, 32),
          folder / "kernels" / fulmen::cuda::hex(kernel.finish()).substr(0, 32)};
}

bool build(_nvrtcProgram& program, const Place& place, const fs::path& library) {
  for (const auto& [name, text] : program.headers) write_file(place.headers / name, text);
  const fs::path source = place.kernel / "kernel.cpp";
  const std::string name = program.text.substr(3, program.text.find('\n') - 3);  // "// name"
  write_file(source, "#include \"" FULMEN_SOURCE_DIR "/tests/emulator/gpu/entry.h\"\n" +
                         program.text + "\nextern \"C\" __attribute__((visibility(\"default\"))) " +
                         "void fulmen_emulated_thread(const void* params) {\n" +
                         "  fulmen::emulator::call(fulmen_kernel, params);\n}\n" +
                         "extern \"C\" __attribute__((visibility(\"default\")))\n" +
                         "const char fulmen_kernel_name[] = \"" + name + "\";\n");
  const fs::path object = place.kernel / "kernel.o";
  const fs::path made = place.kernel / "kernel.so.part";
  const auto [said, succeeded] = run_command(
      command() + " -I" + quoted(place.headers) + " -I" + quoted(FULMEN_SOURCE_DIR "/src") +
      " -o " + quoted(object) + ' ' + quoted(source) + " && " + compiler() + " -shared -o " +
      quoted(made) + ' ' + quoted(object) + ' ' + quoted(FULMEN_EMULATOR_LIBRARY) + " -Wl,-rpath," +
      quoted(fs::path(FULMEN_EMULATOR_LIBRARY).parent_path()));
  program.log = said;
  fs::remove(object);
  if (succeeded) fs::rename(made, library);
  return succeeded;
}

void copy_out(const std::string& from, char* to) { std::memcpy(to, from.data(), from.size()); }

}  // namespace

#define NVRTC extern "C" __attribute__((visibility("default")))

NVRTC int nvrtcVersion(int* major, int* minor) {
  *major = kVersion;
  *minor = 0;
  return kSuccess;
}
NVRTC const char* nvrtcGetErrorString(int result) {
  return result == kSuccess ? "NVRTC_SUCCESS" : "NVRTC_ERROR_COMPILATION";
}
NVRTC int nvrtcGetNumSupportedArchs(int* count) {
  *count = static_cast<int>(std::size(kArchs));
  return kSuccess;
}
NVRTC int nvrtcGetSupportedArchs(int* archs) {
  std::copy(std::begin(kArchs), std::end(kArchs), archs);
  return kSuccess;
}
NVRTC int nvrtcCreateProgram(_nvrtcProgram** program, const char* text, const char*,
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
  return kSuccess;
}
NVRTC int nvrtcDestroyProgram(_nvrtcProgram** program) {
  delete *program;
  *program = nullptr;
  return kSuccess;
}
NVRTC int nvrtcCompileProgram(_nvrtcProgram* program, int, const char* const*) {
  try {
    const Place place = place_of(*program);
    const fs::path library = place.kernel / "kernel.so";
    fs::create_directories(place.kernel);
    const FileLock lock(place.kernel / "lock");
    if (!fs::exists(library) && !build(*program, place, library)) return kCompilation;
    program->image = fulmen::emulator::kImagePrefix + library.string();
    return kSuccess;
  } catch (const std::exception& error) {
    program->log = error.what();
    return kCompilation;
  }
}
NVRTC int nvrtcGetProgramLogSize(_nvrtcProgram* program, std::size_t* bytes) {
  *bytes = program->log.size();
  return kSuccess;
}
NVRTC int nvrtcGetProgramLog(_nvrtcProgram* program, char* log) {
  copy_out(program->log, log);
  return kSuccess;
}
NVRTC int nvrtcGetCUBINSize(_nvrtcProgram* program, std::size_t* bytes) {
  *bytes = program->image.size() + 1;  // with the 0 that ends it
  return kSuccess;
}
NVRTC int nvrtcGetCUBIN(_nvrtcProgram* program, char* image) {
  std::memcpy(image, program->image.c_str(), program->image.size() + 1);
  return kSuccess;
}
