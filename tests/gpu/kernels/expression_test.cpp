// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The naive and simt kernels with a user's expression, in the emulator, against the scalar oracle
// over drawn problems and expressions. interpreted_expression.h stands in place of the text that a
// plan generates. And what that text calls.
#include "../../cpu/drawn_expression.h"
#include "against_oracle.h"
#include "gpu/expression_text.h"
#include "gpu/simt/plan.h"
#include "interpreted_expression.h"
#include "kernels/common/fast_score_mod.cuh"
#include "kernels/naive/naive.cuh"
#include "kernels/simt/backward_simt_captures.cuh"
#include "kernels/simt/backward_simt_dkdv.cuh"
#include "kernels/simt/backward_simt_rows.cuh"
#include "kernels/simt/forward_simt.cuh"
#include "kernels/simt/store_captures.cuh"

namespace fulmen::test {
namespace {

constexpr UserTerms kBothTerms{.score = true, .mask = true};

constexpr FmaConfig naive_with_expression(DType dtype, bool caches = false) {
  return {.dtype = dtype, .caches = caches, .user = kBothTerms};
}

constexpr FmaConfig simt_with_expression(DType dtype, bool caches = false) {
  return {.dtype = dtype,
          .num_threads = 64,
          .rows = 16,
          .columns = 16,
          .max_dim_qk = 96,
          .max_dim_v = 96,
          .caches = caches,
          .user = kBothTerms};
}

using Params = WithExpression<AttentionParams>;

template <FmaConfig kConfig>
void run_forward(const Params& all, KernelRun& run) {
  const AttentionParams& p = all.params;
  if constexpr (kConfig.rows == 0) {
    const gpu::KernelLaunch launch = gpu::naive_forward(p, kBothTerms).at(0);
    EXPECT_EQ(launch.spec.name, gpu::fma_spec("naive/naive", "forward_naive", kConfig).name);
    run.launch(launch, [&] { forward_naive<kConfig>(p); });
  } else {
    run.launch(num_q_tiles(p, kConfig.rows), kConfig.num_threads, kConfig.forward_shared_bytes(),
               "forward_simt", [&] { forward_simt<kConfig>(p); });
  }
}

template <FmaConfig kConfig>
void run_naive_backward(const Params& all, KernelRun& run) {
  const AttentionParams& p = all.params;
  for (const gpu::KernelLaunch& launch : gpu::naive_backward(p, kBothTerms, true)) {
    const std::string& entry = launch.spec.function;
    if (entry == "fulmen::backward_naive_dq") {
      run.launch(launch, [&] { backward_naive_dq<kConfig>(p); });
    } else if (entry == "fulmen::backward_naive_dkdv") {
      run.launch(launch, [&] { backward_naive_dkdv<kConfig>(p); });
    } else if (entry == "fulmen::backward_naive_dbias") {
      run.launch(launch, [&] { backward_naive_dbias<kConfig>(p); });
    } else if (entry == "fulmen::backward_naive_captures") {
      run.launch(launch, [&] { backward_naive_captures<kConfig>(p); });
    } else {
      constexpr FmaConfig kPlain{.dtype = kConfig.dtype};
      run.launch(launch, [&] { backward_naive_dsinks<kPlain>(p); });
    }
  }
}

template <FmaConfig kConfig>
void run_simt_backward(Params& all, KernelRun& run) {
  AttentionParams& p = all.params;
  constexpr FmaConfig kPlain{.dtype = kConfig.dtype};
  const i64 rows = p.batch_extent() * p.heads_q * p.q_rows;
  std::vector<double> workspace(static_cast<size_t>(rows * 4), kNan);
  gpu::set_row_terms(p, reinterpret_cast<u8*>(workspace.data()));
  const auto tiles = [&](const char* name, i64 blocks, const std::function<void()>& kernel) {
    run.launch(blocks, kConfig.num_threads, kConfig.backward_shared_bytes(), name, kernel);
  };
  run.launch(ceil_div(rows, kPlain.num_threads), kPlain.num_threads, 0, "backward_simt_rows",
             [&] { backward_simt_rows<kPlain>(p); });
  const i64 q_tiles = num_q_tiles(p, kConfig.rows);
  if (p.dq.present()) tiles("backward_simt_dq", q_tiles, [&] { backward_simt_dq<kConfig>(p); });
  if (p.dk.present() || p.dv.present()) {
    tiles("backward_simt_dkdv", num_kv_tiles(p, kConfig.rows),
          [&] { backward_simt_dkdv<kConfig>(p); });
  }
  if (p.dbias.present()) {
    tiles("backward_simt_dbias", dbias_tiles(p, kConfig.rows, kConfig.columns),
          [&] { backward_simt_dbias<kConfig>(p); });
  }
  tiles("backward_simt_captures", q_tiles, [&] { backward_simt_captures<kConfig>(p); });
}

struct Family {
  const char* name;
  DType dtype;
  bool caches;
  void (*forward)(const Params& all, KernelRun& run);
  void (*backward)(Params& all, KernelRun& run);  // null: over caches
};

constexpr DType kWide = DType::kFloat32, kHalf = DType::kFloat16;

template <FmaConfig kConfig>
void naive_backward_of(Params& all, KernelRun& run) {
  run_naive_backward<kConfig>(all, run);
}

const Family kFamilies[] = {
    {"naive", kWide, false, run_forward<naive_with_expression(kWide)>,
     naive_backward_of<naive_with_expression(kWide)>},
    {"naive_over_caches", kHalf, true, run_forward<naive_with_expression(kHalf, true)>, nullptr},
    {"simt", kWide, false, run_forward<simt_with_expression(kWide)>,
     run_simt_backward<simt_with_expression(kWide)>},
    {"simt_over_caches", kHalf, true, run_forward<simt_with_expression(kHalf, true)>, nullptr},
};

class ExpressionOnHost : public testing::TestWithParam<Family> {};

// A drawn problem of the family's dtype.
Request drawn_for(RandomProblem& random, const Family& family) {
  const Request drawn = family.caches ? random.draw_cache() : random.draw();
  return with_segments(random, with_expression(random, drawn));
}

TEST_P(ExpressionOnHost, AgreesWithTheOracle) {
  const Family& family = GetParam();
  unsigned left = num_drawn(kProblemsOfATest);
  for (unsigned seed = 40000; left > 0; ++seed) {
    RandomProblem random(seed);
    const Request expected = drawn_for(random, family);
    if (expected.arrays[Array::kQ].dtype != family.dtype) continue;
    --left;
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    const Problem problem = validate(actual, Pointers::kChecked);
    interpreted = &problem;
    KernelRun run{memory_of(actual), seed};
    family.forward(
        {gpu::attention_params(problem), gpu::expression_params(problem, nullptr, nullptr)}, run);
    expect_close(actual, expected, {Array::kO, Array::kLse}, seed);
  }
}

TEST_P(ExpressionOnHost, GradientsAgreeWithTheOracle) {
  const Family& family = GetParam();
  if (family.backward == nullptr) return;
  unsigned left = num_drawn(kProblemsOfATest);
  for (unsigned seed = 41000; left > 0; ++seed) {
    RandomProblem random(seed);
    const Request forward = drawn_for(random, family);
    if (forward.arrays[Array::kQ].dtype != family.dtype) continue;
    Request expected = to_backward(random, forward, (seed % 31) | 1u << (seed % 3));
    if (!add_capture_gradients(random, expected)) continue;
    --left;
    cpu::scalar_forward(validate(forward, Pointers::kChecked));
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_backward(validate(expected, Pointers::kChecked));
    const Problem problem = validate(actual, Pointers::kChecked);
    interpreted = &problem;
    const i64 count = gpu::num_capture_sums(problem);
    std::vector<double> sums(static_cast<size_t>(count) + 1);
    Params all{gpu::attention_params(problem),
               gpu::expression_params(problem, sums.data(), nullptr)};
    KernelRun run{memory_of(actual), seed};
    family.backward(all, run);
    const CaptureGradients ends = gpu::capture_gradients(problem, sums.data());
    run.launch(gpu::store_captures(family.dtype, count),
               [&] { store_captures<FmaConfig{.dtype = kWide}>(ends); });
    expect_close(actual, expected, outputs_of(Operation::kBackward), seed);
  }
}

// In a kernel, since instructions are the emulator's.
template <class Check>
void check_calls(const Check& check) {
  emulator::launch({.blocks = 1, .threads = 32, .kernel = "calls"}, [&] {
    if (ptx::thread_index() == 0) check();
  });
}

TEST(ExpressionCalls, FunctionsOfBothKindsOfMath) {
  check_calls([] {
    for (const float x : {0.01f, 0.4f, 1.5f, 7.f}) {
      const auto expect = [x](double got, double expected) {
        EXPECT_NEAR(got, expected, 2e-6 * (1 + std::abs(expected))) << x;
      };
      const auto expect_all = [&]<class Math>(Math) {
        const double wide = static_cast<double>(x);
        expect(Math::exp(x), std::exp(wide));
        expect(Math::log(x), std::log(wide));
        expect(Math::tanh(x), std::tanh(wide));
        expect(Math::sqrt(x), std::sqrt(wide));
        expect(Math::abs(-x), wide);
        expect(Math::quotient(3.f, x), 3 / wide);
      };
      expect_all(FastMath<float>{});
      expect_all(AccurateMath<float>{});
    }
  });
}

TEST(ExpressionCalls, BoundsAndFloors) {
  check_calls([] {
    EXPECT_EQ(least_of(2.f, 3.f), 2);
    EXPECT_EQ(most_of(2.f, 3.f), 3);
    for (const float other : {-1.f, 1.f}) {
      EXPECT_TRUE(std::isnan(least_of(other, float{kNan})));
      EXPECT_TRUE(std::isnan(least_of(float{kNan}, other)));
      EXPECT_TRUE(std::isnan(most_of(other, float{kNan})));
      EXPECT_TRUE(std::isnan(most_of(float{kNan}, other)));
    }
    EXPECT_EQ(bounded(-5, -3, 4), -3);
    EXPECT_EQ(bounded(9, -3, 4), 4);
    EXPECT_EQ(bounded(2, -3, 4), 2);
    EXPECT_EQ(floor_of(-1.5f), -2);
    EXPECT_EQ(floor_of(-2.f), -2);
    EXPECT_EQ(floor_of(1.75), 1);
    EXPECT_EQ(floor_of(double{kNan}), 0);
    EXPECT_EQ(floor_of(1e30f), std::numeric_limits<i64>::max());
    EXPECT_EQ(floor_of(-1e30), std::numeric_limits<i64>::min());
  });
}

TEST(ExpressionCalls, ReadsStayInsideAndSayWhereTheyWouldNot) {
  check_calls([] {
    const float numbers[] = {1, 2, 3, 4, 5, 6};
    const f16 halves[] = {to_f16(0.5f), to_f16(-8.f)};
    const auto view = [](const void* data, DType dtype) {
      return ArrayView{static_cast<u8*>(const_cast<void*>(data)), {0, 0, 3, 1}, dtype};
    };
    ExpressionParams e{};
    e.captures[0] = view(numbers, DType::kFloat32);
    e.captures[1] = view(halves, DType::kFloat16);
    std::copy_n(std::array<i64, 4>{1, 1, 2, 3}.begin(), 4, e.extents[0]);
    bool outside = false;
    EXPECT_EQ(inside<i32>(e, 0, 2, i64{1}, outside) * stride<i32>(e, 0, 2), 3);
    EXPECT_EQ(inside<i32>(e, 0, 3, 2, outside) * stride<i32>(e, 0, 3), 2);
    EXPECT_FALSE(outside);
    EXPECT_EQ(inside<i64>(e, 0, 3, -1, outside), 0);
    EXPECT_TRUE(outside);
    outside = false;
    EXPECT_EQ(inside<i64>(e, 0, 3, i64{1} << 40, outside), extent<i64>(e, 0, 3) - 1);
    EXPECT_TRUE(outside);
    EXPECT_EQ((real_element<float, double>(e, 0, 5)), 6);
    EXPECT_EQ((real_element<f16, float>(e, 1, i64{1})), -8);
  });
}

INSTANTIATE_TEST_SUITE_P(All, ExpressionOnHost, testing::ValuesIn(kFamilies),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace fulmen::test
