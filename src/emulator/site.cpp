// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Names of sites.
#include "emulator/site.h"

#include <dlfcn.h>

#include <cstdio>
#include <memory>
#include <sstream>

namespace fulmen::emulator {
namespace {

// "kernels/ptx/memory.cuh:30" of a path and line with more before it.
std::string shorten(const std::string& line_text) {
  const size_t folder = line_text.rfind("/kernels/");
  if (folder != std::string::npos) return line_text.substr(folder + 1);
  const size_t slash = line_text.rfind('/');
  return slash == std::string::npos ? line_text : line_text.substr(slash + 1);
}

// The lines of one address, innermost first, at most three.
std::string lines_of_code(const void* address) {
  Dl_info info{};
  if (::dladdr(address, &info) == 0 || info.dli_fname == nullptr) return "unknown code";
  const u64 offset = reinterpret_cast<u64>(address) - reinterpret_cast<u64>(info.dli_fbase);
  std::ostringstream command;
  command << "addr2line -i -e '" << info.dli_fname << "' 0x" << std::hex << offset - 1
          << " 2>/dev/null";
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen(command.str().c_str(), "r"), ::pclose);
  std::string text;
  char line[4096];
  for (int count = 0; pipe && count < 3 && std::fgets(line, sizeof(line), pipe.get());) {
    std::string line_text = line;
    line_text.resize(line_text.find_first_of(" \n"));
    if (line_text.empty() || line_text[0] == '?') continue;
    text += (count++ == 0 ? "" : " in ") + shorten(line_text);
  }
  if (text.empty()) {
    std::ostringstream where;
    where << "code at offset 0x" << std::hex << offset;
    return where.str();
  }
  return text;
}

}  // namespace

std::string Site::text() const {
  if (bits_ == 0) return "unknown line";
  if (bits_ & kIsCode) return lines_of_code(reinterpret_cast<const void*>(bits_ & ~kIsCode));
  const auto where = std::bit_cast<std::source_location>(bits_);
  return shorten(std::string(where.file_name()) + ":" + std::to_string(where.line()));
}

}  // namespace fulmen::emulator
