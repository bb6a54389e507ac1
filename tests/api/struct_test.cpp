// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen.h sections 2 and 3: structs and their versions, null pointers, names, sentences by thread.
#include <gmock/gmock.h>

#include <array>
#include <cmath>
#include <thread>

#include "api/from_c.h"
#include "api/refusal.h"

namespace fulmen::test {
namespace {

using testing::HasSubstr;
using testing::StrEq;
using T = fulmen_tensors;

TEST(TensorInit, MakesContiguousTensors) {
  float data[24];
  const int64_t shape[] = {2, 3, 4};
  fulmen_tensor tensor;
  ASSERT_EQ(fulmen_tensor_init(&tensor, data, FULMEN_FLOAT32, 3, shape), FULMEN_OK);
  EXPECT_EQ(tensor.struct_size, sizeof(fulmen_tensor));
  EXPECT_EQ(tensor.data, data);
  EXPECT_EQ(tensor.rank, 3);
  EXPECT_THAT(std::vector<int64_t>(tensor.strides, tensor.strides + 3),
              testing::ElementsAre(12, 4, 1));
  ASSERT_EQ(fulmen_tensor_init(&tensor, nullptr, FULMEN_BOOL, 0, nullptr), FULMEN_OK);
  EXPECT_EQ(tensor.rank, 0);
}

TEST(TensorInit, RefusesWhatItCannotHold) {
  const int64_t shape[5] = {1, 1, 1, 1, 1};
  fulmen_tensor tensor = {};
  EXPECT_EQ(fulmen_tensor_init(&tensor, nullptr, FULMEN_FLOAT32, 5, shape), FULMEN_ERROR_SHAPE);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("rank is 5; allowed is 0 to 4"));
  EXPECT_EQ(fulmen_tensor_init(&tensor, nullptr, FULMEN_FLOAT32, -1, shape), FULMEN_ERROR_SHAPE);
  EXPECT_EQ(fulmen_tensor_init(&tensor, nullptr, FULMEN_FLOAT32, 2, nullptr),
            FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("shape is null"));
  EXPECT_EQ(tensor.struct_size, 0u);  // nothing is written on error
  EXPECT_EQ(fulmen_tensor_init(nullptr, nullptr, FULMEN_FLOAT32, 0, nullptr),
            FULMEN_ERROR_ARGUMENT);
}

TEST(ProblemInit, SetsTheDefaultsOfTheManual) {
  fulmen_problem problem;
  std::memset(&problem, 0x5a, sizeof problem);
  fulmen_problem_init(&problem);
  EXPECT_EQ(problem.struct_size, sizeof(fulmen_problem));
  EXPECT_TRUE(std::isnan(problem.scale));
  EXPECT_EQ(problem.softcap, 0);
  EXPECT_EQ(problem.causal, 0);
  EXPECT_EQ(problem.alignment, FULMEN_BOTTOM_RIGHT);
  EXPECT_EQ(problem.window_left, FULMEN_NO_LIMIT);
  EXPECT_EQ(problem.window_right, FULMEN_NO_LIMIT);
  EXPECT_EQ(problem.prefix, 0);
  EXPECT_EQ(problem.chunk, 0);
  EXPECT_EQ(problem.dropout_p, 0);
  EXPECT_EQ(problem.max_q, 0);
  EXPECT_EQ(problem.backend, FULMEN_BACKEND_AUTO);
  EXPECT_EQ(problem.implementation, FULMEN_IMPLEMENTATION_AUTO);
  EXPECT_EQ(problem.precision, FULMEN_PRECISION_FLOAT32);
}

TEST(Init, OfNullDoesNothing) {
  fulmen_problem_init(nullptr);
  fulmen_tensors_init(nullptr);
  fulmen_merge_part_init(nullptr);
  fulmen_plan_destroy(nullptr);
  EXPECT_EQ(fulmen_plan_workspace_bytes(nullptr), 0u);
}

TEST(StructSize, ZeroAndUnknownAreRefused) {
  const Refusal rows[] = {
      {"problem 0",
       [](TestCall& c) { c.problem.struct_size = 0; },
       FULMEN_ERROR_ARGUMENT,
       {"problem.struct_size is 0", "fulmen_problem_init"}},
      {"problem of later",
       [](TestCall& c) { c.problem.struct_size += 8; },
       FULMEN_ERROR_ARGUMENT,
       {"problem.struct_size is", "this library knows"}},
      {"tensors 0",
       [](TestCall& c) { c.tensors.struct_size = 0; },
       FULMEN_ERROR_ARGUMENT,
       {"tensors.struct_size is 0", "fulmen_tensors_init"}},
      {"tensors of later",
       [](TestCall& c) { c.tensors.struct_size += 8; },
       FULMEN_ERROR_ARGUMENT,
       {"tensors.struct_size is", "this library knows"}},
      {"k 0",
       [](TestCall& c) { c.tensors.k.struct_size = 0; },
       FULMEN_ERROR_ARGUMENT,
       {"k.struct_size is 0", "fulmen_tensor_init"}},
      {"absent bias 0",
       [](TestCall& c) { c.tensors.bias.struct_size = 0; },
       FULMEN_ERROR_ARGUMENT,
       {"bias.struct_size is 0"}},
      {"o of later",
       [](TestCall& c) { c.tensors.o.struct_size = 4096; },
       FULMEN_ERROR_ARGUMENT,
       {"o.struct_size is 4096"}},
  };
  for (const Refusal& row : rows) {
    SCOPED_TRACE(row.label);
    TestCall call;
    row.spoil(call);
    expect_refused(call, row, call.forward());
  }
}

TEST(NullStructs, AreRefusedByName) {
  TestCall call;
  EXPECT_EQ(fulmen_attention(nullptr, &call.tensors, nullptr), FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("problem is null"));
  EXPECT_EQ(fulmen_attention(&call.problem, nullptr, nullptr), FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("tensors is null"));
  EXPECT_EQ(fulmen_attention(&call.problem, &call.tensors, &call), FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("stream is not null"));
  EXPECT_EQ(fulmen_plan_create(&call.problem, &call.tensors, FULMEN_OPERATION_FORWARD, nullptr),
            FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("plan is null"));
  EXPECT_EQ(fulmen_forward(nullptr, &call.tensors, nullptr, 0, nullptr), FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("plan is null"));
  EXPECT_EQ(fulmen_plan_explain(nullptr, nullptr, 0, nullptr), FULMEN_ERROR_ARGUMENT);
  EXPECT_EQ(fulmen_dense_mask(&call.problem, &call.tensors, nullptr), FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("visible is null"));
  EXPECT_TRUE(call.outputs_untouched());
}

TEST(Operation, UnknownIsRefused) {
  TestCall call;
  fulmen_plan* plan = nullptr;
  EXPECT_EQ(create_plan_of_operation(&call.problem, &call.tensors, 2, &plan),
            FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("operation is 2"));
}

TEST(StatusName, NamesAllAndOthers) {
  EXPECT_THAT(fulmen_status_name(FULMEN_OK), StrEq("FULMEN_OK"));
  EXPECT_THAT(fulmen_status_name(FULMEN_ERROR_SHAPE), StrEq("FULMEN_ERROR_SHAPE"));
  EXPECT_THAT(fulmen_status_name(FULMEN_ERROR_INTERNAL), StrEq("FULMEN_ERROR_INTERNAL"));
  EXPECT_THAT(name_of_status(10), StrEq("unknown status"));
  EXPECT_THAT(name_of_status(-1), StrEq("unknown status"));
}

TEST(LastError, IsTheThreadsOwn) {
  TestCall call;
  call.problem.softcap = -1;
  ASSERT_EQ(call.forward(), FULMEN_ERROR_ARGUMENT);
  const std::string mine = fulmen_last_error();
  std::thread other([] {
    EXPECT_THAT(fulmen_last_error(), StrEq(""));
    TestCall theirs;
    theirs.problem.chunk = -1;
    EXPECT_EQ(theirs.forward(), FULMEN_ERROR_ARGUMENT);
    EXPECT_THAT(fulmen_last_error(), HasSubstr("chunk is -1"));
  });
  other.join();
  EXPECT_EQ(fulmen_last_error(), mine);
  call.problem.softcap = 0;
  ASSERT_EQ(call.forward(), FULMEN_OK);
  EXPECT_EQ(fulmen_last_error(), mine);  // a success keeps the sentence of the last failure
}

TEST(Version, IsThreeNumbers) {
  EXPECT_THAT(fulmen_version(), testing::MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+"));
}

}  // namespace
}  // namespace fulmen::test
