// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen.h section 2, status: sentences by thread, and the way of an exception into a status.

#include "api/boundary.h"

#include <new>
#include <string>

#include "api/convert.h"
#include "core/log.h"

namespace fulmen::api {
namespace {

constexpr const char* kOutOfMemory = "out of memory";

// The sentence of the last failure of this thread: static text where there is no memory for more.
struct LastError {
  std::string text;
  const char* shown = "";
};

LastError& last_error() {
  thread_local LastError the_error;
  return the_error;
}

}  // namespace

fulmen_status fail(Status status, const char* sentence) noexcept {
  LastError& error = last_error();
  try {
    error.text = sentence;
    error.shown = error.text.c_str();
  } catch (const std::bad_alloc&) {
    error.shown = kOutOfMemory;
  }
  log(LogLevel::kError, error.shown);
  return static_cast<fulmen_status>(status);
}

fulmen_status fail_with_current_exception() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    return fail(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return fail(Status::kOutOfMemory, kOutOfMemory);
  } catch (const std::exception& error) {
    return fail(Status::kInternal, error.what());
  } catch (...) {
    return fail(Status::kInternal, "an exception of unknown type; this is a bug in fulmen");
  }
}

}  // namespace fulmen::api

const char* fulmen_last_error(void) { return fulmen::api::last_error().shown; }

const char* fulmen_status_name(fulmen_status status) {
  switch (fulmen::api::number_of(status)) {
#define FULMEN_STATUS(name, code) \
  case code:                      \
    return #code;
#include "fulmen/enums.def"
    default:
      return "unknown status";
  }
}
