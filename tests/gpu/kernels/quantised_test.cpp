// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The naive and simt kernels over keys and values of 8 bits, in the emulator, against the scalar
// oracle over drawn problems, with each type of keys beside one of queries; and over queries of 8
// bits.
#include "against_oracle.h"
#include "gpu/simt/plan.h"
#include "kernels/naive/naive.cuh"
#include "kernels/simt/forward_simt.cuh"

namespace fulmen::test {
namespace {

constexpr FmaConfig naive_of(DType dtype, DType quantised, bool caches, bool with_q = false) {
  return {.dtype = dtype, .caches = caches, .quantised = quantised, .quantised_q = with_q};
}

constexpr FmaConfig simt_of(DType dtype, DType quantised, bool caches, bool with_q = false) {
  return {.dtype = dtype,
          .num_threads = 64,
          .rows = 16,
          .columns = 16,
          .max_dim_qk = 96,
          .max_dim_v = 96,
          .caches = caches,
          .quantised = quantised,
          .quantised_q = with_q};
}

template <FmaConfig kConfig>
void run_naive(const AttentionParams& p, KernelRun& run) {
  const gpu::KernelLaunch launch = gpu::naive_forward(p).at(0);
  EXPECT_EQ(launch.spec.name, gpu::fma_spec("naive/naive", "forward_naive", kConfig).name);
  run.launch(launch, [&] { forward_naive<kConfig>(p); });
}

template <FmaConfig kConfig>
void run_simt(const AttentionParams& p, KernelRun& run) {
  run.launch(num_q_tiles(p, kConfig.rows), kConfig.num_threads, kConfig.forward_shared_bytes(),
             "forward_simt", [&] { forward_simt<kConfig>(p); });
}

struct Kernel {
  const char* name;
  DType dtype, quantised;
  bool caches;
  void (*run)(const AttentionParams& p, KernelRun& run);
  bool with_q = false;
};

constexpr DType kE4M3 = DType::kFloat8E4M3, kE5M2 = DType::kFloat8E5M2, kInt8 = DType::kInt8;
constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;

const Kernel kKernels[] = {
    {"naive_e4m3", kF32, kE4M3, false, run_naive<naive_of(kF32, kE4M3, false)>},
    {"naive_e5m2_caches", kF16, kE5M2, true, run_naive<naive_of(kF16, kE5M2, true)>},
    {"naive_int8_caches", kBF16, kInt8, true, run_naive<naive_of(kBF16, kInt8, true)>},
    {"simt_e4m3", kF32, kE4M3, false, run_simt<simt_of(kF32, kE4M3, false)>},
    {"simt_e4m3_caches", kBF16, kE4M3, true, run_simt<simt_of(kBF16, kE4M3, true)>},
    {"simt_e5m2_caches", kF16, kE5M2, true, run_simt<simt_of(kF16, kE5M2, true)>},
    {"simt_int8", kBF16, kInt8, false, run_simt<simt_of(kBF16, kInt8, false)>},
    {"naive_all_e5m2", kF32, kE5M2, false, run_naive<naive_of(kF32, kE5M2, false, true)>, true},
    {"simt_all_e4m3", kF32, kE4M3, false, run_simt<simt_of(kF32, kE4M3, false, true)>, true},
};

class QuantisedOnHost : public testing::TestWithParam<Kernel> {};

TEST_P(QuantisedOnHost, AgreesWithTheOracle) {
  const Kernel& kernel = GetParam();
  unsigned left = num_drawn(kProblemsOfATest);
  for (unsigned seed = 3000; left > 0; ++seed) {
    RandomProblem random(seed);
    const Request wide = kernel.caches ? random.draw_cache() : random.draw();
    if (wide.arrays[Array::kQ].dtype != kernel.dtype) continue;
    --left;
    const Request expected = quantised(random, wide, kernel.quantised, kernel.with_q);
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    KernelRun run{memory_of(actual), seed};
    kernel.run(gpu::attention_params(validate(actual, Pointers::kChecked)), run);
    expect_close(actual, expected, {Array::kO, Array::kLse}, seed);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, QuantisedOnHost, testing::ValuesIn(kKernels),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace fulmen::test
