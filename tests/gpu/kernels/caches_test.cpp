// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The naive and simt kernels over caches, in the emulator: what they make of entries that no host
// has checked, and pages that lie far apart. Drawn caches are in naive_test.cpp and simt_test.cpp.
#include <sys/mman.h>

#include "against_oracle.h"
#include "kernels/naive/naive.cuh"
#include "kernels/simt/forward_simt.cuh"

namespace fulmen::test {
namespace {

constexpr FmaConfig naive_of(DType quantised) { return {.caches = true, .quantised = quantised}; }
constexpr FmaConfig simt_of(DType quantised) {
  return {.num_threads = 64,
          .rows = 16,
          .columns = 16,
          .max_dim_qk = 32,
          .max_dim_v = 32,
          .caches = true,
          .quantised = quantised};
}

template <FmaConfig kNaive>
void run_naive(const AttentionParams& p) {
  const i64 blocks = ceil_div(forward_naive_tasks(p), kNaive.num_threads);
  emulator::launch({.blocks = blocks, .threads = kNaive.num_threads, .shared_bytes = 0, .seed = 1},
                   [&] { forward_naive<kNaive>(p); });
}

template <FmaConfig kSimt>
void run_simt(const AttentionParams& p) {
  emulator::launch({.blocks = num_q_tiles(p, kSimt.rows),
                    .threads = kSimt.num_threads,
                    .shared_bytes = kSimt.forward_shared_bytes(),
                    .seed = 1},
                   [&] { forward_simt<kSimt>(p); });
}

using KernelCall = void (*)(const AttentionParams& p);
constexpr KernelCall kRuns[] = {run_naive<naive_of(DType::kNone)>, run_simt<simt_of(DType::kNone)>};

// Three requests of 20 query rows, with 9, 17 and 4 keys on pages of 4 rows: of float32 or int8,
// with elements side by side or apart.
struct Cache {
  RandomProblem random{5};
  Request request;
  std::vector<i64> table{3, 0, 6, -1, -1, 1, 9, 2, 8, 4, 7, -1, -1, -1, -1};
  std::vector<i64> lengths{9, 17, 4};

  explicit Cache(DType kv_dtype = DType::kFloat32, i64 element_stride = 1) {
    Arrays& arrays = request.arrays;
    for (const Array array : {Array::kQ, Array::kO}) arrays[array] = plain({3, 2, 20, 24});
    for (const Array array : {Array::kK, Array::kV}) {
      arrays[array] = plain({10, 1, 4, 24}, kv_dtype, element_stride);
    }
    for (const Array input : {Array::kQ, Array::kK, Array::kV}) {
      random.fill_normal(arrays[input], arrays[input].dtype == DType::kInt8 ? 3 : 1);
    }
    arrays[Array::kLse] = plain({3, 2, 20});
    request.options.scale = kNan;
    request.options.causal = true;
  }

  Tensor plain(std::vector<i64> shape, DType dtype = DType::kFloat32, i64 element_stride = 1) {
    Tensor tensor{nullptr, dtype, static_cast<int>(shape.size()), {}, {}};
    i64 elements = element_stride;
    for (int axis = tensor.rank; axis-- > 0; elements *= tensor.shape[axis]) {
      tensor.shape[axis] = shape[static_cast<size_t>(axis)];
      tensor.strides[axis] = elements;
    }
    tensor.data = random.memory(static_cast<size_t>(elements) * sizeof(float));
    return tensor;
  }

  Problem problem() {
    Tensor& pages = request.arrays[Array::kPageTable] = random.indices(DType::kInt64, table);
    pages.rank = 2;
    pages.shape[0] = 3;
    pages.shape[1] = pages.strides[0] = 5;
    pages.strides[1] = 1;
    request.arrays[Array::kKvLengths] = random.indices(DType::kInt64, lengths);
    return validate(request, Pointers::kChecked);
  }

  double result(Array array, i64 index, i64 head, i64 i, i64 dim) const {
    const i64 at[kMaxRank] = {index, head, i, dim};
    return load_real(RandomProblem::address(request.arrays[array], at), DType::kFloat32);
  }

  // What the runs leave of a row: whether it is empty.
  bool is_empty(i64 index, i64 i) const {
    bool empty = true;
    for (i64 head = 0; head < 2; ++head) {
      empty = empty &&
              result(Array::kLse, index, head, i, 0) == -std::numeric_limits<double>::infinity();
      for (i64 dim = 0; dim < 24; ++dim) {
        empty = empty && result(Array::kO, index, head, i, dim) == 0;
      }
    }
    return empty;
  }
  bool is_empty(i64 index) const {
    bool empty = true;
    for (i64 i = 0; i < 20; ++i) empty = empty && is_empty(index, i);
    return empty;
  }
};

struct Damage {
  const char* what;
  void (*spoil)(Cache& cache);
  u32 faults;
};

const Damage kDamages[] = {
    {"a length beyond the table", [](Cache& c) { c.lengths[1] = 21; }, kFaultKvLengths},
    {"a length of 2^40", [](Cache& c) { c.lengths[1] = i64{1} << 40; }, kFaultKvLengths},
    {"a negative length", [](Cache& c) { c.lengths[1] = -1; }, kFaultKvLengths},
    {"a start beyond the keys",
     [](Cache& c) {
       c.request.arrays[Array::kKvStart] = c.random.indices(DType::kInt32, {0, 18, 0});
     },
     kFaultKvLengths},
    {"a negative start",
     [](Cache& c) {
       c.request.arrays[Array::kKvStart] = c.random.indices(DType::kInt32, {0, -1, 0});
     },
     kFaultKvLengths},
    {"a negative number of rows",
     [](Cache& c) {
       c.request.arrays[Array::kQLengths] = c.random.indices(DType::kInt32, {20, -1, 20});
     },
     kFaultQLengths},
    {"more rows than there are",
     [](Cache& c) {
       c.request.arrays[Array::kQLengths] = c.random.indices(DType::kInt64, {20, 21, 20});
     },
     kFaultQLengths},
};

// Of a key without a page: rows that see it are empty, all others are what they are.
TEST(CachesOnDevice, ABadPageEmptiesTheRowsThatSeeIt) {
  struct Page {
    size_t entry;  // of the table, of request 1
    i64 id;
  };
  struct Kind {
    KernelCall run;
    DType dtype;
    i64 element_stride;
  };
  for (const auto& [run, dtype, element_stride] :
       {Kind{kRuns[0], DType::kFloat32, 1}, Kind{kRuns[1], DType::kFloat32, 1},
        Kind{kRuns[1], DType::kFloat32, 2},
        Kind{run_naive<naive_of(DType::kInt8)>, DType::kInt8, 1},
        Kind{run_simt<simt_of(DType::kInt8)>, DType::kInt8, 1}}) {
    Cache whole(dtype, element_stride);
    run(gpu::attention_params(whole.problem()));
    for (const Page& page : {Page{5, -1}, Page{9, 10}, Page{7, i64{1} << 40}}) {
      SCOPED_TRACE(page.entry);
      Cache cache(dtype, element_stride);
      cache.table[page.entry] = page.id;
      FaultBytes faults{};
      run(gpu::attention_params(cache.problem(), &faults));
      EXPECT_EQ(faults.bits(), u32{kFaultPages});
      const i64 first = 4 * static_cast<i64>(page.entry - 5);  // of the keys without
      for (i64 i = 0; i < 20; ++i) {
        const i64 last = i - 3;  // of the keys that row i sees
        EXPECT_EQ(cache.is_empty(1, i), last < 0 || last >= first) << i;
        for (const i64 index : {0, 1, 2}) {
          if (cache.is_empty(index, i)) continue;
          EXPECT_NEAR(cache.result(Array::kO, index, 1, i, 23),
                      whole.result(Array::kO, index, 1, i, 23), 1e-5);
          EXPECT_NEAR(cache.result(Array::kLse, index, 1, i, 0),
                      whole.result(Array::kLse, index, 1, i, 0), 1e-5);
        }
      }
      EXPECT_FALSE(cache.is_empty(0));
      EXPECT_FALSE(cache.is_empty(2));
    }
  }
}

TEST(CachesOnDevice, KeysWithoutASlotAreHidden) {
  const std::vector<i64> sparse{3, -1, 0, -1, 9, 7, -1, 12, 39, -1, -1, -1, -1, -1, -1};
  const auto slots = [](std::vector<i64> table, std::vector<i64> lengths) {
    Cache cache;
    cache.request.options.slots = true;
    cache.request.options.causal = false;
    cache.table = std::move(table);
    cache.lengths = std::move(lengths);
    return cache;
  };
  for (const auto run : kRuns) {
    Cache cache = slots(sparse, {5, 5, 4});
    Cache whole = slots({9, 3, 0, -9, -9, 39, 12, 7, -9, -9, -9, -9, -9, -9, -9}, {3, 3, 0});
    FaultBytes faults{};
    run(gpu::attention_params(cache.problem(), &faults));
    run(gpu::attention_params(whole.problem(), &faults));
    EXPECT_EQ(faults.bits(), 0u);
    for (const i64 index : {0, 1}) {
      EXPECT_FALSE(cache.is_empty(index));
      for (const Array array : {Array::kO, Array::kLse}) {
        EXPECT_NEAR(cache.result(array, index, 1, 19, 0), whole.result(array, index, 1, 19, 0),
                    1e-5);
      }
    }
    EXPECT_TRUE(cache.is_empty(2));
    for (const i64 bad : {i64{40}, i64{-2}, i64{1} << 40}) {
      Cache damaged = slots(sparse, {5, 5, 4});
      damaged.table[8] = bad;
      run(gpu::attention_params(damaged.problem(), &faults));
      EXPECT_EQ(faults.bits(), u32{kFaultPages});
      EXPECT_TRUE(damaged.is_empty(1));
      EXPECT_FALSE(damaged.is_empty(0));
    }
  }
}

TEST(CachesOnDevice, ABadEntryMakesItsRequestEmptyAndIsTold) {
  for (const auto run : kRuns) {
    for (const Damage& damage : kDamages) {
      SCOPED_TRACE(damage.what);
      Cache cache;
      damage.spoil(cache);
      FaultBytes faults{};
      run(gpu::attention_params(cache.problem(), &faults));
      EXPECT_EQ(faults.bits(), damage.faults);
      EXPECT_TRUE(cache.is_empty(1));
      EXPECT_FALSE(cache.is_empty(0));
      EXPECT_FALSE(cache.is_empty(2));
    }
  }
}

TEST(CachesOnDevice, BadOffsetsOfPagesAreTold) {
  for (const auto run : kRuns) {
    for (const std::vector<i64>& offsets : {std::vector<i64>{0, 3, 2, 4}, {0, 3, 16, 17}}) {
      Cache cache;
      cache.problem();
      cache.request.arrays[Array::kPageTable] = cache.random.indices(DType::kInt32, cache.table);
      cache.request.arrays[Array::kPageIndptr] = cache.random.indices(DType::kInt32, offsets);
      cache.request.options.max_kv = 20;
      FaultBytes faults{};
      run(gpu::attention_params(validate(cache.request, Pointers::kChecked), &faults));
      EXPECT_EQ(faults.bits() & kFaultKvOffsets, kFaultKvOffsets);
      EXPECT_TRUE(cache.is_empty(1));
      EXPECT_FALSE(cache.is_empty(0));
    }
  }
}

TEST(CachesOnDevice, EntriesInRangeAreNoFaults) {
  for (const auto run : kRuns) {
    Cache cache;
    cache.request.arrays[Array::kPositions] =
        cache.random.indices(DType::kInt64, std::vector<i64>(20, -5));
    FaultBytes faults{};
    run(gpu::attention_params(cache.problem(), &faults));
    EXPECT_EQ(faults.bits(), 0u);
  }
}

TEST(CachesOnDevice, APositionBeyond32BitsIsToldAndClamped) {
  for (const auto run : kRuns) {
    Cache cache;
    cache.request.arrays[Array::kPositions] =
        cache.random.indices(DType::kInt64, std::vector<i64>(20, i64{1} << 62));
    FaultBytes faults{};
    run(gpu::attention_params(cache.problem(), &faults));
    EXPECT_EQ(faults.bits(), u32{kFaultPositions});
    EXPECT_FALSE(cache.is_empty(1));
  }
}

// Pages lie 6 GiB apart: their numbers times strides are beyond 32 bits, in elements and in bytes.
TEST(CachesOnDevice, PagesMayLieFarApart) {
  constexpr i64 kPageBytes = i64{6} << 30;
  constexpr size_t kBytes = size_t{10} * kPageBytes;
  Cache near, far;
  far.request = near.request;
  void* mapped[2] = {};
  for (int which = 0; which < 2; ++which) {
    const Array array = which == 0 ? Array::kK : Array::kV;
    mapped[which] = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ASSERT_NE(mapped[which], MAP_FAILED);
    Tensor& tensor = far.request.arrays[array];
    tensor.data = mapped[which];
    tensor.strides[0] = kPageBytes / static_cast<i64>(sizeof(float));
    for (i64 page = 0; page < 10; ++page) {
      const i64 at[kMaxRank] = {page, 0, 0, 0};
      std::memcpy(RandomProblem::address(tensor, at),
                  RandomProblem::address(near.request.arrays[array], at), 4 * 24 * sizeof(float));
    }
  }
  for (const auto run : kRuns) {
    far.request = with_fresh_outputs(far.random, far.request);
    run(gpu::attention_params(near.problem()));
    run(gpu::attention_params(far.problem()));
    expect_close(far.request, near.request, {Array::kO, Array::kLse}, 0);
  }
  for (void* const memory : mapped) munmap(memory, kBytes);
}

}  // namespace
}  // namespace fulmen::test
