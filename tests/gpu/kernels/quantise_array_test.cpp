// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen_quantise: the CPU against its definition in float64, with Hadamard's matrix written out;
// kernels in the emulator against the CPU, bit by bit: of equal constants, whose sums have other
// orders.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <map>

#include "../../cpu/random_problem.h"
#include "core/error.h"
#include "cpu/backend.h"
#include "emulator/launch.h"
#include "emulator/schedules.h"
#include "gpu/backend.h"
#include "kernels/quantise/array.cuh"

namespace fulmen::test {
namespace {

// What has a scale of its own.
enum class PerGroup { kTensor, kHead, kHeadOfAll, kRow, kDim };

class DrawnQuantisation {
 public:
  DrawnQuantisation(unsigned seed, const QuantiseArrayConfig& config) : random(seed) {
    batch_ = random.number(1, 3);
    heads_ = random.number(1, 3);
    rows_ = random.one_of({0, 1, 5, 33, 70, 130, 300});
    const std::vector<i64> shape = {batch_, heads_, rows_, config.dim};
    const auto array = [&](DType dtype) {
      return config.vectors ? random.contiguous(dtype, shape) : random.array(dtype, shape);
    };
    given.x = array(config.dtype);
    given.values = array(config.values);
    random.fill_normal(given.x);
    given.extents.rotate = config.rotate;
    if (random.chance(0.5)) shift_dims();
    if (random.chance(0.5)) draw_lengths();
    given.extents.find_constant = random.chance(0.4);
    if (given.extents.find_constant || random.chance(0.4)) {
      const bool shared = !given.extents.find_constant && random.chance(0.5);
      given.constant =
          random.array(DType::kFloat32, {shared ? 1 : batch_, heads_, 1, i64{config.dim}});
      if (!given.extents.find_constant) random.fill_normal(given.constant);
    }
    if (is_quantised(config.values)) draw_scale(config.dim);
  }

  // The same with arrays of its own to write, and the constant that was found.
  QuantiseProblem twin() {
    QuantiseProblem other = given;
    other.values = random.twin(given.values);
    other.extents.find_constant = false;
    if (given.extents.find_scale) other.scale = random.twin(given.scale);
    return other;
  }

  i64 length(i64 b) const { return lengths_.empty() ? rows_ : lengths_[static_cast<size_t>(b)]; }
  // R (x - c), rows that do not count being 0.
  double prepared(i64 b, i64 h, i64 row, i64 dim) const {
    if (row >= length(b)) return 0;
    const i64 part = given.extents.rotate ? rotated_dims(static_cast<i32>(given.x.shape[3])) : 1;
    const i64 first = dim / part * part;
    double sum = 0;
    for (i64 d = first; d < first + part; ++d) {
      const double c = given.constant.present() ? at(given.constant, b, h, 0, d) : 0;
      const bool is_odd = std::popcount(static_cast<u64>((d - first) & (dim - first))) % 2 != 0;
      sum += (is_odd ? -1 : 1) * (at(given.x, b, h, row, d) - c);
    }
    return sum / std::sqrt(static_cast<double>(part));
  }
  static double at(const Tensor& tensor, i64 b, i64 h, i64 row, i64 dim) {
    i64 index[4] = {b, h, row, dim};
    for (int axis = 0; axis < 4; ++axis) {
      if (tensor.shape[axis] == 1) index[axis] = 0;
    }
    return load_real(RandomProblem::address(tensor, index), tensor.dtype);
  }
  template <class Each>
  void for_each(const Each& each) const {
    RandomProblem::for_each(given.values, [&](const i64* i) { each(i[0], i[1], i[2], i[3]); });
  }

  RandomProblem random;
  QuantiseProblem given;

 private:
  void shift_dims() const {
    RandomProblem::for_each(given.x, [&](const i64* i) {
      char* const to = RandomProblem::address(given.x, i);
      const double x = load_real(to, given.x.dtype) + (i[3] % 4 == 1 ? 6 : 0);
      store_real(to, given.x.dtype, x);
    });
  }
  void draw_lengths() {
    for (i64 b = 0; b < batch_; ++b) lengths_.push_back(random.number(0, rows_));
    given.lengths = random.indices(DType::kInt32, lengths_);
    RandomProblem::for_each(given.x, [&](const i64* i) {
      if (i[2] >= length(i[0])) store_real(RandomProblem::address(given.x, i), given.x.dtype, NAN);
    });
  }
  void draw_scale(i64 dim) {
    given.extents.find_scale = random.chance(0.6);
    given.headroom = random.one_of({1, 4});
    const auto per = static_cast<PerGroup>(random.number(0, 4));
    const bool of_all = per == PerGroup::kTensor || per == PerGroup::kHeadOfAll;
    given.scale = random.array(
        DType::kFloat32, {of_all ? 1 : batch_, per == PerGroup::kTensor ? 1 : heads_,
                          per == PerGroup::kRow ? rows_ : 1, per == PerGroup::kDim ? dim : 1});
    if (given.extents.find_scale) return;
    RandomProblem::for_each(given.scale, [&](const i64* i) {
      store_real(RandomProblem::address(given.scale, i), DType::kFloat32,
                 0.01 * static_cast<double>(random.number(1, 9)));
    });
  }

  i64 batch_, heads_, rows_;
  std::vector<i64> lengths_;
};

template <QuantiseArrayConfig kConfig>
u32 run_quantise(const QuantiseProblem& problem, u32 seed) {
  FaultBytes faults{};
  const QuantiseArrayParams params = gpu::quantise_params(problem, &faults);
  const auto launch = [&](i64 blocks, i32 threads, i32 shared, const char* name, auto kernel) {
    emulator::launch({.blocks = blocks,
                      .threads = threads,
                      .shared_bytes = shared,
                      .seed = seed,
                      .kernel = name,
                      .check = true},
                     kernel);
  };
  const QuantiseExtents& extents = problem.extents;
  const i64 heads = extents.batch * extents.heads;
  const i64 blocks = heads * ceil_div(extents.rows, i64{RowLanes::block_rows(kConfig.dim)});
  const bool finds_shared = extents.find_scale && !extents.scales_rows;
  if (extents.find_constant || finds_shared) {
    launch(heads, RowLanes::kSampleThreads, RowLanes::sample_bytes(kConfig.dim),
           "start_quantisation", [&] { start_quantisation<kConfig>(params); });
  }
  if (finds_shared) {
    launch(blocks, RowLanes::kThreads, 0, "find_scales", [&] { find_scales<kConfig>(params); });
  }
  launch(blocks, RowLanes::kThreads, 0, "quantise_array", [&] { quantise_array<kConfig>(params); });
  return faults.bits();
}

// The constant against the mean of the sample, where it takes half of a row or more.
void expect_constants(const DrawnQuantisation& drawn) {
  const QuantiseProblem& given = drawn.given;
  for (i64 b = 0; b < given.x.shape[0]; ++b) {
    const i64 rows = drawn.length(b), count = num_sampled(rows);
    for (i64 h = 0; h < given.x.shape[1]; ++h) {
      double gain = 0;
      std::vector<double> mean(static_cast<size_t>(given.x.shape[3]));
      for (i64 i = 0; i < count; ++i) {
        for (size_t d = 0; d < mean.size(); ++d) {
          const double x = drawn.at(given.x, b, h, sampled_row(i, rows), static_cast<i64>(d));
          mean[d] += x / static_cast<double>(count);
          gain -= x * x;
        }
      }
      for (const double x : mean) gain += 4 * x * x * static_cast<double>(count);
      for (size_t d = 0; d < mean.size(); ++d) {
        const double got = drawn.at(given.constant, b, h, 0, static_cast<i64>(d));
        ASSERT_NEAR(got, gain >= 0 ? mean[d] : 0, 1e-4) << b << ", " << h << ", " << d;
      }
    }
  }
}

// Values and scales against float64.
void expect_definition(const DrawnQuantisation& drawn, const QuantiseProblem& made) {
  const DType dtype = made.values.dtype;
  std::map<std::array<i64, 4>, double> largest;
  const auto group = [&](i64 b, i64 h, i64 row, i64 dim) {
    const i64* const shape = made.scale.shape;
    return std::array{shape[0] > 1 ? b : 0, shape[1] > 1 ? h : 0, shape[2] > 1 ? row : 0,
                      shape[3] > 1 ? dim : 0};
  };
  drawn.for_each([&](i64 b, i64 h, i64 row, i64 dim) {
    if (!made.scale.present()) return;
    double& most = largest[group(b, h, row, dim)];
    most = std::max(most, std::fabs(drawn.prepared(b, h, row, dim)));
  });
  drawn.for_each([&](i64 b, i64 h, i64 row, i64 dim) {
    const double y = drawn.prepared(b, h, row, dim);
    const double got = drawn.at(made.values, b, h, row, dim);
    const std::string where = sentence(b, ", ", h, ", ", row, ", ", dim);
    if (!made.scale.present()) {
      const double ulp = dtype == DType::kFloat32   ? 0x1p-20
                         : dtype == DType::kFloat16 ? 0x1p-11
                                                    : 0x1p-8;
      ASSERT_NEAR(got, y, ulp * (std::fabs(y) + 1)) << where;
      return;
    }
    const double scale = drawn.at(made.scale, b, h, row, dim);
    if (made.extents.find_scale) {
      const double expected = std::max(0x1p-100, largest[group(b, h, row, dim)] * made.headroom /
                                                     static_cast<double>(largest_of(dtype)));
      ASSERT_NEAR(scale, expected, 1e-4 * expected) << where;
    }
    const double most = static_cast<double>(largest_of(dtype));
    const double clamped = std::clamp(y / scale, -most, most);
    const double ulp = dtype == DType::kInt8 ? 0 : dtype == DType::kFloat8E4M3 ? 0x1p-4 : 0x1p-3;
    const double least = dtype == DType::kInt8 ? 0.5 : 0x1p-10;
    ASSERT_NEAR(got, clamped, (ulp + 1e-3) * std::fabs(clamped) + least + 1e-3) << where;
  });
}

void expect_same_bits(const Tensor& a, const Tensor& b) {
  if (!a.present()) return;
  RandomProblem::for_each(a, [&](const i64* i) {
    const double x = load_real(RandomProblem::address(a, i), a.dtype);
    const double y = load_real(RandomProblem::address(b, i), b.dtype);
    ASSERT_EQ(std::bit_cast<u64>(x), std::bit_cast<u64>(y))
        << i[0] << ", " << i[1] << ", " << i[2] << ", " << i[3];
  });
}

template <QuantiseArrayConfig kConfig>
void expect_quantised(unsigned first_seed) {
  for (unsigned seed = first_seed; seed < first_seed + num_drawn(8); ++seed) {
    SCOPED_TRACE(sentence("seed ", seed));
    DrawnQuantisation drawn(seed, kConfig);
    const QuantiseProblem problem = validate_quantise(drawn.given);
    ASSERT_TRUE(!kConfig.vectors || gpu::quantise_config(problem).vectors);
    ASSERT_EQ(run_quantise<kConfig>(problem, seed), 0u);
    if (drawn.given.extents.find_constant) expect_constants(drawn);
    const QuantiseProblem on_cpu = drawn.twin();
    cpu::quantise(validate_quantise(on_cpu));
    expect_definition(drawn, on_cpu);
    expect_same_bits(drawn.given.values, on_cpu.values);
    expect_same_bits(drawn.given.scale, on_cpu.scale);
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(QuantiseArray, IsTheDefinition) {
  using enum DType;
  expect_quantised<QuantiseArrayConfig{kBFloat16, kFloat8E4M3, 64, true, true}>(1);
  expect_quantised<QuantiseArrayConfig{kFloat32, kFloat8E4M3, 80, true, false}>(101);
  expect_quantised<QuantiseArrayConfig{kFloat16, kInt8, 33, false, false}>(201);
  expect_quantised<QuantiseArrayConfig{kBFloat16, kFloat8E5M2, 48, false, true}>(301);
}

TEST(QuantiseArray, RotatesWithoutAScale) {
  using enum DType;
  expect_quantised<QuantiseArrayConfig{kBFloat16, kBFloat16, 128, true, true}>(401);
  expect_quantised<QuantiseArrayConfig{kFloat32, kFloat32, 320, true, true}>(501);
  expect_quantised<QuantiseArrayConfig{kFloat16, kFloat16, 12, true, false}>(601);
}

TEST(QuantiseArray, TheCpuFindsTheConstant) {
  for (unsigned seed = 701; seed < 721; ++seed) {
    DrawnQuantisation drawn(seed, {DType::kFloat16, DType::kFloat8E4M3, 24, true, false});
    if (!drawn.given.extents.find_constant) continue;
    cpu::quantise(validate_quantise(drawn.given));
    expect_constants(drawn);
    expect_definition(drawn, drawn.given);
  }
}

// Numbers that are none leave those of others as they are.
TEST(QuantiseArray, NumbersThatAreNotFinite) {
  constexpr QuantiseArrayConfig kConfig{DType::kFloat32, DType::kFloat8E4M3, 16, false, true};
  RandomProblem random(1);
  QuantiseProblem given;
  given.x = random.contiguous(DType::kFloat32, {1, 1, 4, 16});
  given.values = random.contiguous(DType::kFloat8E4M3, {1, 1, 4, 16});
  given.scale = random.contiguous(DType::kFloat32, {1, 1, 1, 1});
  given.extents.find_scale = true;
  RandomProblem::for_each(given.x, [&](const i64* i) {
    const double x = i[3] == 3 ? NAN : i[3] == 4 ? -INFINITY : static_cast<double>(i[2]);
    store_real(RandomProblem::address(given.x, i), DType::kFloat32, x);
  });
  QuantiseProblem on_cpu = given;
  on_cpu.values = random.twin(given.values);
  on_cpu.scale = random.twin(given.scale);
  run_quantise<kConfig>(validate_quantise(given), 1);
  cpu::quantise(validate_quantise(on_cpu));
  for (const QuantiseProblem& made : {given, on_cpu}) {
    EXPECT_FLOAT_EQ(static_cast<float>(DrawnQuantisation::at(made.scale, 0, 0, 0, 0)), 3 / 448.f);
    EXPECT_TRUE(std::isnan(DrawnQuantisation::at(made.values, 0, 0, 2, 3)));
    EXPECT_EQ(DrawnQuantisation::at(made.values, 0, 0, 2, 4), -448);
    EXPECT_EQ(DrawnQuantisation::at(made.values, 0, 0, 3, 0), 448);
  }
}

TEST(QuantiseArray, ALengthOutOfRangeIsAFault) {
  constexpr QuantiseArrayConfig kConfig{DType::kFloat32, DType::kInt8, 16, false, true};
  RandomProblem random(1);
  QuantiseProblem given;
  given.x = random.contiguous(DType::kFloat32, {2, 1, 4, 16});
  given.values = random.contiguous(DType::kInt8, {2, 1, 4, 16});
  random.fill_normal(given.x, 50);
  given.lengths = random.indices(DType::kInt64, {5, 4});
  const QuantiseProblem problem = validate_quantise(given);
  EXPECT_EQ(run_quantise<kConfig>(problem, 1), u32{kFaultKvLengths});
  EXPECT_EQ(DrawnQuantisation::at(given.values, 0, 0, 1, 1), 0);
  EXPECT_NE(DrawnQuantisation::at(given.values, 1, 0, 1, 1), 0);
  EXPECT_THROW(cpu::quantise(problem), Error);
}

}  // namespace
}  // namespace fulmen::test
