// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The table.

#include "gpu/implementations.h"

#include "core/error.h"
#include "gpu/fma.h"
#include "gpu/forward_sm80/run.h"
#include "gpu/naive/run.h"
#include "gpu/simt/run.h"
#include "gpu/sm90_run.h"

namespace fulmen::gpu {
namespace {

constexpr Runner kRunners[] = {
    {Implementation::kSm90, sm90_launches, sm90_run},
    {Implementation::kSm80, sm80_launches, sm80_run},
    {Implementation::kSimt, simt_launches, fma_run},
    {Implementation::kNaive, naive_launches, fma_run},
};

}  // namespace

const Runner& runner_of(Implementation implementation) {
  for (const Runner& runner : kRunners) {
    if (runner.implementation == implementation) return runner;
  }
  throw Error(Status::kInternal, sentence("implementation ", name(implementation),
                                          " is planned but cannot run; please report this"));
}

}  // namespace fulmen::gpu
