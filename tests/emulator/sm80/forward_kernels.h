// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The kernels with which forward_sm80_test.cpp answers drawn problems: small tiles, so that the
// problems have several blocks in both directions; one and more stages, K and V in a single buffer,
// one and two row tiles, groups of one, two and four warps, keys interleaved or not, problems of
// fixed length or any.
#pragma once

#include "emulator/sm80/launch_forward.h"

namespace fulmen::test {

// The kinds of problem that are different kernels here. Arrays that a kernel reads and a problem
// lacks are added, see with_neutral_arrays().
enum class Kind { kPlain, kDense, kStats, kMasked, kCapped, kSloped, kBiased, kCappedAndBiased };
constexpr i32 kTeamWarps[] = {1, 1, 2, 1, 2, 2, 1, 4};

template <DType kDType, Kind kKind, DType kBias, bool kDropout, bool kAligned>
constexpr ForwardSm80Config config_of() {
  ForwardSm80Config config;
  config.aligned = kAligned;
  config.score.fp32_out = !kAligned && kKind != Kind::kCapped && kKind != Kind::kSloped;
  config.dtype = kDType;
  config.d_qk = 80;  // drawn dims are at most 80
  // A warp alone leaves the polynomial of softcap by itself, a group does not.
  const bool is_alone = kKind == Kind::kCapped && !kAligned;
  config.warps_n = is_alone ? 1 : kTeamWarps[static_cast<int>(kKind)];
  config.d_v = config.warps_n == 1 ? 48 : 64;  // two parts of V at most
  config.warps = kKind == Kind::kStats ? 4 : max(2, config.warps_n);
  config.row_tiles = kKind == Kind::kBiased ? 1 : 2;
  config.kv_rows = kKind == Kind::kPlain ? 48 : 16 * max(2, config.warps_n);
  config.stages = kDropout ? 1 : kKind == Kind::kPlain ? 3 : 2;
  config.stage_blocks = kKind == Kind::kPlain ? 2 : 1;
  config.score.bias = kBias;
  constexpr bool kHasBias = kBias != DType::kNone;
  config.score.mask = config.score.documents = kHasBias || kKind == Kind::kMasked;
  config.score.score_mod = kKind == Kind::kCapped || kKind == Kind::kCappedAndBiased;
  config.score.alibi = kHasBias || kKind == Kind::kSloped;
  config.score.dropout = kDropout;
  config.fixed_length = config.q_in_registers = kKind == Kind::kDense;
  config.interleaved = (config.score.mask || kDropout) && config.warp_columns() % 32 == 0;
  if (kKind == Kind::kCapped || kKind == Kind::kStats) {
    config.single_buffer = true;
    config.stages = 1;
  }
  config.predicates_copies = kKind == Kind::kStats;
  config.score.stats = kKind != Kind::kPlain;
  return config;
}

template <DType kDType, Kind kKind, bool kAligned, DType kBias = DType::kNone>
void launch_kind(const AttentionParams& p, unsigned seed) {
  if constexpr (kHasScoreTerms<kDType>) {
    if (p.dropout.enabled())
      return launch<config_of<kDType, kKind, kBias, true, kAligned>()>(p, seed);
  }
  launch<config_of<kDType, kKind, kBias, false, kAligned>()>(p, seed);
}

template <DType kDType, Kind kKind>
void launch_biased(const AttentionParams& p, unsigned seed) {
  if (p.bias.present() && p.bias.dtype == kDType) {
    return launch_kind<kDType, kKind, false, kDType>(p, seed);
  }
  launch_kind<kDType, kKind, false, DType::kFloat32>(p, seed);
}

inline bool is_dense(const AttentionParams& p) {
  const IntervalMask& mask = p.mask_options;
  return p.rng == nullptr && !p.packed.q && !p.q_lengths.present() && !p.kv_lengths.present() &&
         mask.window_left == kNoLimit && mask.window_right == kNoLimit && mask.prefix == 0 &&
         mask.chunk == 0;
}

template <DType kDType>
void launch_dtype(const AttentionParams& p, bool aligned, unsigned seed) {
  const bool is_masked = p.mask.present() || p.q_ids.present();
  const bool is_natural = p.bias.present() || !(p.score_map.scale > 0);
  const bool is_capped = p.score_map.softcap != 0;
  const bool is_sloped = p.alibi_slopes.present();
  const bool is_mixed = is_masked || is_natural || p.o.dtype == DType::kFloat32;
  if constexpr (kHasScoreTerms<kDType>) {
    if (is_capped && (is_mixed || is_sloped)) {
      return launch_biased<kDType, Kind::kCappedAndBiased>(p, seed);
    }
    if (is_natural || (is_mixed && is_sloped)) {
      return launch_biased<kDType, Kind::kBiased>(p, seed);
    }
    if (is_sloped && !is_capped) return launch_kind<kDType, Kind::kSloped, false>(p, seed);
  }
  if (is_capped) {
    return aligned ? launch_kind<kDType, Kind::kCapped, true>(p, seed)
                   : launch_kind<kDType, Kind::kCapped, false>(p, seed);
  }
  if (is_masked) return launch_kind<kDType, Kind::kMasked, false>(p, seed);
  if (p.stats.present()) {
    return aligned ? launch_kind<kDType, Kind::kStats, true>(p, seed)
                   : launch_kind<kDType, Kind::kStats, false>(p, seed);
  }
  if (aligned && is_dense(p)) return launch_kind<kDType, Kind::kDense, true>(p, seed);
  aligned ? launch_kind<kDType, Kind::kPlain, true>(p, seed)
          : launch_kind<kDType, Kind::kPlain, false>(p, seed);
}

}  // namespace fulmen::test
