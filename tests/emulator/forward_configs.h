// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The configs of forward_sm90 that the tests run, one source file for each head dimension, so that
// each is a translation unit of its own. A config is a template argument of the kernel; the tests
// see it as a value beside a function.
#pragma once

#include <string_view>

#include "kernels/forward_sm90/config.h"

namespace fulmen::test {

using RunForward = void (*)(const ForwardArguments& arguments);

struct ForwardKernel {
  std::string_view name;
  ForwardSm90Config config;
  RunForward run;  // the body of one thread
};

extern const ForwardKernel kD64Full;
extern const ForwardKernel kD64Causal;
extern const ForwardKernel kD64Prefix;
extern const ForwardKernel kD64Window;
extern const ForwardKernel kD64OneStage;
extern const ForwardKernel kD64Chunk;
extern const ForwardKernel kD64Half;
extern const ForwardKernel kD128Causal;
extern const ForwardKernel kD128QRegisters;
extern const ForwardKernel kD128SumGrew;
extern const ForwardKernel kD128EveryBlock;
extern const ForwardKernel kD256Causal;

}  // namespace fulmen::test
