// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One line for each option.

#include "gpu/score_options.h"

#include "core/error.h"

namespace fulmen::gpu {
namespace {

MaskKind mask_kind_of(const IntervalMask& mask) {
  if (mask.window_left != kNoLimit || mask.chunk > 0) return MaskKind::kBoth;
  if (mask.causal || mask.window_right != kNoLimit) return MaskKind::kRight;
  return MaskKind::kNone;
}

std::string suffix(const char* option, bool is_on) {
  return is_on ? sentence("_", option) : std::string();
}

std::string suffix(const char*, MaskKind kind) {
  constexpr const char* kSuffixes[] = {"", "_right", "_left", "_both"};
  return kSuffixes[static_cast<int>(kind)];
}

std::string suffix(const char* option, DType dtype) {
  return dtype == DType::kNone ? std::string() : sentence("_", option, "_", name(dtype));
}

}  // namespace

ScoreOptions score_options_of(const Problem& problem) {
  return {
      .mask_kind = mask_kind_of(problem.mask),
      .mask = problem.has(Array::kMask),
      .bias = problem.arrays[Array::kBias].dtype,
      .documents = problem.has(Array::kQIds),
      .alibi = problem.has(Array::kAlibiSlopes),
      .softcap = problem.score_map.softcap != 0,
      .dropout = problem.dropout.enabled(),
      .sinks = problem.has(Array::kSinks),
      .negative_scale = !(problem.score_map.scale > 0),
      .varlen = problem.packed || problem.has(Array::kQLengths) || problem.has(Array::kKvLengths),
      .stats = problem.has(Array::kStats),
      .fp32_out = problem.arrays[Array::kO].dtype == DType::kFloat32,
  };
}

std::string name_suffix(const ScoreOptions& score) {
  std::string text;
  for_each_field(score, [&text](const char* option, auto value) { text += suffix(option, value); });
  return text;
}

}  // namespace fulmen::gpu
