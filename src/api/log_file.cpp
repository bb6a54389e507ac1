// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Lines are written whole, by one write each, so that those of several processes do not mix.

#include "api/log_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core/error.h"
#include "core/log.h"

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

}  // namespace fulmen::api
