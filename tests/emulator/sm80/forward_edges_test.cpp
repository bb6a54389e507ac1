// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// forward_sm80 where one key more or less decides: lengths one short of whole blocks, windows that
// begin at every place of a block, and what statistics say where blocks kept a maximum.
#include <gtest/gtest.h>

#include "cpu/backend.h"
#include "cpu/random_problem.h"
#include "cpu/tiled_support.h"
#include "emulator/sm80/launch_forward.h"
#include "gpu/params.h"

namespace fulmen::test {
namespace {

// A block of 32 rows; blocks of 32 keys.
constexpr ForwardSm80Config kSmall = [] {
  ForwardSm80Config config;
  config.d_qk = config.d_v = 16;
  config.warps = 2;
  config.row_tiles = 1;
  config.kv_rows = 32;
  config.score.stats = true;
  return config;
}();
constexpr i64 kRows = 32;
// Rows of all arrays are copied and stored as vectors.
constexpr ForwardSm80Config kAligned = [] {
  ForwardSm80Config config = kSmall;
  config.aligned = true;
  return config;
}();

Request request_of(RandomProblem& random, i64 keys) {
  Request request;
  Arrays& arrays = request.arrays;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    const bool of_keys = array == Array::kK || array == Array::kV;
    arrays[array] = random.contiguous(DType::kBFloat16, {1, 1, of_keys ? keys : kRows, 16});
    if (array != Array::kO) random.fill_normal(arrays[array]);
  }
  arrays[Array::kLse] = random.array(DType::kFloat32, {1, 1, kRows});
  arrays[Array::kStats] = random.array(DType::kFloat32, {1, 1, kRows, 2});
  request.options.scale = kNan;
  return request;
}

double number(const Request& request, Array array, i64 row, i64 which) {
  const i64 at[4] = {0, 0, row, which};
  return load_real(RandomProblem::address(request.arrays[array], at), DType::kFloat32);
}

// As the oracle; and no weight is above 1, so that a backward pass may take row_max from scores.
template <ForwardSm80Config kConfig>
void expect_agreement(RandomProblem& random, const Request& expected, i64 keys,
                      const std::string& what) {
  const Request actual = with_fresh_outputs(random, expected);
  cpu::scalar_forward(validate(expected, Pointers::kChecked));
  launch<kConfig>(gpu::attention_params(validate(actual, Pointers::kChecked)), 1);
  const Difference o = compare(actual.arrays[Array::kO], expected.arrays[Array::kO]);
  EXPECT_LE(o.largest, 2 * tolerance(DType::kBFloat16, DType::kBFloat16) * max(o.magnitude, 1.0))
      << what << ", o" << o.place;
  EXPECT_TRUE(random.is_intact_around(actual.arrays[Array::kO])) << what;
  const Difference lse = compare(actual.arrays[Array::kLse], expected.arrays[Array::kLse]);
  EXPECT_LE(lse.largest, 1e-5 * max(lse.magnitude, 1.0)) << what << ", lse" << lse.place;
  for (i64 row = 0; row < kRows; ++row) {
    EXPECT_LE(number(actual, Array::kStats, row, 1), 1.00001 * static_cast<double>(keys))
        << what << ", stats, row " << row;
  }
}

TEST(ForwardSm80Edges, OneKeyLessThanWholeBlocks) {
  for (const i64 keys : {31, 63, 95, 127}) {
    RandomProblem random(static_cast<unsigned>(keys));
    expect_agreement<kSmall>(random, request_of(random, keys), keys,
                             std::to_string(keys) + " keys");
  }
}

// Also at the second key of a block, and at its last.
TEST(ForwardSm80Edges, AWindowBeginsAnywhereInABlock) {
  for (i64 left = 34; left < 34 + 32; ++left) {
    RandomProblem random(static_cast<unsigned>(left));
    Request request = request_of(random, 128);
    request.options.window_left = left;
    expect_agreement<kSmall>(random, request, 128, "window_left " + std::to_string(left));
  }
}

TEST(ForwardSm80Edges, RowsPastALengthAreZero) {
  for (const i64 length : {0, 1, 15, 16, 31}) {
    RandomProblem random(static_cast<unsigned>(length));
    Request request = request_of(random, 40);
    request.arrays[Array::kQLengths] = random.indices(DType::kInt32, {length});
    const std::string what = std::to_string(length) + " rows";
    expect_agreement<kSmall>(random, request, 40, what);
    expect_agreement<kAligned>(random, request, 40, what);
  }
}

// Scores that grow by 6 nats from block to block, as the main loop meets them.
TEST(ForwardSm80Edges, NoScoreIsAboveRowMax) {
  RandomProblem random(3);
  const Request request = request_of(random, 128);
  const auto fill = [&](Array array, const auto& value) {
    const Tensor& tensor = request.arrays[array];
    RandomProblem::for_each(tensor, [&](const i64* at) {
      store_real(RandomProblem::address(tensor, at), tensor.dtype, value(at[2]));
    });
  };
  fill(Array::kQ, [](i64) { return 1.; });
  fill(Array::kK, [](i64 key) { return -1.5 * static_cast<double>(key / 32); });
  expect_agreement<kSmall>(random, request, 128, "growing scores");
}

}  // namespace
}  // namespace fulmen::test
