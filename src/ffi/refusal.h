// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// How the binding says no: a status and one sentence, thrown by whoever reads an argument, raised
// in Python by exports.cpp under the name of the status.
#pragma once

#include <string>

#include "fulmen/fulmen.h"

namespace fulmen::ffi {

struct Refusal {
  fulmen_status status;
  std::string sentence;
};

// A failed call of the C ABI, with its sentence: arrays are called what the caller calls them.
void check_failed(fulmen_status status);
inline void check(fulmen_status status) {
  if (status != FULMEN_OK) check_failed(status);
}

}  // namespace fulmen::ffi
