// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen_append_kv and fulmen_rotary through the C ABI: by hand, and what they refuse.
#include <gmock/gmock.h>

#include <algorithm>

#include "api/refusal.h"

namespace fulmen::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

fulmen_tensor tensor(void* data, fulmen_dtype dtype, const Shape& shape) {
  fulmen_tensor made;
  EXPECT_EQ(
      fulmen_tensor_init(&made, data, dtype, static_cast<int32_t>(shape.size()), shape.data()),
      FULMEN_OK);
  return made;
}

// Two requests with one new row each, one head, 4 elements; 3 pages of 2 rows.
struct Call {
  float k_cache[3 * 2 * 4];
  float v_cache[3 * 2 * 4];
  float k[2 * 4] = {1, 2, 3, 4, 5, 6, 7, 8};
  float v[2 * 4] = {11, 12, 13, 14, 15, 16, 17, 18};
  float cos[6 * 2], sin[6 * 2];
  float q[2 * 4] = {1, 0, 0, 1, 1, 2, 3, 4};
  float q_out[2 * 4];
  int64_t slots[2] = {3, -1};
  int32_t table[2 * 2] = {2, 0, 1, 99};
  int32_t lengths[2] = {1, 0};
  int64_t positions[2] = {0, 5};
  int64_t cu_new[3] = {0, 1, 2};
  int64_t indptr[3] = {0, 2, 3};
  fulmen_append append;

  Call() {
    for (float* array : {k_cache, v_cache}) std::fill(array, array + 24, kEmpty);
    std::fill(q_out, q_out + 8, kEmpty);
    for (int i = 0; i < 12; ++i) {  // position t: a quarter turn, t times
      constexpr float kSine[] = {0, 1, 0, -1, 0};
      sin[i] = kSine[i / 2 % 4];
      cos[i] = kSine[i / 2 % 4 + 1];
    }
    fulmen_append_init(&append);
    append.k_cache = tensor(k_cache, FULMEN_FLOAT32, {3, 1, 2, 4});
    append.v_cache = tensor(v_cache, FULMEN_FLOAT32, {3, 1, 2, 4});
    append.k = tensor(k, FULMEN_FLOAT32, {2, 1, 1, 4});
    append.v = tensor(v, FULMEN_FLOAT32, {2, 1, 1, 4});
  }

  void add_slots() { append.slots = tensor(slots, FULMEN_INT64, {2, 1}); }
  void add_table() {
    append.page_table = tensor(table, FULMEN_INT32, {2, 2});
    append.kv_lengths = tensor(lengths, FULMEN_INT32, {2});
  }
  void add_rotation() {
    append.cos = tensor(cos, FULMEN_FLOAT32, {6, 2});
    append.sin = tensor(sin, FULMEN_FLOAT32, {6, 2});
    append.positions = tensor(positions, FULMEN_INT64, {2, 1});
    append.q = tensor(q, FULMEN_FLOAT32, {2, 1, 1, 4});
    append.q_out = tensor(q_out, FULMEN_FLOAT32, {2, 1, 1, 4});
  }
  fulmen_status run() { return fulmen_append_kv(&append, nullptr); }

  bool is_untouched() const {
    const auto is_empty = [](float x) { return x == kEmpty; };
    return std::all_of(k_cache, k_cache + 24, is_empty) &&
           std::all_of(v_cache, v_cache + 24, is_empty) && std::all_of(q_out, q_out + 8, is_empty);
  }
  std::vector<float> row(const float* cache, int slot) const {
    return {cache + 4 * slot, cache + 4 * slot + 4};
  }

  static constexpr float kEmpty = -77;
};

// One memory whose pages are of K and of V in turn, as a server may hold them: v is k, a page on.
TEST(AppendKv, PoolsCountedFromDifferentPagesAreTaken) {
  Call c;
  c.append.k_cache.shape[0] = c.append.v_cache.shape[0] = 2;
  c.append.v_cache.data = c.k_cache + 2 * 4;
  c.slots[0] = 1;
  c.add_slots();
  ASSERT_EQ(c.run(), FULMEN_OK) << fulmen_last_error();
  EXPECT_THAT(c.row(c.k_cache, 1), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(c.row(c.k_cache, 3), ElementsAre(11, 12, 13, 14));
}

TEST(AppendKv, ToSlots) {
  Call call;
  call.add_slots();
  ASSERT_EQ(call.run(), FULMEN_OK) << fulmen_last_error();
  EXPECT_THAT(call.row(call.k_cache, 3), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(call.row(call.v_cache, 3), ElementsAre(11, 12, 13, 14));
  for (const int slot : {0, 1, 2, 4, 5}) {  // also the last, which -1 is not
    EXPECT_THAT(call.row(call.k_cache, slot), testing::Each(Call::kEmpty)) << slot;
  }
}

TEST(AppendKv, BehindTheKeysPresent) {
  Call call;
  call.add_table();
  ASSERT_EQ(call.run(), FULMEN_OK) << fulmen_last_error();
  EXPECT_THAT(call.row(call.k_cache, 2 * 2 + 1), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(call.row(call.v_cache, 1 * 2 + 0), ElementsAre(15, 16, 17, 18));
}

TEST(AppendKv, RotatesByPairsOfHalvesOrNeighbours) {
  Call call;
  call.add_slots();
  call.slots[1] = 0;
  call.add_rotation();
  ASSERT_EQ(call.run(), FULMEN_OK) << fulmen_last_error();
  EXPECT_THAT(call.row(call.k_cache, 3), ElementsAre(1, 2, 3, 4));    // position 0
  EXPECT_THAT(call.row(call.k_cache, 0), ElementsAre(-7, -8, 5, 6));  // a quarter turn
  EXPECT_THAT(call.row(call.v_cache, 0), ElementsAre(15, 16, 17, 18));
  EXPECT_THAT(call.row(call.q_out, 1), ElementsAre(-3, -4, 1, 2));
  call.append.interleaved = 1;
  call.append.q_out = call.append.q;
  ASSERT_EQ(call.run(), FULMEN_OK) << fulmen_last_error();
  EXPECT_THAT(call.row(call.k_cache, 0), ElementsAre(-6, 5, -8, 7));
  EXPECT_THAT(call.row(call.q, 1), ElementsAre(-2, 1, -4, 3));
}

TEST(AppendKv, PositionsAreThoseOfTheCacheByDefault) {
  Call call;
  call.add_table();
  call.add_rotation();
  call.append.positions = fulmen_append{}.positions;
  call.append.positions.struct_size = sizeof(fulmen_tensor);
  ASSERT_EQ(call.run(), FULMEN_OK) << fulmen_last_error();
  EXPECT_THAT(call.row(call.k_cache, 5), ElementsAre(-3, -4, 1, 2));  // length 1
  EXPECT_THAT(call.row(call.k_cache, 2), ElementsAre(5, 6, 7, 8));    // length 0
}

TEST(AppendKv, PackedRowsAndTablesInOneRow) {
  Call call;
  call.add_table();
  call.append.k = tensor(call.k, FULMEN_FLOAT32, {1, 2, 4});
  call.append.v = tensor(call.v, FULMEN_FLOAT32, {1, 2, 4});
  call.cu_new[1] = 0;  // the first request has none, the second both
  call.append.cu_new = tensor(call.cu_new, FULMEN_INT64, {3});
  call.append.page_table = tensor(call.table, FULMEN_INT32, {3});
  call.append.page_indptr = tensor(call.indptr, FULMEN_INT64, {3});
  ASSERT_EQ(call.run(), FULMEN_OK) << fulmen_last_error();
  EXPECT_THAT(call.row(call.k_cache, 2), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(call.row(call.k_cache, 3), ElementsAre(5, 6, 7, 8));
}

TEST(AppendKv, ZeroSizesAreLegal) {
  Call call;
  call.add_slots();
  for (fulmen_tensor* array : {&call.append.k, &call.append.v, &call.append.slots}) {
    array->shape[array->rank == 2 ? 1 : 2] = 0;
    array->data = nullptr;
  }
  EXPECT_EQ(call.run(), FULMEN_OK) << fulmen_last_error();
  EXPECT_TRUE(call.is_untouched());
}

TEST(Rotary, RowsStandAtTheirNumberByDefault) {
  Call call;
  const fulmen_tensor x = tensor(call.k, FULMEN_FLOAT32, {1, 1, 2, 4});
  const fulmen_tensor out = tensor(call.q_out, FULMEN_FLOAT32, {1, 1, 2, 4});
  const fulmen_tensor cos = tensor(call.cos, FULMEN_FLOAT32, {6, 2});
  const fulmen_tensor sin = tensor(call.sin, FULMEN_FLOAT32, {6, 2});
  ASSERT_EQ(fulmen_rotary(&x, nullptr, &cos, &sin, 0, &out, nullptr), FULMEN_OK)
      << fulmen_last_error();
  EXPECT_THAT(call.row(call.q_out, 0), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(call.row(call.q_out, 1), ElementsAre(-7, -8, 5, 6));
  const fulmen_tensor positions = tensor(call.positions, FULMEN_INT64, {2});
  call.positions[0] = 2;
  ASSERT_EQ(fulmen_rotary(&x, &positions, &cos, &sin, 1, &x, nullptr), FULMEN_OK);
  EXPECT_THAT(call.row(call.k, 0), ElementsAre(-1, -2, -3, -4));
  EXPECT_THAT(call.row(call.k, 1), ElementsAre(-6, 5, -8, 7));
}

struct AppendRefusal {
  void (*spoil)(Call& call);
  fulmen_status status;
  std::vector<const char*> words;
};

void remove(fulmen_tensor& tensor) {
  tensor.data = nullptr;
  tensor.rank = 0;
}

const AppendRefusal kAppendRefusals[] = {
    {[](Call& c) { c.append.struct_size = 0; }, FULMEN_ERROR_ARGUMENT, {"append.struct_size is 0"}},
    {[](Call& c) { c.append.k.struct_size = 3; }, FULMEN_ERROR_ARGUMENT, {"k.struct_size is 3"}},
    {[](Call& c) { remove(c.append.k_cache); }, FULMEN_ERROR_ARGUMENT, {"k_cache is missing"}},
    {[](Call& c) { remove(c.append.v_cache); }, FULMEN_ERROR_ARGUMENT, {"v_cache is missing"}},
    {[](Call& c) { remove(c.append.k); }, FULMEN_ERROR_ARGUMENT, {"k is missing"}},
    {[](Call& c) { remove(c.append.v); }, FULMEN_ERROR_ARGUMENT, {"v is missing"}},
    {[](Call& c) { remove(c.append.slots); },
     FULMEN_ERROR_ARGUMENT,
     {"page_table is missing", "pass slots"}},
    {[](Call& c) { c.add_table(); }, FULMEN_ERROR_ARGUMENT, {"slots and page_table are both"}},
    {[](Call& c) {
       remove(c.append.slots);
       c.add_table();
       remove(c.append.kv_lengths);
     },
     FULMEN_ERROR_ARGUMENT,
     {"kv_lengths is missing"}},
    {[](Call& c) { c.append.page_indptr = tensor(c.indptr, FULMEN_INT64, {3}); },
     FULMEN_ERROR_ARGUMENT,
     {"page_indptr is given without page_table"}},
    {[](Call& c) { remove(c.append.sin); }, FULMEN_ERROR_ARGUMENT, {"cos is given without sin"}},
    {[](Call& c) { remove(c.append.cos); }, FULMEN_ERROR_ARGUMENT, {"sin is given without cos"}},
    {[](Call& c) {
       remove(c.append.cos);
       remove(c.append.sin);
     },
     FULMEN_ERROR_ARGUMENT,
     {"positions is given without cos and sin"}},
    {[](Call& c) {
       remove(c.append.cos);
       remove(c.append.sin);
       remove(c.append.positions);
     },
     FULMEN_ERROR_ARGUMENT,
     {"q is given without cos and sin"}},
    {[](Call& c) {
       c.append.kv_lengths = tensor(c.lengths, FULMEN_INT32, {2});
       for (fulmen_tensor* array :
            {&c.append.cos, &c.append.sin, &c.append.positions, &c.append.q, &c.append.q_out}) {
         remove(*array);
       }
     },
     FULMEN_ERROR_ARGUMENT,
     {"kv_lengths is given without"}},
    {[](Call& c) {
       for (fulmen_tensor* array :
            {&c.append.cos, &c.append.sin, &c.append.positions, &c.append.q, &c.append.q_out}) {
         remove(*array);
       }
       c.append.interleaved = 1;
     },
     FULMEN_ERROR_ARGUMENT,
     {"interleaved is 1 without cos"}},
    {[](Call& c) { c.append.interleaved = 2; },
     FULMEN_ERROR_ARGUMENT,
     {"interleaved is 2", "0 or 1"}},
    {[](Call& c) { remove(c.append.positions); }, FULMEN_ERROR_ARGUMENT, {"positions is missing"}},
    {[](Call& c) { remove(c.append.q_out); }, FULMEN_ERROR_ARGUMENT, {"q is given without q_out"}},
    {[](Call& c) { remove(c.append.q); }, FULMEN_ERROR_ARGUMENT, {"q_out is given without q"}},
    {[](Call& c) { c.append.k_cache.rank = 3; }, FULMEN_ERROR_SHAPE, {"k_cache has rank 3", "4"}},
    {[](Call& c) { c.append.k_cache.data = nullptr; },
     FULMEN_ERROR_ARGUMENT,
     {"k_cache has elements"}},
    {[](Call& c) { c.append.k.strides[0] = -1; }, FULMEN_ERROR_ARGUMENT, {"k has stride -1"}},
    {[](Call& c) { c.append.k.dtype = FULMEN_INT32; }, FULMEN_ERROR_DTYPE, {"k is int32"}},
    {[](Call& c) { c.append.v.dtype = FULMEN_FLOAT16; },
     FULMEN_ERROR_DTYPE,
     {"v is float16", "dtype of k, float32"}},
    {[](Call& c) { c.append.k_cache.dtype = FULMEN_FLOAT16; },
     FULMEN_ERROR_DTYPE,
     {"k_cache is float16 where k is float32", "the dtype of k", "float8_e4m3fn"}},
    {[](Call& c) { c.append.v_cache.dtype = FULMEN_INT8; },
     FULMEN_ERROR_DTYPE,
     {"v_cache is int8", "the dtype of k_cache, float32"}},
    {[](Call& c) { c.append.k_scale = tensor(c.cos, FULMEN_FLOAT32, {1}); },
     FULMEN_ERROR_ARGUMENT,
     {"k_scale is given where k_cache is float32", "int8"}},
    {[](Call& c) {
       c.append.k_cache.dtype = c.append.v_cache.dtype = FULMEN_INT8;
       c.append.v_scale = tensor(c.cos, FULMEN_FLOAT16, {1});
     },
     FULMEN_ERROR_DTYPE,
     {"v_scale is float16", "float32"}},
    {[](Call& c) {
       c.append.k_cache.dtype = c.append.v_cache.dtype = FULMEN_INT8;
       c.append.k_scale = tensor(c.cos, FULMEN_FLOAT32, {3, 1});
     },
     FULMEN_ERROR_SHAPE,
     {"k_scale has shape (3, 1)", "row of the page = 2 or 1"}},
    {[](Call& c) { c.append.slots.dtype = FULMEN_FLOAT32; },
     FULMEN_ERROR_DTYPE,
     {"slots is float32", "int32 or int64"}},
    {[](Call& c) { c.append.cos.dtype = c.append.sin.dtype = FULMEN_FLOAT16; },
     FULMEN_ERROR_DTYPE,
     {"cos is float16", "or float32"}},
    {[](Call& c) { c.append.sin.dtype = FULMEN_FLOAT16; },
     FULMEN_ERROR_DTYPE,
     {"sin is float16", "that of cos"}},
    {[](Call& c) { set_shape(c.append.v_cache, {3, 1, 1, 4}); },
     FULMEN_ERROR_SHAPE,
     {"v_cache has shape (3, 1, 1, 4)", "row of the page"}},
    {[](Call& c) { set_shape(c.append.k_cache, {3, 1, 0, 4}); },
     FULMEN_ERROR_SHAPE,
     {"pages of 0 rows"}},
    {[](Call& c) { set_shape(c.append.slots, {1, 2}); },
     FULMEN_ERROR_SHAPE,
     {"slots has shape (1, 2)"}},
    {[](Call& c) { set_shape(c.append.q, {2, 1, 1, 3}); }, FULMEN_ERROR_SHAPE, {"q has shape"}},
    {[](Call& c) { set_shape(c.append.q_out, {1, 2, 1, 4}); },
     FULMEN_ERROR_SHAPE,
     {"q_out has shape"}},
    {[](Call& c) { set_shape(c.append.sin, {3, 2}); }, FULMEN_ERROR_SHAPE, {"sin has shape"}},
    {[](Call& c) {
       set_shape(c.append.cos, {4, 3});
       set_shape(c.append.sin, {4, 3});
     },
     FULMEN_ERROR_SHAPE,
     {"cos has 3 columns", "head dim 4", "at most 2"}},
    {[](Call& c) { c.append.cu_new = tensor(c.cu_new, FULMEN_INT64, {0}); },
     FULMEN_ERROR_SHAPE,
     {"rank 4"}},
    {[](Call& c) { c.append.k_cache.strides[0] = 4; },
     FULMEN_ERROR_ARGUMENT,
     {"k_cache has strides by which"}},
    {[](Call& c) { c.append.v_cache.data = c.append.k_cache.data; },
     FULMEN_ERROR_ARGUMENT,
     {"k_cache overlaps v_cache"}},
    {[](Call& c) { c.append.v_cache.data = static_cast<float*>(c.append.k_cache.data) + 1; },
     FULMEN_ERROR_ARGUMENT,
     {"k_cache overlaps v_cache"}},
    {[](Call& c) { c.append.q_out.data = c.append.k.data; },
     FULMEN_ERROR_ARGUMENT,
     {"q_out overlaps k"}},
    {[](Call& c) { c.append.q.data = static_cast<float*>(c.append.q_out.data) + 1; },
     FULMEN_ERROR_ARGUMENT,
     {"q_out overlaps q", "the same array"}},
    {[](Call& c) { c.slots[1] = 6; },
     FULMEN_ERROR_ARGUMENT,
     {"slots has 6 for row 0 of request 1", "0 to 5", "-1"}},
    {[](Call& c) { c.slots[0] = -2; }, FULMEN_ERROR_ARGUMENT, {"slots has -2"}},
    {[](Call& c) { c.positions[1] = 6; },
     FULMEN_ERROR_ARGUMENT,
     {"row 0 of request 1 stands at position 6 by positions", "0 to 5"}},
    {[](Call& c) { c.positions[0] = -1; }, FULMEN_ERROR_ARGUMENT, {"position -1"}},
};

TEST(AppendKv, RefusesWithNothingWritten) {
  for (const AppendRefusal& row : kAppendRefusals) {
    SCOPED_TRACE(row.words[0]);
    Call call;
    call.add_slots();
    call.add_rotation();
    row.spoil(call);
    EXPECT_EQ(call.run(), row.status);
    for (const char* word : row.words) EXPECT_THAT(fulmen_last_error(), HasSubstr(word));
    EXPECT_TRUE(call.is_untouched());
  }
  EXPECT_EQ(fulmen_append_kv(nullptr, nullptr), FULMEN_ERROR_ARGUMENT);
  Call call;
  call.add_slots();
  EXPECT_EQ(fulmen_append_kv(&call.append, &call), FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("stream is not null"));
  EXPECT_TRUE(call.is_untouched());
}

const AppendRefusal kTableRefusals[] = {
    {[](Call& c) { c.table[0] = 3; },
     FULMEN_ERROR_ARGUMENT,
     {"page_table has page 3 for row 0 of request 0", "0 to 2"}},
    {[](Call& c) { c.table[2] = -1; }, FULMEN_ERROR_ARGUMENT, {"page -1"}},
    {[](Call& c) { c.lengths[0] = 5; }, FULMEN_ERROR_ARGUMENT, {"kv_lengths[0] is 5", "0 to 4"}},
    {[](Call& c) { c.lengths[1] = -1; }, FULMEN_ERROR_ARGUMENT, {"kv_lengths[1] is -1"}},
    {[](Call& c) { c.lengths[1] = 4; },
     FULMEN_ERROR_ARGUMENT,
     {"no page for row 0 of request 1, which is key 4", "4 rows"}},
    {[](Call& c) {
       c.append.page_table = tensor(c.table, FULMEN_INT32, {4});
       c.append.page_indptr = tensor(c.indptr, FULMEN_INT64, {3});
       c.indptr[2] = 5;
     },
     FULMEN_ERROR_ARGUMENT,
     {"page_indptr has 2 and 5 at 1", "at most at 4"}},
    {[](Call& c) {
       c.append.k = tensor(c.k, FULMEN_FLOAT32, {1, 2, 4});
       c.append.v = tensor(c.v, FULMEN_FLOAT32, {1, 2, 4});
       c.append.cu_new = tensor(c.cu_new, FULMEN_INT64, {3});
       c.cu_new[1] = 3;
     },
     FULMEN_ERROR_ARGUMENT,
     {"cu_new has 0 and 3 at 0", "at most at 2"}},
};

TEST(AppendKv, RefusesContentsThatTheHostSees) {
  for (const AppendRefusal& row : kTableRefusals) {
    SCOPED_TRACE(row.words[0]);
    Call call;
    call.add_table();
    row.spoil(call);
    EXPECT_EQ(call.run(), row.status);
    for (const char* word : row.words) EXPECT_THAT(fulmen_last_error(), HasSubstr(word));
    EXPECT_TRUE(call.is_untouched());
  }
}

TEST(Rotary, Refuses) {
  Call call;
  call.add_rotation();
  const fulmen_append& a = call.append;
  const auto run = [&](const fulmen_tensor* x, const fulmen_tensor* cos, const fulmen_tensor* out) {
    return fulmen_rotary(x, nullptr, cos, &a.sin, 0, out, nullptr);
  };
  EXPECT_EQ(run(nullptr, &a.cos, &a.q_out), FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("x is missing"));
  EXPECT_EQ(run(&a.q, nullptr, &a.q_out), FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("cos is missing"));
  EXPECT_EQ(run(&a.q, &a.cos, nullptr), FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("out is missing"));
  EXPECT_EQ(run(&a.q, &a.cos, &a.cos), FULMEN_ERROR_SHAPE);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("out has shape (6, 2)"));
  EXPECT_TRUE(call.is_untouched());
  EXPECT_EQ(run(&a.q, &a.cos, &a.q_out), FULMEN_OK) << fulmen_last_error();
}

TEST(AppendKv, InitSetsAllThatTheCallerKnows) {
  fulmen_append_init(nullptr);
  fulmen_append append;
  std::memset(&append, 0xff, sizeof append);
  fulmen_append_init(&append);
  EXPECT_EQ(append.struct_size, sizeof append);
  EXPECT_EQ(append.interleaved, 0);
  EXPECT_EQ(append.k_cache.data, nullptr);
  EXPECT_EQ(append.q_out.rank, 0);
  EXPECT_EQ(append.q_out.struct_size, sizeof(fulmen_tensor));
}

}  // namespace
}  // namespace fulmen::test
