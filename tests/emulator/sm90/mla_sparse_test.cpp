// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// mla_sm90 on the host where each key lies where a table says: lists of slots in any order, some of
// which name none, over rows of bfloat16 and over records, against the scalar oracle.
#include "latent_support.h"

namespace fulmen::test {
namespace {

constexpr MlaSm90Config kSlots = [] {
  MlaSm90Config config = kOneRow;
  config.schedule.paged = config.gathers = true;
  return config;
}();
constexpr MlaSm90Config records_of(i32 bytes) {
  MlaSm90Config config = kSlots;
  config.record = bytes;
  config.several = bytes == 584;
  config.schedule.quantised = DType::kUint8;
  config.schedule.d_qk = bytes == 584 ? 512 : 576;
  return config;
}
constexpr MlaSm90Config kRecords656 = records_of(656), kRecords584 = records_of(584);

// Scales of records: powers of two near 2^-7; any numbers there; powers of two, and numbers that
// carry the position, far from where float16 has all bits; the latter beyond it.
enum class Scales { kPowers, kAny, kFar, kLargePositions };

// A record of the pool.
void write_record(RandomProblem& random, const Tensor& pool, const MlaSm90Config& config, i64 slot,
                  Scales scales) {
  u8* const page = static_cast<u8*>(pool.data) + slot / pool.shape[2] * pool.strides[0];
  const RecordRow<u8> row(config.schedule.d_qk, page, slot % pool.shape[2], pool.shape[2],
                          pool.strides[2]);
  const i64 stored = row.layout.stored(), group = row.layout.group;
  for (i64 d = 0; d < stored; ++d) {
    row.stored[d] = to_e4m3(static_cast<float>(random.normal() * 100)).bits;
  }
  for (i64 g = 0; g < stored / group; ++g) {
    const long near = std::lround(-7 + random.normal());
    const long exponent = scales == Scales::kFar && random.chance(0.1) ? near + 16 : near;
    if (row.layout.has_page_scales()) {
      row.scales[g] = static_cast<u8>(127 + exponent);
    } else {
      const double scale =
          std::exp2(static_cast<double>(exponent)) * (scales == Scales::kAny ? 1.3 : 1);
      store_real(row.scales + 4 * g, DType::kFloat32, scale);
    }
  }
  double unit = 1;
  if (scales == Scales::kFar) unit = random.one_of({0.0, 0x1p-18, 1.0, 0x1p16});
  if (scales == Scales::kLargePositions) unit = random.one_of({1.0, 0x1p16});
  for (i64 d = 0; d < kRecordRotary; ++d) {
    store_real(row.rotary + 2 * d, DType::kBFloat16, random.normal() * unit);
  }
}

void write_row(RandomProblem& random, const Tensor& pool, i64 slot) {
  for (i64 d = 0; d < MlaSm90Config::kDims; ++d) {
    const i64 at[4] = {slot / pool.shape[2], 0, slot % pool.shape[2], d};
    store_real(RandomProblem::address(pool, at), DType::kBFloat16, random.normal());
  }
}

// Lists of slots in any order over a pool, whose other rows are NaN; about every fifth names none.
Request sparse_request(RandomProblem& random, const MlaSm90Config& config,
                       const std::vector<i64>& lengths, i64 heads, i64 page_rows, Scales scales) {
  const i64 batch = static_cast<i64>(lengths.size());
  const i64 topk = max<i64>(1, *std::max_element(lengths.begin(), lengths.end()));
  Request request = latent_request(random, kOneRow, {lengths, heads});
  Arrays& arrays = request.arrays;
  arrays[Array::kQ] =
      random.contiguous(DType::kBFloat16, {batch, heads, 1, i64{config.schedule.d_qk}});
  random.fill_normal(arrays[Array::kQ]);
  const i64 pages = ceil_div(2 * batch * topk, page_rows);
  const bool has_records = config.record != 0;
  Tensor& pool = arrays[Array::kK];
  pool = random.contiguous(has_records ? DType::kUint8 : DType::kBFloat16,
                           {pages, 1, page_rows, has_records ? i64{config.record} : i64{576}});
  const size_t bytes = static_cast<size_t>(pages * pool.strides[0] * size_bytes(pool.dtype));
  std::memset(pool.data, 0xff, bytes);
  std::vector<i64> order(static_cast<size_t>(pages * page_rows));
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size() - 1; i > 0; --i) {
    std::swap(order[i], order[static_cast<size_t>(random.number(0, static_cast<i64>(i)))]);
  }
  std::vector<i64> table(static_cast<size_t>(batch * topk), kNoSlot);
  for (size_t b = 0, used = 0; b < lengths.size(); ++b) {
    for (i64 j = 0; j < lengths[b]; ++j) {
      if (random.chance(0.2)) continue;
      const i64 slot = order[used++];
      table[b * static_cast<size_t>(topk) + static_cast<size_t>(j)] = slot;
      if (has_records) {
        write_record(random, pool, config, slot, scales);
      } else {
        write_row(random, pool, slot);
      }
    }
  }
  arrays[Array::kV] = pool;
  arrays[Array::kV].shape[3] = 512;
  Tensor& slots = arrays[Array::kPageTable] = random.indices(DType::kInt32, table);
  slots.rank = 2;
  slots.shape[0] = batch;
  slots.shape[1] = slots.strides[0] = topk;
  slots.strides[1] = 1;
  request.options.slots = 1;
  return request;
}

template <MlaSm90Config kConfig>
void expect_sparse(const std::vector<i64>& lengths, i64 heads, i64 page_rows, i64 workers, u32 seed,
                   Scales scales = Scales::kPowers) {
  RandomProblem random(seed);
  const Request request = sparse_request(random, kConfig, lengths, heads, page_rows, scales);
  expect_latent<kConfig>(random, request, workers, seed);
}

TEST(MlaSm90Sparse, Slots) {
  expect_sparse<kSlots>({1, 47, 0}, 16, 64, 2, 1);
  expect_sparse<kSlots>({48, 49, 97}, 70, 1, 3, 2);
  expect_sparse<kSlots>({200, 3}, 8, 5, 1, 3);
  expect_sparse<kSlots>({90, 90, 90, 90}, 8, 64, 3, 4);  // two whole row tiles a worker
  expect_sparse<kSlots>({290, 290}, 8, 64, 5, 5);        // two workers a row tile
}

TEST(MlaSm90Sparse, Records) {
  expect_sparse<kRecords656>({1, 47, 0}, 16, 64, 2, 1);
  expect_sparse<kRecords656>({49, 300}, 70, 1, 3, 2);
  expect_sparse<kRecords656>({49, 5}, 4, 64, 2, 3, Scales::kAny);
  expect_sparse<kRecords656>({49, 5}, 4, 64, 2, 4, Scales::kFar);
  expect_sparse<kRecords584>({1, 47, 0}, 16, 64, 2, 1);
  expect_sparse<kRecords584>({49, 300}, 70, 2, 1, 2);
  expect_sparse<kRecords584>({9, 3}, 4, 2, 2, 3, Scales::kFar);
  expect_sparse<kRecords584>({9, 3}, 4, 2, 2, 4, Scales::kLargePositions);
}

template <MlaFewRowsConfig kConfig>
void expect_few_rows(const std::vector<i64>& lengths, i64 heads, i64 page_rows, u32 seed,
                     Scales scales = Scales::kPowers) {
  RandomProblem random(seed);
  const Request request = sparse_request(random, kConfig.common, lengths, heads, page_rows, scales);
  expect_latent(random, request, seed,
                [&](const Problem& problem) { attend_few_rows<kConfig>(problem, seed); });
}

// A cluster for each 16 rows; blocks that have no key of the last round, and none at all.
TEST(MlaSm90Sparse, FewRows) {
  constexpr MlaFewRowsConfig kAlone = MlaFewRowsConfig::of(kRecords656, 1);
  constexpr MlaFewRowsConfig kTwo = MlaFewRowsConfig::of(kRecords584, 2);
  constexpr MlaFewRowsConfig kFour = [] {
    MlaSm90Config config = kRecords656;
    config.schedule.one_query = true;
    return MlaFewRowsConfig::of(config, 4);
  }();
  constexpr MlaFewRowsConfig kSixteen = MlaFewRowsConfig::of(kRecords656, 16);
  expect_few_rows<kSixteen>({1100}, 16, 64, 1);
  expect_few_rows<kAlone>({1, 200, 0}, 16, 64, 1);
  expect_few_rows<kAlone>({20, 5}, 4, 64, 3, Scales::kAny);
  expect_few_rows<kTwo>({1, 270, 0}, 20, 64, 1);
  expect_few_rows<kTwo>({20, 5}, 4, 2, 2, Scales::kFar);
  expect_few_rows<kTwo>({9, 3}, 4, 2, 4, Scales::kLargePositions);
  expect_few_rows<kFour>({600, 3}, 5, 1, 1);
}

// A slot that the pool does not have empties its row, and is told; lists of none but -1 are empty.
TEST(MlaSm90Sparse, SlotsThatAreNone) {
  RandomProblem random(5);
  const Request request =
      sparse_request(random, kRecords656, {100, 60, 60}, 16, 64, Scales::kPowers);
  const Tensor& table = request.arrays[Array::kPageTable];
  i32* const slots = static_cast<i32*>(table.data);
  slots[7] = static_cast<i32>(request.arrays[Array::kK].shape[0] * 64);
  for (i64 j = 0; j < 60; ++j) slots[2 * table.strides[0] + j] = -1;
  FaultBytes faults{};
  attend<kRecords656>(validate(request, Pointers::kChecked), 2, 6, &faults);
  EXPECT_EQ(faults.bits(), u32{kFaultPages});
  RandomProblem::for_each(request.arrays[Array::kLse], [&](const i64* at) {
    const double lse =
        load_real(RandomProblem::address(request.arrays[Array::kLse], at), DType::kFloat32);
    EXPECT_EQ(lse == -kInfinity<double>, at[0] != 1) << at[0] << ", " << at[1];
  });
  RandomProblem::for_each(request.arrays[Array::kO], [&](const i64* at) {
    const double o =
        load_real(RandomProblem::address(request.arrays[Array::kO], at), DType::kBFloat16);
    EXPECT_TRUE(at[0] == 1 ? o == o : o == 0) << at[0] << ", " << at[1];
  });
}

}  // namespace
}  // namespace fulmen::test
