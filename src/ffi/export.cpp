// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// How an error leaves the library: under the name of its status, for python/fulmen/errors.py.

#include "ffi/export.h"

#include <dlfcn.h>

#include <exception>
#include <string_view>

#include "ffi/refusal.h"

namespace fulmen::ffi {
namespace {

// tvm-ffi has loaded its library for all to see before it calls us: nothing is linked.
template <typename Function>
Function found(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

TVMFFIByteArray text(std::string_view of) { return {of.data(), of.size()}; }

// Without a backtrace: tvm-ffi would read the symbols of every library of the process for it, which
// takes seconds beside PyTorch, and the frames of a refusal say nothing to its reader.
void raise(std::string_view kind, std::string_view sentence) {
  using Create = int (*)(const TVMFFIByteArray* kind, const TVMFFIByteArray* message,
                         const TVMFFIByteArray* backtrace, void** error);
  using Take = void (*)(void* error);
  using Release = int (*)(void* error);
  static const auto create = found<Create>("TVMFFIErrorCreate");
  static const auto set_raised = found<Take>("TVMFFIErrorSetRaised");
  static const auto release = found<Release>("TVMFFIObjectDecRef");
  if (create == nullptr || set_raised == nullptr || release == nullptr) return;
  const TVMFFIByteArray kind_text = text(kind), message = text(sentence), backtrace = text("");
  void* error = nullptr;
  if (create(&kind_text, &message, &backtrace, &error) != 0) return;
  set_raised(error);
  release(error);
}

}  // namespace

// No exception may leave: tvm-ffi ends the process on those that it does not know.
int guarded(Body body, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result) {
  try {
    *result = TVMFFIAny{kTVMFFIInt, 0, {body(Arguments(args, num_args))}};
    return 0;
  } catch (const Refusal& refusal) {
    raise(fulmen_status_name(refusal.status), refusal.sentence);
  } catch (const std::exception& error) {
    raise(fulmen_status_name(FULMEN_ERROR_INTERNAL), error.what());
  } catch (...) {
    raise(fulmen_status_name(FULMEN_ERROR_INTERNAL), "an unknown exception left the library");
  }
  return -1;
}

}  // namespace fulmen::ffi
