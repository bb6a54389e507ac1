// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// How the library says no: a status and one sentence. Thrown anywhere inside, caught at the C ABI.
// sentence("q has ", 3, " heads") builds the text.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace fulmen {

// Same numbers as fulmen_status (the C ABI checks it at compile time).
enum class Status {
  kOk = 0,
  kArgument = 1,
  kShape = 2,
  kDType = 3,
  kUnsupported = 4,
  kDevice = 5,
  kCompile = 6,
  kNotFound = 7,
  kOutOfMemory = 8,
  kInternal = 9,
};

class Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& sentence)
      : std::runtime_error(sentence), status_(status) {}
  Status status() const { return status_; }

 private:
  Status status_;
};

template <class... Parts>
std::string sentence(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace fulmen
