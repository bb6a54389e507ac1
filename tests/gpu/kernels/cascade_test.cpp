// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The two kernels around the passes of a cascade, in the emulator. What prepare says of requests is
// looked at by itself; the passes over what it says are computed here, key by key in float64; and
// what combine makes of them is attention over all keys, as the scalar oracle has it.
#include "kernels/cascade/cascade.cuh"

#include "against_oracle.h"

namespace fulmen::test {
namespace {

constexpr i64 kCascadeHeads = 4, kCascadeKvHeads = 2, kCascadeDim = 16, kCascadeDimV = 136;
constexpr i64 kCascadePageRows = 4;
constexpr float kNever = std::numeric_limits<float>::quiet_NaN();

// A pass over some keys, of one row: o, row max and row sum; empty where a key has no page.
struct PassOfRow {
  double row_max = -std::numeric_limits<double>::infinity();
  double row_sum = 0;
  std::vector<double> o = std::vector<double>(kCascadeDimV, kNever);
};

// Requests over pages, the first of which all of them have in common.
struct SharedCache {
  RandomProblem random;
  Request request;
  std::vector<i64> counts;   // query rows of each request
  std::vector<i64> lengths;  // keys
  std::vector<i64> shared;   // kv_shared: of each request, or one number
  std::vector<i64> table;    // of `width` entries each
  i64 width = 12;
  bool is_packed;
  bool has_sinks = false;

  SharedCache(unsigned seed, std::vector<i64> counts_, std::vector<i64> lengths_,
              std::vector<i64> shared_, bool is_packed_)
      : random(seed),
        counts(std::move(counts_)),
        lengths(std::move(lengths_)),
        shared(std::move(shared_)),
        is_packed(is_packed_) {
    const i64 common = ceil_div(max_of(shared), kCascadePageRows);
    for (size_t b = 0; b < lengths.size(); ++b) {
      for (i64 entry = 0; entry < width; ++entry) {
        const i64 own = static_cast<i64>(b) * width + entry;
        table.push_back(entry < common ? num_pages() - 1 - entry : own % (num_pages() - common));
      }
    }
  }

  static i64 max_of(const std::vector<i64>& x) { return *std::max_element(x.begin(), x.end()); }
  i64 num_requests() const { return static_cast<i64>(lengths.size()); }
  i64 num_pages() const { return num_requests() * width + 3; }
  i64 row_extent() const {
    i64 all = 2;  // rows behind the last offset
    for (const i64 count : counts) all += count;
    return is_packed ? all : max_of(counts);
  }

  Problem validated() {
    Arrays& arrays = request.arrays;
    const i64 rows = row_extent();
    std::vector<i64> q{kCascadeHeads, rows, kCascadeDim}, o{kCascadeHeads, rows, kCascadeDimV};
    std::vector<i64> sums{kCascadeHeads, rows}, pairs{kCascadeHeads, rows, 2};
    if (!is_packed) {
      for (std::vector<i64>* shape : {&q, &o, &sums, &pairs}) {
        shape->insert(shape->begin(), num_requests());
      }
    }
    arrays[Array::kQ] = random.contiguous(DType::kBFloat16, q);
    arrays[Array::kK] = random.contiguous(
        DType::kBFloat16, {num_pages(), kCascadeKvHeads, kCascadePageRows, kCascadeDim});
    arrays[Array::kV] = random.contiguous(
        DType::kBFloat16, {num_pages(), kCascadeKvHeads, kCascadePageRows, kCascadeDimV});
    for (const Array array : {Array::kQ, Array::kK, Array::kV}) {
      random.fill_normal(arrays[array], array == Array::kQ ? 2 : 1);
    }
    arrays[Array::kO] = random.array(DType::kBFloat16, o);
    arrays[Array::kLse] = random.array(DType::kFloat32, sums);
    arrays[Array::kStats] = random.array(DType::kFloat32, pairs);
    Tensor& pages = arrays[Array::kPageTable] = random.indices(DType::kInt32, table);
    pages.rank = 2;
    pages.shape[0] = num_requests();
    pages.shape[1] = pages.strides[0] = width;
    pages.strides[1] = 1;
    arrays[Array::kKvLengths] = random.indices(DType::kInt32, lengths);
    arrays[Array::kKvShared] = random.indices(DType::kInt64, shared);
    if (is_packed) {
      std::vector<i64> offsets{0};
      for (const i64 count : counts) offsets.push_back(offsets.back() + count);
      arrays[Array::kCuQ] = random.indices(DType::kInt32, offsets);
    } else {
      arrays[Array::kQLengths] = random.indices(DType::kInt32, counts);
    }
    if (has_sinks) {
      arrays[Array::kSinks] = random.contiguous(DType::kFloat32, {kCascadeHeads});
      random.fill_normal(arrays[Array::kSinks], 8);  // shares that no rounding hides
    }
    request.options.scale = kNan;
    request.options.causal = true;
    return validate(request, Pointers::kChecked);
  }

  // Whose keys the kernels may call shared: as many as every request with rows and keys says.
  i64 shared_by_all() const {
    i64 fewest = -1;
    for (size_t b = 0; b < lengths.size(); ++b) {
      if (counts[b] == 0 || lengths[b] == 0) continue;
      const i64 said = shared[shared.size() == 1 ? 0 : b];
      const i64 own = max<i64>(0, min<i64>(said, lengths[b] - counts[b]));
      fewest = fewest < 0 ? own : min(fewest, own);
    }
    return max<i64>(fewest, 0);
  }
  i64 first_with_keys() const {
    size_t b = 0;
    while (b + 1 < lengths.size() && (counts[b] == 0 || lengths[b] == 0)) ++b;
    return static_cast<i64>(b);
  }
};

// A call as a cascade, with the memory that its kernels share.
class CascadeRun {
 public:
  CascadeRun(const SharedCache& cache, const Problem& problem, i32 num_parts, u32 seed)
      : cache_(cache), problem_(problem), seed_(seed) {
    params_.attention = gpu::attention_params(problem);
    params_.kv_shared = gpu::view_of(problem.arrays[Array::kKvShared]);
    params_.num_parts = num_parts;
    params_.chunk_pages = 2;
    kv_start_.resize(cache.lengths.size(), -1);
    page_begin_.resize(static_cast<size_t>(num_parts) + 1, -1);
    kv_lengths_.resize(static_cast<size_t>(num_parts), -1);
    const auto size = [&](i64 copies, i64 dim) {
      return static_cast<size_t>(copies * kCascadeHeads * params_.rows() * dim);
    };
    q_.resize(size(num_parts, kCascadeDim));
    shared_o_.resize(size(num_parts, kCascadeDimV), kNever);
    shared_stats_.resize(size(num_parts, 2), kNever);
    own_o_.resize(size(1, kCascadeDimV), kNever);
    own_stats_.resize(size(1, 2), kNever);
    params_.kv_start = kv_start_.data();
    params_.page_begin = page_begin_.data();
    params_.kv_lengths = kv_lengths_.data();
    params_.q = q_.data();
    params_.shared_o = shared_o_.data();
    params_.shared_stats = shared_stats_.data();
    params_.own_o = own_o_.data();
    params_.own_stats = own_stats_.data();
  }

  void prepare() {
    constexpr CascadeConfig kConfig{.num_threads = 64};
    emulator::launch({.blocks = 4,
                      .threads = kConfig.num_threads,
                      .shared_bytes = kConfig.num_threads / 32 * 8,
                      .seed = seed_,
                      .together = true,
                      .kernel = "prepare_cascade"},
                     [&] { prepare_cascade<kConfig>(params_); });
  }

  void combine() {
    constexpr CascadeConfig kConfig{.num_threads = 128};
    emulator::launch({.blocks = ceil_div(params_.rows() * kCascadeHeads, 4),
                      .threads = kConfig.num_threads,
                      .shared_bytes = 0,
                      .seed = seed_,
                      .kernel = "combine_cascade"},
                     [&] { combine_cascade<kConfig>(params_); });
  }

  // Parts follow one another, begin where a chunk of pages does, and are all of the shared keys.
  void expect_prepared() const {
    const i64 keys = cache_.shared_by_all();
    const i64 entries = cache_.first_with_keys() * cache_.width;
    i64 met = 0;
    for (size_t part = 0; part < kv_lengths_.size(); ++part) {
      EXPECT_GE(kv_lengths_[part], 0);
      if (kv_lengths_[part] == 0) continue;
      EXPECT_EQ(met % (kCascadePageRows * params_.chunk_pages), 0) << part;
      EXPECT_EQ(page_begin_[part], entries + met / kCascadePageRows) << part;
      met += kv_lengths_[part];
      EXPECT_EQ(page_begin_[part + 1], entries + ceil_div(met, kCascadePageRows)) << part;
    }
    EXPECT_EQ(met, keys);
    EXPECT_LE(*std::max_element(kv_lengths_.begin(), kv_lengths_.end()),
              keys / params_.num_parts + 2 * kCascadePageRows * params_.chunk_pages);
    for (size_t b = 0; b < kv_start_.size(); ++b) {
      EXPECT_EQ(kv_start_[b], min(keys, cache_.lengths[b])) << b;
    }
    for (i64 part = 0; part < params_.num_parts; ++part) {
      each_row([&](i64 head, i64 batch, i64 row, i64 number) {
        const i64 at = (part * kCascadeHeads + head) * params_.rows() + number;
        for (i64 d = 0; d < kCascadeDim; ++d) {
          const u16* const from =
              reinterpret_cast<const u16*>(problem_.arrays[Array::kQ].address(batch, head, row, d));
          ASSERT_EQ(q_[static_cast<size_t>(at * kCascadeDim + d)], *from) << part << head << row;
        }
      });
    }
  }

  // What the two passes leave: over the parts for every row, over the own keys for those there are.
  void compute_passes() {
    const i64 entries = problem_.arrays[Array::kPageTable].shape[3];
    each_row([&](i64 head, i64 batch, i64 row, i64 number) {
      for (i32 part = 0; part < params_.num_parts; ++part) {
        std::vector<i64> keys;
        const size_t own = static_cast<size_t>(part);
        for (i64 n = 0; n < kv_lengths_[own]; ++n) {
          keys.push_back(row_of_pool(page_begin_[own], n));
        }
        store(pass_over(head, batch, row, keys), shared_o_, shared_stats_,
              (part * kCascadeHeads + head) * params_.rows() + number);
      }
      const auto [request, i] = request_of(batch, row);
      if (request < 0) return;
      const size_t b = static_cast<size_t>(request);
      std::vector<i64> keys;
      for (i64 j = kv_start_[b]; j <= cache_.lengths[b] - cache_.counts[b] + i; ++j) {
        keys.push_back(row_of_pool(request * entries, j));
      }
      store(pass_over(head, batch, row, keys), own_o_, own_stats_, head * params_.rows() + number);
    });
  }

  // The request that owns a row and its number there; -1: none, or one without keys.
  std::pair<i64, i64> request_of(i64 batch, i64 row) const {
    i64 request = batch, i = row;
    if (cache_.is_packed) {
      for (request = 0; request < cache_.num_requests(); ++request) {
        const i64 count = cache_.counts[static_cast<size_t>(request)];
        if (i < count) break;
        i -= count;
      }
      if (request == cache_.num_requests()) return {-1, 0};
    }
    const size_t b = static_cast<size_t>(request);
    return {i < cache_.counts[b] && cache_.lengths[b] > 0 ? request : -1, i};
  }

 private:
  template <class Visit>
  void each_row(const Visit& visit) const {
    for (i64 head = 0; head < kCascadeHeads; ++head) {
      for (i64 number = 0; number < params_.rows(); ++number) {
        const i64 rows = params_.attention.q_rows;
        visit(head, number / rows, number % rows, number);
      }
    }
  }

  // Page * rows + row of a key behind an entry of the table; -1: it has none.
  i64 row_of_pool(i64 first_entry, i64 j) const {
    const size_t entry = static_cast<size_t>(first_entry + j / kCascadePageRows);
    const i64 page = cache_.table[entry];
    if (page < 0 || page >= cache_.num_pages()) return -1;
    return page * kCascadePageRows + j % kCascadePageRows;
  }

  double number_of(Array array, i64 a, i64 b, i64 c, i64 d) const {
    return load_real(problem_.arrays[array].address(a, b, c, d), DType::kBFloat16);
  }

  PassOfRow pass_over(i64 head, i64 batch, i64 row, const std::vector<i64>& keys) const {
    const i64 kv_head = head / (kCascadeHeads / kCascadeKvHeads);
    PassOfRow pass;
    std::vector<double> scores;
    for (const i64 key : keys) {
      if (key < 0) return {};
      double score = 0;
      for (i64 d = 0; d < kCascadeDim; ++d) {
        score += number_of(Array::kQ, batch, head, row, d) *
                 number_of(Array::kK, key / kCascadePageRows, kv_head, key % kCascadePageRows, d);
      }
      scores.push_back(score / std::sqrt(static_cast<double>(kCascadeDim)));
      pass.row_max = max(pass.row_max, scores.back());
    }
    if (keys.empty()) return pass;
    for (const double score : scores) pass.row_sum += std::exp(score - pass.row_max);
    for (i64 d = 0; d < kCascadeDimV; ++d) {
      double sum = 0;
      for (size_t n = 0; n < keys.size(); ++n) {
        sum +=
            std::exp(scores[n] - pass.row_max) * number_of(Array::kV, keys[n] / kCascadePageRows,
                                                           kv_head, keys[n] % kCascadePageRows, d);
      }
      pass.o[static_cast<size_t>(d)] = sum / pass.row_sum;
    }
    return pass;
  }

  static void store(const PassOfRow& pass, std::vector<float>& o, std::vector<float>& stats,
                    i64 at) {
    const size_t row = static_cast<size_t>(at);
    stats[2 * row] = static_cast<float>(pass.row_max);
    stats[2 * row + 1] = static_cast<float>(pass.row_sum);
    for (size_t d = 0; d < pass.o.size(); ++d) {
      o[row * pass.o.size() + d] = static_cast<float>(pass.o[d]);
    }
  }

  const SharedCache& cache_;
  const Problem& problem_;
  u32 seed_;
  CascadeParams params_{};
  std::vector<i32> kv_start_, page_begin_, kv_lengths_;
  std::vector<u16> q_;
  std::vector<float> shared_o_, shared_stats_, own_o_, own_stats_;
};

// The call again, with fresh outputs, as a cascade. cache: what its numbers are.
Request run_cascade(RandomProblem& random, const SharedCache& cache, const Request& call,
                    i32 num_parts, u32 seed) {
  const Request actual = with_fresh_outputs(random, call);
  const Problem problem = validate(actual, Pointers::kChecked);
  CascadeRun run(cache, problem, num_parts, seed);
  run.prepare();
  run.expect_prepared();
  run.compute_passes();
  run.combine();
  return actual;
}

const std::vector<Array> kCascadeResults{Array::kO, Array::kLse, Array::kStats};

void expect_cascade_agrees(SharedCache cache, i32 num_parts, u32 seed) {
  cpu::scalar_forward(cache.validated());
  const Request actual = run_cascade(cache.random, cache, cache.request, num_parts, seed);
  expect_close(actual, cache.request, kCascadeResults, seed);
}

TEST(Cascade, AgreesWithTheOracle) {
  expect_cascade_agrees({1, {1, 1, 1}, {40, 33, 48}, {32, 32, 32}, false}, 1, 1);
  // Of two rows, of which the first request has one; the third says less than the others.
  expect_cascade_agrees({2, {1, 2, 2}, {40, 45, 42}, {30, 40, 22}, false}, 3, 2);
  SharedCache with_sinks{3, {2, 2, 2}, {47, 30, 31}, {26}, false};
  with_sinks.has_sinks = true;
  expect_cascade_agrees(with_sinks, 2, 3);
}

// Nothing of the first, which has no keys; the second has no rows; the last ends before the prompt.
TEST(Cascade, RequestsWithoutKeysOrRowsSayNothing) {
  expect_cascade_agrees({4, {2, 0, 2, 1}, {0, 7, 44, 19}, {40, 3, 40, 40}, false}, 3, 4);
  expect_cascade_agrees({5, {2, 2}, {0, 0}, {40, 40}, false}, 2, 5);
  expect_cascade_agrees({6, {1, 1}, {20, 24}, {0, 8}, false}, 2, 6);  // no keys are shared
}

TEST(Cascade, MoreRequestsThanAWarpAndMorePartsThanAreReadAtOnce) {
  std::vector<i64> counts, lengths;
  for (i64 b = 0; b < 70; ++b) {
    counts.push_back(b % 7 == 3 ? 0 : 1 + b % 2);
    lengths.push_back(b % 11 == 5 ? 0 : 41 + b % 7);
  }
  expect_cascade_agrees({7, counts, lengths, {38}, true}, 5, 7);
  expect_cascade_agrees({8, counts, lengths, {12}, true}, 7, 8);  // parts without keys
}

// A length beyond the table: that request is empty, and the others are what they are.
TEST(Cascade, ALengthOutOfRangeEmptiesItsRequest) {
  SharedCache cache{9, {1, 1, 1}, {40, 0, 48}, {32}, false};
  cpu::scalar_forward(cache.validated());
  Request damaged = cache.request;
  damaged.arrays[Array::kKvLengths] = cache.random.indices(DType::kInt32, {40, 49, 48});
  const Request actual = run_cascade(cache.random, cache, damaged, 2, 9);
  expect_close(actual, cache.request, kCascadeResults, 9);
}

bool is_empty_row(const Request& result, i64 batch, i64 row) {
  for (i64 head = 0; head < kCascadeHeads; ++head) {
    const i64 at[kMaxRank] = {batch, head, row, 0};
    const Tensor& lse = result.arrays[Array::kLse];
    if (load_real(RandomProblem::address(lse, at), lse.dtype) != -HUGE_VAL) return false;
    for (i64 d = 0; d < kCascadeDimV; ++d) {
      const i64 element[kMaxRank] = {batch, head, row, d};
      const Tensor& o = result.arrays[Array::kO];
      if (load_real(RandomProblem::address(o, element), o.dtype) != 0) return false;
    }
  }
  return true;
}

// Rows that see a key without a page are empty: of one request, or of all.
TEST(Cascade, RowsThatSeeABadPageAreEmpty) {
  SharedCache whole{10, {3, 3}, {40, 42}, {33}, false};
  whole.validated();
  const Request expected = run_cascade(whole.random, whole, whole.request, 2, 10);
  const auto damaged = [&](std::initializer_list<size_t> entries) {
    SharedCache cache = whole;
    for (const size_t entry : entries) cache.table[entry] = cache.num_pages();
    cache.request.arrays[Array::kPageTable].data =
        whole.random.indices(DType::kInt32, cache.table).data;
    return run_cascade(whole.random, cache, cache.request, 2, 10);
  };
  // Keys 40 and 41 of the second request, of which its row 0 sees none.
  const Request own = damaged({static_cast<size_t>(whole.width) + 10});
  const Request common = damaged({2, static_cast<size_t>(whole.width) + 2});
  for (i64 batch = 0; batch < 2; ++batch) {
    for (i64 row = 0; row < 3; ++row) {
      EXPECT_FALSE(is_empty_row(expected, batch, row));
      EXPECT_EQ(is_empty_row(own, batch, row), batch == 1 && row > 0) << batch << row;
      EXPECT_TRUE(is_empty_row(common, batch, row)) << batch << row;
    }
  }
}

}  // namespace
}  // namespace fulmen::test
