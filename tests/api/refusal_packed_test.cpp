// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The preconditions that packed sequences add; and that good calls are not refused.
#include <gmock/gmock.h>

#include <limits>

#include "api/refusal.h"

namespace fulmen::test {
namespace {

using T = fulmen_tensors;

const Refusal kPacked[] = {
    {"q with a batch axis",
     [](TestCall& c) { set_shape(c.tensors.q, {1, 4, 6, 4}); },
     FULMEN_ERROR_SHAPE,
     {"q has rank 4", "2 to 3", "leave the batch axis out"}},
    {"no offsets",
     [](TestCall& c) { c.indices(&T::cu_q, {}); },
     FULMEN_ERROR_SHAPE,
     {"cu_q has no element"}},
    {"different counts of offsets",
     [](TestCall& c) { c.indices(&T::cu_kv, {0, 8}); },
     FULMEN_ERROR_SHAPE,
     {"cu_kv has shape (2)", "= 3"}},
    {"first offset 1",
     [](TestCall& c) { c.indices(&T::cu_q, {1, 2, 6}); },
     FULMEN_ERROR_ARGUMENT,
     {"cu_q[0] is 1", "is 0"}},
    {"offsets that decrease",
     [](TestCall& c) { c.indices(&T::cu_kv, {0, 5, 3}); },
     FULMEN_ERROR_ARGUMENT,
     {"cu_kv[2] is 3 after 5", "not decrease"}},
    {"offsets beyond the rows",
     [](TestCall& c) { c.indices(&T::cu_q, {0, 2, 7}); },
     FULMEN_ERROR_ARGUMENT,
     {"cu_q[2] is 7", "q has 6 rows"}},
    {"offsets at the end of int64",
     [](TestCall& c) { c.indices(&T::cu_q, {0, std::numeric_limits<int64_t>::max(), 6}); },
     FULMEN_ERROR_ARGUMENT,
     {"cu_q[1] is 9223372036854775807"}},
    {"no sequence for the rows",
     [](TestCall& c) {
       c.indices(&T::cu_q, {0});
       c.indices(&T::cu_kv, {0});
     },
     FULMEN_ERROR_ARGUMENT,
     {"cu_q names no sequence", "6 rows"}},
    {"longer than max_q",
     [](TestCall& c) { c.problem.max_q = 3; },
     FULMEN_ERROR_ARGUMENT,
     {"sequence 1 4 rows", "max_q = 3"}},
    {"longer than max_kv",
     [](TestCall& c) { c.problem.max_kv = 4; },
     FULMEN_ERROR_ARGUMENT,
     {"sequence 1 5 rows", "max_kv = 4"}},
    {"negative max_q",
     [](TestCall& c) { c.problem.max_q = -1; },
     FULMEN_ERROR_ARGUMENT,
     {"max_q is -1"}},
    {"length beyond its sequence",
     [](TestCall& c) { c.indices(&T::q_lengths, {3, 1}); },
     FULMEN_ERROR_ARGUMENT,
     {"q_lengths[0] is 3", "2 rows of q"}},
    {"mask of too few rows",
     [](TestCall& c) { c.output(&T::mask, FULMEN_BOOL, {3, 5}); },
     FULMEN_ERROR_SHAPE,
     {"mask has 3 query rows", "longest sequence has 4"}},
    {"bias of too few keys",
     [](TestCall& c) { c.input(&T::bias, FULMEN_FLOAT32, {1, 4}); },
     FULMEN_ERROR_SHAPE,
     {"bias has 4 key rows", "longest sequence has 5"}},
    {"mask of another count of sequences",
     [](TestCall& c) { c.output(&T::mask, FULMEN_BOOL, {3, 1, 1, 5}); },
     FULMEN_ERROR_SHAPE,
     {"mask has shape (3, 1, 1, 5)", "batch = 2 or 1"}},
    {"ids with a batch axis",
     [](TestCall& c) {
       c.indices(&T::kv_ids, {0, 0, 0, 0, 0, 0, 0, 0});
       c.indices(&T::q_ids, {0, 0, 0, 0, 0, 0});
       set_shape(c.tensors.q_ids, {1, 6});
     },
     FULMEN_ERROR_SHAPE,
     {"q_ids has rank 2"}},
};

TEST(Refusal, OfPackedCalls) {
  for (const Refusal& row : kPacked) {
    SCOPED_TRACE(row.label);
    TestCall call = packed_call();
    row.spoil(call);
    expect_refused(call, row, call.forward());
  }
}

TEST(Refusal, GoodCallsAreNotRefused) {
  TestCall dense;
  EXPECT_EQ(dense.forward(), FULMEN_OK) << fulmen_last_error();
  dense.add_backward();
  EXPECT_EQ(dense.backward(), FULMEN_OK) << fulmen_last_error();
  TestCall packed = packed_call();
  EXPECT_EQ(packed.forward(), FULMEN_OK) << fulmen_last_error();
}

// Dropout counts batch * heads in 32 bits; a broadcast q has that many without any memory.
TEST(Refusal, OfMoreHeadsThanDropoutCanCount) {
  TestCall call;
  call.problem.dropout_p = 0.5;
  for (const Member member : {&T::q, &T::k, &T::v, &T::o, &T::lse, &T::stats}) {
    fulmen_tensor& tensor = call.tensors.*member;
    tensor.shape[0] = 65536;
    tensor.shape[1] = 65536;
    tensor.shape[2] = 0;
  }
  EXPECT_EQ(call.forward(), FULMEN_ERROR_SHAPE);
  EXPECT_THAT(fulmen_last_error(), testing::HasSubstr("batch * heads is 4294967296"));
}

}  // namespace
}  // namespace fulmen::test
