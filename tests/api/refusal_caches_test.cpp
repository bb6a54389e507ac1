// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The preconditions of page tables, left padding, positions and trees: of shapes and presence, of
// contents on the CPU, and what does not take them.
#include <gmock/gmock.h>

#include <limits>

#include "api/cache_call.h"
#include "api/refusal.h"

namespace fulmen::test {
namespace {

using testing::HasSubstr;
using T = fulmen_tensors;

// Rows of a request of a table: the call has 3 requests with 4 entries each.
void set_entry(TestCall& c, int64_t request, int64_t entry, int64_t id) {
  static_cast<int64_t*>(c.tensors.page_table.data)[request * 4 + entry] = id;
}

const Refusal kPaged[] = {
    {"no lengths",
     [](TestCall& c) { c.remove(&T::kv_lengths); },
     FULMEN_ERROR_ARGUMENT,
     {"kv_lengths is missing", "page_table"}},
    {"cu_kv",
     [](TestCall& c) { c.indices(&T::cu_kv, {0, 3, 3, 9}); },
     FULMEN_ERROR_ARGUMENT,
     {"cu_kv is given beside page_table", "leave cu_kv out"}},
    {"page_indptr alone",
     [](TestCall& c) {
       c.remove(&T::page_table);
       c.indices(&T::page_indptr, {0, 1, 2, 3});
     },
     FULMEN_ERROR_ARGUMENT,
     {"page_table is missing", "page_indptr"}},
    {"pages of 0 rows",
     [](TestCall& c) {
       set_shape(c.tensors.k, {9, 2, 0, 4});
       set_shape(c.tensors.v, {9, 2, 0, 6});
     },
     FULMEN_ERROR_SHAPE,
     {"k has pages of 0 rows", "at least 1"}},
    {"v of another number of pages",
     [](TestCall& c) { set_shape(c.tensors.v, {8, 2, 3, 6}); },
     FULMEN_ERROR_SHAPE,
     {"v has shape (8, 2, 3, 6)", "page = 9", "row of the page = 3"}},
    {"table of one axis",
     [](TestCall& c) { c.indices(&T::page_table, {0, 0, 0}); },
     FULMEN_ERROR_SHAPE,
     {"page_table has rank 1", "(batch, page)", "page_indptr"}},
    {"table of two axes beside page_indptr",
     [](TestCall& c) {
       c.indices(&T::page_indptr, {0, 4, 8, 12});
       c.problem.max_kv = 9;
     },
     FULMEN_ERROR_SHAPE,
     {"page_table has rank 2 beside page_indptr", "1"}},
    {"table of another batch",
     [](TestCall& c) { set_shape(c.tensors.page_table, {2, 4}); },
     FULMEN_ERROR_SHAPE,
     {"page_table has shape (2, 4)", "batch = 3"}},
    {"float table",
     [](TestCall& c) { c.input(&T::page_table, FULMEN_FLOAT32, {3, 4}); },
     FULMEN_ERROR_DTYPE,
     {"page_table is float32", "int32 or int64"}},
    {"page_indptr without max_kv",
     [](TestCall& c) {
       c.indices(&T::page_table, {0, 1, 2});
       c.indices(&T::page_indptr, {0, 1, 1, 3});
     },
     FULMEN_ERROR_ARGUMENT,
     {"max_kv is 0 with page_indptr", "upper bound"}},
    {"page_indptr of another count",
     [](TestCall& c) {
       c.indices(&T::page_table, {0, 1, 2});
       c.indices(&T::page_indptr, {0, 1, 3});
       c.problem.max_kv = 9;
     },
     FULMEN_ERROR_SHAPE,
     {"page_indptr has shape (3)", "= 4"}},
    {"max_q without cu_q",
     [](TestCall& c) { c.problem.max_q = 3; },
     FULMEN_ERROR_ARGUMENT,
     {"max_q is 3 without cu_q"}},
    {"mask of too few keys",
     [](TestCall& c) { c.output(&T::mask, FULMEN_BOOL, {3, 11}); },
     FULMEN_ERROR_SHAPE,
     {"mask has 11 key columns", "12 keys", "max_kv"}},
    {"bias of too few keys",
     [](TestCall& c) {
       c.problem.max_kv = 8;
       c.input(&T::bias, FULMEN_FLOAT32, {3, 7});
     },
     FULMEN_ERROR_SHAPE,
     {"bias has 7 key columns", "8 keys"}},
    {"ids of too few keys",
     [](TestCall& c) {
       c.indices(&T::q_ids, {0, 0, 0});
       c.indices(&T::kv_ids, {0, 0, 0, 0, 0});
     },
     FULMEN_ERROR_SHAPE,
     {"kv_ids has 5 key columns", "12 or more"}},
    {"kv_start of another batch",
     [](TestCall& c) { c.indices(&T::kv_start, {0, 0}); },
     FULMEN_ERROR_SHAPE,
     {"kv_start has shape (2)", "batch = 3"}},
    {"kv_shared of another batch",
     [](TestCall& c) { c.indices(&T::kv_shared, {0, 0}); },
     FULMEN_ERROR_SHAPE,
     {"kv_shared has shape (2)", "batch = 3"}},
    {"kv_shared without pages",
     [](TestCall& c) {
       c.remove(&T::page_table);
       c.indices(&T::kv_shared, {1});
     },
     FULMEN_ERROR_ARGUMENT,
     {"page_table is missing", "kv_shared"}},
    {"positions of another row count",
     [](TestCall& c) { c.indices(&T::positions, {0, 1}); },
     FULMEN_ERROR_SHAPE,
     {"positions has shape (2)", "q_row = 3"}},
    {"int32 tree",
     [](TestCall& c) { c.indices(&T::tree, {0, 1, 2}).dtype = FULMEN_INT32; },
     FULMEN_ERROR_DTYPE,
     {"tree is int32", "int64"}},

    // contents
    {"length beyond the table",
     [](TestCall& c) { c.indices(&T::kv_lengths, {7, 0, 13}); },
     FULMEN_ERROR_ARGUMENT,
     {"kv_lengths[2] is 13", "its pages hold 12 keys"}},
    {"length beyond max_kv",
     [](TestCall& c) { c.problem.max_kv = 6; },
     FULMEN_ERROR_ARGUMENT,
     {"kv_lengths[0] is 7", "6 keys", "max_kv"}},
    {"negative length",
     [](TestCall& c) { c.indices(&T::kv_lengths, {7, -1, 5}); },
     FULMEN_ERROR_ARGUMENT,
     {"kv_lengths[1] is -1"}},
    {"page beyond the pool",
     [](TestCall& c) { set_entry(c, 0, 2, 9); },
     FULMEN_ERROR_ARGUMENT,
     {"page_table[0, 2] is 9", "9 pages", "0 to 8"}},
    {"negative page",
     [](TestCall& c) { set_entry(c, 2, 0, -1); },
     FULMEN_ERROR_ARGUMENT,
     {"page_table[2, 0] is -1"}},
    {"page_indptr that decreases",
     [](TestCall& c) {
       c.indices(&T::page_table, {4, 0, 7, 0, 8});
       c.indices(&T::page_indptr, {0, 3, 2, 5});
       c.problem.max_kv = 9;
     },
     FULMEN_ERROR_ARGUMENT,
     {"page_indptr[2] is 2 after 3"}},
    {"page_indptr beyond the table",
     [](TestCall& c) {
       c.indices(&T::page_table, {4, 0, 7, 0, 8});
       c.indices(&T::page_indptr, {0, 3, 3, 6});
       c.problem.max_kv = 9;
     },
     FULMEN_ERROR_ARGUMENT,
     {"page_indptr[3] is 6", "5 entries"}},
    {"page_indptr below the table",
     [](TestCall& c) {
       c.indices(&T::page_table, {4, 0, 7, 0, 8});
       c.indices(&T::page_indptr, {-1, 3, 3, 5});
       c.problem.max_kv = 9;
     },
     FULMEN_ERROR_ARGUMENT,
     {"page_indptr[0] is -1"}},
    {"kv_start beyond the keys",
     [](TestCall& c) { c.indices(&T::kv_start, {8, 0, 0}); },
     FULMEN_ERROR_ARGUMENT,
     {"kv_start[0] is 8", "7 keys", "0 to 7"}},
    {"negative kv_shared",
     [](TestCall& c) { c.indices(&T::kv_shared, {0, 0, -2}); },
     FULMEN_ERROR_ARGUMENT,
     {"kv_shared[2] is -2", "0 or more"}},
    {"kv_shared of pages that differ",
     [](TestCall& c) { c.indices(&T::kv_shared, {4}); },
     FULMEN_ERROR_ARGUMENT,
     {"kv_shared says that request", "leave kv_shared out"}},
    {"negative kv_start",
     [](TestCall& c) { c.indices(&T::kv_start, {0, 0, -2}); },
     FULMEN_ERROR_ARGUMENT,
     {"kv_start[2] is -2"}},
    {"position of 33 bits",
     [](TestCall& c) { c.indices(&T::positions, {0, int64_t{1} << 31, 0}); },
     FULMEN_ERROR_ARGUMENT,
     {"positions has 2147483648 at row 1", "2147483647"}},

    // slots
    {"slots without a table",
     [](TestCall& c) {
       c.problem.slots = 1;
       c.remove(&T::page_table);
     },
     FULMEN_ERROR_ARGUMENT,
     {"page_table is missing", "slots = 1"}},
    {"more keys than slots",
     [](TestCall& c) { c.problem.slots = 1; },
     FULMEN_ERROR_ARGUMENT,
     {"kv_lengths[0] is 7", "hold 4 keys"}},
    {"slot beyond the pool",
     [](TestCall& c) {
       c.problem.slots = 1;
       c.indices(&T::kv_lengths, {3, 0, 2});
       set_entry(c, 0, 2, 27);
     },
     FULMEN_ERROR_ARGUMENT,
     {"page_table[0, 2] is 27", "27 slots", "0 to 26, and -1"}},
    {"slot -2",
     [](TestCall& c) {
       c.problem.slots = 1;
       c.indices(&T::kv_lengths, {3, 0, 2});
       set_entry(c, 2, 1, -2);
     },
     FULMEN_ERROR_ARGUMENT,
     {"page_table[2, 1] is -2", "0 to 26, and -1"}},
};

TEST(Refusal, OfCallsOverCaches) {
  for (const Refusal& row : kPaged) {
    SCOPED_TRACE(row.label);
    TestCall call = paged_call();
    row.spoil(call);
    expect_refused(call, row, call.forward());
  }
}

TEST(Refusal, OfSlots) {
  TestCall call = paged_call();
  call.problem.slots = 1;
  fulmen_tensor visible;
  const int64_t shape[] = {3, 4, 3, 4};
  char none[3 * 4 * 3 * 4] = {};
  ASSERT_EQ(fulmen_tensor_init(&visible, none, FULMEN_BOOL, 4, shape), FULMEN_OK);
  EXPECT_EQ(fulmen_dense_mask(&call.problem, &call.tensors, &visible), FULMEN_ERROR_UNSUPPORTED);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("slots is 1; a dense mask"));

  call.problem.implementation = FULMEN_SM80;
  call.problem.device_name = "h100";
  fulmen_plan* plan = nullptr;
  EXPECT_EQ(fulmen_plan_create(&call.problem, &call.tensors, FULMEN_OPERATION_FORWARD, &plan),
            FULMEN_ERROR_UNSUPPORTED);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("sm80: does not take a page_table of slots"));
}

TEST(Refusal, OfTreesOfMoreThan64Rows) {
  CacheSizes sizes;
  sizes.call.q_rows = 65;
  TestCall call = paged_call(sizes);
  call.indices(&T::tree, std::vector<int64_t>(65));
  EXPECT_EQ(call.forward(), FULMEN_ERROR_SHAPE);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("up to 65 query rows a request; allowed is 0 to 64"));
  EXPECT_TRUE(call.outputs_untouched());

  sizes.call.batch = 1;
  sizes.lengths = {7};
  sizes.pages.resize(1);
  TestCall packed = paged_call(sizes);
  for (const Member member : {&T::q, &T::o, &T::lse, &T::stats}) {
    fulmen_tensor& tensor = packed.tensors.*member;
    for (int axis = 0; axis + 1 < tensor.rank; ++axis) {
      tensor.shape[axis] = tensor.shape[axis + 1];
      tensor.strides[axis] = tensor.strides[axis + 1];
    }
    --tensor.rank;
  }
  packed.indices(&T::cu_q, {0, 65});
  packed.indices(&T::tree, std::vector<int64_t>(65));
  EXPECT_EQ(packed.forward(), FULMEN_ERROR_SHAPE);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("pass max_q"));
  packed.problem.max_q = 64;
  EXPECT_EQ(packed.forward(), FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("cu_q gives sequence 0 65 rows"));
  EXPECT_TRUE(packed.outputs_untouched());
}

TEST(Refusal, OfGradientsOverCaches) {
  for (const Member member :
       {&T::page_table, &T::kv_start, &T::kv_shared, &T::positions, &T::tree}) {
    TestCall call;
    call.add_backward();
    call.indices(member, {0, 0, 0});
    if (member == &T::kv_shared) call.indices(&T::page_table, {0, 0, 0});
    if (call.tensors.page_table.dtype != 0) call.indices(&T::kv_lengths, {0, 0});
    EXPECT_EQ(call.backward(), FULMEN_ERROR_UNSUPPORTED);
    EXPECT_THAT(fulmen_last_error(), HasSubstr("backward does not take"));
    EXPECT_TRUE(call.outputs_untouched());
  }
}

}  // namespace
}  // namespace fulmen::test
