// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Makes a BackwardKernel of a config: the only place of the tests that sees the kernels' text.
#pragma once

#include "backward_kernels.h"
#include "kernels/backward_sm90/backward_sm90.cuh"
#include "kernels/backward_sm90/preprocess.cuh"

namespace fulmen::test {

constexpr BackwardPreprocessConfig prepare_config(const BackwardSm90Config& config,
                                                  bool sinks = false) {
  return {.dtype = config.dtype,
          .dims = config.dims,
          .score = {.sinks = sinks, .varlen = config.score.varlen, .stats = config.score.stats}};
}

template <BackwardSm90Config kConfig>
constexpr BackwardKernel backward_kernel(std::string_view name) {
  return {name, kConfig,
          [](const BackwardPreprocessParams& params) {
            backward_preprocess_sm90<prepare_config(kConfig)>(params);
          },
          [](const BackwardPreprocessParams& params) {
            backward_preprocess_sm90<prepare_config(kConfig, true)>(params);
          },
          [](const BackwardParams& params) { backward_sm90<kConfig>(params); }};
}

}  // namespace fulmen::test
