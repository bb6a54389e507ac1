// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// JSON, as far as the library writes it: quoted text, numbers without the locale, lists, members.
#pragma once

#include <string>
#include <vector>

namespace fulmen::json {

// "text", with quotes, backslashes and control characters escaped.
std::string quoted(const std::string& text);

// A number that reads back as the same one; null where it is not finite.
std::string number(double value);

// [a, b, c] of texts that are JSON already.
std::string list(const std::vector<std::string>& items);

// "key": value, where the value is JSON already.
std::string field(const char* key, const std::string& value);

}  // namespace fulmen::json
