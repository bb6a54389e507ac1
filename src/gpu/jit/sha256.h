// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// SHA-256 (FIPS 180-4, section 6.2): the kernel cache's key and checksum. A cryptographic hash
// because an entry is machine code: two different kernels must never share a name, not even when
// someone tries; and its own 60 lines because they are cheaper than a dependency.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace fulmen::gpu {

class Sha256 {
 public:
  using Digest = std::array<std::uint8_t, 32>;

  void add(std::string_view bytes);

  // A field of a key: its length first, so that ("ab", "c") and ("a", "bc") differ.
  void add_field(std::string_view bytes);

  Digest finish();

 private:
  void compress(const std::uint8_t* block);

  std::array<std::uint32_t, 8> state_{0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au,
                                      0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};
  std::array<std::uint8_t, 64> pending_{};
  std::uint64_t num_bytes_ = 0;
};

Sha256::Digest sha256(std::string_view bytes);
std::string hex(const Sha256::Digest& digest);
std::string bytes_of(const Sha256::Digest& digest);  // as they are, for files

}  // namespace fulmen::gpu
