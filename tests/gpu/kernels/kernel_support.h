// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Running kernels in the emulator for drawn problems.
#pragma once

#include <gtest/gtest.h>

#include "../../cpu/tiled_support.h"
#include "emulator/launch.h"
#include "emulator/request_memory.h"
#include "emulator/schedules.h"
#include "expect_close.h"
#include "gpu/gpu_plan.h"
#include "gpu/params.h"

namespace fulmen::test {

// One run of a problem, whose kernels come one after the other.
struct KernelRun {
  emulator::GlobalMemory memory;
  u32 seed;
  bool together = false;  // all blocks of a kernel at the same time, in any order

  // Every tenth, or all by FULMEN_TEST_FULL: the checker looks at every load of slow kernels.
  bool is_checked() const { return seed % 10 == 0 || tests_everything(); }

  void launch(i64 blocks, i64 threads, i64 shared_bytes, const std::string& name,
              const std::function<void()>& kernel) {
    emulator::launch({.blocks = blocks,
                      .threads = static_cast<i32>(threads),
                      .shared_bytes = static_cast<i32>(shared_bytes),
                      .seed = seed,
                      .together = together,
                      .kernel = name,
                      .check = is_checked(),
                      .memory = is_checked() ? &memory : nullptr},
                     kernel);
  }
  void launch(const gpu::KernelLaunch& launched, const std::function<void()>& kernel) {
    launch(launched.num_blocks, launched.spec.num_threads, launched.spec.shared_bytes,
           launched.spec.function, kernel);
  }
};

// Run<kDType>::run(p, run) for the dtype of q.
template <template <DType> class Run>
void for_dtype(const AttentionParams& p, KernelRun& run) {
  switch (p.q.dtype) {
    case DType::kFloat64:
      return Run<DType::kFloat64>::run(p, run);
    case DType::kFloat32:
      return Run<DType::kFloat32>::run(p, run);
    case DType::kFloat16:
      return Run<DType::kFloat16>::run(p, run);
    default:
      return Run<DType::kBFloat16>::run(p, run);
  }
}

}  // namespace fulmen::test
