// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// forward_sm90 of e4m3 on the host, against the scalar oracle: V transposed by the kernel before
// it, scales of both signs, dense and packed sequences of every length around a block of keys, and
// values that are NaN. An error beyond that of weights of 4 significant bits is none of rounding.
#include <cmath>

#include "../eight_bits.h"
#include "kernels/forward_sm90/values.cuh"
#include "launch_forward.h"

namespace fulmen::test {
namespace {

constexpr ForwardSm90Config of_8_bits(i32 dim, i32 kv_rows, MaskKind mask) {
  ForwardSm90Config config;
  config.dtype = DType::kFloat8E4M3;
  config.o_dtype = DType::kBFloat16;
  config.d_qk = config.d_v = dim;
  config.kv_rows = kv_rows;
  config.stages = dim > 128 ? 1 : 2;
  config.shift_rule = ShiftRule::kWhenSumGrew;
  config.ping_pong = false;
  config.score.mask_kind = mask;
  return config;
}

constexpr ForwardSm90Config packed_64() {
  ForwardSm90Config config = of_8_bits(64, 128, MaskKind::kBoth);
  config.warpgroups = 1;
  config.o_dtype = DType::kFloat16;
  config.stage_output = false;
  config.score.varlen = config.score.sinks = config.score.stats = true;
  return config;
}

constexpr ForwardSm90Config packed_256() {
  ForwardSm90Config config = packed_64();
  config.d_qk = config.d_v = 256;
  config.kv_rows = 96;
  return config;
}

// O in two parts beside a block of scores, as plans have it.
constexpr ForwardSm90Config three_warpgroups(i32 dim) {
  ForwardSm90Config config = of_8_bits(dim, 128, MaskKind::kRight);
  config.warpgroups = config.q_slots = 3;
  return config;
}

constexpr ForwardSm90Config kPlain256 = of_8_bits(256, 128, MaskKind::kNone);
constexpr ForwardSm90Config kPlain128 = of_8_bits(128, 128, MaskKind::kNone);
constexpr ForwardSm90Config kCausal96 = of_8_bits(96, 128, MaskKind::kRight);
constexpr ForwardSm90Config kCausal128 = of_8_bits(128, 128, MaskKind::kRight);
constexpr ForwardSm90Config kCausal160 = of_8_bits(160, 128, MaskKind::kRight);
constexpr ForwardSm90Config kCausal256 = of_8_bits(256, 128, MaskKind::kRight);

// V, and the byte behind it, as the emulator's checker knows them.
emulator::GlobalMemory memory_of(const Tensor& v) {
  emulator::GlobalArray known{"v", v.data, size_bytes(v.dtype)};
  std::copy_n(v.shape, v.rank, known.extents.begin());
  std::copy_n(v.strides, v.rank, known.strides.begin());
  known.margin_bytes = 1;
  return emulator::GlobalMemory({known});
}

template <ForwardSm90Config kConfig>
void run_of_8_bits(const Problem& problem, u32 seed) {
  ForwardArguments arguments{};
  ForwardParams& params = arguments.params;
  params = gpu::forward_sm90_params(problem, kConfig, gpu_named("h100"));
  const u64 blocks = gpu::num_key_ranges(problem, kConfig);
  const u64 heads = static_cast<u64>(problem.heads_kv), dims = kConfig.d_v;
  const u64 row = static_cast<u64>(kConfig.row_bytes(kConfig.kv_rows));
  std::vector<u8> values(blocks * heads * row * dims + 16, 0x7f);  // NaN until they are written
  params.values = values.data() + (16 - reinterpret_cast<u64>(values.data()) % 16) % 16;
  gpu::TensorBox box{params.values,
                     {row, dims, heads, blocks},
                     {row, row * dims, row * dims * heads},
                     static_cast<u32>(dims)};
  box.box_dims = static_cast<u32>(row);
  box.dtype = kConfig.dtype;
  u32 next_block = 0;
  params.next_block = &next_block;
  arguments.maps = {map_of(problem.arrays[Array::kQ], 64),
                    map_of(problem.arrays[Array::kK], kConfig.kv_rows), map_of(box),
                    map_of(problem.arrays[Array::kO], 64)};
  emulator::GlobalMemory memory = memory_of(problem.arrays[Array::kV]);
  emulator::launch({.blocks = static_cast<i32>(blocks * heads),
                    .threads = kValueThreads,
                    .shared_bytes = kConfig.v_bytes(),
                    .seed = seed,
                    .kernel = "transpose_values_sm90",
                    .memory = &memory},
                   [&] { transpose_values_sm90<kConfig>(arguments); });
  emulator::launch({.blocks = min<i64>(gpu::max_work_tiles(problem, kConfig), 2),
                    .threads = kConfig.threads(),
                    .shared_bytes = kConfig.shared_bytes(),
                    .seed = seed,
                    .together = true,
                    .kernel = "forward_sm90",
                    .check = is_sampled(seed)},
                   [&] { forward_sm90<kConfig>(arguments); });
}

template <ForwardSm90Config kConfig>
void expect_close_of_8_bits(EightBits& given, DType o_dtype, u32 seed) {
  fulmen::test::expect_close_of_8_bits(
      given, o_dtype, seed, [&](const Problem& problem) { run_of_8_bits<kConfig>(problem, seed); });
}

template <ForwardSm90Config kConfig>
void expect_close_across_blocks(std::initializer_list<i64> lengths) {
  u32 seed = 0;
  for (const i64 kv_rows : lengths) {
    EightBits given(1, 130, kv_rows, kConfig.d_v, false, seed % 2 == 0 ? 0.4f : -0.4f);
    given.request.options.causal = true;
    expect_close_of_8_bits<kConfig>(given, DType::kBFloat16, ++seed);
  }
}

TEST(ForwardSm90Of8Bits, IsCausalAcrossBlocksOfKeys) {
  expect_close_across_blocks<kCausal128>({127, 128, 129, 400});
  expect_close_across_blocks<kCausal96>({129, 300});
  expect_close_across_blocks<kCausal256>({130, 400});  // O in parts
  expect_close_across_blocks<kCausal160>({300});
  expect_close_across_blocks<three_warpgroups(128)>({127, 400});
  expect_close_across_blocks<three_warpgroups(96)>({300});
}

template <ForwardSm90Config kConfig>
void expect_close_packed(u32 seed) {
  EightBits given(1, 90, 300, kConfig.d_v, true, 0.3f);
  given.pack_with_sinks();
  expect_close_of_8_bits<kConfig>(given, DType::kFloat16, seed);
}

TEST(ForwardSm90Of8Bits, PackedSequencesBeginAnywhere) {
  for (u32 seed = 1; seed <= 2; ++seed) expect_close_packed<packed_64()>(seed);
  expect_close_packed<packed_256()>(3);
}

// By 2^10 and more from a block of keys to the next, in either order: weights that would be more
// than e4m3 has are made small again, and the sums so far with them.
TEST(ForwardSm90Of8Bits, WeightsGrow) {
  for (const double growth : {-24.0, 24.0}) {
    EightBits given(1, 64, 512, 128, false, 0.4f);
    const Arrays& arrays = given.request.arrays;
    EightBits::fill(arrays[Array::kQ], [] { return 1; });
    EightBits::fill(arrays[Array::kK], [&, i = 0]() mutable {
      return 0.5 * given.normal() + growth / 512 * static_cast<double>(i++ / 128 % 512);
    });
    expect_close_of_8_bits<kPlain128>(given, DType::kBFloat16, 5);
  }
}

// The same of a wide O, where every other row of 8 has weights that stay.
TEST(ForwardSm90Of8Bits, WeightsOfSomeRowsGrow) {
  EightBits given(1, 64, 512, 256, false, 0.4f);
  const Arrays& arrays = given.request.arrays;
  EightBits::fill(arrays[Array::kQ],
                  [i = 0]() mutable { return i++ / 256 % 16 < 8 ? 1.0 : 0.0625; });
  EightBits::fill(arrays[Array::kK], [&, i = 0]() mutable {
    return 0.5 * given.normal() - 12.0 / 512 * static_cast<double>(i++ / 256 % 512);
  });
  expect_close_of_8_bits<kPlain256>(given, DType::kBFloat16, 5);
}

// The same where the causal mask crosses two blocks of keys: what was added up after the first is
// made small as well.
TEST(ForwardSm90Of8Bits, WeightsGrowUnderAMask) {
  EightBits given(1, 128, 200, 128, false, 0.4f);
  given.request.options.causal = true;
  const Arrays& arrays = given.request.arrays;
  EightBits::fill(arrays[Array::kQ], [] { return 1; });
  EightBits::fill(arrays[Array::kK], [&, i = 0]() mutable {
    return 0.5 * given.normal() - 24.0 / 512 * static_cast<double>(i++ / 128 % 200);
  });
  expect_close_of_8_bits<kCausal128>(given, DType::kBFloat16, 5);
}

// The first row of the second 64 sees all of the first block of keys and nothing of the one after,
// with which its rows begin: it has no maximum when it meets scores that are all far below 0.
TEST(ForwardSm90Of8Bits, LowScoresInABlockThatAllRowsSee) {
  EightBits given(1, 128, 191, 128, false, 0.4f);
  given.request.options.causal = true;
  const Arrays& arrays = given.request.arrays;
  EightBits::fill(arrays[Array::kQ], [] { return 1; });
  EightBits::fill(arrays[Array::kK], [&] { return 0.5 * given.normal() - 26; });
  expect_close_of_8_bits<kCausal128>(given, DType::kBFloat16, 5);
}

// With values that are all near 2 the mean error is a bias: of weights that are cut off, divided by
// the sum of those before, 0.2 %; of sums of 14 bits over more keys, as much and more.
template <ForwardSm90Config kConfig>
double bias_of(i64 kv_rows) {
  EightBits given(1, 64, kv_rows, kConfig.d_v, false, 0.25f);
  const Arrays& arrays = given.request.arrays;
  for (const Array each : {Array::kQScale, Array::kKScale}) {
    EightBits::fill(arrays[each], [] { return 0.5; });
  }
  EightBits::fill(arrays[Array::kVScale], [] { return 1; });
  EightBits::fill(arrays[Array::kV], [&] { return 2 + 0.5 * given.normal(); });
  const Problem problem = with_output_of_16_bits(given, DType::kFloat16);
  run_of_8_bits<kConfig>(problem, 7);
  cpu::scalar_forward(validate(given.request, Pointers::kChecked));
  double error = 0, size = 0;
  const i64 count = 4 * 64 * kConfig.d_v;
  for (i64 i = 0; i < count; ++i) {
    const double expected =
        static_cast<double>(static_cast<float*>(given.request.arrays[Array::kO].data)[i]);
    error +=
        load_real(static_cast<char*>(problem.arrays[Array::kO].data) + 2 * i, DType::kFloat16) -
        expected;
    size += expected;
  }
  return error / size;
}

TEST(ForwardSm90Of8Bits, ValuesOfOneSignHaveNoBias) {
  EXPECT_LT(std::fabs(bias_of<kPlain128>(1024)), 0.001);
  EXPECT_LT(std::fabs(bias_of<kPlain256>(1024)), 0.001);
  EXPECT_LT(std::fabs(bias_of<three_warpgroups(128)>(1024)), 0.001);
}

// The lse of n equal scores is their score and log n, whatever exp2 makes of the maximum's weight.
TEST(ForwardSm90Of8Bits, EqualScores) {
  EightBits given(1, 40, 40, 128, false, 0.4f);
  given.request.options.causal = true;
  Arrays& arrays = given.request.arrays;
  EightBits::fill(arrays[Array::kKScale], [] { return 0; });
  arrays[Array::kLse] = tensor_of(given.lse, DType::kFloat32, {1, 4, 40});
  run_of_8_bits<kCausal128>(with_output_of_16_bits(given), 2);
  for (i32 row = 0; row < 160; ++row) {
    const float* const lse = static_cast<float*>(arrays[Array::kLse].data);
    ASSERT_FLOAT_EQ(lse[row], std::log(static_cast<float>(row % 40 + 1))) << "row " << row;
  }
}

// Each reaches the rows that see its key, and no other.
TEST(ForwardSm90Of8Bits, ValuesThatAreNaN) {
  EightBits given(1, 20, 120, 128, false, 0.4f);
  given.request.options.causal = true;
  const Tensor& v = given.request.arrays[Array::kV];
  static_cast<u8*>(v.data)[109 * 128 + 5] = 0x7f;
  static_cast<u8*>(v.data)[(120 + 3) * 128 + 77] = 0xff;
  expect_close_of_8_bits<kCausal128>(given, DType::kBFloat16, 3);
}

}  // namespace
}  // namespace fulmen::test
