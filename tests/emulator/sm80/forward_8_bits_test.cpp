// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// forward_sm80 of e4m3 on the host, with tensor cores that keep 14 bits of a sum, against the
// scalar oracle: scales of both signs, dense and packed sequences of every length around a block of
// keys, rows that are vectors and rows that are not, and values that are NaN.
#include "emulator/eight_bits.h"
#include "emulator/sm80/launch_forward.h"
#include "gpu/params.h"

namespace fulmen::test {
namespace {

constexpr ForwardSm80Config of_8_bits_sm80(i32 dim, i32 row_tiles, i32 kv_rows, bool aligned) {
  ForwardSm80Config config;
  config.dtype = DType::kFloat8E4M3;
  config.o_dtype = DType::kBFloat16;
  config.d_qk = config.d_v = dim;
  config.warps = row_tiles == 1 ? 4 : 2;
  config.row_tiles = row_tiles;
  config.kv_rows = kv_rows;
  config.aligned = config.even_k = aligned;
  config.lazy_max = false;
  return config;
}

constexpr ForwardSm80Config packed_sm80() {
  ForwardSm80Config config = of_8_bits_sm80(64, 1, 32, true);
  config.o_dtype = DType::kFloat16;
  config.score.stats = true;
  return config;
}

// Q stays in registers; o in float32, and as it is.
constexpr ForwardSm80Config wide_output_sm80() {
  ForwardSm80Config config = of_8_bits_sm80(64, 2, 64, false);
  config.q_in_registers = config.score.fp32_out = true;
  return config;
}

template <ForwardSm80Config kConfig>
void expect_close_sm80(EightBits& given, DType o_dtype, u32 seed) {
  expect_close_of_8_bits(given, o_dtype, seed, [&](const Problem& problem) {
    launch<kConfig>(gpu::attention_params(problem), seed);
  });
}

template <ForwardSm80Config kConfig>
void expect_close_at_lengths(std::initializer_list<i64> lengths) {
  u32 seed = 0;
  for (const i64 kv_rows : lengths) {
    EightBits given(1, 70, kv_rows, kConfig.d_v, false, seed % 2 == 0 ? 0.4f : -0.4f);
    given.request.options.causal = true;
    expect_close_sm80<kConfig>(given, DType::kBFloat16, ++seed);
  }
}

TEST(ForwardSm80Of8Bits, IsCausalAcrossBlocksOfKeys) {
  expect_close_at_lengths<of_8_bits_sm80(128, 2, 32, true)>({31, 32, 33, 200});
  expect_close_at_lengths<of_8_bits_sm80(64, 2, 64, false)>({65, 130});
  expect_close_at_lengths<of_8_bits_sm80(256, 1, 64, true)>({63, 140});
  expect_close_at_lengths<of_8_bits_sm80(96, 1, 128, true)>({129, 300});
}

TEST(ForwardSm80Of8Bits, DimsThatAreFilledUp) {
  constexpr ForwardSm80Config kPadded = [] {
    ForwardSm80Config config = of_8_bits_sm80(96, 1, 32, true);
    config.even_k = false;
    return config;
  }();
  EightBits given(1, 20, 90, 80, false, 0.4f);
  expect_close_sm80<kPadded>(given, DType::kBFloat16, 1);
}

TEST(ForwardSm80Of8Bits, PackedSequencesBeginAnywhere) {
  for (u32 seed = 1; seed <= 2; ++seed) {
    EightBits given(1, 90, 300, 64, true, 0.3f);
    given.pack_with_sinks();
    expect_close_sm80<packed_sm80()>(given, DType::kFloat16, seed);
  }
}

TEST(ForwardSm80Of8Bits, WritesFloat32) {
  EightBits given(1, 33, 100, 64, false, -0.4f);
  given.request.options.causal = true;
  const Problem problem = validate(given.request, Pointers::kChecked);
  launch<wide_output_sm80()>(gpu::attention_params(problem), 3);
  const std::vector<float> got = given.o_wide;
  cpu::scalar_forward(problem);
  double error = 0, size = 0;
  for (size_t i = 0; i + 16 < got.size(); ++i) {
    const double difference = static_cast<double>(got[i] - given.o_wide[i]);
    error += difference * difference;
    size += static_cast<double>(given.o_wide[i] * given.o_wide[i]);
  }
  EXPECT_LT(std::sqrt(error / size), 0.05);
}

// By 2^10 and more from a block of keys to the next, in either order.
TEST(ForwardSm80Of8Bits, WeightsGrow) {
  for (const double growth : {-24.0, 24.0}) {
    EightBits given(1, 32, 256, 128, false, 0.4f);
    const Arrays& arrays = given.request.arrays;
    EightBits::fill(arrays[Array::kQ], [] { return 1; });
    EightBits::fill(arrays[Array::kK], [&, i = 0]() mutable {
      return 0.5 * given.normal() + growth / 256 * static_cast<double>(i++ / 128 % 256);
    });
    expect_close_sm80<of_8_bits_sm80(128, 2, 32, true)>(given, DType::kBFloat16, 5);
  }
}

// A sum over all keys by the tensor core would be cut off by 0.7 %.
TEST(ForwardSm80Of8Bits, ValuesOfOneSignHaveNoBias) {
  constexpr ForwardSm80Config kConfig = of_8_bits_sm80(64, 2, 64, true);
  EightBits given(1, 32, 1024, 64, false, 0.25f);
  const Arrays& arrays = given.request.arrays;
  for (const Array each : {Array::kQScale, Array::kKScale}) {
    EightBits::fill(arrays[each], [] { return 0.5; });
  }
  EightBits::fill(arrays[Array::kVScale], [] { return 1; });
  EightBits::fill(arrays[Array::kV], [&] { return 2 + 0.5 * given.normal(); });
  const Problem problem = with_output_of_16_bits(given, DType::kBFloat16);
  launch<kConfig>(gpu::attention_params(problem), 7);
  cpu::scalar_forward(validate(given.request, Pointers::kChecked));
  double error = 0, size = 0;
  for (i64 i = 0; i < 4 * 32 * 64; ++i) {
    const double expected = static_cast<double>(static_cast<float*>(arrays[Array::kO].data)[i]);
    error +=
        load_real(static_cast<char*>(problem.arrays[Array::kO].data) + 2 * i, DType::kBFloat16) -
        expected;
    size += expected;
  }
  EXPECT_LT(std::fabs(error / size), 0.0015);
}

// Each reaches the rows that see its key, and no other.
TEST(ForwardSm80Of8Bits, ValuesThatAreNaN) {
  EightBits given(1, 20, 120, 128, false, 0.4f);
  given.request.options.causal = true;
  const Tensor& v = given.request.arrays[Array::kV];
  static_cast<u8*>(v.data)[109 * 128 + 5] = 0x7f;
  static_cast<u8*>(v.data)[(120 + 3) * 128 + 77] = 0xff;
  expect_close_sm80<of_8_bits_sm80(128, 2, 32, true)>(given, DType::kBFloat16, 3);
}

}  // namespace
}  // namespace fulmen::test
