// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// How an error leaves the library: under the name of its status, for python/fulmen/errors.py.

#include "ffi/export.h"

#include <dlfcn.h>

#include <exception>

#include "ffi/refusal.h"

namespace fulmen::ffi {
namespace {

// tvm-ffi has loaded its library for all to see before it calls us: nothing is linked.
void raise(const char* kind, const char* sentence) {
  using SetRaised = void (*)(const char* kind, const char* message);
  static const auto set_raised =
      reinterpret_cast<SetRaised>(dlsym(RTLD_DEFAULT, "TVMFFIErrorSetRaisedFromCStr"));
  if (set_raised != nullptr) set_raised(kind, sentence);
}

}  // namespace

// No exception may leave: tvm-ffi ends the process on those that it does not know.
int guarded(Body body, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result) {
  try {
    *result = TVMFFIAny{kTVMFFIInt, 0, {body(Arguments(args, num_args))}};
    return 0;
  } catch (const Refusal& refusal) {
    raise(fulmen_status_name(refusal.status), refusal.sentence.c_str());
  } catch (const std::exception& error) {
    raise(fulmen_status_name(FULMEN_ERROR_INTERNAL), error.what());
  } catch (...) {
    raise(fulmen_status_name(FULMEN_ERROR_INTERNAL), "an unknown exception left the library");
  }
  return -1;
}

}  // namespace fulmen::ffi
