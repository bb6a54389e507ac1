// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Makes a BackwardKernel of a config: the only place of the tests that sees the kernels' text.
#pragma once

#include "backward_kernels.h"
#include "kernels/backward_prepare_sm90.cuh"
#include "kernels/backward_sm90.cuh"

namespace fulmen::test {

template <BackwardConfig kConfig>
constexpr BackwardKernel backward_kernel(std::string_view name) {
  constexpr BackwardPrepareConfig kPrepare{.dtype = kConfig.dtype,
                                           .dims = kConfig.dims,
                                           .has_stats = kConfig.has_stats,
                                           .sequences = kConfig.sequences};
  constexpr BackwardPrepareConfig kWithSinks{.dtype = kConfig.dtype,
                                             .dims = kConfig.dims,
                                             .has_stats = kConfig.has_stats,
                                             .sequences = kConfig.sequences,
                                             .sinks = true};
  return {name, kConfig,
          [](const BackwardPrepareParams& params) { backward_prepare_sm90<kPrepare>(params); },
          [](const BackwardPrepareParams& params) { backward_prepare_sm90<kWithSinks>(params); },
          [](const BackwardParams& params) { backward_sm90<kConfig>(params); }};
}

}  // namespace fulmen::test
