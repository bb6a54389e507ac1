// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Running kernels on the host for drawn problems.
#pragma once

#include <gtest/gtest.h>

#include "../../cpu/tiled_support.h"
#include "cuda/fma_kernels.h"
#include "cuda/params.h"
#include "expect_close.h"
#include "host_grid.h"

namespace fulmen::test {

template <class Kernel>
void run_kernel(const cuda::KernelLaunch& launch, const Kernel& kernel) {
  host::run_grid(launch.num_blocks, launch.spec.num_threads, launch.spec.shared_bytes, kernel);
}

// Run<kDType>::run(p) for the dtype of q.
template <template <DType> class Run>
void for_dtype(const AttentionParams& p) {
  switch (p.q.dtype) {
    case DType::kFloat64:
      return Run<DType::kFloat64>::run(p);
    case DType::kFloat32:
      return Run<DType::kFloat32>::run(p);
    case DType::kFloat16:
      return Run<DType::kFloat16>::run(p);
    default:
      return Run<DType::kBFloat16>::run(p);
  }
}

}  // namespace fulmen::test
