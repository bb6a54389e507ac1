// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Chunks of prompts and single rows in one call: two kernels, each of which leaves the other's
// requests alone. In either order they make what the oracle makes.
#include <numeric>

#include "launch_forward.h"
#include "mixed_decodes.h"

namespace fulmen::test {
namespace {

constexpr ForwardSm90Config kChunks{
    .d_qk = 64,
    .d_v = 64,
    .kv_rows = 64,
    .stage_output = false,
    .caches = true,
    .paged = true,
    .mixed = true,
    .score = {.mask_kind = MaskKind::kRight, .varlen = true, .stats = true}};

// Rows and keys of requests of 8 query heads over 2, in pages of 16; some rows belong to none.
Request request_of(RandomProblem& random, const std::vector<i64>& rows,
                   const std::vector<i64>& keys) {
  Request request;
  Arrays& arrays = request.arrays;
  const i64 batch = static_cast<i64>(rows.size()), width = 14;
  std::vector<i64> offsets{0};
  for (const i64 count : rows) offsets.push_back(offsets.back() + count);
  const i64 all_rows = offsets.back() + 3;
  for (const Array array : {Array::kQ, Array::kO}) {
    arrays[array] = random.contiguous(DType::kBFloat16, {8, all_rows, 64});
  }
  arrays[Array::kLse] = random.contiguous(DType::kFloat32, {8, all_rows});
  arrays[Array::kStats] = random.contiguous(DType::kFloat32, {8, all_rows, 2});
  for (const Array array : {Array::kK, Array::kV}) {
    arrays[array] = random.contiguous(DType::kBFloat16, {batch * width, 2, 16, 64});
  }
  for (const Array array : {Array::kQ, Array::kK, Array::kV}) random.fill_normal(arrays[array]);
  std::vector<i64> table(static_cast<size_t>(batch * width));
  std::iota(table.rbegin(), table.rend(), 0);
  Tensor& page_table = arrays[Array::kPageTable] = random.indices(DType::kInt32, table);
  page_table.rank = 2;
  page_table.shape[0] = batch;
  page_table.shape[1] = page_table.strides[0] = width;
  page_table.strides[1] = 1;
  arrays[Array::kCuQ] = random.indices(DType::kInt32, offsets);
  arrays[Array::kKvLengths] = random.indices(DType::kInt32, keys);
  request.options.max_q = *std::max_element(rows.begin(), rows.end());
  request.options.scale = kNan;
  request.options.causal = true;
  return request;
}

void expect_both_kernels(const std::vector<i64>& rows, const std::vector<i64>& keys) {
  for (const bool decodes_first : {true, false}) {
    RandomProblem random(5);
    const Request expected = request_of(random, rows, keys);
    Request actual = expected;
    for (const Array output : {Array::kO, Array::kLse, Array::kStats}) {
      actual.arrays[output] = random.twin(expected.arrays[output]);
    }
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    const Problem problem = validate(actual, Pointers::kChecked);
    if (decodes_first) run_decodes(problem, 1);
    run_forward<kChunks>(problem, 1);
    if (!decodes_first) run_decodes(problem, 1);
    expect_close_rows(actual, expected, 1);
  }
}

// Up to 4 rows of 4 heads that share keys are few.
TEST(Sm90Mixed, ChunksAndSingleRows) {
  expect_both_kernels({1, 70, 0, 4, 5, 1, 140}, {200, 190, 30, 17, 20, 1, 150});
}
TEST(Sm90Mixed, SingleRowsLast) { expect_both_kernels({20, 1, 2}, {33, 224, 0}); }
TEST(Sm90Mixed, OfOneKind) {
  expect_both_kernels({1, 1, 3}, {100, 7, 64});
  expect_both_kernels({30, 8}, {100, 9});
}

}  // namespace
}  // namespace fulmen::test
