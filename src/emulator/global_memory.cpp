// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From addresses to elements.
#include "emulator/global_memory.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <sstream>

namespace fulmen::emulator {

constexpr u64 kNumLocks = 64;

struct GlobalMemory::Array::Shadow {
  std::vector<Granule> granules;
  std::array<std::mutex, kNumLocks> locks;  // of granule number mod kNumLocks
};

GlobalMemory::Array::Array(const GlobalArray& array) : array_(array) {
  i64 low = 0;
  i64 high = 0;
  i64 count = 1;
  for (size_t axis = 0; axis < 4; ++axis) {
    const i64 reach = (array.extents[axis] - 1) * array.strides[axis];
    (reach < 0 ? low : high) += reach;
    if (array.strides[axis] != 0) count *= array.extents[axis];
  }
  begin_ = static_cast<const u8*>(array.data) + low * array.element_bytes;
  end_ = static_cast<const u8*>(array.data) + (high + 1) * array.element_bytes;
  dense_ = count == high - low + 1;
  std::ranges::sort(by_stride_, [this](size_t a, size_t b) {
    return std::llabs(array_.strides[a]) > std::llabs(array_.strides[b]);
  });
  if (array.writable) {
    shadow_ = std::make_shared<Shadow>();
    const u64 bytes = static_cast<u64>(end_ - begin_) + reinterpret_cast<u64>(begin_) % 16;
    shadow_->granules.resize((bytes + kGranuleBytes - 1) / kGranuleBytes);
    if (array.initialised) {
      for (Granule& granule : shadow_->granules) granule.initialise(0xffff);
    }
  }
}

bool GlobalMemory::Array::is_near(const u8* address) const {
  const u64 at = reinterpret_cast<u64>(address);
  return at >= first() && at < last();
}

// The index of the element at an address; false where there is none.
bool GlobalMemory::Array::decode(const u8* address, std::array<i64, 4>& index) const {
  i64 rest = (address - begin_) / array_.element_bytes;
  index = {};
  for (const size_t axis : by_stride_) {
    const i64 stride = std::llabs(array_.strides[axis]);
    if (stride == 0) continue;
    const i64 step = std::min(rest / stride, array_.extents[axis] - 1);
    rest -= step * stride;
    index[axis] = array_.strides[axis] < 0 ? array_.extents[axis] - 1 - step : step;
  }
  return rest == 0;
}

bool GlobalMemory::Array::has(const u8* address, u64 bytes) const {
  if (address < begin_ || address + bytes > end_) return false;
  std::array<i64, 4> index;
  return dense_ || (decode(address, index) && decode(address + bytes - 1, index));
}

std::string GlobalMemory::Array::name_element(const u8* address) const {
  std::ostringstream name;
  name << array_.name;
  std::array<i64, 4> index;
  if (address < begin_) {
    name << ", " << begin_ - address << " bytes before its first";
  } else if (address >= end_) {
    name << ", " << address - end_ << " bytes behind its last";
  } else if (!decode(address, index)) {
    name << ", between its rows";
  } else {
    for (const i64 i : index) name << '[' << i << ']';
  }
  return name.str();
}

Finding GlobalMemory::Array::touch(const u8* address, u64 bytes, Access access, const Clock& clock,
                                   const Earlier& before, u32 random) {
  const u64 base = reinterpret_cast<u64>(begin_) / kGranuleBytes;
  Finding found;
  for_each_granule(reinterpret_cast<u64>(address), bytes, [&](u64 number, u16 bits) {
    access.bytes = bits;
    const std::lock_guard lock(shadow_->locks[number % kNumLocks]);
    const Finding finding = shadow_->granules[number - base].touch(access, clock, before, random);
    if (found.fault == Fault::kNone) found = finding;
  });
  return found;
}

GlobalMemory::GlobalMemory(const std::vector<GlobalArray>& arrays) {
  for (const GlobalArray& array : arrays) {
    const bool empty = std::ranges::any_of(array.extents, [](i64 n) { return n <= 0; });
    if (array.data == nullptr || empty) continue;
    arrays_.emplace_back(array);
    first_ = std::min(first_, arrays_.back().first());
    last_ = std::max(last_, arrays_.back().last());
  }
}

const GlobalMemory::Array* GlobalMemory::find(const u8* address, u64 bytes,
                                              const Array*& near) const {
  near = nullptr;
  const u64 at = reinterpret_cast<u64>(address);
  if (at < first_ || at >= last_) return nullptr;
  for (const Array& array : arrays_) {
    if (array.has(address, bytes)) return &array;
    if (array.is_near(address)) near = &array;
  }
  return nullptr;
}

}  // namespace fulmen::emulator
