// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// wgmma m64nNk16, and m64nNk32 of e4m3: descriptors and fragments of PTX ISA 9.0, section 9.7.15,
// decoded.
#include "emulator/wgmma.h"

#include <bit>
#include <utility>

#include "emulator/order.h"
#include "emulator/shared_memory.h"
#include "emulator/tensor_core.h"

namespace fulmen::emulator {
namespace {

constexpr u32 kRows = 64;
constexpr u32 kMaxDepth = 32;
constexpr u32 kDepthBytes = 32;  // of a row of an operand
constexpr u32 kMaxColumns = 256;
constexpr u32 kGroupBytes = 1024;  // 8 rows of 128 bytes, the unit of the swizzle
constexpr u32 kChunkBytes = 128;   // of a swizzled row

u32 depth(DType dtype) { return kDepthBytes / static_cast<u32>(size_bytes(dtype)); }

// The number in the low bits of a word.
float element(u32 word, DType dtype) {
  if (dtype == DType::kFloat8E4M3) return to_float(e4m3{static_cast<u8>(word)});
  const u16 half = static_cast<u16>(word);
  return dtype == DType::kBFloat16 ? to_float(bf16{half}) : to_float(f16{half});
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

  // Of byte `at` of row `row`. Swizzled: rows of 128 bytes, further ones `leading_bytes` away. Else
  // groups of 16 bytes, 8 rows of which lie together.
  u32 address(u32 row, u32 at) const {
    if (!swizzled) {
      const u32 rows = transposed ? leading_bytes : stride_bytes;
      const u32 columns = transposed ? stride_bytes : leading_bytes;
      return start + row / 8 * rows + at / 16 * columns + row % 8 * 16 + at % 16;
    }
    return swizzled_128(start + at / kChunkBytes * leading_bytes + row / 8 * kGroupBytes +
                        row % 8 * kChunkBytes + at % kChunkBytes);
  }
  float load(u32 row, u32 column, DType dtype) const {
    const u32 size = static_cast<u32>(size_bytes(dtype));
    const u32 at = address(row, column * size);
    return element(size == 1 ? load_raw<u8>(at) : load_raw<u16>(at), dtype);
  }
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
      for (u32 n = 0; n < any_.columns; ++n) d[n] = any_.accumulate ? sum(row, n) : 0;
      b_.row(a_[row], d, d);
      for (u32 n = 0; n < any_.columns; ++n) sum(row, n) = d[n];
    }
  }

 private:
  void load_a() {
    if (any_.a_in_registers) return load_a_from_registers();
    const Descriptor shared(any_.a[0], any_.upper, false);
    for (u32 row = 0; row < kRows; ++row) {
      for (u32 k = 0; k < depth_; ++k) a_[row][k] = shared.load(row, k, any_.dtype);
    }
  }

  // A word has neighbours of a row; four threads have 16 bytes of it.
  void load_a_from_registers() {
    const u32 size = static_cast<u32>(size_bytes(any_.dtype));
    for (u32 row = 0; row < kRows; ++row) {
      for (u32 k = 0; k < depth_; ++k) {
        const u32 byte = k * size;
        const u32 thread = row / 16 * 32 + row % 8 * 4 + byte % 16 / 4;
        const u32 word = parts_[thread]->a[byte / 16 * 2 + row % 16 / 8];
        a_[row][k] = element(word >> byte % 4 * 8, any_.dtype);
      }
    }
  }

  void load_b() {
    const Descriptor shared(any_.b, any_.upper, any_.transpose_b);
    for (u32 k = 0; k < depth_; ++k) {
      for (u32 n = 0; n < any_.columns; ++n) {
        b_.set(k, n,
               any_.transpose_b ? shared.load(k, n, any_.dtype) : shared.load(n, k, any_.dtype));
      }
    }
  }

  // Of the accumulator.
  float& sum(u32 row, u32 n) const {
    const u32 thread = row / 16 * 32 + row % 8 * 4 + n % 8 / 2;
    return parts_[thread]->accumulator[n / 8 * 4 + row % 16 / 8 * 2 + n % 2];
  }

  const std::array<const Product*, kWarpgroupSize>& parts_;
  const Product& any_;
  const u32 depth_ = depth(any_.dtype);
  float a_[kRows][kMaxDepth];
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
  const auto read = [&](u32 word, bool transposed, u32 rows, u32 bytes) {
    const Descriptor matrix(word, product.upper, transposed);
    expect_layout(engine, matrix.address(0, 0) - kSharedBase,
                  matrix.swizzled ? Layout::kSwizzled : Layout::kPlain, product.site);
    for (u32 row = 0; row < rows; ++row) {
      for (u32 byte = 0; byte < bytes; byte += 16) {
        const u32 address = matrix.address(row, byte);
        shared_at(address, 16, 16);
        on_shared_by(engine, true, address - kSharedBase, 16, Kind::kRead, product.site);
      }
    }
  };
  if (!product.a_in_registers) read(product.a[0], false, kRows, kDepthBytes);
  if (product.transpose_b) {
    read(product.b, true, depth(product.dtype), product.columns * 2);
  } else {
    read(product.b, false, product.columns, kDepthBytes);
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
    count(&Counters::product_flops, u64{2} * kRows * product.columns * depth(product.dtype));
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
