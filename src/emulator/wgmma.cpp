// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// wgmma m64nNk16: descriptors and fragments of PTX ISA 9.0, section 9.7.15, decoded.
#include "emulator/wgmma.h"

#include <bit>
#include <utility>

#include "emulator/order.h"
#include "emulator/shared_memory.h"
#include "emulator/tensor_core.h"

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

  // Of element `column` of row `row`. Swizzled: rows of 64, further columns `leading_bytes` away.
  // Else groups of 8 columns, 8 rows of which lie together.
  u32 address(u32 row, u32 column) const {
    if (!swizzled) {
      const u32 rows = transposed ? leading_bytes : stride_bytes;
      const u32 columns = transposed ? stride_bytes : leading_bytes;
      return start + row / 8 * rows + column / 8 * columns + row % 8 * 16 + column % 8 * 2;
    }
    return swizzled_128(start + column / kChunkColumns * leading_bytes + row / 8 * kGroupBytes +
                        row % 8 * 128 + column % kChunkColumns * 2);
  }
  u16 load(u32 row, u32 column) const { return load_raw<u16>(address(row, column)); }
};

// One product of all 128 threads, gathered from their parts.
class WarpgroupProduct {
 public:
  explicit WarpgroupProduct(const std::array<const Product*, kWarpgroupSize>& parts)
      : parts_(parts), any_(*parts[0]), b_(any_.columns, any_.dtype) {
    for (const Product* part : parts) {
      const bool same =
          part->columns == any_.columns && part->dtype == any_.dtype &&
          part->transpose_b == any_.transpose_b && part->a_in_registers == any_.a_in_registers &&
          part->accumulate == any_.accumulate && part->b == any_.b && part->upper == any_.upper &&
          (any_.a_in_registers || part->a[0] == any_.a[0]);
      if (!same) fail("the threads of a warpgroup issued different wgmma");
    }
  }

  void run() {
    load_a();
    load_b();
    for (u32 row = 0; row < kRows; ++row) {
      float d[kMaxColumns];
      for (u32 n = 0; n < any_.columns; ++n) d[n] = any_.accumulate ? element(row, n) : 0;
      b_.row(a_[row], d, d);
      for (u32 n = 0; n < any_.columns; ++n) element(row, n) = d[n];
    }
  }

 private:
  void load_a() {
    if (any_.a_in_registers) return load_a_from_registers();
    const Descriptor shared(any_.a[0], any_.upper, false);
    for (u32 row = 0; row < kRows; ++row) {
      for (u32 k = 0; k < kDepth; ++k) a_[row][k] = widen(shared.load(row, k), any_.dtype);
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
        const u16 x = any_.transpose_b ? shared.load(k, n) : shared.load(n, k);
        b_.set(k, n, widen(x, any_.dtype));
      }
    }
  }

  // Of the accumulator.
  float& element(u32 row, u32 n) const {
    const u32 thread = row / 16 * 32 + row % 8 * 4 + n % 8 / 2;
    return parts_[thread]->accumulator[n / 8 * 4 + row % 16 / 8 * 2 + n % 2];
  }

  const std::array<const Product*, kWarpgroupSize>& parts_;
  const Product& any_;
  float a_[kRows][kDepth];
  TensorCoreMatrix b_;
};

// The oldest group of the warpgroup whose first thread is given.
void run_oldest_group(Thread* threads) {
  const size_t num_products = threads[0].wgmma.groups.front().size();
  for (u32 t = 0; t < kWarpgroupSize; ++t) {
    if (threads[t].wgmma.groups.size() != threads[0].wgmma.groups.size() ||
        threads[t].wgmma.groups.front().size() != num_products) {
      fail("the threads of a warpgroup committed different groups of wgmma");
    }
  }
  for (size_t i = 0; i < num_products; ++i) {
    std::array<const Product*, kWarpgroupSize> parts;
    for (u32 t = 0; t < kWarpgroupSize; ++t) parts[t] = &threads[t].wgmma.groups.front()[i];
    WarpgroupProduct(parts).run();
  }
  for (u32 t = 0; t < kWarpgroupSize; ++t) {
    threads[t].wgmma.groups.erase(threads[t].wgmma.groups.begin());
  }
}

// Operands in shared memory, as the checker sees them: read by the warpgroup's engine once all four
// warps have issued the product, ordered after what all of them are ordered after.
void read_operands(const Product& product, const Engine& engine) {
  const auto read = [&](u32 word, bool transposed, u32 rows, u32 columns) {
    const Descriptor matrix(word, product.upper, transposed);
    expect_layout(engine, matrix.address(0, 0) - kSharedBase,
                  matrix.swizzled ? Layout::kSwizzled : Layout::kPlain, product.site);
    for (u32 row = 0; row < rows; ++row) {
      for (u32 column = 0; column < columns; column += 8) {
        const u32 address = matrix.address(row, column);
        shared_at(address, 16, 16);
        on_shared_by(engine, true, address - kSharedBase, 16, Kind::kRead, product.site);
      }
    }
  };
  if (!product.a_in_registers) read(product.a[0], false, kRows, kDepth);
  if (product.transpose_b) {
    read(product.b, true, kDepth, product.columns);
  } else {
    read(product.b, false, product.columns, kDepth);
  }
}

void order_product(const Product& product, u32 number) {
  Warpgroup& group = block().warpgroups[self().warpgroup()];
  if (group.agent == kNoAgent) {
    group.agent = world().new_engine("wgmma of warpgroup " + std::to_string(self().warpgroup()));
  }
  const u32 at = number - group.first_pending;
  if (group.pending.size() <= at) group.pending.resize(at + 1);
  PendingProduct& pending = group.pending[at];
  if (pending.warps++ == 0) {
    pending.clock = self().clock;
  } else {
    pending.clock.meet(self().clock);
  }
  if (pending.warps < 4) return;
  read_operands(product, {group.agent, number, pending.clock});
  pending.clock.clear();
  while (!group.pending.empty() && group.pending.front().warps == 4) {
    group.pending.erase(group.pending.begin());
    ++group.first_pending;
  }
}

void order_registers(const Product& product, u32 number) {
  WgmmaThread& own = self().wgmma;
  const float* const end = product.accumulator + product.columns / 2;
  Accumulator* known = nullptr;
  for (Accumulator& other : own.accumulators) {
    if (other.begin == product.accumulator && other.end == end) known = &other;
  }
  const u64 touched = known != nullptr && !product.a_in_registers ? known->touched : own.committed;
  if (own.fenced < touched) fail("missing wgmma.fence: registers of the product were used since");
  if (known == nullptr) {
    std::erase_if(own.accumulators, [&](const Accumulator& other) {
      return other.begin < end && product.accumulator < other.end;
    });
    own.accumulators.push_back({product.accumulator, end, own.committed, 0});
    known = &own.accumulators.back();
  }
  known->product = number;
}

}  // namespace

void wgmma_touch(const u8* begin, u64 bytes, Kind kind, Site site) {
  WgmmaThread& own = self().wgmma;
  const u8* const end = begin + bytes;
  for (Accumulator& accumulator : own.accumulators) {
    const u8* const first = reinterpret_cast<const u8*>(accumulator.begin);
    if (end <= first || begin >= reinterpret_cast<const u8*>(accumulator.end)) continue;
    accumulator.touched = ++own.events;
    if (accumulator.product <= own.complete) continue;
    at(site);
    fail(std::string(kind == Kind::kRead ? "reads" : "writes") + " register " +
         std::to_string((begin - first) / 4) +
         " of an accumulator before wgmma.wait_group has covered its product");
  }
}

void wgmma_fence() { self().wgmma.fenced = ++self().wgmma.events; }

void wgmma_issue(const Product& product) {
  at(product.site);
  WgmmaThread& own = self().wgmma;
  ++own.issued;
  if (self().index % kWarpgroupSize == 0) {
    count(&Counters::products);
    count(&Counters::product_flops, u64{2} * kRows * product.columns * kDepth);
  }
  if (checking()) {
    order_registers(product, own.issued);
    if (self().lane() == 0) order_product(product, own.issued);
  }
  own.open.push_back(product);
}

void wgmma_commit() {
  WgmmaThread& own = self().wgmma;
  own.groups.push_back(std::exchange(own.open, {}));
  own.group_ends.push_back(own.issued);
  own.committed = ++own.events;
}

void wgmma_wait(u32 pending_groups) {
  Warpgroup& group = block().warpgroups[self().warpgroup()];
  if (group.meeting.arrived + 1 == kWarpgroupSize) {  // the last one to come does the work for all
    Thread* const threads = &block().threads[self().warpgroup() * kWarpgroupSize];
    while (threads[0].wgmma.groups.size() > pending_groups) run_oldest_group(threads);
  }
  meet(group.meeting, kWarpgroupSize, "wgmma.wait_group", false);
  WgmmaThread& own = self().wgmma;
  while (own.group_ends.size() > pending_groups) {
    own.complete = own.group_ends.front();
    own.group_ends.erase(own.group_ends.begin());
  }
  if (checking() && own.complete > 0) self().clock.seen.raise(group.agent, own.complete);
}

}  // namespace fulmen::emulator
