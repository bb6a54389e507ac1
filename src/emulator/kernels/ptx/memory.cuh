// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Loads and stores on the host: what src/kernels/ptx/memory.cuh declares.
#pragma once

#include "emulator/block.h"
#include "emulator/shared_memory.h"
#include "emulator/warp.h"

namespace fulmen::ptx {

struct U32x4 {
  u32 word[4];
};
struct U32x2 {
  u32 word[2];
};
struct F32x2 {
  float word[2];
};

inline u32 dynamic_shared() { return emulator::kSharedBase; }
inline u32 load_shared(u32 address, Site site = Where::current()) {
  return emulator::load_shared<u32>(address, site);
}
inline void store_shared(u32 address, u32 x, Site site = Where::current()) {
  emulator::store_shared(address, x, site);
}
inline void or_shared(u32 address, u32 bits, Site site = Where::current()) {
  emulator::or_shared(address, bits, site);
}
inline void store_shared_x2(u32 address, U32x2 x, Site site = Where::current()) {
  emulator::store_shared(address, x, site);
}
inline U32x2 load_shared_x2(u32 address, Site site = Where::current()) {
  return emulator::load_shared<U32x2>(address, site);
}
inline F32x2 load_shared_f32x2(u32 address, Site site = Where::current()) {
  return emulator::load_shared<F32x2>(address, site);
}
inline U32x4 load_shared_x4(u32 address, Site site = Where::current()) {
  return emulator::load_shared<U32x4>(address, site);
}
inline void store_shared_x4(u32 address, U32x4 x, Site site = Where::current()) {
  emulator::store_shared(address, x, site);
}

inline void stmatrix_x4(u32 row_address, U32x4 x, Site site = Where::current()) {
  emulator::store_matrices(row_address, {x.word[0], x.word[1], x.word[2], x.word[3]}, site);
}
inline void stmatrix_x4_trans(u32 row_address, U32x4 x, Site site = Where::current()) {
  emulator::store_transposed_matrices(row_address, {x.word[0], x.word[1], x.word[2], x.word[3]},
                                      site);
}
inline U32x4 ldmatrix_x4(u32 row_address, Site site = Where::current()) {
  const std::array<u32, 4> words = emulator::load_matrices(row_address, site);
  return {{words[0], words[1], words[2], words[3]}};
}

inline U32x4 load_global_x4(const u16* pointer, Site site = Where::current()) {
  if (reinterpret_cast<u64>(pointer) % sizeof(U32x4) != 0) {
    emulator::fail("ld.global.v4 from an address that is not a multiple of 16");
  }
  emulator::on_global(pointer, sizeof(U32x4), emulator::Kind::kRead, site);
  U32x4 x;
  emulator::copy_bytes(&x, pointer, sizeof(x));
  return x;
}
template <class T>
T load_constant(const T* pointer, Site site = Where::current()) {
  if (reinterpret_cast<u64>(pointer) % sizeof(T) != 0) {
    emulator::fail("ld.global.nc from an address that is not a multiple of the element's size");
  }
  emulator::on_global(pointer, sizeof(T), emulator::Kind::kRead, site);
  return emulator::load_unseen(pointer);
}

inline void store_global_x4(u16* pointer, U32x4 x, Site site = Where::current()) {
  if (reinterpret_cast<u64>(pointer) % sizeof(x) != 0) {
    emulator::fail("st.global.v4 to an address that is not a multiple of 16");
  }
  emulator::on_global(pointer, sizeof(x), emulator::Kind::kWrite, site);
  emulator::copy_bytes(pointer, &x, sizeof(x));
}

inline u32 atomic_inc(u32* pointer, u32 last, Site site = Where::current()) {
  emulator::on_global(pointer, sizeof(u32), emulator::Kind::kAtomic, site);
  const u32 old = emulator::load_unseen(pointer);
  emulator::store_unseen(pointer, old >= last ? 0 : old + 1);
  return old;
}

inline u8* shared_bytes() { return emulator::block().shared; }

}  // namespace fulmen::ptx
