// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// How a refusal is checked.
#include "api/refusal.h"

#include <gmock/gmock.h>

namespace fulmen::test {

using T = fulmen_tensors;

TestCall packed_call() {
  TestCall call({.batch = 1, .q_rows = 6, .kv_rows = 8});
  for (const Member member : {&T::q, &T::k, &T::v, &T::o, &T::lse, &T::stats}) {
    fulmen_tensor& tensor = call.tensors.*member;
    for (int axis = 0; axis + 1 < tensor.rank; ++axis) {
      tensor.shape[axis] = tensor.shape[axis + 1];
      tensor.strides[axis] = tensor.strides[axis + 1];
    }
    --tensor.rank;
  }
  call.indices(&T::cu_q, {0, 2, 6});
  call.indices(&T::cu_kv, {0, 3, 8});
  return call;
}

void expect_refused(const TestCall& call, const Refusal& row, fulmen_status got) {
  EXPECT_EQ(got, row.status) << fulmen_status_name(got) << ": " << fulmen_last_error();
  for (const char* word : row.words) EXPECT_THAT(fulmen_last_error(), testing::HasSubstr(word));
  EXPECT_TRUE(call.outputs_untouched());
}

void expect_call_refuses(const Refusal& row) {
  SCOPED_TRACE(row.label);
  TestCall call;
  row.spoil(call);
  expect_refused(call, row, call.forward());
}

void expect_plan_refuses(const Refusal& row) {
  SCOPED_TRACE(row.label);
  TestCall call;
  row.spoil(call);
  const std::string first_word = row.words.front();
  const bool needs_memory = first_word.find("overlaps") != std::string::npos ||
                            first_word.find("elements") != std::string::npos ||
                            first_word.find("lengths[") != std::string::npos;
  int never_set = 0;
  fulmen_plan* plan = reinterpret_cast<fulmen_plan*>(&never_set);
  const fulmen_status status =
      fulmen_plan_create(&call.problem, &call.tensors, FULMEN_OPERATION_FORWARD, &plan);
  EXPECT_EQ(status, needs_memory ? FULMEN_OK : row.status) << fulmen_last_error();
  EXPECT_EQ(plan == nullptr, !needs_memory);
  fulmen_plan_destroy(plan);
}

void set_shape(fulmen_tensor& tensor, const Shape& shape) {
  void* const data = tensor.data;
  ASSERT_EQ(fulmen_tensor_init(&tensor, data, tensor.dtype, static_cast<int32_t>(shape.size()),
                               shape.data()),
            FULMEN_OK);
}

}  // namespace fulmen::test
