// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// forward_sm90 over caches, on the host, against the scalar oracle: pages of several sizes in pools
// of all orders, tables of both forms, left padding, packed queries, several heads in a tile. What
// no request may read is NaN, or an id of no page.
#include <sys/mman.h>

#include <numeric>
#include <random>

#include "launch_forward.h"

namespace fulmen::test {
namespace {

constexpr ForwardSm90Config kCausalPages{
    .d_qk = 64,
    .d_v = 64,
    .kv_rows = 64,
    .stage_output = false,
    .caches = true,
    .paged = true,
    .score = {.mask_kind = MaskKind::kRight, .varlen = true, .stats = true}};
// The same where warps copy single rows.
constexpr ForwardSm90Config by_rows(ForwardSm90Config config) {
  config.gathers = true;
  return config;
}
constexpr ForwardSm90Config kWindowedPages{.dtype = DType::kFloat16,
                                           .d_qk = 96,
                                           .d_v = 80,
                                           .warpgroups = 3,
                                           .kv_rows = 80,
                                           .shift_rule = ShiftRule::kWhenSumGrew,
                                           .stage_output = false,
                                           .caches = true,
                                           .paged = true,
                                           .score = {.mask_kind = MaskKind::kBoth,
                                                     .alibi = true,
                                                     .sinks = true,
                                                     .varlen = true,
                                                     .fp32_out = true}};
constexpr ForwardSm90Config kPagesOfFourHeads{.d_qk = 128,
                                              .d_v = 128,
                                              .warpgroups = 1,
                                              .kv_rows = 64,
                                              .stages = 3,
                                              .heads_per_tile = 4,
                                              .stage_output = false,
                                              .cache_hints = true,
                                              .caches = true,
                                              .paged = true,
                                              .score = {.varlen = true}};
constexpr ForwardSm90Config kWidePages{.d_qk = 272,
                                       .d_v = 384,
                                       .kv_rows = 64,
                                       .stages = 1,
                                       .split_dims = true,
                                       .stage_output = false,
                                       .caches = true,
                                       .paged = true,
                                       .score = {.mask_kind = MaskKind::kRight, .varlen = true}};
constexpr ForwardSm90Config kLeftPadding{
    .d_qk = 64,
    .d_v = 64,
    .kv_rows = 64,
    .stage_output = false,
    .caches = true,
    .score = {.mask_kind = MaskKind::kBoth, .varlen = true, .stats = true}};

// A request over caches that a config computes, drawn.
class CacheRequest {
 public:
  CacheRequest(RandomProblem& random, const ForwardSm90Config& config, unsigned seed)
      : random_(random), config_(config), shuffle_(seed) {
    batch_ = random.number(1, 3);
    heads_kv_ = random.number(1, 2);
    heads_q_ = heads_kv_ * config.heads_per_tile * random.number(1, 2);
    packed_ = config.paged && random.chance(0.5);
    longest_ = random.one_of<i64>({random.number(1, 9), random.number(60, 70), 200});
    const i64 most_rows = config.heads_per_tile > 1 ? 16 : 150;
    for (i64 b = 0; b < batch_; ++b) {
      q_lengths_.push_back(random.chance(0.2) ? 0 : random.number(1, most_rows));
      lengths_.push_back(random.chance(0.2) ? 0 : random.number(1, longest_));
    }
    draw_queries();
    config.paged ? draw_pages() : draw_rows();
    if (!config.paged || (config.gathers && random.chance(0.3))) {
      std::vector<i64> starts;
      for (const i64 length : lengths_) starts.push_back(random.number(0, length));
      request.arrays[Array::kKvStart] = random.indices(DType::kInt64, starts);
    }
    request.arrays[Array::kKvLengths] = random.indices(DType::kInt32, lengths_);
    draw_options();
  }

  Request request;

 private:
  // On a multiple of 16 bytes.
  void* aligned_memory(i64 elements, DType dtype) {
    char* data = random_.memory(static_cast<size_t>(elements * size_bytes(dtype)) + 16);
    return data + (16 - reinterpret_cast<u64>(data) % 16) % 16;
  }

  Tensor of_queries(DType dtype, i64 dim) {
    const i64 rows = request_rows_, row = ceil_div(dim, 8) * 8;
    Tensor tensor{nullptr,
                  dtype,
                  4,
                  {batch_, heads_q_, rows, dim},
                  {rows * heads_q_ * row, row, heads_q_ * row, 1}};
    tensor.data = aligned_memory(batch_ * rows * heads_q_ * row, dtype);
    if (!packed_) return tensor;
    tensor.rank = 3;
    std::copy(tensor.shape + 1, tensor.shape + 4, tensor.shape);
    std::copy(tensor.strides + 1, tensor.strides + 4, tensor.strides);
    return tensor;
  }

  void draw_queries() {
    Arrays& arrays = request.arrays;
    request_rows_ = *std::max_element(q_lengths_.begin(), q_lengths_.end()) + 1;
    if (packed_) {
      std::vector<i64> offsets{0};
      for (const i64 length : q_lengths_) offsets.push_back(offsets.back() + length);
      request.options.max_q = request_rows_;
      request_rows_ = offsets.back() + random_.number(1, 3);
      arrays[Array::kCuQ] = random_.indices(DType::kInt32, offsets);
    } else {
      arrays[Array::kQLengths] = random_.indices(DType::kInt64, q_lengths_);
    }
    dim_qk_ = random_.number(1, config_.d_qk);
    if (config_.gathers) dim_qk_ = 8 * ceil_div(dim_qk_, 8);
    dim_v_ = 8 * random_.number(1, config_.d_v / 8);
    arrays[Array::kQ] = of_queries(config_.dtype, dim_qk_);
    random_.fill_normal(arrays[Array::kQ]);
    const DType o = config_.score.fp32_out ? DType::kFloat32 : config_.dtype;
    arrays[Array::kO] = of_queries(o, dim_v_);
    arrays[Array::kLse] = of_queries(DType::kFloat32, 1);
    --arrays[Array::kLse].rank;
    if (config_.score.stats) arrays[Array::kStats] = of_queries(DType::kFloat32, 2);
  }

  // Key `row` of page or entry `batch`, in k and v.
  void fill_key(i64 batch, i64 row) {
    for (const Array array : {Array::kK, Array::kV}) {
      Tensor one = request.arrays[array];
      const i64 at[kMaxRank] = {batch, 0, row, 0};
      one.data = RandomProblem::address(one, at);
      one.shape[0] = one.shape[2] = 1;
      random_.fill_normal(one);
    }
  }

  // K and V with a row of `rows` rows each, heads or rows outermost, in one allocation or two.
  void draw_pools(i64 pages, i64 rows) {
    const i64 row = 8 * ceil_div(max(dim_qk_, dim_v_), 8), both = random_.number(1, 2);
    const bool heads_first = random_.chance(0.5);
    const i64 page = both * heads_kv_ * rows * row;
    char* const data = static_cast<char*>(aligned_memory(2 * pages * page, config_.dtype));
    for (const auto& [array, dim] : {std::pair{Array::kK, dim_qk_}, std::pair{Array::kV, dim_v_}}) {
      Tensor& tensor = request.arrays[array] = {
          data,
          config_.dtype,
          4,
          {pages, heads_kv_, rows, dim},
          {page, heads_first ? rows * row : row, heads_first ? row : heads_kv_ * row, 1}};
      const i64 elements = both == 2 ? page / 2 : pages * page;  // of all V behind K's
      if (array == Array::kV) tensor.data = data + elements * size_bytes(config_.dtype);
    }
  }

  void draw_rows() {
    draw_pools(batch_, longest_);
    for (i64 b = 0; b < batch_; ++b) {
      for (i64 j = 0; j < lengths_[static_cast<size_t>(b)]; ++j) fill_key(b, j);
    }
  }

  void draw_pages() {
    // A box has at least one row in 32 of a block's.
    const i64 rows = config_.gathers ? random_.one_of<i64>({1, 3, 8, 48, 256})
                                     : random_.one_of<i64>({8, 16, 48, 64, 256});
    const i64 width = ceil_div(longest_, rows) + random_.number(0, 2);
    const i64 num_pages = batch_ * width + 2;
    draw_pools(num_pages, rows);
    std::vector<i64> free(static_cast<size_t>(num_pages)), table, ragged, offsets{0};
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), shuffle_);
    for (i64 b = 0; b < batch_; ++b) {
      const i64 length = lengths_[static_cast<size_t>(b)];
      for (i64 page = 0; page < width; ++page) {
        i64 id = random_.one_of<i64>({-1, num_pages, 1 << 30, -(1 << 30)});  // never followed
        if (page * rows < length) {
          const bool is_shared = b > 0 && page == 0 && lengths_[0] > 0 && random_.chance(0.5);
          if (is_shared) {
            id = table[0];
          } else {
            id = free.back();
            free.pop_back();
          }
          for (i64 row = 0; row < min(rows, length - page * rows); ++row) fill_key(id, row);
          ragged.push_back(id);
        }
        table.push_back(id);
      }
      offsets.push_back(static_cast<i64>(ragged.size()));
    }
    Arrays& arrays = request.arrays;
    const DType type = random_.one_of({DType::kInt32, DType::kInt64});
    if (random_.chance(0.4)) {
      ragged.push_back(-7);
      arrays[Array::kPageTable] = random_.indices(type, ragged);
      arrays[Array::kPageIndptr] = random_.indices(DType::kInt32, offsets);
      request.options.max_kv = longest_;
      return;
    }
    Tensor& page_table = arrays[Array::kPageTable] = random_.indices(type, table);
    page_table.rank = 2;
    page_table.shape[0] = batch_;
    page_table.shape[1] = page_table.strides[0] = width;
    page_table.strides[1] = 1;
  }

  void draw_options() {
    Options& options = request.options;
    options.scale = kNan;
    options.alignment = random_.one_of({Alignment::kBottomRight, Alignment::kTopLeft});
    options.causal = config_.score.mask_kind != MaskKind::kNone;
    if (config_.score.mask_kind == MaskKind::kBoth) {
      options.window_left = random_.number(0, 100);
      if (random_.chance(0.3)) options.prefix = random_.number(1, 50);
    }
    if (config_.score.alibi) {
      request.arrays[Array::kAlibiSlopes] = random_.array(DType::kFloat32, {batch_, heads_q_});
      random_.fill_normal(request.arrays[Array::kAlibiSlopes], 0.1);
    }
    if (config_.score.sinks) {
      request.arrays[Array::kSinks] = random_.array(DType::kFloat32, {heads_q_});
      random_.fill_normal(request.arrays[Array::kSinks], 2);
    }
  }

  RandomProblem& random_;
  ForwardSm90Config config_;
  std::mt19937 shuffle_;
  i64 batch_, heads_q_, heads_kv_, longest_, request_rows_ = 0, dim_qk_ = 0, dim_v_ = 0;
  bool packed_;
  std::vector<i64> q_lengths_, lengths_;
};

template <ForwardSm90Config kConfig>
void expect_agreement(unsigned first, unsigned count) {
  for (unsigned seed = first; seed < first + num_drawn(count); ++seed) {
    RandomProblem random(seed);
    expect_agreement<kConfig>(CacheRequest(random, kConfig, seed).request, random, seed);
  }
}

TEST(Sm90OverCaches, CausalPages) { expect_agreement<kCausalPages>(1, 40); }
TEST(Sm90OverCaches, WindowsSinksAlibi) { expect_agreement<kWindowedPages>(101, 20); }
TEST(Sm90OverCaches, HeadsShareTiles) { expect_agreement<kPagesOfFourHeads>(201, 20); }
TEST(Sm90OverCaches, WideHeads) { expect_agreement<kWidePages>(301, 5); }
TEST(Sm90OverCaches, CausalRows) { expect_agreement<by_rows(kCausalPages)>(501, 40); }
TEST(Sm90OverCaches, WindowsSinksAlibiByRows) {
  expect_agreement<by_rows(kWindowedPages)>(601, 20);
}
TEST(Sm90OverCaches, HeadsShareTilesByRows) {
  expect_agreement<by_rows(kPagesOfFourHeads)>(701, 20);
}
TEST(Sm90OverCaches, WideHeadsByRows) { expect_agreement<by_rows(kWidePages)>(801, 5); }
TEST(Sm90OverCaches, LeftPadding) { expect_agreement<kLeftPadding>(401, 20); }

// Two requests of 40 query rows and as many keys as `lengths` say, in pages of 16 rows.
struct TwoRequests {
  RandomProblem random{7};
  Request request;

  explicit TwoRequests(const std::vector<i64>& lengths) {
    Arrays& arrays = request.arrays;
    for (const Array array : {Array::kQ, Array::kO}) {
      arrays[array] = random.contiguous(DType::kBFloat16, {2, 4, 40, 64});
    }
    arrays[Array::kLse] = random.contiguous(DType::kFloat32, {2, 4, 40});
    arrays[Array::kStats] = random.contiguous(DType::kFloat32, {2, 4, 40, 2});
    for (const Array array : {Array::kK, Array::kV}) {
      arrays[array] = random.contiguous(DType::kBFloat16, {25, 2, 16, 64});
    }
    for (const Array array : {Array::kQ, Array::kK, Array::kV}) random.fill_normal(arrays[array]);
    std::vector<i64> table(24);
    std::iota(table.begin(), table.end(), 1);
    std::reverse(table.begin(), table.end());
    Tensor& page_table = arrays[Array::kPageTable] = random.indices(DType::kInt32, table);
    page_table.rank = 2;
    page_table.shape[0] = 2;
    page_table.shape[1] = page_table.strides[0] = 12;
    page_table.strides[1] = 1;
    arrays[Array::kKvLengths] = random.indices(DType::kInt32, lengths);
    request.options.scale = kNan;
    request.options.causal = true;
  }

  template <ForwardSm90Config kConfig>
  u32 faults_of_run() {
    FaultBytes faults{};
    run_forward<kConfig>(validate(request, Pointers::kChecked), 1, false, &faults);
    return faults.bits();
  }
  double lse(i64 index, i64 row) const {
    const i64 at[kMaxRank] = {index, 3, row, 0};
    return load_real(RandomProblem::address(request.arrays[Array::kLse], at), DType::kFloat32);
  }
};

TEST(Sm90OverCaches, LengthsOfEveryResidue) {
  for (i64 length = 60; length < 60 + (tests_everything() ? 72 : 20); ++length) {
    TwoRequests two({length, 192 - length});
    const unsigned seed = static_cast<unsigned>(length);
    expect_agreement<kCausalPages>(two.request, two.random, seed);
    expect_agreement<by_rows(kCausalPages)>(two.request, two.random, seed);
  }
}

// Of 50 keys rows 22 and on see those of the third page.
template <ForwardSm90Config kConfig>
void expect_empty_rows_of_bad_pages() {
  for (const i64 bad : {i64{-1}, i64{25}, i64{1} << 30}) {
    TwoRequests two({50, 192});
    i32* const table = static_cast<i32*>(two.request.arrays[Array::kPageTable].data);
    table[2] = static_cast<i32>(bad);
    table[4] = -7;  // of no keys
    EXPECT_EQ(two.faults_of_run<kConfig>(), u32{kFaultPages});
    const double nothing = -std::numeric_limits<double>::infinity();
    for (i64 row = 0; row < 40; ++row) {
      EXPECT_EQ(two.lse(0, row) == nothing, row >= 22) << row;
      EXPECT_GT(two.lse(1, row), -100);
      const i64 at[kMaxRank] = {0, 3, row, 5};
      const double o =
          load_real(RandomProblem::address(two.request.arrays[Array::kO], at), DType::kBFloat16);
      EXPECT_EQ(o == 0, row >= 22) << row;
    }
  }
}

TEST(Sm90OverCaches, RowsThatSeeABadPageAreEmpty) {
  expect_empty_rows_of_bad_pages<kCausalPages>();
  expect_empty_rows_of_bad_pages<by_rows(kCausalPages)>();
}

TEST(Sm90OverCaches, BadLengthsAndStartsAreRecorded) {
  TwoRequests good({50, 192});
  EXPECT_EQ(good.faults_of_run<kCausalPages>(), 0u);
  TwoRequests longer({50, 193});
  EXPECT_EQ(longer.faults_of_run<kCausalPages>(), u32{kFaultKvLengths});
  EXPECT_EQ(longer.lse(1, 0), -std::numeric_limits<double>::infinity());
  TwoRequests late({50, 192});
  late.request.arrays[Array::kKvStart] = late.random.indices(DType::kInt32, {51, 3});
  EXPECT_EQ(late.faults_of_run<by_rows(kCausalPages)>(), u32{kFaultKvLengths});
  EXPECT_EQ(late.lse(0, 0), -std::numeric_limits<double>::infinity());
}

// Pages lie 6 GiB apart: their numbers times strides are beyond 32 bits, in elements and in bytes.
TEST(Sm90OverCaches, PagesMayLieFarApart) {
  constexpr i64 kPageBytes = i64{6} << 30;
  constexpr size_t kBytes = size_t{25} * kPageBytes;
  TwoRequests two({50, 192});
  const Request near = two.request;
  void* mapped[2] = {};
  for (int which = 0; which < 2; ++which) {
    const Array array = which == 0 ? Array::kK : Array::kV;
    mapped[which] = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ASSERT_NE(mapped[which], MAP_FAILED);
    Tensor& tensor = two.request.arrays[array];
    tensor.data = mapped[which];
    tensor.strides[0] = kPageBytes / 2;
    for (i64 page = 0; page < 25; ++page) {
      const i64 at[kMaxRank] = {page, 0, 0, 0};
      std::memcpy(RandomProblem::address(tensor, at),
                  RandomProblem::address(near.arrays[array], at), 2 * 16 * 64 * 2);
    }
  }
  expect_agreement<kCausalPages>(two.request, two.random, 1);
  expect_agreement<by_rows(kCausalPages)>(two.request, two.random, 1);
  for (void* each : mapped) munmap(each, kBytes);
}

}  // namespace
}  // namespace fulmen::test
