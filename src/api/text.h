// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Texts into buffers of callers: the rules at the head of fulmen.h section 7.
#pragma once

#include <string>

namespace fulmen::api {

// Cut between characters of UTF-8 where the buffer ends. Throws Error: null with a capacity.
void copy_text(const std::string& text, char* buffer, size_t capacity, size_t* needed);

}  // namespace fulmen::api
