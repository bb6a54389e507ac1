// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Host code of kernels. A program is compiled with the emulator's instructions before the kernel's
// own into a shared library, kept in a folder under a hash of all that it depends on: the text, its
// headers, the emulator, the command and the compiler's version. Any number of processes may use
// the folder at once.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace fulmen::emulator {

using Headers = std::vector<std::pair<std::string, std::string>>;  // name, text

struct HostCode {
  std::string library;  // its path; "" where the compiler refused
  std::string log;
};
// The text begins with a line "// name of the kernel" and defines fulmen_kernel.
HostCode compile_for_host(const std::string& text, const Headers& headers);

}  // namespace fulmen::emulator
