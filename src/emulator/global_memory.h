// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The arrays of a call, by name: where they lie, which a kernel may write, which hold something to
// begin with. Made by a test, given to every launch of the call; what one launch wrote the next may
// read. Accesses to memory of none of them nor of their margins (parameters, a thread's own
// variables) are not looked at. Thread safe.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "emulator/shadow.h"

namespace fulmen::emulator {

struct GlobalArray {
  std::string name;
  const void* data = nullptr;
  i64 element_bytes = 1;
  std::array<i64, 4> extents{1, 1, 1, 1};
  std::array<i64, 4> strides{0, 0, 0, 0};  // in elements; 0: the axis is broadcast
  bool writable = false;
  bool initialised = true;
  bool ordered = false;  // atomic additions must come in one order, as sums of floats depend on it
  i64 margin_bytes =
      0;  // before and behind it that belong to no other array: touching them is an error
};

class GlobalMemory {
 public:
  explicit GlobalMemory(const std::vector<GlobalArray>& arrays);

  class Array {
   public:
    explicit Array(const GlobalArray& array);

    const std::string& name() const { return array_.name; }
    bool writable() const { return array_.writable; }
    bool ordered() const { return array_.ordered; }
    // Whether the bytes belong to elements, none to a gap between rows or to what lies around.
    bool has(const u8* address, u64 bytes) const;
    bool is_near(const u8* address) const;
    u64 first() const { return reinterpret_cast<u64>(begin_) - margin(); }
    u64 last() const { return reinterpret_cast<u64>(end_) + margin(); }
    std::string name_element(const u8* address) const;  // "q[0][1][17][4]"
    Finding touch(const u8* address, u64 bytes, Access access, const Clock& clock,
                  const Earlier& before, u32 random);

   private:
    u64 margin() const { return static_cast<u64>(array_.margin_bytes); }
    bool decode(const u8* address, std::array<i64, 4>& index) const;

    GlobalArray array_;
    const u8* begin_;
    const u8* end_;
    std::array<size_t, 4> by_stride_{0, 1, 2, 3};  // axes, the largest stride first
    bool dense_;
    struct Shadow;
    std::shared_ptr<Shadow> shadow_;  // of writable arrays
  };

  // The array that the bytes belong to, or null. `near`: one that they miss by little, or null.
  const Array* find(const u8* address, u64 bytes, const Array*& near) const;

 private:
  std::vector<Array> arrays_;
  u64 first_ = ~u64{0};  // addresses of all arrays lie in [first_, last_)
  u64 last_ = 0;
};

}  // namespace fulmen::emulator
