// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The boundary between C++ inside and C outside: nothing thrown crosses it. Each C function is
// return guarded([&] { ... }), in which Error becomes its status and sentence.
#pragma once

#include "api/log_file.h"
#include "core/error.h"
#include "fulmen/fulmen.h"

namespace fulmen::api {

// Remembers the sentence for fulmen_last_error of this thread, tells the log, returns the status.
fulmen_status fail(Status status, const char* sentence) noexcept;

// The exception in flight, as a failure. Called from a catch block.
fulmen_status fail_with_current_exception() noexcept;

template <class Body>
fulmen_status guarded(const Body& body) noexcept {
  try {
    follow_environment_log();
    body();
    return FULMEN_OK;
  } catch (...) {
    return fail_with_current_exception();
  }
}

}  // namespace fulmen::api
