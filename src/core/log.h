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

void set_log(LogCallback callback, void* user);

// So that nobody builds a message that no one reads.
bool log_is_on();

void log(LogLevel level, const char* message);

}  // namespace fulmen
