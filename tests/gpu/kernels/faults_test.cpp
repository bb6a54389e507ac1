// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What kernels tell the host of lengths, offsets and rng that are out of range.
#include "kernels/common/faults.cuh"

#include <gtest/gtest.h>

#include "emulator/launch.h"

namespace fulmen {
namespace {

constexpr AxisEntry offsets(i64 begin, i64 end) { return {true, false, begin, end, 0}; }
constexpr AxisEntry length(i64 rows) { return {false, true, 0, 0, rows}; }

TEST(Faults, EntriesInRangeAreNone) {
  EXPECT_EQ(axis_faults({false, false, 0, 0, 0}, 10, 1, 4), 0u);
  for (const AxisEntry& entry : {offsets(0, 0), offsets(0, 10), offsets(10, 10), length(0),
                                 length(10), AxisEntry{true, true, 2, 7, 5}}) {
    EXPECT_EQ(axis_faults(entry, 10, 1, 4), 0u);
  }
}

TEST(Faults, OffsetsOutOfRangeOrOrder) {
  for (const AxisEntry& entry : {offsets(-1, 3), offsets(5, 4), offsets(3, 11)}) {
    EXPECT_EQ(axis_faults(entry, 10, 1, 4), 1u);
  }
  EXPECT_EQ(axis_faults({true, true, 5, 4, -1}, 10, 1, 4), 1u);  // no rows: the length says nothing
}

TEST(Faults, LengthsNegativeOrBeyondTheRows) {
  EXPECT_EQ(axis_faults(length(-1), 10, 1, 4), 4u);
  EXPECT_EQ(axis_faults(length(11), 10, 1, 4), 4u);
  EXPECT_EQ(axis_faults({true, true, 2, 7, 6}, 10, 1, 4), 4u);
}

// A tree mask has bits for 64 rows: a request of more is empty.
TEST(Faults, MoreRowsThanATreeHasBitsOf) {
  CacheLayout layout{};
  layout.has_tree = true;
  const CacheEntry keys{{false, false, 0, 0, 0}, 0, 0, 0};
  for (const i64 rows : {64, 65}) {
    const bool is_more = rows > 64;
    for (const bool has_length : {false, true}) {
      const AxisEntry q{false, has_length, 0, 0, rows};
      const CacheSequence found = cache_sequence_of(layout, q, rows, keys, 100, 0, 0, true, true);
      EXPECT_EQ(found.shape.q_len, is_more ? 0 : rows);
      EXPECT_EQ(found.shape.kv_len, 100);
      const u32 fault = has_length ? kFaultQLengths : kFaultQOffsets;
      EXPECT_EQ(found.faults, is_more ? fault : 0u);
    }
  }
}

// Numbers and offsets stay where the kernel finds them: on the host, in this process.
TEST(Faults, TheBytesCollectWhatEveryThreadFinds) {
  i32 q_lengths[3] = {4, -1, 2};
  i64 cu_kv[4] = {0, 3, 2, 5};
  const i64 rng[2] = {1, i64{1} << 32};
  FaultBytes faults{};
  AttentionParams p{};
  p.packed = {true, true};
  p.num_sequences = 3;
  p.q_rows = 4;
  p.kv_rows = 5;
  p.q_lengths = {reinterpret_cast<u8*>(q_lengths), {0, 0, 0, 1}, DType::kInt32};
  p.cu_kv = {reinterpret_cast<u8*>(cu_kv), {0, 0, 0, 1}, DType::kInt64};
  p.rng = rng;
  const emulator::Grid grid{.blocks = 2, .threads = 32, .shared_bytes = 0, .seed = 1};
  emulator::launch(grid, [&] { record_faults(p, 32); });  // nobody to tell
  EXPECT_EQ(faults.bits(), 0u);
  p.faults = &faults;
  emulator::launch(grid, [&] { record_faults(p, 32); });
  EXPECT_EQ(faults.bits(), u32{kFaultQLengths | kFaultKvOffsets | kFaultRng});
}

}  // namespace
}  // namespace fulmen
