// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Kernel text is compiled with -fsanitize=thread and linked without ThreadSanitizer: these are the
// functions that the compiler then calls before every load and store through a pointer, so that no
// kernel has to say what it touches. The same is done by KCSAN in the Linux kernel. Code of tests
// in the same file calls them too, outside of any thread of a block; nothing happens then.
#include <cstring>

#include "emulator/accesses.h"
#include "emulator/block.h"

namespace fulmen::emulator {
namespace {

void access(const void* address, u64 bytes, Kind kind, const void* code) {
  if (!watching) return;
  on_pointer(address, bytes, kind, Site::of_code(code));
}

}  // namespace
}  // namespace fulmen::emulator

using fulmen::u64;
using fulmen::emulator::Kind;

#define FULMEN_ACCESS(NAME, BYTES, KIND)                                               \
  void NAME(void* address) {                                                           \
    fulmen::emulator::access(address, BYTES, Kind::KIND, __builtin_return_address(0)); \
  }
#define FULMEN_ACCESSES(BYTES)                                                           \
  FULMEN_ACCESS(__tsan_read##BYTES, BYTES, kRead)                                        \
  FULMEN_ACCESS(__tsan_write##BYTES, BYTES, kWrite)                                      \
  FULMEN_ACCESS(__tsan_unaligned_read##BYTES, BYTES, kRead)                              \
  FULMEN_ACCESS(__tsan_unaligned_write##BYTES, BYTES, kWrite)                            \
  FULMEN_ACCESS(__tsan_volatile_read##BYTES, BYTES, kRead)                               \
  FULMEN_ACCESS(__tsan_volatile_write##BYTES, BYTES, kWrite)                             \
  void __tsan_read_write##BYTES(void* address) {                                         \
    fulmen::emulator::access(address, BYTES, Kind::kRead, __builtin_return_address(0));  \
    fulmen::emulator::access(address, BYTES, Kind::kWrite, __builtin_return_address(0)); \
  }
// Atomics of the standard library, in tests: kernels have those of kernels/ptx.
#define FULMEN_ATOMICS(BITS, TYPE)                                                          \
  TYPE __tsan_atomic##BITS##_load(const TYPE* a, int) {                                     \
    return __atomic_load_n(a, __ATOMIC_SEQ_CST);                                            \
  }                                                                                         \
  void __tsan_atomic##BITS##_store(TYPE* a, TYPE x, int) {                                  \
    __atomic_store_n(a, x, __ATOMIC_SEQ_CST);                                               \
  }                                                                                         \
  TYPE __tsan_atomic##BITS##_exchange(TYPE* a, TYPE x, int) {                               \
    return __atomic_exchange_n(a, x, __ATOMIC_SEQ_CST);                                     \
  }                                                                                         \
  TYPE __tsan_atomic##BITS##_fetch_add(TYPE* a, TYPE x, int) {                              \
    return __atomic_fetch_add(a, x, __ATOMIC_SEQ_CST);                                      \
  }                                                                                         \
  TYPE __tsan_atomic##BITS##_fetch_sub(TYPE* a, TYPE x, int) {                              \
    return __atomic_fetch_sub(a, x, __ATOMIC_SEQ_CST);                                      \
  }                                                                                         \
  bool __tsan_atomic##BITS##_compare_exchange_strong(TYPE* a, TYPE* c, TYPE x, int, int) {  \
    return __atomic_compare_exchange_n(a, c, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }                                                                                         \
  bool __tsan_atomic##BITS##_compare_exchange_weak(TYPE* a, TYPE* c, TYPE x, int, int) {    \
    return __atomic_compare_exchange_n(a, c, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }

extern "C" {
#pragma GCC diagnostic ignored "-Wmissing-declarations"
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wmissing-prototypes"
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}
FULMEN_ACCESSES(1)
FULMEN_ACCESSES(2)
FULMEN_ACCESSES(4)
FULMEN_ACCESSES(8)
FULMEN_ACCESSES(16)
void __tsan_read_range(void* address, u64 bytes) {
  fulmen::emulator::access(address, bytes, Kind::kRead, __builtin_return_address(0));
}
void __tsan_write_range(void* address, u64 bytes) {
  fulmen::emulator::access(address, bytes, Kind::kWrite, __builtin_return_address(0));
}
// clang calls these instead of the C library's.
void* __tsan_memcpy(void* to, const void* from, u64 bytes) {
  fulmen::emulator::access(from, bytes, Kind::kRead, __builtin_return_address(0));
  fulmen::emulator::access(to, bytes, Kind::kWrite, __builtin_return_address(0));
  return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, u64 bytes) {
  fulmen::emulator::access(from, bytes, Kind::kRead, __builtin_return_address(0));
  fulmen::emulator::access(to, bytes, Kind::kWrite, __builtin_return_address(0));
  return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int byte, u64 bytes) {
  fulmen::emulator::access(to, bytes, Kind::kWrite, __builtin_return_address(0));
  return std::memset(to, byte, bytes);
}
FULMEN_ATOMICS(8, unsigned char)
FULMEN_ATOMICS(32, unsigned)
FULMEN_ATOMICS(64, unsigned long)
}  // extern "C"
