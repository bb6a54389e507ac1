// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Shared memory by 32-bit address: every access is checked for range and alignment. Bytes that
// no thread wrote hold NaN.
#pragma once

#include <cstring>

#include "emulator/cluster.h"

namespace fulmen::emulator {

// `bytes` bytes at `address`, which must be a multiple of `alignment`.
inline u8* shared_at(u32 address, u32 bytes, u32 alignment) {
  return bytes_at(own(address), bytes, alignment);
}

// By an engine, whose accesses are checked as a whole.
template <class T>
T load_raw(u32 address) {
  T x;
  copy_bytes(&x, shared_at(address, sizeof(T), sizeof(T)), sizeof(T));
  return x;
}
template <class T>
void store_raw(u32 address, const T& x) {
  copy_bytes(shared_at(address, sizeof(T), sizeof(T)), &x, sizeof(T));
}

// By the running thread.
template <class T>
T load_shared(u32 address, Site site = Where::current()) {
  shared_at(address, sizeof(T), sizeof(T));
  on_shared(address - kSharedBase, sizeof(T), Kind::kRead, site);
  return load_raw<T>(address);
}
template <class T>
void store_shared(u32 address, const T& x, Site site = Where::current()) {
  shared_at(address, sizeof(T), sizeof(T));
  on_shared(address - kSharedBase, sizeof(T), Kind::kWrite, site);
  store_raw(address, x);
}

// Sets bits beside those that other threads set.
inline void or_shared(u32 address, u32 bits, Site site = Where::current()) {
  shared_at(address, sizeof(u32), sizeof(u32));
  on_shared(address - kSharedBase, sizeof(u32), Kind::kAtomic, site);
  store_raw(address, load_raw<u32>(address) | bits);
}

// The same of any block of the cluster.
template <class T>
T load_cluster(u32 address, Site site) {
  const Location from = in_cluster(address);
  const u8* const bytes = bytes_at(from, sizeof(T), sizeof(T));
  on_cluster(from, sizeof(T), Kind::kRead, site);
  T x;
  copy_bytes(&x, bytes, sizeof(T));
  return x;
}
template <class T>
void store_cluster(u32 address, const T& x, Site site) {
  const Location to = in_cluster(address);
  u8* const bytes = bytes_at(to, sizeof(T), sizeof(T));
  on_cluster(to, sizeof(T), Kind::kWrite, site);
  copy_bytes(bytes, &x, sizeof(T));
}

// Where a byte lies under the 128-byte swizzle: 16-byte vectors of a 128-byte row are exchanged by
// the row's number mod 8.
constexpr u32 swizzled_128(u32 address) { return address ^ (((address >> 7) & 7) << 4); }
// Of rows of 64 bytes.
constexpr u32 swizzled_64(u32 address) { return address ^ (((address >> 7) & 3) << 4); }

}  // namespace fulmen::emulator
