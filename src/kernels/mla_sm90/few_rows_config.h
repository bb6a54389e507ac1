// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What mla_few_rows is compiled to know of a call, and how its shared memory is laid out.
#pragma once

#include "kernels/mla_sm90/config.h"

namespace fulmen {

struct MlaFewRowsConfig {
  // Record, schedule: row tiles of 16 rows, and blocks of 128 keys for each block of a cluster.
  MlaSm90Config common;

  static constexpr i32 kRows = 16;     // of all heads, in a row tile
  static constexpr i32 kKeys = 64;     // of a buffer
  static constexpr i32 kBuffers = 2;   // each with warps of its own that bring keys
  static constexpr i32 kWarps = 8;     // of a buffer; and of those that multiply
  static constexpr i32 kQuarters = 4;  // of the dims of a score: each has a sum of its own
  static constexpr i32 kWarpKeys = kKeys / kWarps;
  static constexpr i32 kWarpDims = 512 / kWarps;
  static constexpr i32 kWarpRows = kRows / kWarps;               // of P
  static constexpr i32 kScoreKeys = kKeys * kQuarters / kWarps;  // of a warp's scores

  static constexpr MlaFewRowsConfig of(MlaSm90Config config, i32 cluster) {
    config.schedule.row_warps = 1;
    config.schedule.kv_rows = kKeys;
    config.schedule.cluster = cluster;
    return {config};
  }

  // Those that multiply come first.
  static constexpr i32 num_warps() { return kWarps * (1 + kBuffers); }
  static constexpr i32 threads() { return 32 * num_warps(); }
  constexpr i32 dims() const { return common.record == 584 ? 512 : 576; }
  // Units of 16 bytes from one row to the next are odd: eight rows meet all banks.
  constexpr i32 row_bytes() const { return dims() * 2 + 16; }
  static constexpr i32 weight_bytes() { return kKeys * 2 + 16; }  // of a row of P
  static constexpr i32 score_floats() { return kKeys + 8; }
  static constexpr i32 sum_floats() { return 512 + 8; }
  // Where eight neighbouring dims of a key or of Q lie in their row, number `vector` of all: what
  // lanes make of 16 bytes each goes to two places, in each of which all lanes are neighbours.
  static constexpr i32 unit_of(i32 vector) {
    return vector < 64 ? vector % 2 * 32 + vector / 2 : vector;
  }

  // Shared memory, in this order: keys, Q, P, scores of quarters (O, once all keys are summed),
  // maxima and sums of rows, what rows of O are multiplied by, which keys of a warp are not there,
  // what warps found wrong.
  constexpr i32 q_at() const { return kBuffers * kKeys * row_bytes(); }
  constexpr i32 p_at() const { return q_at() + kRows * row_bytes(); }
  constexpr i32 scores_at() const { return p_at() + kRows * weight_bytes(); }
  constexpr i32 states_at() const {
    return scores_at() + kRows * 4 * max(kQuarters * score_floats(), sum_floats());
  }
  constexpr i32 factors_at() const { return states_at() + kRows * 8; }
  constexpr i32 missing_at() const { return factors_at() + kRows * 4; }
  constexpr i32 bad_at() const { return missing_at() + kBuffers * kWarps * 4; }
  constexpr i32 shared_bytes() const { return bad_at() + kBuffers * kWarps * 4; }
};

template <class Each>
constexpr void for_each_field(const MlaFewRowsConfig& config, Each each) {
  each("common", config.common);
}

// Shared memory as addresses.
template <MlaFewRowsConfig kConfig>
struct MlaFewRowsStorage {
  using Config = MlaFewRowsConfig;
  u32 base;

  constexpr u32 key(i32 buffer, i32 row) const {
    return base + (buffer * Config::kKeys + row) * kConfig.row_bytes();
  }
  constexpr u32 q(i32 row) const { return base + kConfig.q_at() + row * kConfig.row_bytes(); }
  constexpr u32 p(i32 row) const { return base + kConfig.p_at() + row * Config::weight_bytes(); }
  // What a quarter of the dims says of a row and a key.
  constexpr u32 score(i32 quarter, i32 row, i32 key) const {
    return base + kConfig.scores_at() +
           ((quarter * Config::kRows + row) * Config::score_floats() + key) * 4;
  }
  // O of a row, at the end.
  constexpr u32 sum(i32 row, i32 dim) const {
    return base + kConfig.scores_at() + (row * Config::sum_floats() + dim) * 4;
  }
  constexpr u32 state(i32 row) const { return base + kConfig.states_at() + row * 8; }
  constexpr u32 factor(i32 row) const { return base + kConfig.factors_at() + row * 4; }
  // Of warp `warp` of those of a buffer.
  constexpr u32 missing(i32 buffer, i32 warp) const {
    return base + kConfig.missing_at() + (buffer * Config::kWarps + warp) * 4;
  }
  // Of all that bring keys.
  constexpr u32 bad(i32 warp) const { return base + kConfig.bad_at() + warp * 4; }

  // Named barriers: keys are there; they were read; of the warps that multiply.
  static constexpr u32 full(i32 buffer) { return 1 + static_cast<u32>(buffer); }
  static constexpr u32 empty(i32 buffer) { return 3 + static_cast<u32>(buffer); }
  static constexpr u32 kMultiplying = 5;
  static constexpr u32 kTogether = 2 * 32 * Config::kWarps;  // threads of the former
};

}  // namespace fulmen
