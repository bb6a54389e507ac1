// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a function that reads Arguments and returns a number to a symbol that tvm-ffi calls.
#pragma once

#include "ffi/arguments.h"
#include "fulmen/fulmen.h"

namespace fulmen::ffi {

using Body = int64_t (*)(Arguments);

// Runs a body; an error, of the library or any other, is raised in Python. 0, or -1 after an error.
int guarded(Body body, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result);

}  // namespace fulmen::ffi

#define FULMEN_FFI_EXPORT(verb)                                                                \
  extern "C" FULMEN_API int __tvm_ffi_fulmen_##verb(void*, const fulmen::ffi::TVMFFIAny* args, \
                                                    int32_t num_args,                          \
                                                    fulmen::ffi::TVMFFIAny* result) {          \
    return fulmen::ffi::guarded(fulmen::ffi::verb, args, num_args, result);                    \
  }
