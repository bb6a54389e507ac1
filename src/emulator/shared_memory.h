// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Shared memory by 32-bit address: every access is checked for range and alignment. Bytes that
// nobody wrote hold NaN.
#pragma once

#include <cstring>

#include "emulator/block.h"

namespace fulmen::emulator {

// `bytes` bytes at `address`, which must be a multiple of `alignment`.
inline u8* shared_at(u32 address, u32 bytes, u32 alignment) {
  std::vector<u8>& shared = block().shared;
  const u64 end = u64{address} + bytes;
  if (address < kSharedBase || end > kSharedBase + shared.size()) {
    fail(std::to_string(bytes) + " bytes at shared address " + std::to_string(address) +
         ", which begins at " + std::to_string(kSharedBase) + " and has " +
         std::to_string(shared.size()) + " bytes");
  }
  if (address % alignment != 0) {
    fail("shared address " + std::to_string(address) + " is not a multiple of " +
         std::to_string(alignment));
  }
  return &shared[address - kSharedBase];
}

template <class T>
T load_shared(u32 address) {
  T x;
  std::memcpy(&x, shared_at(address, sizeof(T), sizeof(T)), sizeof(T));
  return x;
}

template <class T>
void store_shared(u32 address, const T& x) {
  std::memcpy(shared_at(address, sizeof(T), sizeof(T)), &x, sizeof(T));
}

// Where a byte lies under the 128-byte swizzle: 16-byte units of a 128-byte row are exchanged by
// the row's number mod 8.
constexpr u32 swizzled_128(u32 address) { return address ^ (((address >> 7) & 7) << 4); }

}  // namespace fulmen::emulator
