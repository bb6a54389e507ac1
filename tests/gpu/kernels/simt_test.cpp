// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The simt kernels' own text, run in the emulator, against the scalar oracle over drawn problems.
// One small tile for each dtype, so that the problems have several blocks in both directions.
#include <map>
#include <set>

#include "against_oracle.h"
#include "gpu/simt/plan.h"
#include "kernels/naive/naive.cuh"
#include "kernels/simt/backward_simt_dkdv.cuh"
#include "kernels/simt/backward_simt_rows.cuh"
#include "kernels/simt/forward_simt.cuh"

namespace fulmen::test {
namespace {

template <DType kDType, bool kAddsDq = false, bool kCaches = false>
constexpr FmaConfig config_of() {
  FmaConfig config;
  config.dtype = kDType;
  config.num_threads = 64;
  config.rows = 16;
  config.columns = 16;
  config.max_dim_qk = config.max_dim_v = 96;  // drawn dims are at most 80
  config.adds_dq = kAddsDq;
  config.caches = kCaches;
  return config;
}

// As plan_simt makes them: tiles of 16 lie in one block of lists.
AttentionParams by_tiles(AttentionParams p) {
  p.lists_by_pair = false;
  return p;
}

template <DType kDType, bool kCaches>
struct SimtForwardOf {
  static void run(const AttentionParams& given, KernelRun& run) {
    const AttentionParams p = by_tiles(given);
    constexpr FmaConfig kConfig = config_of<kDType, false, kCaches>();
    run.launch(num_q_tiles(p, kConfig.rows), kConfig.num_threads, kConfig.forward_shared_bytes(),
               "forward_simt", [&] { forward_simt<kConfig>(p); });
  }
};

template <DType kDType>
struct SimtForward : SimtForwardOf<kDType, false> {};
template <DType kDType>
struct SimtOverCaches : SimtForwardOf<kDType, true> {};

template <DType kDType, bool kAddsDq>
void run_backward(const AttentionParams& given, KernelRun& run) {
  AttentionParams p = by_tiles(given);
  constexpr FmaConfig kConfig = config_of<kDType, kAddsDq>();
  const i64 rows = p.batch_extent() * p.heads_q * p.q_rows;
  std::vector<double> workspace(static_cast<size_t>(rows * 4), kNan);
  gpu::set_row_terms(p, reinterpret_cast<u8*>(workspace.data()));
  run.launch(ceil_div(rows, kConfig.num_threads), kConfig.num_threads, 0, "backward_simt_rows",
             [&] { backward_simt_rows<kConfig>(p); });
  if (p.dq.present() && !kAddsDq) {
    run.launch(num_q_tiles(p, kConfig.rows), kConfig.num_threads, kConfig.backward_shared_bytes(),
               "backward_simt_dq", [&] { backward_simt_dq<kConfig>(p); });
  }
  if (p.dk.present() || p.dv.present()) {
    run.launch(num_kv_tiles(p, kConfig.rows), kConfig.num_threads, kConfig.backward_shared_bytes(),
               "backward_simt_dkdv", [&] { backward_simt_dkdv<kConfig>(p); });
  }
  if (p.dbias.present()) {
    run.launch(dbias_tiles(p, kConfig.rows, kConfig.columns), kConfig.num_threads,
               kConfig.backward_shared_bytes(), "backward_simt_dbias",
               [&] { backward_simt_dbias<kConfig>(p); });
  }
  if (p.dsinks.present()) {
    run.launch(p.heads_q, kConfig.num_threads, kConfig.num_threads * sizeof(double),
               "backward_simt_dsinks", [&] { backward_simt_dsinks<kConfig>(p); });
  }
}

// As gpu/simt/plan.h says of simt_adds_dq.
bool can_add_dq(const AttentionParams& p) {
  const i64 bytes = size_bytes(p.q.dtype);
  return bytes >= 4 && p.dq.present() && (p.dk.present() || p.dv.present()) &&
         reinterpret_cast<u64>(p.dq.data) % static_cast<u64>(bytes) == 0;
}

// dQ by a pass of its own, and for odd seeds by atomics where that can be.
template <DType kDType>
struct SimtBackward {
  static void run(const AttentionParams& p, KernelRun& run) {
    if constexpr (size_bytes(kDType) >= 4) {
      if (run.seed % 2 == 1 && can_add_dq(p)) return run_backward<kDType, true>(p, run);
    }
    run_backward<kDType, false>(p, run);
  }
};

template <DType kDType>
struct SimtBackwardInPasses {
  static void run(const AttentionParams& p, KernelRun& run) { run_backward<kDType, false>(p, run); }
};

class SimtOnHost : public testing::TestWithParam<unsigned> {};

TEST_P(SimtOnHost, ForwardAgreesWithTheOracle) { expect_forward_agrees<SimtForward>(GetParam()); }

TEST_P(SimtOnHost, CachesAgreeWithTheOracle) { expect_caches_agree<SimtOverCaches>(GetParam()); }

TEST_P(SimtOnHost, BackwardAgreesWithTheOracle) {
  expect_backward_agrees<SimtBackward>(GetParam());
}

TEST(SimtOnHostParts, AreMerged) { expect_parts_are_merged<SimtForward>(600); }

TEST(SimtOnHostLists, AgreeWithTheOracle) { expect_lists_agree<SimtForward, SimtBackward>(); }
TEST(SimtOnHostLists, MayBeAHeadsOwn) { expect_lists_of_heads_agree<SimtForward>(); }

TEST(SimtOnHostPlanted, WhatIsHiddenDoesNotShow) {
  expect_hidden_does_not_show<SimtForward, SimtBackward>();
  expect_hidden_does_not_show<SimtForward, SimtBackwardInPasses>();
}

TEST(SimtOnHostPlanted, RowsWithoutKeysDoNotShow) {
  expect_rows_without_keys_do_not_show<SimtForward, SimtBackward>();
}

TEST(SimtOnHostArrays, SumsOfDbias) { expect_sums_of_dbias<SimtForward, SimtBackward>(); }

TEST(SimtOnHostArrays, MayLieAnywhere) {
  expect_arrays_may_lie_anywhere<SimtForward, SimtBackward>();
}

// As many vectors as a row of the tile has, and threads that are a multiple of them.
template <DType kDType>
struct SimtWholeRows {
  static void run(const AttentionParams& p, KernelRun& run) {
    constexpr FmaConfig kConfig = [] {
      FmaConfig config = config_of<kDType>();
      config.max_dim_qk = config.max_dim_v = 64;
      return config;
    }();
    run.launch(num_q_tiles(p, kConfig.rows), kConfig.num_threads, kConfig.forward_shared_bytes(),
               "forward_simt", [&] { forward_simt<kConfig>(p); });
  }
};

TEST(SimtOnHostArrays, WholeRowsAreCopied) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32}) {
    RandomProblem random(12);
    const Request expected = small_request(random, dtype, 35, 40, 64);
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run_on<SimtWholeRows>(actual, 1);
    expect_close(actual, expected, {Array::kO, Array::kLse}, 1);
  }
}

// ---- Bits over schedules -----------------------------------------------------------------------

// Bits of `need`, in this order.
constexpr Array kGradients[] = {Array::kDQ, Array::kDK, Array::kDV, Array::kDBias, Array::kDSinks};
constexpr unsigned kAllGradients = 31;

// Two query heads that share 70 keys, five blocks of them, and a bias and sinks.
Request request_of_several_blocks(RandomProblem& random, DType dtype, unsigned need) {
  Request request;
  Arrays& arrays = request.arrays;
  const auto fill = [&](Array array, DType type, std::vector<i64> shape) {
    arrays[array] = random.array(type, std::move(shape));
    random.fill_normal(arrays[array]);
  };
  fill(Array::kQ, dtype, {1, 2, 20, 24});
  fill(Array::kK, dtype, {1, 1, 70, 24});
  fill(Array::kV, dtype, {1, 1, 70, 16});
  fill(Array::kBias, accumulator(dtype), {1, 2, 1, 70});
  fill(Array::kSinks, accumulator(dtype), {2});
  arrays[Array::kO] = random.array(dtype, {1, 2, 20, 16});
  arrays[Array::kLse] = random.array(accumulator(dtype), {1, 2, 20});
  arrays[Array::kStats] = random.array(accumulator(dtype), {1, 2, 20, 2});
  request.options.scale = kNan;
  cpu::scalar_forward(validate(request, Pointers::kChecked));
  return to_backward(random, request, need);
}

std::string bits_of(const Tensor& tensor) {
  std::string bits;
  RandomProblem::for_each(tensor, [&](const i64* at) {
    bits.append(RandomProblem::address(tensor, at), static_cast<size_t>(size_bytes(tensor.dtype)));
  });
  return bits;
}

// How many different results each gradient has over schedules in which all blocks run together.
template <DType kDType, bool kAddsDq>
std::map<Array, size_t> num_results() {
  RandomProblem random(11);
  const Request first = request_of_several_blocks(random, kDType, kAllGradients);
  std::map<Array, std::set<std::string>> results;
  for (u32 seed = 1; seed <= (tests_everything() ? 20u : 4u); ++seed) {
    const Request request = with_fresh_outputs(random, first);
    KernelRun run{memory_of(request), seed, true};
    run_backward<kDType, kAddsDq>(gpu::attention_params(validate(request, Pointers::kChecked)),
                                  run);
    for (const Array gradient : kGradients) {
      results[gradient].insert(bits_of(request.arrays[gradient]));
    }
  }
  std::map<Array, size_t> counts;
  for (const auto& [gradient, found] : results) counts[gradient] = found.size();
  return counts;
}

TEST(SimtBits, DeterministicGradientsHaveTheSameInEverySchedule) {
  for (const auto& counts :
       {num_results<DType::kFloat32, false>(), num_results<DType::kFloat64, false>()}) {
    for (const auto& [gradient, count] : counts) EXPECT_EQ(count, 1u) << name(gradient);
  }
}

TEST(SimtBits, SumsOfDqByAtomicsDependOnTheSchedule) {
  for (const auto& counts :
       {num_results<DType::kFloat32, true>(), num_results<DType::kFloat64, true>()}) {
    for (const auto& [gradient, count] : counts) {
      EXPECT_EQ(count > 1, gradient == Array::kDQ) << name(gradient);
    }
  }
}

template <DType kDType>
void expect_same_bits_alone() {
  const auto result = [](Array gradient, unsigned need) {
    RandomProblem random(11);
    const Request request = request_of_several_blocks(random, kDType, need);
    KernelRun run{memory_of(request), 1, true};
    run_backward<kDType, false>(gpu::attention_params(validate(request, Pointers::kChecked)), run);
    return bits_of(request.arrays[gradient]);
  };
  unsigned need = 1;
  for (const Array gradient : kGradients) {
    EXPECT_EQ(result(gradient, need), result(gradient, kAllGradients)) << name(gradient);
    need *= 2;
  }
}

TEST(SimtBits, DeterministicGradientsAloneAreWhatTheyAreAmongTheOthers) {
  expect_same_bits_alone<DType::kFloat32>();
  expect_same_bits_alone<DType::kFloat64>();
  expect_same_bits_alone<DType::kBFloat16>();
}

INSTANTIATE_TEST_SUITE_P(Drawn, SimtOnHost, testing::Range(200u, 300u, 25u));

}  // namespace
}  // namespace fulmen::test
