// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The tiled forward pass with products by emulated tiles, whose outputs are transposed, against the
// scalar oracle on every machine: of bf16 and of f16 as sums of two; also where one block of keys
// holds a number that tiles must not multiply, so that outputs are transposed back for it.

#include <gtest/gtest.h>

#include "cpu/backend.h"
#include "cpu/kernels.h"
#include "plan/tiled_workspace.h"
#include "tiled_support.h"
#if defined(__x86_64__)
#include "emulated_tiles.h"
#endif

namespace fulmen::test {
namespace {

#if defined(__x86_64__)

// Null where the panels of the instruction set in use are of another width than any of theirs.
const cpu::PairKernels* emulated_tiles(DType dtype) {
  const bool splits = dtype == DType::kFloat16;
  if (!splits && dtype != DType::kBFloat16) return nullptr;
  switch (cpu::kernels<float>().lanes) {
    case 16:
      return splits ? &cpu::kEmulatedSplitAvx2 : &cpu::kEmulatedTilesAvx2;
    case 32:
      return splits ? &cpu::kEmulatedSplitAvx512 : &cpu::kEmulatedTilesAvx512;
    default:
      return nullptr;
  }
}

// Whether it was run.
bool run_by_tiles(RandomProblem& random, const Request& request) {
  CpuDevice device = cpu::cpu_device();
  device.has_tiles = true;
  device.num_threads = 2;
  const Plan plan = choose(validate(request, Pointers::kChecked), device);
  const cpu::PairKernels* const pairs = emulated_tiles(plan.problem.kv_dtype());
  if (!pairs) return false;
  char* const workspace = static_cast<char*>(random.memory(plan.workspace_bytes + 1)) + 1;
  cpu::tiled_forward(plan, plan.problem, workspace, pairs);
  return true;
}

bool agrees_by_tiles(RandomProblem& random, const Request& expected, unsigned seed) {
  const Request actual = with_fresh_outputs(random, expected);
  if (!run_by_tiles(random, actual)) return false;
  cpu::scalar_forward(validate(expected, Pointers::kChecked));
  const DType computed = expected.arrays[Array::kQ].dtype;
  for (const Array output : {Array::kO, Array::kLse}) {
    const Tensor& stored = actual.arrays[output];
    const Difference difference = compare(stored, expected.arrays[output]);
    const bool rounds_weights = output == Array::kO && computed == DType::kBFloat16;
    const double allowed = tolerance(computed, rounds_weights ? computed : stored.dtype);
    EXPECT_LE(difference.largest, allowed * max(difference.magnitude, 1.0))
        << "seed " << seed << ", " << name(output);
  }
  return true;
}

TEST(ForwardByTiles, AgreesWithTheOracle) {
  int runs = 0;
  for (unsigned seed = 20000; seed < 20200; ++seed) {
    RandomProblem random(seed);
    const Request request = seed % 3 == 0 ? random.draw_cache() : random.draw();
    runs += agrees_by_tiles(random, request, seed) ? 1 : 0;
  }
  EXPECT_GT(runs, emulated_tiles(DType::kBFloat16) ? 30 : -1);
}

TEST(ForwardByTiles, HeadsThatAreReadTogetherHaveTheBitsOfHeadsAlone) {
  if (!emulated_tiles(DType::kBFloat16)) GTEST_SKIP() << "no tiles beside such vectors";
  const auto run = [](RandomProblem& random, const Request& request) {
    EXPECT_TRUE(run_by_tiles(random, request));
  };
  for (const i64 group : {2, 3, 8}) {
    EXPECT_TRUE(has_bits_of_heads_alone(DType::kBFloat16, group, run)) << group;
  }
}

// (1, 2, rows, 64), of more rows than two strips and more keys than one block.
TEST(ForwardByTiles, TurnsOutputsBackForBlocksOfOtherNumbers) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const i64 odd_key : {5, 255, 299}) {
      RandomProblem random(static_cast<unsigned>(odd_key));
      Request request;
      for (const Array array : {Array::kQ, Array::kK, Array::kV}) {
        request.arrays[array] =
            random.contiguous(dtype, {1, 2, array == Array::kQ ? 150 : 300, 64});
        random.fill_normal(request.arrays[array]);
      }
      request.arrays[Array::kO] = random.contiguous(DType::kFloat32, {1, 2, 150, 64});
      const Tensor& V = request.arrays[Array::kV];
      V.set_real(0, 1, odd_key, 3, dtype == DType::kBFloat16 ? 0x1p-130 : HUGE_VAL);
      EXPECT_EQ(agrees_by_tiles(random, request, 0), emulated_tiles(dtype) != nullptr);
    }
  }
}

#endif

}  // namespace
}  // namespace fulmen::test
