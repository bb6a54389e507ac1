// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The naive and simt kernels over records of latent attention, in the emulator, against the scalar
// oracle: both layouts, contiguous, in pages and by slots.
#include "against_oracle.h"
#include "kernels/naive/naive.cuh"
#include "kernels/simt/forward_simt.cuh"

namespace fulmen::test {
namespace {

constexpr FmaConfig record_config(bool caches) {
  return {.dtype = DType::kFloat32,
          .num_threads = 64,
          .rows = 8,
          .columns = 8,
          .max_dim_qk = 576,
          .max_dim_v = 512,
          .caches = caches,
          .quantised = DType::kUint8};
}

template <bool kCaches>
void run_over_records(const AttentionParams& p) {
  constexpr FmaConfig kConfig = record_config(kCaches);
  const i64 blocks = ceil_div(forward_naive_tasks(p), kConfig.num_threads);
  emulator::launch({.blocks = blocks, .threads = kConfig.num_threads, .shared_bytes = 0, .seed = 1},
                   [&] { forward_naive<kConfig>(p); });
}

template <bool kCaches>
void run_tiles_over_records(const AttentionParams& p) {
  constexpr FmaConfig kConfig = record_config(kCaches);
  emulator::launch({.blocks = num_q_tiles(p, kConfig.rows),
                    .threads = kConfig.num_threads,
                    .shared_bytes = kConfig.forward_shared_bytes(),
                    .seed = 1},
                   [&] { forward_simt<kConfig>(p); });
}

Tensor record_tensor(RandomProblem& random, DType dtype, std::vector<i64> shape) {
  Tensor tensor{nullptr, dtype, static_cast<int>(shape.size()), {}, {}};
  i64 elements = 1;
  for (int axis = tensor.rank; axis-- > 0; elements *= tensor.shape[axis]) {
    tensor.shape[axis] = shape[static_cast<size_t>(axis)];
    tensor.strides[axis] = elements;
  }
  tensor.data = random.memory(static_cast<size_t>(elements * size_bytes(dtype)));
  return tensor;
}

// 2 entries or pages of 5 records: any numbers but NaN, scales of about 1 / 100.
Request request_over(RandomProblem& random, const RecordLayout& layout) {
  Request request;
  Arrays& arrays = request.arrays;
  arrays[Array::kQ] = record_tensor(random, DType::kFloat32, {2, 2, 1, layout.dims});
  arrays[Array::kO] = record_tensor(random, DType::kFloat32, {2, 2, 1, 512});
  arrays[Array::kLse] = record_tensor(random, DType::kFloat32, {2, 2, 1});
  random.fill_normal(arrays[Array::kQ], 0.1);
  Tensor& k = arrays[Array::kK] = record_tensor(random, DType::kUint8, {2, 1, 5, layout.bytes});
  arrays[Array::kV] = k;
  arrays[Array::kV].shape[3] = 512;
  for (i64 at = 0; at < 10; ++at) {
    u8* const page = reinterpret_cast<u8*>(k.address(at / 5, 0, 0, 0));
    const RecordRow<u8> row(layout.dims, page, at % 5, 5, layout.bytes);
    for (i64 d = 0; d < layout.stored(); ++d) {
      row.stored[d] = static_cast<u8>(random.number(0, 0x60) | random.number(0, 1) << 7);
    }
    for (i64 group = 0; group < layout.stored() / layout.group; ++group) {
      const float scale = static_cast<float>(random.number(1, 20)) / 1000;
      layout.has_page_scales()
          ? store_bytes(row.scales + group, static_cast<u8>(random.number(118, 123)))
          : store_bytes(row.scales + 4 * group, scale);
    }
    for (i64 d = 0; d < kRecordRotary; ++d) {
      store_bytes(row.rotary + 2 * d, to_bf16(static_cast<float>(random.number(-99, 99)) / 50));
    }
  }
  request.options.scale = 0.05;
  return request;
}

template <bool kCaches>
void expect_records_agree(RandomProblem& random, const Request& expected) {
  const Problem problem = validate(expected, Pointers::kChecked);
  check_lengths(problem);
  check_pages(problem);
  cpu::scalar_forward(problem);
  for (const auto run : {run_over_records<kCaches>, run_tiles_over_records<kCaches>}) {
    const Request actual = with_fresh_outputs(random, expected);
    run(gpu::attention_params(validate(actual, Pointers::kChecked)));
    expect_close(actual, expected, {Array::kO, Array::kLse}, 0);
  }
}

TEST(RecordsOnHost, AgreeWithTheOracle) {
  for (const RecordLayout& layout : {kRecord656, kRecord584}) {
    RandomProblem random(31);
    Request request = request_over(random, layout);
    expect_records_agree<false>(random, request);
    Arrays& arrays = request.arrays;
    const auto set_table = [&](const std::vector<i64>& table, const std::vector<i64>& lengths) {
      Tensor& entries = arrays[Array::kPageTable] = random.indices(DType::kInt32, table);
      entries.rank = 2;
      entries.shape[0] = 2;
      entries.shape[1] = entries.strides[0] = static_cast<i64>(table.size()) / 2;
      entries.strides[1] = 1;
      arrays[Array::kKvLengths] = random.indices(DType::kInt32, lengths);
    };
    set_table({1, 0, 0, -9}, {9, 4});
    expect_records_agree<true>(random, request);
    request.options.slots = true;
    set_table({7, -1, 2, 9, 0, 5, -1, 4}, {4, 2});
    expect_records_agree<true>(random, request);
  }
}

}  // namespace
}  // namespace fulmen::test
