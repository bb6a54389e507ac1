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

constexpr bool agree(Status status, fulmen_status code) {
  return static_cast<int>(status) == static_cast<int>(code);
}
static_assert(agree(Status::kOk, FULMEN_OK));
static_assert(agree(Status::kArgument, FULMEN_ERROR_ARGUMENT));
static_assert(agree(Status::kShape, FULMEN_ERROR_SHAPE));
static_assert(agree(Status::kDType, FULMEN_ERROR_DTYPE));
static_assert(agree(Status::kUnsupported, FULMEN_ERROR_UNSUPPORTED));
static_assert(agree(Status::kDevice, FULMEN_ERROR_DEVICE));
static_assert(agree(Status::kCompile, FULMEN_ERROR_COMPILE));
static_assert(agree(Status::kNotFound, FULMEN_ERROR_NOT_FOUND));
static_assert(agree(Status::kOutOfMemory, FULMEN_ERROR_OUT_OF_MEMORY));
static_assert(agree(Status::kInternal, FULMEN_ERROR_INTERNAL));

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
    case FULMEN_OK:
      return "FULMEN_OK";
    case FULMEN_ERROR_ARGUMENT:
      return "FULMEN_ERROR_ARGUMENT";
    case FULMEN_ERROR_SHAPE:
      return "FULMEN_ERROR_SHAPE";
    case FULMEN_ERROR_DTYPE:
      return "FULMEN_ERROR_DTYPE";
    case FULMEN_ERROR_UNSUPPORTED:
      return "FULMEN_ERROR_UNSUPPORTED";
    case FULMEN_ERROR_DEVICE:
      return "FULMEN_ERROR_DEVICE";
    case FULMEN_ERROR_COMPILE:
      return "FULMEN_ERROR_COMPILE";
    case FULMEN_ERROR_NOT_FOUND:
      return "FULMEN_ERROR_NOT_FOUND";
    case FULMEN_ERROR_OUT_OF_MEMORY:
      return "FULMEN_ERROR_OUT_OF_MEMORY";
    case FULMEN_ERROR_INTERNAL:
      return "FULMEN_ERROR_INTERNAL";
    default:
      return "unknown status";
  }
}
