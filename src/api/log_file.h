// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// FULMEN_LOG: a file, or "stderr", that hears what the log says while no callback is set.
#pragma once

namespace fulmen::api {

// Sends the log there: one line a message, with its level. `destination`: "stderr" or the path of a
// file, which is made or added to; a callback goes first. Throws Error kArgument when it cannot be
// opened.
void log_to(const char* destination);

// Once in the life of the process, at its first call: what FULMEN_LOG says. Throws like log_to,
// and then again at the next call.
void follow_environment_log();

// Back to that, after a callback: FULMEN_LOG's destination, or silence.
void restore_environment_log();

}  // namespace fulmen::api
