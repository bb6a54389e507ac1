// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// How most checks end.
#pragma once

#include "core/error.h"

namespace fulmen {

// An argument outside what is allowed, as one sentence.
[[noreturn]] inline void refuse(const std::string& text) { throw Error(Status::kArgument, text); }

}  // namespace fulmen
