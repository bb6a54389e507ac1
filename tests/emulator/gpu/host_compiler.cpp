// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
#include "emulator/gpu/host_compiler.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "emulator/gpu/gpu.h"
#include "gpu/jit/sha256.h"

namespace fulmen::emulator {
namespace {

namespace fs = std::filesystem;

// FULMEN_SOURCE_DIR and FULMEN_EMULATOR_LIBRARY come from CMake.
constexpr const char* kEmulator = FULMEN_SOURCE_DIR "/src/emulator";
constexpr const char* kEntry = FULMEN_SOURCE_DIR "/tests/emulator/gpu/entry.h";

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

// The instrumentation's functions are the emulator's (src/emulator/instrumented.cpp), so the
// sanitizer is not linked.
std::string command() {
  const bool check = setting("FULMEN_EMULATOR_CHECK", 1) != 0;
  return compiler() + " -std=c++20 -O1 -fPIC -ffp-contract=off -w -Wno-psabi" +
         (check ? " -g1 -fsanitize=thread" : "");
}

std::string key_of(std::initializer_list<std::string> fields) {
  gpu::Sha256 hash;
  for (const std::string& field : fields) hash.add_field(field);
  return gpu::hex(hash.finish()).substr(0, 32);
}

// Of the compiler and what it reads before all kernels.
const std::string& entry_key() {
  static const std::string key =
      key_of({read_file(kEntry), command(), run_command(compiler() + " --version").first});
  return key;
}

// Of the emulator too.
const std::string& common_key() {
  static const std::string key = [] {
    std::vector<fs::path> files;
    for (const auto& entry : fs::recursive_directory_iterator(kEmulator)) {
      const fs::path extension = entry.path().extension();
      if (extension == ".h" || extension == ".cuh") files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    std::string texts;
    for (const fs::path& file : files) texts += read_file(file);
    return key_of({entry_key(), texts, FULMEN_EMULATOR_LIBRARY});
  }();
  return key;
}

// One process at a time makes what lies in a folder.
class FolderLock {
 public:
  explicit FolderLock(const fs::path& folder) {
    fs::create_directories(folder);
    file_ = ::open((folder / "lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file_ >= 0) ::flock(file_, LOCK_EX);
  }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock() {
    if (file_ >= 0) ::close(file_);
  }

 private:
  int file_;
};

// entry.h, beside it what the compiler made of it: the standard library's headers take most of the
// time of a small kernel.
fs::path entry_header() {
  const fs::path folder = cache_folder() / "entry" / entry_key();
  const fs::path header = folder / "entry.h";
  const fs::path made = folder / "entry.h.gch";
  const FolderLock lock(folder);
  if (!fs::exists(made)) {
    const fs::path part = folder / "entry.part";
    write_file(header, read_file(kEntry));
    run_command(command() + " -x c++-header -o " + quoted(part) + ' ' + quoted(header));
    if (fs::exists(part)) fs::rename(part, made);
  }
  return header;
}

// The headers as files, written once.
fs::path header_folder(const Headers& headers) {
  std::string texts;
  for (const auto& [name, text] : headers) texts += name + '\n' + text;
  const fs::path folder = cache_folder() / "headers" / key_of({texts});
  const FolderLock lock(folder);
  if (fs::exists(folder / "complete")) return folder;
  for (const auto& [name, text] : headers) write_file(folder / name, text);
  write_file(folder / "complete", "");
  return folder;
}

// With the functions that driver.cpp looks for.
std::string with_entry(const std::string& text) {
  const std::string name = text.substr(3, text.find('\n') - 3);
  return text + "\n#define FULMEN_VISIBLE extern \"C\" __attribute__((visibility(\"default\")))\n" +
         "FULMEN_VISIBLE void " + kThreadEntry + "(const void* params) {\n" +
         "  fulmen::emulator::call(fulmen_kernel, params);\n}\n" + "FULMEN_VISIBLE const char " +
         kKernelName + "[] = \"" + name + "\";\n";
}

// Through an object: the instrumented code shall not be linked with ThreadSanitizer.
std::pair<std::string, bool> build(const fs::path& source, const fs::path& headers,
                                   const fs::path& library) {
  const fs::path object = source.parent_path() / "kernel.o";
  const fs::path made = source.parent_path() / "kernel.so.part";
  const fs::path emulator = FULMEN_EMULATOR_LIBRARY;
  auto said = run_command(
      command() + " -include " + quoted(entry_header()) + " -I" + quoted(kEmulator) + " -I" +
      quoted(headers) + " -I" + quoted(FULMEN_SOURCE_DIR "/src") + " -c -o " + quoted(object) +
      ' ' + quoted(source) + " && " + compiler() + " -shared -o " + quoted(made) + ' ' +
      quoted(object) + ' ' + quoted(emulator) + " -Wl,-rpath," + quoted(emulator.parent_path()));
  fs::remove(object);
  if (said.second) fs::rename(made, library);
  return said;
}

}  // namespace

HostCode compile_for_host(const std::string& text, const Headers& headers) {
  const fs::path written = header_folder(headers);
  const fs::path folder = cache_folder() / "kernels" / key_of({written, text, common_key()});
  const fs::path library = folder / "kernel.so";
  const FolderLock lock(folder);
  if (fs::exists(library)) return {library, ""};
  write_file(folder / "kernel.cpp", with_entry(text));
  const auto [said, succeeded] = build(folder / "kernel.cpp", written, library);
  return {succeeded ? library.string() : "", said};
}

}  // namespace fulmen::emulator
