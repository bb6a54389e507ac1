// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The configs of backward_sm90 that the tests run, with the kernel that prepares for each; one
// source file for each tile width, so that each is a translation unit of its own.
#pragma once

#include <string_view>

#include "kernels/backward_sm90/config_beside.h"

namespace fulmen::test {

struct BackwardKernel {
  std::string_view name;
  BackwardSm90Config config;
  void (*prepare)(const BackwardPreprocessParams& params);  // the bodies of one thread
  void (*prepare_with_sinks)(const BackwardPreprocessParams& params);
  void (*run)(const BackwardParams& params);
};

extern const BackwardKernel kBackwardD64Full;
extern const BackwardKernel kBackwardD64Causal;
extern const BackwardKernel kBackwardD64Window;
extern const BackwardKernel kBackwardD64Half;
extern const BackwardKernel kBackwardD64DqOnly;
extern const BackwardKernel kBackwardD64Sequences;
extern const BackwardKernel kBackwardD64Ordered;
extern const BackwardKernel kBackwardD128Ordered;
extern const BackwardKernel kBackwardD128NoDq;
extern const BackwardKernel kBackwardD128Sequences;
extern const BackwardKernel kBackwardD128Full;
extern const BackwardKernel kBackwardD128Causal;
extern const BackwardKernel kBackwardD128Window;
extern const BackwardKernel kBackwardD128Stats;
extern const BackwardKernel kBackwardD128NoTurns;

}  // namespace fulmen::test
