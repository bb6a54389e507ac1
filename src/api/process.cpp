// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen.h section 8: the log and the threads of the process. A log in a file is written line by
// line, each whole, by one write, so that those of several processes do not mix.

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "api/boundary.h"
#include "core/error.h"
#include "core/log.h"
#include "cpu/thread_pool.h"

namespace fulmen::api {
namespace {

std::atomic<int> destination_file{-1};

void write_line(LogLevel level, const char* message, void*) {
  constexpr const char* kNames[] = {"error", "warning", "info"};
  const std::string line =
      sentence("fulmen ", kNames[static_cast<int>(level)], ": ", message, "\n");
  // A log that cannot be written is no reason to fail a call.
  [[maybe_unused]] const auto written = ::write(destination_file, line.data(), line.size());
}

}  // namespace

void log_to(const char* destination) {
  int file = STDERR_FILENO;
  if (std::strcmp(destination, "stderr") != 0) {
    file = ::open(destination, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  }
  if (file < 0) {
    throw Error(Status::kArgument,
                sentence("FULMEN_LOG is '", destination, "', which cannot be opened (",
                         std::strerror(errno), "); name a file or stderr, or unset it"));
  }
  destination_file = file;
  if (!log_is_on()) restore_environment_log();
}

void follow_environment_log() {
  static const bool followed = [] {
    const char* named = std::getenv("FULMEN_LOG");
    if (named != nullptr && *named != '\0') log_to(named);
    return true;
  }();
  static_cast<void>(followed);
}

void restore_environment_log() { set_log(destination_file < 0 ? nullptr : write_line, nullptr); }

namespace {

static_assert(static_cast<int>(LogLevel::kError) == FULMEN_LOG_ERROR);
static_assert(static_cast<int>(LogLevel::kWarning) == FULMEN_LOG_WARNING);
static_assert(static_cast<int>(LogLevel::kInfo) == FULMEN_LOG_INFO);

// int64_t and i64 may be different types of one width, and so the callbacks' types: each side is
// called through a function of its own type.
struct Caller {
  fulmen_log_callback log = nullptr;
  void* log_user = nullptr;
  fulmen_parallel_for parallel_for = nullptr;
  void* parallel_user = nullptr;
};

Caller& caller() {
  static Caller the_caller;
  return the_caller;
}

void forward_log(LogLevel level, const char* message, void*) {
  caller().log(static_cast<fulmen_log_level>(level), message, caller().log_user);
}

struct Work {
  cpu::Body body;
  void* context;
};

void run_body(void* context, int64_t index) {
  const Work& work = *static_cast<const Work*>(context);
  work.body(work.context, index);
}

void forward_parallel_for(i64 n, cpu::Body body, void* context, void*) {
  Work work{body, context};
  caller().parallel_for(n, run_body, &work, caller().parallel_user);
}

}  // namespace

}  // namespace fulmen::api

using fulmen::Error;
using fulmen::sentence;
using fulmen::Status;
using fulmen::api::caller;
using fulmen::api::guarded;

void fulmen_set_log(fulmen_log_callback callback, void* user) {
  caller().log = callback;
  caller().log_user = user;
  if (callback == nullptr) return fulmen::api::restore_environment_log();
  fulmen::set_log(fulmen::api::forward_log, nullptr);
}

fulmen_status fulmen_set_num_threads(int32_t num_threads) {
  return guarded([&] {
    if (num_threads < 0) {
      throw Error(Status::kArgument, sentence("num_threads is ", num_threads,
                                              "; allowed is 1 or more, or 0: default"));
    }
    fulmen::cpu::set_num_threads(num_threads);
  });
}

fulmen_status fulmen_set_parallel_for(fulmen_parallel_for parallel_for, int32_t max_threads,
                                      void* user) {
  return guarded([&] {
    if (parallel_for == nullptr) {
      fulmen::cpu::set_parallel_for(nullptr, 0, nullptr);
      return;
    }
    if (max_threads < 1) {
      throw Error(Status::kArgument,
                  sentence("max_threads is ", max_threads, "; allowed is 1 or more"));
    }
    caller().parallel_for = parallel_for;
    caller().parallel_user = user;
    fulmen::cpu::set_parallel_for(fulmen::api::forward_parallel_for, max_threads, nullptr);
  });
}
