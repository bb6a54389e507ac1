// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The merge kernel's own text, run in the emulator, against the CPU's merge in float64.
#include "kernels/merge/merge.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cpu/backend.h"
#include "emulator/launch.h"
#include "gpu/backend.h"

namespace fulmen::test {
namespace {

constexpr i64 kBatch = 2, kHeads = 3, kRows = 5;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <class T>
Tensor tensor_over(std::vector<T>& memory, DType dtype, i64 heads_first_rows, i64 dim) {
  return {memory.data(),
          dtype,
          4,
          {heads_first_rows == 1 ? 1 : kBatch, kHeads, heads_first_rows, dim},
          {kHeads * heads_first_rows * dim, heads_first_rows * dim, dim, 1}};
}

// The same merge in two precisions: parts' o and lse, sinks, and what is written.
template <class T>
struct Merge {
  std::vector<std::vector<T>> o, lse;
  std::vector<T> sinks, out, out_lse;
  MergeProblem problem;

  Merge(const std::vector<std::vector<double>>& os, const std::vector<std::vector<double>>& lses,
        const std::vector<double>& sink, i64 dim, DType dtype, bool in_place) {
    const auto copy = [](const std::vector<double>& x) {
      return std::vector<T>(x.begin(), x.end());
    };
    for (const auto& x : os) o.push_back(copy(x));
    for (const auto& x : lses) lse.push_back(copy(x));
    sinks = copy(sink);
    out.resize(o[0].size());
    out_lse.resize(lse[0].size());
    for (std::size_t i = 0; i < o.size(); ++i) {
      problem.parts.push_back(
          {tensor_over(o[i], dtype, kRows, dim), tensor_over(lse[i], dtype, kRows, 1)});
    }
    if (!sinks.empty()) problem.sinks = tensor_over(sinks, dtype, 1, 1);
    problem.o = in_place ? problem.parts[1].o : tensor_over(out, dtype, kRows, dim);
    problem.lse = in_place ? problem.parts[1].lse : tensor_over(out_lse, dtype, kRows, 1);
  }
};

void run(const MergeProblem& problem, u32 seed) {
  const MergeParams params = gpu::merge_params(problem);
  emulator::launch({.blocks = ceil_div(params.num_rows, 4),
                    .threads = 128,
                    .shared_bytes = 0,
                    .seed = seed,
                    .kernel = "merge"},
                   [&] { merge<FmaConfig{}>(params); });
}

// A NaN agrees with a NaN, an infinity with itself.
void expect_near(double got, double wanted) {
  if (std::isnan(wanted) || std::isinf(wanted)) {
    EXPECT_TRUE(std::isnan(wanted) ? std::isnan(got) : got == wanted) << got << " for " << wanted;
  } else {
    EXPECT_NEAR(got, wanted, 2e-6 * std::max(1.0, std::fabs(wanted)));
  }
}

void expect_merges(i64 dim, std::size_t num_parts, bool has_sinks, bool in_place, u32 seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  const auto draw = [&](i64 count) {
    std::vector<double> x(static_cast<std::size_t>(count));
    for (double& value : x) value = static_cast<float>(normal(random));
    return x;
  };
  constexpr i64 kAllRows = kBatch * kHeads * kRows;
  std::vector<std::vector<double>> o, lse;
  for (std::size_t i = 0; i < num_parts; ++i) {
    o.push_back(draw(kAllRows * dim));
    lse.push_back(draw(kAllRows));
  }
  lse[0][3] = -kInfinity;  // saw nothing: the NaN beside it says nothing
  o[0][static_cast<std::size_t>(3 * dim)] = std::nan("");
  for (auto& of_part : lse) of_part[4] = -kInfinity;  // nobody saw anything
  lse[0][5] = std::nan("");
  const std::vector<double> sinks = has_sinks ? draw(kHeads) : std::vector<double>();
  Merge<float> narrow(o, lse, sinks, dim, DType::kFloat32, in_place);
  Merge<double> wide(o, lse, sinks, dim, DType::kFloat64, in_place);
  run(narrow.problem, seed);
  cpu::merge(wide.problem);
  const auto& got = in_place ? narrow.o[1] : narrow.out;
  const auto& wanted = in_place ? wide.o[1] : wide.out;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    expect_near(static_cast<double>(got[i]), wanted[i]);
  }
  const auto& got_lse = in_place ? narrow.lse[1] : narrow.out_lse;
  const auto& wanted_lse = in_place ? wide.lse[1] : wide.out_lse;
  for (std::size_t i = 0; i < wanted_lse.size(); ++i) {
    expect_near(static_cast<double>(got_lse[i]), wanted_lse[i]);
  }
}

TEST(Merge, AgreesWithTheCpu) {
  expect_merges(40, 2, false, false, 1);
  expect_merges(1, 3, true, false, 2);
  expect_merges(300, 5, true, false, 3);  // more than a lane has at once
  expect_merges(64, MergeParams::kMaxParts, false, false, 4);
}

TEST(Merge, APartIsMergedInPlace) {
  expect_merges(200, 3, true, true, 5);
  expect_merges(33, 2, false, true, 6);
}

}  // namespace
}  // namespace fulmen::test
