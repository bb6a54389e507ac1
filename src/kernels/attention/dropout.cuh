// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which probabilities dropout removes, decided by counter alone, so that the pattern depends on no
// tile, backend, layout or thread. One Philox4x32-10 call (Salmon et al., "Parallel random numbers:
// as easy as 1, 2, 3", SC 2011, section 3.3) decides eight neighbouring keys, 16 bits each.
// key = the 64-bit seed; counter = (j / 8, i, batch * heads_q + head, offset).
#pragma once

#include "kernels/base.cuh"

namespace fulmen {

struct Philox4x32 {
  u32 word[4];
};

// Several draws with one key, whose schedule is theirs together.
template <u32 kDraws>
constexpr void philox4x32_10(Philox4x32 (&counters)[kDraws], u64 key) {
  u32 key0 = static_cast<u32>(key);
  u32 key1 = static_cast<u32>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (u32 draw = 0; draw < kDraws; ++draw) {
      Philox4x32& counter = counters[draw];
      const u64 product0 = static_cast<u64>(0xD2511F53u) * counter.word[0];
      const u64 product1 = static_cast<u64>(0xCD9E8D57u) * counter.word[2];
      counter = {
          {static_cast<u32>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<u32>(product1),
           static_cast<u32>(product0 >> 32) ^ counter.word[3] ^ key1, static_cast<u32>(product0)}};
    }
    key0 += 0x9E3779B9u;  // golden ratio
    key1 += 0xBB67AE85u;  // sqrt(3) - 1
  }
}
constexpr Philox4x32 philox4x32_10(Philox4x32 counter, u64 key) {
  Philox4x32 one[1] = {counter};
  philox4x32_10(one, key);
  return one[0];
}

struct Dropout {
  u32 threshold = 0;  // of 65536: an entry whose 16 bits lie below it is dropped; 0: no dropout
  u64 seed = 0;
  u32 offset = 0;

  constexpr bool enabled() const { return threshold != 0; }

  // What a kept probability is multiplied by; 0 when everything is dropped.
  constexpr double kept_scale() const {
    return threshold == 65536 ? 0.0 : 65536.0 / (65536.0 - threshold);
  }

  // The decisions for keys 8 * group .. 8 * group + 7 of row `q_row`.
  constexpr Philox4x32 draw(u32 group, u32 q_row, u32 batch_head) const {
    return philox4x32_10({{group, q_row, batch_head, offset}}, seed);
  }

  // Whether key number `lane` (0..7) of a draw stays.
  constexpr bool keeps(const Philox4x32& drawn, u32 lane) const {
    return ((drawn.word[lane / 2] >> (16 * (lane % 2))) & 0xffffu) >= threshold;
  }
};

// The decisions for one row, key by key: keys that follow each other share a draw.
struct DropoutRow {
  const Dropout& dropout;
  i64 row;
  u32 batch_head;
  i64 group = -1;
  Philox4x32 drawn{};

  constexpr DropoutRow(const Dropout& dropout_, i64 row_, u32 batch_head_)
      : dropout(dropout_), row(row_), batch_head(batch_head_) {}

  constexpr bool keeps(i64 key) {
    if (key / 8 != group) {
      group = key / 8;
      drawn = dropout.draw(static_cast<u32>(group), static_cast<u32>(row), batch_head);
    }
    return dropout.keeps(drawn, static_cast<u32>(key) % 8);
  }
};

// round(p * 65536) for p in [0, 1].
constexpr u32 dropout_threshold(double p) { return static_cast<u32>(p * 65536.0 + 0.5); }

}  // namespace fulmen
