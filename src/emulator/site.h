// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A line of a kernel's text, in eight bytes: the line that called a function of kernels/ptx, or
// the address of an instrumented load or store, whose line is looked up (with addr2line, where it
// is installed) only when a report needs it.
#pragma once

#include <bit>
#include <source_location>
#include <string>

#include "kernels/base.cuh"

namespace fulmen::emulator {

class Site {
 public:
  constexpr Site() = default;
  constexpr Site(std::source_location where) : bits_(std::bit_cast<u64>(where)) {}
  static Site of_code(const void* address) {
    Site site;
    site.bits_ = reinterpret_cast<u64>(address) | kIsCode;
    return site;
  }

  // "kernels/simt/forward_simt.cuh:88"; where functions were inlined, the innermost line first.
  std::string text() const;
  constexpr bool operator==(const Site&) const = default;
  constexpr u64 key() const { return bits_; }

 private:
  static constexpr u64 kIsCode = u64{1} << 63;  // addresses of programs have it clear
  u64 bits_ = 0;
};
static_assert(sizeof(std::source_location) == 8);

using Where = std::source_location;  // as a default argument: Site site = Where::current()

}  // namespace fulmen::emulator

namespace fulmen::ptx {  // the last argument of functions that touch memory
using emulator::Site;
using emulator::Where;
}  // namespace fulmen::ptx
