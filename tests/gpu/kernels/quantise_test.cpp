// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The kernels of precision "fp8" in the emulator: products of what they make of q and k are those
// of q and k, to the rounding of e4m3, and what they cannot serve they say.
#include "kernels/quantise/quantise.cuh"

#include "against_oracle.h"

namespace fulmen::test {
namespace {

constexpr QuantiseConfig quantise_of(DType dtype, i32 d_qk, i32 d_v, bool varlen) {
  return {.dtype = dtype, .d_qk = d_qk, .d_v = d_v, .varlen = varlen};
}
constexpr i64 kQueryHeads = 4, kKeyHeads = 2;

// A request of 2 entries, or with `packed` one of 2 sequences, whose keys have something in common.
struct SixteenBits {
  RandomProblem random{5};
  Request request;
  i64 q_rows, kv_rows, q_used[2], kv_used[2];

  SixteenBits(const QuantiseConfig& config, i64 q_rows_, i64 kv_rows_, double offset)
      : q_rows(q_rows_), kv_rows(kv_rows_), q_used{q_rows, q_rows}, kv_used{kv_rows, kv_rows} {
    Arrays& arrays = request.arrays;
    const auto draw = [&](Array array, i64 heads, i64 rows, i64 dim) {
      arrays[array] = random.contiguous(config.dtype, {2, heads, rows, dim});
      random.fill_normal(arrays[array]);
    };
    draw(Array::kQ, kQueryHeads, q_rows, config.d_qk);
    draw(Array::kK, kKeyHeads, kv_rows, config.d_qk);
    draw(Array::kV, kKeyHeads, kv_rows, config.d_v);
    draw(Array::kO, kQueryHeads, q_rows, config.d_v);
    arrays[Array::kLse] = random.array(DType::kFloat32, {2, kQueryHeads, q_rows});
    request.options.scale = 0.5;
    request.options.precision = Precision::kFp8;
    for_each(Array::kK, [&](char* x, i64 dim) {
      store_real(x, config.dtype, load_real(x, config.dtype) + (dim % 8 == 0 ? offset : 0));
    });
    if (!config.varlen) return;
    q_used[1] = q_rows - 3;
    kv_used[0] = kv_rows / 3;
    arrays[Array::kQLengths] = random.indices(DType::kInt32, {q_used[0], q_used[1]});
    arrays[Array::kKvLengths] = random.indices(DType::kInt32, {kv_used[0], kv_used[1]});
    for (i64 row = kv_used[0]; row < kv_rows; ++row) set_row(Array::kK, 0, row, NAN);
    for (i64 row = kv_used[0]; row < kv_rows; ++row) set_row(Array::kV, 0, row, NAN);
    for (i64 row = q_used[1]; row < q_rows; ++row) set_row(Array::kQ, 1, row, NAN);
  }

  const Tensor& of(Array array) const { return request.arrays[array]; }
  char* at(Array array, i64 batch, i64 head, i64 row, i64 dim) const {
    const i64 index[4] = {batch, head, row, dim};
    return static_cast<char*>(RandomProblem::address(of(array), index));
  }
  double number(Array array, i64 batch, i64 head, i64 row, i64 dim) const {
    return load_real(at(array, batch, head, row, dim), of(array).dtype);
  }
  template <class Each>
  void for_each(Array array, const Each& each) const {
    const Tensor& x = of(array);
    for (i64 i = 0; i < x.shape[0] * x.shape[1] * x.shape[2] * x.shape[3]; ++i) {
      const i64 dim = i % x.shape[3], row = i / x.shape[3] % x.shape[2];
      const i64 head = i / x.shape[3] / x.shape[2];
      each(at(array, head / x.shape[1], head % x.shape[1], row, dim), dim);
    }
  }
  // A row of head 1 times a number; NaN: becomes that, in all heads.
  void set_row(Array array, i64 batch, i64 row, double factor) const {
    const Tensor& x = of(array);
    for (i64 head = factor != factor ? 0 : 1; head < x.shape[1]; ++head) {
      for (i64 dim = 0; dim < x.shape[3]; ++dim) {
        store_real(at(array, batch, head, row, dim), x.dtype,
                   factor * number(array, batch, head, row, dim));
      }
    }
  }
};

template <QuantiseConfig kConfig>
struct EightBitsOf {
  const SixteenBits& given;
  std::vector<u8> q, k, v;
  std::vector<float> q_scale, k_scale, v_scale, constant, difference;
  u32 unfit = 0;
  QuantiseParams params{};

  explicit EightBitsOf(const SixteenBits& given_) : given(given_) {
    const auto resized = [](auto& memory, i64 count) {
      memory.assign(static_cast<size_t>(count), 0x7f);
      return memory.data();
    };
    params.q = resized(q, 2 * kQueryHeads * given.q_rows * kConfig.d_qk);
    params.k = resized(k, 2 * kKeyHeads * given.kv_rows * kConfig.d_qk);
    params.v = resized(v, 2 * kKeyHeads * given.kv_rows * kConfig.d_v);
    params.q_scale = resized(q_scale, 2 * kQueryHeads);
    params.k_scale = resized(k_scale, 2 * kKeyHeads);
    params.v_scale = resized(v_scale, 2 * kKeyHeads);
    params.constant = resized(constant, 2 * kKeyHeads * kConfig.d_qk);
    params.difference = resized(difference, 2 * kQueryHeads * given.q_rows);
    params.unfit = &unfit;
    params.attention = gpu::attention_params(validate(given.request, Pointers::kChecked));
    params.scale = 0.5f;
  }

  void run(u32 seed) {
    const auto launch = [&](i64 blocks, i32 threads, i32 shared, const char* name,
                            const std::function<void()>& kernel) {
      emulator::launch({.blocks = blocks,
                        .threads = threads,
                        .shared_bytes = shared,
                        .seed = seed,
                        .kernel = name,
                        .check = true},
                       kernel);
    };
    launch(2 * (kQueryHeads + kKeyHeads), RowLanes::kSampleThreads, RowLanes::sample_bytes(256),
           "sample_operands", [&] { sample_operands<kConfig>(params); });
    const auto blocks = [](i64 heads, i64 rows, i32 dim) {
      return 2 * heads * ceil_div(rows, i64{RowLanes::block_rows(dim)});
    };
    launch(blocks(kQueryHeads, given.q_rows, kConfig.d_qk) +
               blocks(kKeyHeads, given.kv_rows, kConfig.d_qk) +
               blocks(kKeyHeads, given.kv_rows, kConfig.d_v),
           RowLanes::kThreads, 0, "quantise_operands", [&] { quantise_operands<kConfig>(params); });
  }

  double product(i64 q_head, i64 row, i64 kv_head, i64 key) const {
    double sum = 0;
    for (i64 d = 0; d < kConfig.d_qk; ++d) {
      const u8 x = q[static_cast<size_t>((q_head * given.q_rows + row) * kConfig.d_qk + d)];
      const u8 y = k[static_cast<size_t>((kv_head * given.kv_rows + key) * kConfig.d_qk + d)];
      sum += static_cast<double>(to_float(e4m3{x})) * static_cast<double>(to_float(e4m3{y}));
    }
    return sum * static_cast<double>(q_scale[static_cast<size_t>(q_head)]) *
           static_cast<double>(k_scale[static_cast<size_t>(kv_head)]);
  }

  // scale q k of rows in use, as exact as e4m3 is.
  void expect_close_scores() const {
    double errors = 0, sizes = 0;
    for (i64 head = 0; head < 2 * kQueryHeads; ++head) {
      const i64 batch = head / kQueryHeads, h = head % kQueryHeads, g = h / 2;
      for (i64 i = 0; i < given.q_used[batch]; ++i) {
        for (i64 j = 0; j < given.kv_used[batch]; ++j) {
          double s = 0, qq = 0, kk = 0;
          for (i64 d = 0; d < kConfig.d_qk; ++d) {
            const double x = given.number(Array::kQ, batch, h, i, d);
            const double y = given.number(Array::kK, batch, g, j, d);
            const size_t c = static_cast<size_t>((batch * kKeyHeads + g) * kConfig.d_qk + d);
            const double rest = y - static_cast<double>(constant[c]);
            s += x * y;
            qq += x * x;
            kk += rest * rest;
          }
          const auto at = static_cast<size_t>(head * given.q_rows + i);
          const double got = product(head, i, batch * kKeyHeads + g, j) +
                             static_cast<double>(difference[at]) / 0.5;
          ASSERT_NEAR(got, s, 0.13 * std::sqrt(qq * kk)) << head << ", " << i << ", " << j;
          errors += (got - s) * (got - s);
          sizes += qq * kk / kConfig.d_qk;
        }
      }
    }
    EXPECT_LT(std::sqrt(errors / sizes), 0.06);
  }

  void expect_close_values() const {
    for (i64 head = 0; head < 2 * kKeyHeads; ++head) {
      const double scale = static_cast<double>(v_scale[static_cast<size_t>(head)]);
      for (i64 j = 0; j < given.kv_used[head / kKeyHeads]; ++j) {
        for (i64 d = 0; d < kConfig.d_v; ++d) {
          const double x = given.number(Array::kV, head / kKeyHeads, head % kKeyHeads, j, d);
          const u8 y = v[static_cast<size_t>((head * given.kv_rows + j) * kConfig.d_v + d)];
          ASSERT_NEAR(scale * static_cast<double>(to_float(e4m3{y})), x,
                      std::fabs(x) / 16 + scale * 0x1p-10)
              << head << ", " << j << ", " << d;
        }
      }
    }
  }
};

template <QuantiseConfig kConfig>
void expect_scores_and_values(i64 q_rows, i64 kv_rows, double offset) {
  const SixteenBits given(kConfig, q_rows, kv_rows, offset);
  if (offset == 0) given.set_row(Array::kK, 1, 4, 0);  // zeros fit
  EightBitsOf<kConfig> eight(given);
  eight.run(3);
  EXPECT_EQ(eight.unfit, 0u);
  const auto is_zero = [](float x) { return x == 0; };
  EXPECT_EQ(std::all_of(eight.constant.begin(), eight.constant.end(), is_zero), offset == 0);
  eight.expect_close_scores();
  eight.expect_close_values();
}

TEST(Quantise, ScoresAndValuesAreThoseOf16Bits) {
  expect_scores_and_values<quantise_of(DType::kBFloat16, 64, 64, false)>(20, 70, 8);
  expect_scores_and_values<quantise_of(DType::kFloat16, 80, 112, true)>(21, 90, 0);
  expect_scores_and_values<quantise_of(DType::kBFloat16, 256, 48, true)>(9, 300, 6);
}

constexpr QuantiseConfig kOf64 = quantise_of(DType::kBFloat16, 64, 64, true);

TEST(Quantise, SaysWhatE4M3DoesNotServe) {
  struct Row {
    Array array;
    i64 row;
    double factor;
  };
  // Row 6 of 300 is none of the sample.
  for (const Row& row : {Row{Array::kK, 6, 64},
                         {Array::kK, 8, 0x1p-12},
                         {Array::kV, 6, 64},
                         {Array::kV, 8, 0x1p-14},
                         {Array::kQ, 3, 0x1p-12},
                         {Array::kQ, 2, INFINITY},
                         {Array::kK, 299, NAN},
                         {Array::kV, 7, INFINITY}}) {
    const SixteenBits given(kOf64, 10, 300, 0);
    given.set_row(row.array, row.array == Array::kQ ? 0 : 1, row.row, row.factor);
    EightBitsOf<kOf64> eight(given);
    eight.run(4);
    EXPECT_EQ(eight.unfit, 1u) << name(row.array) << ", row " << row.row;
  }
}

TEST(Quantise, LseIsThatOfAllOfTheScore) {
  const SixteenBits given(kOf64, 10, 40, 8);
  EightBitsOf<kOf64> eight(given);
  eight.run(1);
  const auto lse_of = [&](i64 i) -> float& {
    const Tensor& lse = given.of(Array::kLse);
    const i64 index[3] = {i / 10 / kQueryHeads, i / 10 % kQueryHeads, i % 10};
    return *reinterpret_cast<float*>(RandomProblem::address(lse, index));
  };
  for (i64 i = 0; i < 2 * kQueryHeads * 10; ++i) lse_of(i) = i % 7 == 0 ? -INFINITY : 2.f;
  emulator::launch({.blocks = 1,
                    .threads = RowLanes::kThreads,
                    .shared_bytes = 0,
                    .seed = 1,
                    .kernel = "restore_constant",
                    .check = true},
                   [&] { restore_constant<kOf64>(eight.params); });
  for (i64 i = 0; i < 2 * kQueryHeads * 10; ++i) {
    if (i / 10 == 7 && i % 10 >= 7) continue;  // behind the length
    const float more = eight.difference[static_cast<size_t>(i)];
    EXPECT_EQ(lse_of(i), i % 7 == 0 ? -INFINITY : 2.f + more) << i;
  }
}

TEST(Quantise, KeepsTheConstantBesideSinks) {
  const SixteenBits given(kOf64, 10, 40, 8);
  EightBitsOf<kOf64> eight(given);
  eight.params.keeps_constant = true;
  eight.run(1);
  for (const float x : eight.constant) EXPECT_EQ(x, 0);
  eight.expect_close_scores();
}

}  // namespace
}  // namespace fulmen::test
