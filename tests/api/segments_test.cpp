// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Segments through the C ABI: refusals, that they change nothing where they say what would be so
// anyway, and that a run of a plan reads those of its own call.
#include <gmock/gmock.h>

#include <cmath>

#include "api/refusal.h"

namespace fulmen::test {
namespace {

using T = fulmen_tensors;
using SegmentWords = std::vector<int64_t>;  // three numbers each

fulmen_tensor& add_segments(TestCall& call, Member member, const SegmentWords& words,
                            int64_t batch = 1) {
  const int64_t count = static_cast<int64_t>(words.size()) / 3 / batch;
  fulmen_tensor& array = call.input(member, FULMEN_INT64, {batch, count, 3});
  std::memcpy(array.data, words.data(), words.size() * sizeof(int64_t));
  return array;
}

template <int64_t... kWords>
void spoil_rows(TestCall& call) {
  add_segments(call, &T::q_segments, {kWords...});
}
template <int64_t... kWords>
void spoil_keys(TestCall& call) {
  add_segments(call, &T::q_segments, {0, 3, 0});
  add_segments(call, &T::kv_segments, {kWords...});
}

const Refusal kSegmentRefusals[] = {
    {"keys alone",
     [](TestCall& c) { add_segments(c, &T::kv_segments, {0, 5, 0}); },
     FULMEN_ERROR_ARGUMENT,
     {"kv_segments is given without q_segments", "pass both"}},
    {"two numbers",
     [](TestCall& c) { c.input(&T::q_segments, FULMEN_INT32, {1, 2}); },
     FULMEN_ERROR_SHAPE,
     {"q_segments has shape (1, 2)", "= 3"}},
    {"another batch",
     [](TestCall& c) { add_segments(c, &T::q_segments, SegmentWords(9), 3); },
     FULMEN_ERROR_SHAPE,
     {"q_segments has shape (3, 1, 3)", "batch = 2"}},
    {"floats",
     [](TestCall& c) { c.input(&T::q_segments, FULMEN_FLOAT32, {1, 1, 3}); },
     FULMEN_ERROR_DTYPE,
     {"q_segments is float32", "int32 or int64"}},
    {"none",
     [](TestCall& c) { c.input(&T::q_segments, FULMEN_INT32, {1, 0, 3}); },
     FULMEN_ERROR_SHAPE,
     {"q_segments has 0 segments", "1 to 64"}},
    {"too many",
     [](TestCall& c) { add_segments(c, &T::q_segments, SegmentWords(195)); },
     FULMEN_ERROR_SHAPE,
     {"q_segments has 65 segments", "1 to 64"}},
    {"beside positions",
     [](TestCall& c) {
       add_segments(c, &T::q_segments, {0, 3, 0});
       c.indices(&T::positions, {0, 1, 2});
     },
     FULMEN_ERROR_UNSUPPORTED,
     {"q_segments is given beside positions"}},
    {"beside left padding",
     [](TestCall& c) {
       add_segments(c, &T::q_segments, {0, 3, 0});
       c.indices(&T::kv_start, {0, 1});
     },
     FULMEN_ERROR_UNSUPPORTED,
     {"q_segments is given beside kv_start"}},
    {"beside lists of blocks",
     [](TestCall& c) {
       add_segments(c, &T::q_segments, {0, 3, 0});
       c.problem.block_q = c.problem.block_kv = 64;
       c.input(&T::blocks, FULMEN_INT32, {1, 1, 1, 1});
     },
     FULMEN_ERROR_UNSUPPORTED,
     {"q_segments is given beside blocks", "mask text"}},
};

const Refusal kSegmentContents[] = {
    {"rows beyond the last",
     spoil_rows<0, 2, 0, 2, 2, 7>,
     FULMEN_ERROR_ARGUMENT,
     {"q_segments[0, 1] is (2, 2, 7)", "within the 3"}},
    {"a negative first row", spoil_rows<-1, 2, 0>, FULMEN_ERROR_ARGUMENT, {"(-1, 2, 0)"}},
    {"fewer rows than none", spoil_rows<1, -1, 0>, FULMEN_ERROR_ARGUMENT, {"(1, -1, 0)"}},
    {"a negative position", spoil_rows<0, 2, -4>, FULMEN_ERROR_ARGUMENT, {"(0, 2, -4)"}},
    {"a position beyond 31 bits",
     spoil_rows<0, 2, 2147483647>,
     FULMEN_ERROR_ARGUMENT,
     {"(0, 2, 2147483647)"}},
    {"shared rows",
     spoil_rows<0, 2, 0, 1, 2, 9>,
     FULMEN_ERROR_ARGUMENT,
     {"q_segments[0]", "0 and 1", "share a row"}},
    {"keys beyond the last",
     spoil_keys<4, 2, 0>,
     FULMEN_ERROR_ARGUMENT,
     {"kv_segments[0, 0] is (4, 2, 0)", "within the 5"}},
};

TEST(Segments, WhatTheyMayNotBe) {
  for (const Refusal& row : kSegmentRefusals) {
    SCOPED_TRACE(row.label);
    expect_call_refuses(row);
    expect_plan_refuses(row);
  }
  for (const Refusal& row : kSegmentContents) {
    SCOPED_TRACE(row.label);
    expect_call_refuses(row);
  }
}

TEST(Segments, SayWhatIsSoAnyway) {
  for (const fulmen_implementation implementation : {FULMEN_SCALAR, FULMEN_TILED}) {
    TestCall plain, segmented;
    for (TestCall* const call : {&plain, &segmented}) {
      call->problem.implementation = implementation;
      call->problem.causal = 1;
      call->problem.window_left = 2;
    }
    add_segments(segmented, &T::q_segments, {1, 2, 3, 0, 1, 2});
    ASSERT_EQ(plain.forward(), FULMEN_OK) << fulmen_last_error();
    ASSERT_EQ(segmented.forward(), FULMEN_OK) << fulmen_last_error();
    for (const Member member : {&T::o, &T::lse}) {
      EXPECT_THAT(segmented.floats(member),
                  testing::Pointwise(testing::FloatNear(1e-6f), plain.floats(member)));
    }
  }
}

// A row that no segment has sees nothing, and a run of a plan reads the segments of its own call.
TEST(Segments, MayChangeFromRunToRun) {
  TestCall call;
  add_segments(call, &T::q_segments, {0, 3, 0});
  fulmen_plan* plan = nullptr;
  ASSERT_EQ(fulmen_plan_create(&call.problem, &call.tensors, FULMEN_OPERATION_FORWARD, &plan),
            FULMEN_OK)
      << fulmen_last_error();
  std::vector<char> workspace(fulmen_plan_workspace_bytes(plan));
  for (const int64_t first : {0, 1}) {
    const SegmentWords words{first, 3 - first, 0};
    std::memcpy(call.tensors.q_segments.data, words.data(), sizeof(int64_t) * 3);
    ASSERT_EQ(fulmen_forward(plan, &call.tensors, workspace.data(), workspace.size(), nullptr),
              FULMEN_OK)
        << fulmen_last_error();
    const float lse = call.floats(&T::lse)[0];
    EXPECT_EQ(std::isinf(lse), first == 1) << lse;
  }
  fulmen_plan_destroy(plan);
}

}  // namespace
}  // namespace fulmen::test
