// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The indexer of sparse latent attention, in the emulator and on the CPU: over small integers,
// whose scores are exact in float32, so that both choose the keys that the definition chooses, ties
// included; and entries that are out of range.
#include "kernels/indexer/indexer.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "../../cpu/random_problem.h"
#include "core/error.h"
#include "cpu/backend.h"
#include "emulator/launch.h"
#include "emulator/schedules.h"
#include "gpu/backend.h"

namespace fulmen::test {
namespace {

// A problem of small integers, as a caller gives it.
class DrawnIndexer {
 public:
  DrawnIndexer(unsigned seed, DType q, DType k, i64 most_topk, bool in_eights)
      : random(seed), in_eights_(in_eights) {
    batch = random.number(1, 3);
    rows = random.number(1, 4);
    keys = random.one_of({1, 5, 100, 128, 129, 300, 500});
    heads = random.one_of({1, 3, 16, in_eights ? 70 : 33});
    dim = in_eights ? random.one_of({8, 40, 64}) : random.one_of({1, 8, 33, 40});
    topk = random.number(0, most_topk);
    page_size = random.one_of({0, 1, 3, 64});
    given.extents.causal = random.chance(0.5);
    given.q = integers(q, {batch, heads, rows, dim});
    given.weights = integers(DType::kFloat32, {batch, heads, rows});
    draw_keys(k);
    given.indices =
        random.array(seed % 2 == 0 ? DType::kInt32 : DType::kInt64, {batch, rows, topk});
  }

  RandomProblem random;
  IndexerProblem given;
  i64 batch, rows, keys, heads, dim, topk, page_size;
  std::vector<i64> lengths;

  // The slots that a row's indices must be.
  std::vector<i64> expected(i64 b, i64 i) const {
    const i64 seen = keys_of_row(lengths[static_cast<size_t>(b)], rows, i, given.extents.causal);
    std::vector<std::pair<double, i64>> scores;  // rising: the best first
    for (i64 j = 0; j < seen; ++j) scores.emplace_back(-score(b, i, j), j);
    std::sort(scores.begin(), scores.end());
    std::vector<i64> chosen;
    for (const auto& [negated, j] : scores) {
      if (static_cast<i64>(chosen.size()) < topk) chosen.push_back(j);
    }
    std::sort(chosen.begin(), chosen.end());
    for (i64& j : chosen) j = slot(b, j);
    chosen.resize(static_cast<size_t>(topk), -1);
    return chosen;
  }

  std::string wrong(const Tensor& indices) const {
    for (i64 b = 0; b < batch; ++b) {
      for (i64 i = 0; i < rows; ++i) {
        const std::vector<i64> slots = expected(b, i);
        for (i64 n = 0; n < topk; ++n) {
          const i64 at[] = {b, i, n, 0};
          const i64 got = load_index(RandomProblem::address(indices, at), indices.dtype);
          if (got == slots[static_cast<size_t>(n)]) continue;
          return sentence("row ", b, ", ", i, ": index ", n, " is ", got, " where ",
                          slots[static_cast<size_t>(n)], " was expected");
        }
      }
    }
    return "";
  }

 private:
  Tensor integers(DType dtype, const std::vector<i64>& shape) {
    const Tensor made = in_eights_ ? random.contiguous(dtype, shape) : random.array(dtype, shape);
    RandomProblem::for_each(made, [&](const i64* at) {
      store_real(RandomProblem::address(made, at), dtype,
                 static_cast<double>(random.number(-3, 3)));
    });
    return made;
  }

  void draw_keys(DType k) {
    for (i64 b = 0; b < batch; ++b) lengths.push_back(random.number(0, keys));
    given.kv_lengths = random.indices(DType::kInt32, lengths);
    const i64 columns = page_size > 0 ? ceil_div(keys, page_size) : 1;
    const i64 pages = page_size > 0 ? batch * columns + 2 : batch;
    pages_of_.resize(static_cast<size_t>(batch * columns));
    std::iota(pages_of_.rbegin(), pages_of_.rend(), page_size > 0 ? 1 : 0);
    if (page_size > 0) {
      given.page_table = random.indices(DType::kInt64, pages_of_);
      given.page_table.rank = 2;
      given.page_table.shape[0] = batch;
      given.page_table.shape[1] = given.page_table.strides[0] = columns;
      given.page_table.strides[1] = 1;
    }
    given.k = integers(k, {pages, 1, page_size > 0 ? page_size : keys, dim});
    if (k == DType::kFloat8E4M3 && random.chance(0.5)) {
      given.k_scale = random.array(DType::kFloat32, {pages, 1, given.k.shape[2], 1});
      RandomProblem::for_each(given.k_scale, [&](const i64* at) {
        store_real(RandomProblem::address(given.k_scale, at), DType::kFloat32,
                   std::exp2(static_cast<double>(random.number(-2, 2))));
      });
    }
  }

  i64 page_of_key(i64 b, i64 j) const {
    return page_size > 0
               ? pages_of_[static_cast<size_t>(b * ceil_div(keys, page_size) + j / page_size)]
               : b;
  }
  i64 row_of_key(i64 j) const { return page_size > 0 ? j % page_size : j; }
  i64 slot(i64 b, i64 j) const {
    return page_of_key(b, j) * (page_size > 0 ? page_size : keys) + row_of_key(j);
  }

  double score(i64 b, i64 i, i64 j) const {
    const i64 page = page_of_key(b, j), row = row_of_key(j);
    const double scale = given.k_scale.present() ? given.k_scale.real(page, 0, row, 0) : 1;
    double sum = 0;
    for (i64 h = 0; h < heads; ++h) {
      double dot = 0;
      for (i64 d = 0; d < dim; ++d) dot += given.q.real(b, h, i, d) * given.k.real(page, 0, row, d);
      sum += given.weights.real(b, h, i, 0) * std::max(dot * scale, 0.0);
    }
    return sum;
  }

  bool in_eights_;
  std::vector<i64> pages_of_;
};

template <IndexerConfig kConfig>
u32 run_indexer(const IndexerProblem& problem, u32 seed) {
  FaultBytes faults{};
  const IndexerParams params = gpu::indexer_params(problem, &faults);
  emulator::launch({.blocks = problem.extents.batch * problem.extents.rows,
                    .threads = kConfig.num_threads,
                    .shared_bytes = kConfig.shared_bytes(),
                    .seed = seed,
                    .kernel = "mla_indexer",
                    .check = seed % 3 == 0},
                   [&] { mla_indexer<kConfig>(params); });
  return faults.bits();
}

// Few keys are kept, so that they are sorted out several times. is_one: which are meant. kDim: of
// the tiles of tensor cores, or 0.
template <DType kQ, DType kK, i32 kCapacity, i32 kDim = 0>
void expect_choices(unsigned seed, i64 most_topk, u32 count, const auto& is_one) {
  for (; count > 0; ++seed) {
    DrawnIndexer drawn(seed, kQ, kK, most_topk, kDim > 0);
    if (!is_one(drawn)) continue;
    --count;
    const IndexerProblem problem = validate_indexer(drawn.given);
    const u32 faults = run_indexer<IndexerConfig{kQ, kK, kCapacity, 256, kDim}>(problem, seed);
    ASSERT_TRUE(kDim == 0 || gpu::indexer_config(problem).dim == kDim);
    ASSERT_EQ(drawn.wrong(drawn.given.indices), "") << "seed " << seed;
    ASSERT_EQ(faults, 0u);
    IndexerProblem on_cpu = drawn.given;
    on_cpu.indices = drawn.random.twin(drawn.given.indices);
    cpu::index_keys(validate_indexer(on_cpu));
    ASSERT_EQ(drawn.wrong(on_cpu.indices), "") << "on the CPU, seed " << seed;
  }
}
template <DType kQ, DType kK, i32 kCapacity, i32 kDim = 0>
void expect_choices(unsigned first_seed, i64 most_topk) {
  expect_choices<kQ, kK, kCapacity, kDim>(first_seed, most_topk, num_drawn(8),
                                          [](const DrawnIndexer&) { return true; });
}

TEST(IndexerKernel, ChoosesWhatTheDefinitionChooses) {
  expect_choices<DType::kBFloat16, DType::kBFloat16, 256>(1, 100);
  expect_choices<DType::kFloat16, DType::kFloat8E4M3, 256>(101, 20);
  expect_choices<DType::kFloat8E4M3, DType::kFloat8E4M3, 256>(201, 100);
  expect_choices<DType::kFloat32, DType::kFloat32, 512>(301, 250);
}

// Of more keys than are kept, most of which are among the best.
TEST(IndexerKernel, SortsOutSeveralTimes) {
  expect_choices<DType::kBFloat16, DType::kBFloat16, 256>(
      401, 120, 2, [](const DrawnIndexer& drawn) {
        return drawn.topk > 80 && *std::ranges::max_element(drawn.lengths) > 400;
      });
}

TEST(IndexerKernel, EachKeyHasItsScale) {
  expect_choices<DType::kFloat16, DType::kFloat8E4M3, 256>(
      501, 20, 2, [](const DrawnIndexer& drawn) {
        return drawn.given.k_scale.present() && drawn.page_size != 1 && drawn.topk > 5 &&
               *std::ranges::max_element(drawn.lengths) > 60;
      });
}

TEST(IndexerKernel, TensorCoresChooseTheSame) {
  expect_choices<DType::kBFloat16, DType::kBFloat16, 256, 64>(601, 100);
  expect_choices<DType::kBFloat16, DType::kFloat8E4M3, 256, 64>(701, 100);
  expect_choices<DType::kFloat8E4M3, DType::kFloat8E4M3, 512, 64>(801, 250);
}

TEST(IndexerKernel, CapacityHoldsTheChosenAndATile) {
  for (i64 topk = 0; topk <= kMostChosen; ++topk) {
    const i32 capacity = indexer_capacity(topk);
    ASSERT_GE(capacity, topk + IndexerConfig::kTileKeys);
    ASSERT_EQ(capacity & (capacity - 1), 0);
  }
  EXPECT_LE(IndexerConfig{.capacity = indexer_capacity(kMostChosen)}.shared_bytes(), 99 * 1024);
}

TEST(IndexerKernel, EntriesOutOfRangeHideKeysAndAreRecorded) {
  RandomProblem random(7);
  IndexerProblem given;
  given.q = random.contiguous(DType::kFloat32, {2, 1, 1, 4});
  given.k = random.contiguous(DType::kFloat32, {3, 1, 2, 4});
  given.weights = random.contiguous(DType::kFloat32, {2, 1, 1});
  for (const Tensor* tensor : {&given.q, &given.k, &given.weights}) random.fill_normal(*tensor);
  given.kv_lengths = random.indices(DType::kInt64, {4, 9});
  given.page_table = random.indices(DType::kInt64, {3, 1});
  given.indices = random.contiguous(DType::kInt32, {2, 1, 5});
  const IndexerProblem problem = validate_indexer(given);
  constexpr IndexerConfig kConfig{DType::kFloat32, DType::kFloat32, 256};
  EXPECT_EQ(run_indexer<kConfig>(problem, 3), u32{kFaultPages | kFaultKvLengths});
  for (i64 n = 0; n < 5; ++n) {
    EXPECT_EQ(problem.indices.index(0, 0, 0, n), n < 2 ? 2 + n : -1);
    EXPECT_EQ(problem.indices.index(1, 0, 0, n), -1);
  }
  EXPECT_THROW(cpu::index_keys(problem), Error);
}

}  // namespace
}  // namespace fulmen::test
