// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Running kernels on the host for drawn problems, and judging the results.
#pragma once

#include <gtest/gtest.h>

#include "../../cpu/random_problem.h"
#include "../../cpu/tiled_support.h"
#include "cuda/fma_kernels.h"
#include "cuda/params.h"
#include "host_grid.h"

namespace fulmen::test {

template <class Kernel>
void run_kernel(const cuda::KernelLaunch& launch, const Kernel& kernel) {
  host::run_grid(launch.num_blocks, launch.spec.num_threads, launch.spec.shared_bytes, kernel);
}

inline void expect_close(const Request& actual, const Request& expected,
                         const std::vector<Array>& outputs, unsigned seed) {
  for (const Array output : outputs) {
    const Tensor& stored = actual.arrays[output];
    if (!stored.present()) continue;
    const Difference difference = compare(stored, expected.arrays[output]);
    const double allowed = tolerance(expected.arrays[Array::kQ].dtype, stored.dtype);
    EXPECT_LE(difference.largest, allowed * max(difference.magnitude, 1.0))
        << "seed " << seed << ", " << name(output);
  }
}

}  // namespace fulmen::test
