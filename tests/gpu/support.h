// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What several tests of src/gpu need: environment variables and folders for a scope, an Error by
// its status and words, and a kernel small enough to make up.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>

#include "core/error.h"
#include "fake_driver.h"
#include "gpu/jit/compiler.h"

namespace fulmen::gpu {

class ScopedVariable {
 public:
  ScopedVariable(const char* name, const std::optional<std::string>& value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    set(value);
  }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;
  ~ScopedVariable() { set(old_); }

 private:
  void set(const std::optional<std::string>& value) {
    if (value) {
      ::setenv(name_, value->c_str(), 1);
    } else {
      ::unsetenv(name_);
    }
  }
  const char* name_;
  std::optional<std::string> old_;
};

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = std::filesystem::temp_directory_path() / "fulmen-test-XXXXXX";
    path_ = ::mkdtemp(pattern.data());
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::permissions(path_, std::filesystem::perms::owner_all, ignored);
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// The Error that `action` throws must have this status and hold each of these words.
template <class Action>
void expect_error(Status status, std::initializer_list<const char*> words, const Action& action) {
  try {
    action();
    ADD_FAILURE() << "no error was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.status()), static_cast<int>(status)) << error.what();
    for (const char* word : words) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
          << "'" << word << "' is missing in: " << error.what();
    }
  }
}

// What `body` returns in a child process; changes of the process's own state stay there.
template <class Body>
bool holds_in_child(const Body& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body() ? 0 : 1);
  int status = 0;
  return ::waitpid(child, &status, 0) == child && status == 0;
}

// A kernel that stands for any: its text is valid, though nothing here runs it.
inline KernelSpec small_spec(const std::string& name) {
  KernelSpec spec;
  spec.name = name;
  spec.include = "kernels/attention/mask.cuh";
  spec.function = "fulmen::nothing";
  spec.config_type = "fulmen::IntervalMask";
  spec.config = {{"causal", "true"}, {"chunk", "8"}};
  spec.params_type = "fulmen::SequenceShape";
  spec.params_bytes = 12;
  spec.num_threads = 128;
  return spec;
}

// The fake driver's own functions.
template <class Function>
Function* fake_driver(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(::dlopen(FAKE_DRIVER_FILE, RTLD_NOW), name));
}

inline int num_calls(const char* function) {
  return fake_driver<FakeNumCalls>("fake_num_calls")(function);
}
inline int num_launches() { return fake_driver<FakeNumLaunches>("fake_num_launches")(); }
inline FakeLaunch launch_number(int index) {
  return fake_driver<FakeLaunchOf>("fake_launch")(index);
}
inline FakeLaunch last_launch() { return launch_number(num_launches() - 1); }

// How many programs the fake compiler was given.
inline int num_compilations() {
  void* compiler = ::dlopen(FAKE_NVRTC_FILE, RTLD_NOW);
  return reinterpret_cast<int (*)()>(::dlsym(compiler, "fake_num_compilations"))();
}

}  // namespace fulmen::gpu
