// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// How the library says no: a status and one sentence. Thrown anywhere inside, caught at the C ABI.
// sentence("q has ", 3, " heads") builds the text.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "fulmen/fulmen.h"

namespace fulmen {

enum class Status {
#define FULMEN_STATUS(name, code) name = code,
#include "fulmen/enums.def"
};

class Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& sentence)
      : std::runtime_error(sentence), status_(status) {}
  Status status() const { return status_; }

 private:
  Status status_;
};

// How most checks end: an argument outside what is allowed, as one sentence.
[[noreturn]] inline void refuse(const std::string& text) { throw Error(Status::kArgument, text); }

template <class... Parts>
std::string sentence(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace fulmen
