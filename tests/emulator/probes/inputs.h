// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The runs of probes: which instruction on which numbers. The same on every machine.
#pragma once

#include <string>
#include <vector>

#include "probes.h"

namespace fulmen::test {

struct ProbeRun {
  std::string name;
  Probe probe;
  ProbeFamily family;
  std::vector<u32> in;
  std::size_t out_words;
  i32 count = 1;
  u32 box_columns = 0;        // of the tensor map; 0: none
  std::size_t tensor_at = 0;  // in words, of `in`, or of the output of a store
};

// Of tensors: dims, rows, heads, batch.
inline constexpr u64 kProbeExtents[] = {80, 40, 3, 2};

std::vector<ProbeRun> probe_runs();

}  // namespace fulmen::test
