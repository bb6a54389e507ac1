// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen.h section 7: the text rules, and what the texts hold.
#include <gmock/gmock.h>

#include "api/test_call.h"

namespace fulmen::test {
namespace {

using testing::HasSubstr;

std::string explained(const TestCall& call) {
  size_t needed = 0;
  EXPECT_EQ(
      fulmen_explain(&call.problem, &call.tensors, FULMEN_OPERATION_FORWARD, nullptr, 0, &needed),
      FULMEN_OK);
  std::string text(needed, '?');
  EXPECT_EQ(fulmen_explain(&call.problem, &call.tensors, FULMEN_OPERATION_FORWARD, text.data(),
                           text.size(), nullptr),
            FULMEN_OK);
  EXPECT_EQ(text.back(), '\0');
  text.pop_back();
  return text;
}

TEST(Explain, NamesTheChosenAndTheRejected) {
  TestCall call;
  EXPECT_THAT(explained(call), HasSubstr("\"implementation\": \"tiled\""));
  EXPECT_THAT(explained(call), HasSubstr("\"rejected\": [{\"implementation\": \"scalar\""));
  call.problem.implementation = FULMEN_SCALAR;
  EXPECT_THAT(explained(call), HasSubstr("\"implementation\": \"scalar\""));
  EXPECT_TRUE(call.outputs_untouched());
}

TEST(Explain, IsCutWhereTheBufferEnds) {
  TestCall call;
  const std::string whole = explained(call);
  for (const size_t capacity : {size_t{1}, size_t{2}, size_t{40}, whole.size(), whole.size() + 1}) {
    std::string buffer(capacity + 8, '#');
    size_t needed = 0;
    ASSERT_EQ(fulmen_explain(&call.problem, &call.tensors, FULMEN_OPERATION_FORWARD, buffer.data(),
                             capacity, &needed),
              FULMEN_OK);
    EXPECT_EQ(needed, whole.size() + 1);
    EXPECT_EQ(std::string(buffer.c_str()), whole.substr(0, capacity - 1));
    EXPECT_EQ(buffer.substr(capacity), "########");
  }
}

TEST(Explain, NullBufferNeedsCapacityZero) {
  TestCall call;
  EXPECT_EQ(
      fulmen_explain(&call.problem, &call.tensors, FULMEN_OPERATION_FORWARD, nullptr, 5, nullptr),
      FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("buffer is null with capacity 5"));
  EXPECT_EQ(
      fulmen_explain(&call.problem, &call.tensors, FULMEN_OPERATION_FORWARD, nullptr, 0, nullptr),
      FULMEN_OK);
}

TEST(Explain, OfAPlanIsTheSame) {
  TestCall call;
  fulmen_plan* plan = nullptr;
  ASSERT_EQ(fulmen_plan_create(&call.problem, &call.tensors, FULMEN_OPERATION_FORWARD, &plan),
            FULMEN_OK);
  char text[4096];
  EXPECT_EQ(fulmen_plan_explain(plan, text, sizeof text, nullptr), FULMEN_OK);
  EXPECT_EQ(text, explained(call));
  fulmen_plan_destroy(plan);
}

TEST(Explain, RefusesWhatACallRefuses) {
  TestCall call;
  call.problem.softcap = -1;
  char text[16] = "untouched";
  EXPECT_EQ(fulmen_explain(&call.problem, &call.tensors, FULMEN_OPERATION_FORWARD, text,
                           sizeof text, nullptr),
            FULMEN_ERROR_ARGUMENT);
  EXPECT_STREQ(text, "untouched");
}

TEST(BuildInfo, TellsVersionCompilerAndInstructionSets) {
  char text[4096];
  size_t needed = 0;
  ASSERT_EQ(fulmen_build_info(text, sizeof text, &needed), FULMEN_OK);
  EXPECT_EQ(needed, std::strlen(text) + 1);
  EXPECT_THAT(text, HasSubstr(std::string("\"version\": \"") + fulmen_version() + "\""));
  for (const char* key : {"\"commit\"", "\"compiler\"", "\"build_type\"", "\"isas\": [\"",
                          "\"isa\"", "\"threads\""}) {
    EXPECT_THAT(text, HasSubstr(key));
  }
}

}  // namespace
}  // namespace fulmen::test
