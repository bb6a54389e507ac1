// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The log callback of the process.

#include "core/log.h"

namespace fulmen {
namespace {

struct Sink {
  LogCallback callback = nullptr;
  void* user = nullptr;
};

Sink& sink() {
  static Sink the_sink;
  return the_sink;
}

}  // namespace

void set_log(LogCallback callback, void* user) { sink() = {callback, user}; }

bool log_is_on() { return sink().callback != nullptr; }

void log(LogLevel level, const char* message) {
  const Sink& to = sink();
  if (to.callback != nullptr) to.callback(level, message, to.user);
}

}  // namespace fulmen
