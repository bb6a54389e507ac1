// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The library's one way to say something unasked: the caller's callback (fulmen_set_log). Silent
// until one is set. Setting it while other calls run is the caller's mistake; fulmen.h says so.
#pragma once

namespace fulmen {

// Same numbers as fulmen_log_level (the C ABI checks it at compile time).
enum class LogLevel { kError = 0, kWarning = 1, kInfo = 2 };

using LogCallback = void (*)(LogLevel level, const char* message, void* user);

struct LogSink {
  LogCallback callback = nullptr;
  void* user = nullptr;
};
inline LogSink the_log;

inline void set_log(LogCallback callback, void* user) { the_log = {callback, user}; }

// Whether a message has a reader: it need not be built without.
inline bool log_is_on() { return the_log.callback != nullptr; }

inline void log(LogLevel level, const char* message) {
  if (log_is_on()) the_log.callback(level, message, the_log.user);
}

}  // namespace fulmen
