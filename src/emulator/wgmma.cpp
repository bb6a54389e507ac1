// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// wgmma m64nNk16: descriptors and fragments of PTX ISA 9.0, section 9.7.15, decoded. Products are
// summed in float32, 16 at a time and then onto the accumulator; the hardware rounds otherwise.
#include "emulator/wgmma.h"

#include "emulator/shared_memory.h"

namespace fulmen::emulator {
namespace {

constexpr u32 kRows = 64;
constexpr u32 kDepth = 16;
constexpr u32 kMaxColumns = 256;
constexpr u32 kGroupBytes = 1024;  // 8 rows of 128 bytes, the unit of the swizzle
constexpr u32 kChunkColumns = 64;  // 16-bit elements of a 128-byte row

float widen(u16 bits, DType dtype) {
  return dtype == DType::kBFloat16 ? to_float(bf16{bits}) : to_float(f16{bits});
}

// A matrix in shared memory, in one of two layouts.
struct Descriptor {
  u32 start;
  u32 leading_bytes;
  u32 stride_bytes;
  bool swizzled;
  bool transposed;

  Descriptor(u32 lower, u32 upper, bool transposed_)
      : start((lower & 0x3fffu) << 4),
        leading_bytes((lower >> 16 & 0x3fffu) << 4),
        stride_bytes((upper & 0x3fffu) << 4),
        swizzled(upper >> 30 == 1),
        transposed(transposed_) {
    if (swizzled ? stride_bytes != kGroupBytes : upper >> 30 != 0) {
      fail("a descriptor of a layout that is not known here");
    }
  }

  // Element `column` of row `row`. Swizzled: rows of 64, further columns `leading_bytes` away.
  // Else units of 8 columns, 8 rows of which lie together.
  u16 load(u32 row, u32 column) const {
    if (!swizzled) {
      const u32 rows = transposed ? leading_bytes : stride_bytes;
      const u32 columns = transposed ? stride_bytes : leading_bytes;
      return emulator::load_shared<u16>(start + row / 8 * rows + column / 8 * columns +
                                        row % 8 * 16 + column % 8 * 2);
    }
    const u32 address = start + column / kChunkColumns * leading_bytes + row / 8 * kGroupBytes +
                        row % 8 * 128 + column % kChunkColumns * 2;
    return emulator::load_shared<u16>(swizzled_128(address));
  }
};

// One product of all 128 threads, gathered from their parts.
class WarpgroupProduct {
 public:
  explicit WarpgroupProduct(const std::array<const Product*, kWarpgroupSize>& parts)
      : parts_(parts), any_(*parts[0]) {
    for (const Product* part : parts) {
      const bool same = part->columns == any_.columns && part->dtype == any_.dtype &&
                        part->transpose_b == any_.transpose_b &&
                        part->a_in_registers == any_.a_in_registers &&
                        part->accumulate == any_.accumulate && part->b == any_.b && part->upper == any_.upper &&
                        (any_.a_in_registers || part->a[0] == any_.a[0]);
      if (!same) fail("the threads of a warpgroup issued different wgmma");
    }
  }

  void run() {
    load_a();
    load_b();
    for (u32 row = 0; row < kRows; ++row) {
      float sum[kMaxColumns] = {};
      for (u32 k = 0; k < kDepth; ++k) {
        for (u32 n = 0; n < any_.columns; ++n) sum[n] += a_[row][k] * b_[k][n];
      }
      write_row(row, sum);
    }
  }

 private:
  void load_a() {
    if (any_.a_in_registers) return load_a_from_registers();
    const Descriptor shared(any_.a[0], any_.upper, false);
    for (u32 row = 0; row < kRows; ++row) {
      for (u32 k = 0; k < kDepth; ++k) {
        a_[row][k] = widen(shared.load(row, k), any_.dtype);
      }
    }
  }

  void load_a_from_registers() {
    for (u32 row = 0; row < kRows; ++row) {
      for (u32 k = 0; k < kDepth; ++k) {
        const u32 thread = row / 16 * 32 + row % 8 * 4 + k % 8 / 2;
        const u32 word = parts_[thread]->a[k / 8 * 2 + row % 16 / 8];
        a_[row][k] = widen(static_cast<u16>(k % 2 == 0 ? word : word >> 16), any_.dtype);
      }
    }
  }

  void load_b() {
    const Descriptor shared(any_.b, any_.upper, any_.transpose_b);
    for (u32 k = 0; k < kDepth; ++k) {
      for (u32 n = 0; n < any_.columns; ++n) {
        b_[k][n] = widen(any_.transpose_b ? shared.load(k, n) : shared.load(n, k), any_.dtype);
      }
    }
  }

  void write_row(u32 row, const float* sum) const {
    for (u32 n = 0; n < any_.columns; ++n) {
      const u32 thread = row / 16 * 32 + row % 8 * 4 + n % 8 / 2;
      float& d = parts_[thread]->accumulator[n / 8 * 4 + row % 16 / 8 * 2 + n % 2];
      d = any_.accumulate ? d + sum[n] : sum[n];
    }
  }

  const std::array<const Product*, kWarpgroupSize>& parts_;
  const Product& any_;
  float a_[kRows][kDepth];
  float b_[kDepth][kMaxColumns];
};

// The oldest group of the warpgroup whose first thread is given.
void run_oldest_group(Thread* threads) {
  const size_t num_products = threads[0].groups.front().size();
  for (u32 t = 0; t < kWarpgroupSize; ++t) {
    if (threads[t].groups.size() != threads[0].groups.size() ||
        threads[t].groups.front().size() != num_products) {
      fail("the threads of a warpgroup committed different groups of wgmma");
    }
  }
  for (size_t i = 0; i < num_products; ++i) {
    std::array<const Product*, kWarpgroupSize> parts;
    for (u32 t = 0; t < kWarpgroupSize; ++t) parts[t] = &threads[t].groups.front()[i];
    WarpgroupProduct(parts).run();
  }
  for (u32 t = 0; t < kWarpgroupSize; ++t) {
    threads[t].groups.erase(threads[t].groups.begin());
  }
}

}  // namespace

void wgmma_issue(const Product& product) { self().open.push_back(product); }

void wgmma_commit() {
  self().groups.push_back(std::move(self().open));
  self().open.clear();
}

void wgmma_wait(u32 pending_groups) {
  Meeting& meeting = block().warpgroups[self().warpgroup()];
  if (meeting.arrived + 1 == kWarpgroupSize) {  // the last one to come does the work for all
    Thread* const threads = &block().threads[self().warpgroup() * kWarpgroupSize];
    while (threads[0].groups.size() > pending_groups) run_oldest_group(threads);
  }
  meet(meeting, kWarpgroupSize, "wgmma.wait_group");
}

}  // namespace fulmen::emulator
