// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen_schema: what it says is what the header has.
#include <gmock/gmock.h>

#include <cstddef>
#include <string>

#include "core/error.h"
#include "fulmen/fulmen.h"

namespace fulmen::test {
namespace {

using testing::HasSubstr;

std::string schema() {
  size_t needed = 0;
  EXPECT_EQ(fulmen_schema(nullptr, 0, &needed), FULMEN_OK);
  std::string text(needed, '\0');
  EXPECT_EQ(fulmen_schema(text.data(), text.size(), nullptr), FULMEN_OK);
  text.pop_back();
  return text;
}

TEST(Schema, IsOneObjectWithBalancedBrackets) {
  const std::string text = schema();
  std::string open;
  bool is_quoted = false;
  for (const char c : text) {
    if (c == '"') is_quoted = !is_quoted;
    if (is_quoted) continue;
    if (c == '{' || c == '[') open += c == '{' ? '}' : ']';
    if (c != '}' && c != ']') continue;
    ASSERT_FALSE(open.empty());
    ASSERT_EQ(open.back(), c);
    open.pop_back();
  }
  EXPECT_TRUE(open.empty() && !is_quoted);
  EXPECT_EQ(text.front(), '{');
}

TEST(Schema, SaysWhereTheFieldsAre) {
  const std::string text = schema();
#define FULMEN_OPTION(kind, type, name, ...)                                           \
  EXPECT_THAT(text, HasSubstr(sentence("\"offset\": ", offsetof(fulmen_problem, name), \
                                       ", \"bytes\": ", sizeof(fulmen_problem::name))));
#include "fulmen/options.def"
#define FULMEN_ARRAY(array, member, word, ...)                                                 \
  EXPECT_THAT(text, HasSubstr(sentence("{\"name\": \"" #member "\", \"word\": \"" word "\", ", \
                                       "\"offset\": ", offsetof(fulmen_tensors, member))));
#include "fulmen/arrays.def"
  EXPECT_THAT(text, HasSubstr(sentence("\"sizes\": {\"problem\": ", sizeof(fulmen_problem),
                                       ", \"tensors\": ", sizeof(fulmen_tensors))));
}

TEST(Schema, HoldsTheBytesOfInit) {
  fulmen_problem problem;
  fulmen_problem_init(&problem);
  const auto* bytes = reinterpret_cast<const unsigned char*>(&problem);
  std::string digits;
  for (size_t i = 0; i < sizeof problem; ++i) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", bytes[i]);
    digits += two;
  }
  EXPECT_THAT(schema(), HasSubstr("\"problem\": \"" + digits + "\""));
}

TEST(Schema, NamesChoicesRolesAndBounds) {
  const std::string text = schema();
  for (const char* part :
       {"\"choices\": [\"bottom_right\", \"top_left\"]",
        "\"name\": \"sm90\", \"number\": 6, \"backend\": \"cuda\"",
        "\"name\": \"FULMEN_ERROR_SHAPE\", \"number\": 2",
        "\"name\": \"bfloat16\", \"number\": 4, \"bytes\": 2, \"kind\": \"float\"",
        "\"kind\": \"limit\"", "\"default\": null",
        "\"role\": \"result\", \"differentiable\": false, \"forward_only\": false, "
        "\"replaceable\": false",
        "\"forward_only\": true, \"replaceable\": true", "\"role\": \"upstream\"",
        "\"of\": \"sinks\"", "\"name\": \"kv_rows\", \"least\": 16"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
}

}  // namespace
}  // namespace fulmen::test
