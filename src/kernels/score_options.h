// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a kernel is compiled to know of scores and masks: the part that the configs of all families
// have in common, each as its member `score`. An option that is off leaves no instruction behind.
// src/gpu/params.h fills it from a problem and names it in the names of kernels.
#pragma once

#include "kernels/base.cuh"

namespace fulmen {

// Which bounds of a row's interval of visible keys have to be looked at. In a config: those that
// the problem's mask has (the end of the sequence is handled by all). Of one block of keys: those
// that can lie inside the block for some row.
enum class MaskKind : u8 {
  kNone,
  kRight,  // causal, right window
  kLeft,   // of a block only
  kBoth,
};

// On tensor cores the backward pass keeps P and dS times 2^weight_shift: their exponential makes 0
// of what is below 2^-126, where bfloat16 still has numbers down to 2^-133 and float32 to 2^-149.
// Sums are divided by it where they are scaled anyway.
constexpr i32 weight_shift(DType gradient) {
  return gradient == DType::kBFloat16 ? 16 : gradient == DType::kFloat32 ? 24 : 0;
}

// Which parts of a user's expression there are (common/expression.cuh).
struct UserTerms {
  bool score = false;
  bool mask = false;
  bool captures = false;  // sums gradients of what the score reads

  constexpr bool operator==(const UserTerms&) const = default;
  constexpr bool any() const { return score || mask; }
};

template <class Each>
constexpr void for_each_field(const UserTerms& user, Each each) {
  each("score", user.score);
  each("mask", user.mask);
  each("captures", user.captures);
}

struct ScoreOptions {
  MaskKind mask_kind = MaskKind::kNone;  // of causal, window, prefix and chunk
  bool mask = false;                     // an array says which pairs are visible
  DType bias = DType::kNone;             // of the array that is added to scores
  bool documents = false;                // only pairs with equal ids are visible
  bool alibi = false;
  bool score_mod = false;  // scores pass through a function: attention/score_mod.cuh
  bool dropout = false;
  bool sinks = false;
  bool negative_scale = false;  // the scale may be 0 or negative
  bool varlen = false;          // lengths or packed offsets, read from device memory
  bool stats = false;           // row_max and row_sum: forward they are written, backward read
  bool fp32_out = false;        // O is float32
  bool accumulate = false;      // O and stats hold a part of the rows, which the result joins
  bool blocks = false;  // lists of blocks say which tiles of pairs are met (tile_lists/config.h)
  bool mask_tiles = false;  // a user's mask does
  UserTerms user{};

  constexpr bool operator==(const ScoreOptions&) const = default;

  // Whether scores pass through functions whose slope may differ from pair to pair.
  constexpr bool has_slopes() const { return score_mod || user.score; }

  constexpr bool has_tile_lists() const { return blocks || mask_tiles; }

  // Whether rows may see the more keys the further back they are: of a user's mask that is a guess.
  constexpr bool may_be_causal() const { return mask_kind != MaskKind::kNone || mask_tiles; }

  // Whether scores are more than a positive scale times dot(q, k), where they are visible.
  constexpr bool scales_scores() const {
    return negative_scale || score_mod || alibi || bias != DType::kNone || user.score;
  }

  // Whether those are in nats when the softmax multiplies them, as a user has them; else in log2.
  constexpr bool has_nats() const { return user.score; }
  // How many of what scores are in, as many as one nat.
  constexpr float per_nat() const { return has_nats() ? 1.f : kLog2E<float>; }

  // Whether an array may have hidden a pair before a user's expression is asked; whether his mask
  // is, in blocks of which it is not known.
  constexpr bool hides_before_user() const { return mask || bias != DType::kNone; }
  constexpr bool asks_user_mask() const { return user.mask && !mask_tiles; }

  // Whether arrays or a user's expression say which pairs are visible, or change their scores.
  constexpr bool has_pair_terms() const {
    return mask || bias != DType::kNone || documents || user.any();
  }
  // The same of every pair. A user's mask alone is asked in tiles that it cuts, where a kernel
  // knows those before.
  constexpr bool asks_every_pair() const {
    return mask || bias != DType::kNone || documents || user.score || asks_user_mask();
  }
};

// Calls each(name, value) for each field in turn. Every config has such a function beside it: the
// generated text of a kernel sets what is listed here, and the host checks that nothing is missing
// (gpu/jit/kernel_spec.h).
template <class Each>
constexpr void for_each_field(const ScoreOptions& score, Each each) {
  each("mask_kind", score.mask_kind);
  each("mask", score.mask);
  each("bias", score.bias);
  each("documents", score.documents);
  each("alibi", score.alibi);
  each("score_mod", score.score_mod);
  each("dropout", score.dropout);
  each("sinks", score.sinks);
  each("negative_scale", score.negative_scale);
  each("varlen", score.varlen);
  each("stats", score.stats);
  each("fp32_out", score.fp32_out);
  each("accumulate", score.accumulate);
  each("blocks", score.blocks);
  each("mask_tiles", score.mask_tiles);
  each("user", score.user);
}

}  // namespace fulmen
