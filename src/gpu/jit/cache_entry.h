// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One compiled kernel as bytes, with a checksum; and files that are either whole or absent.
// A file that was cut short, changed or written by another version decodes to nothing.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "gpu/jit/compiler.h"

namespace fulmen::gpu {

// "fulmen kernel 1\n" | SHA-256 of the rest | bytes of log, of cubin (u64 each) | log | cubin
std::string encode(const CompiledKernel& kernel);
std::optional<CompiledKernel> decode(std::string_view bytes);

// The whole file, or nothing. `touch` marks it as used now.
std::optional<std::string> read_file(const std::string& path, bool touch);

// Writes a temporary file beside `path` and renames it, so that readers see all or nothing. Returns
// "" or what went wrong; then nothing is left behind.
std::string write_file_atomically(const std::string& path, std::string_view bytes);

}  // namespace fulmen::gpu
