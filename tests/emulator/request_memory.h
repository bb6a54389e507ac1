// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The arrays of a request of RandomProblem, as the emulator's checker knows them: by name, inputs
// only to be read, outputs that hold nothing yet unless results are merged with what they hold.
#pragma once

#include <algorithm>

#include "cpu/random_problem.h"
#include "cpu/tiled_support.h"
#include "emulator/global_memory.h"

namespace fulmen::test {

inline emulator::GlobalMemory memory_of(const Request& request) {
  std::vector<emulator::GlobalArray> arrays;
  const std::vector<Array> outputs = outputs_of(request.operation);
  for (int i = 0; i < kNumArrays; ++i) {
    const Array array = static_cast<Array>(i);
    const Tensor& tensor = request.arrays[array];
    if (!tensor.present()) continue;
    const bool output = std::ranges::find(outputs, array) != outputs.end();
    emulator::GlobalArray known{name(array), tensor.data, size_bytes(tensor.dtype)};
    for (int axis = 0; axis < tensor.rank; ++axis) {
      known.extents[static_cast<size_t>(axis)] = tensor.shape[axis];
      known.strides[static_cast<size_t>(axis)] = tensor.strides[axis];
    }
    known.writable = output;
    known.initialised = !output || request.options.accumulate;
    known.margin_bytes = RandomProblem::kMarginBytes;
    arrays.push_back(known);
  }
  return emulator::GlobalMemory(arrays);
}

}  // namespace fulmen::test
