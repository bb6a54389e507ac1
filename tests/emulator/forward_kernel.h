// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Makes a ForwardKernel of a config: the only place of the tests that sees the kernel's text.
#pragma once

#include "forward_configs.h"
#include "kernels/forward_sm90/forward_sm90.cuh"

namespace fulmen::test {

template <ForwardSm90Config kConfig>
constexpr ForwardKernel forward_kernel(std::string_view name) {
  return {name, kConfig,
          [](const ForwardArguments& arguments) { forward_sm90<kConfig>(arguments); }};
}

}  // namespace fulmen::test
