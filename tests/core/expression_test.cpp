// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The language of scores and masks: values by hand, sentences with columns, derivatives against
// differences, and that any text ends in a program or in one sentence.
#include "core/expression.h"

#include <gmock/gmock.h>

#include <cmath>
#include <random>

#include "core/program.h"

namespace fulmen::test {
namespace {

using expression::Expression;
using expression::Operands;
using expression::Program;
using expression::Value;
using expression::Variable;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

// Captures t (3, 4) of float32 and n (4) of int32; scalar x.
struct Sources {
  float t[12] = {0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23};
  i32 n[4] = {5, -6, 7, 8};
  double x = 0.5;
  Arrays arrays;

  Sources() {
    arrays[capture(0)] = {t, DType::kFloat32, 4, {1, 1, 3, 4}, {0, 0, 4, 1}};
    arrays[capture(1)] = {n, DType::kInt32, 4, {1, 1, 1, 4}, {0, 0, 0, 1}};
  }

  Operands operands(double s, i64 i, i64 j) {
    Operands all;
    all.s = s;
    all.variables = {0, 1, 2, 3, i, j, i + 2, 9, 11, 0, 0};  // s, b, h, hk, i, j, p, q_len, kv_len
    all.scalars = &x;
    all.arrays = &arrays;
    return all;
  }
};

std::shared_ptr<const Program> compiled(const char* score, const char* mask = nullptr) {
  const expression::Names names{{"t", "n"}, {"x"}};
  auto made = std::make_shared<Expression>();
  made->names = names;
  if (score) made->score = expression::parse("score", score, names);
  if (mask) made->mask = expression::parse("mask", mask, names);
  return expression::compile(made, std::vector<DType>{DType::kFloat32, DType::kInt32});
}

Value value_of(const Program& program, i32 step, const expression::Goal& goal,
               const Operands& operands) {
  std::vector<Value> values(program.steps.size());
  evaluate(program, goal, operands, values.data());
  return values[static_cast<size_t>(step)];
}

double score_of(const char* text, double s = 2, i64 i = 3, i64 j = 4) {
  Sources sources;
  const auto program = compiled(text);
  return value_of(*program, program->score, program->score_goal, sources.operands(s, i, j)).real;
}

bool mask_of(const char* text, i64 i = 3, i64 j = 4) {
  Sources sources;
  const auto program = compiled(nullptr, text);
  return value_of(*program, program->mask, program->mask_goal, sources.operands(0, i, j)).integer;
}

std::string refusal_of(const std::string& text, bool is_mask = false) {
  try {
    is_mask ? compiled(nullptr, text.c_str()) : compiled(text.c_str());
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kArgument);
    return error.what();
  }
  return "";
}

TEST(Expression, HasTheValuesOfArithmetic) {
  EXPECT_EQ(score_of("1 + 2 * 3 - 4"), 3);
  EXPECT_EQ(score_of("(1 + 2) * 3 / 2"), 4.5);
  EXPECT_EQ(score_of("-7 // 2"), -4);
  EXPECT_EQ(score_of("-7 % 3"), 2);
  EXPECT_EQ(score_of("7 % -3"), -2);
  EXPECT_EQ(score_of("7 // (i - i)"), 0);
  EXPECT_EQ(score_of("7 % (i - i)"), 0);
  EXPECT_EQ(score_of("7 / 2"), 3.5);
  EXPECT_EQ(score_of("--s"), 2);
  EXPECT_EQ(score_of("9223372036854775807 + 1"), -0x1p63);
  EXPECT_EQ(score_of("(-9223372036854775807 - 1) // -1"), -0x1p63);
  EXPECT_EQ(score_of("abs(-3) + min(4, 2, 3) + max(1.5, 2)"), 7);
  EXPECT_EQ(score_of("clamp(s, -1, 1) + clamp(i, 5, 9)"), 6);
  EXPECT_EQ(score_of("floor(-2.5) + floor(3)"), 0);
  EXPECT_EQ(score_of("floor(1e300)"), 0x1p63);
  EXPECT_EQ(score_of("floor(0 / 0.0)"), 0);
  EXPECT_DOUBLE_EQ(score_of("exp(log(s)) + tanh(0) + sqrt(16)"), 6);
  EXPECT_EQ(score_of("select(i < j, 1, 2.5)"), 1);
  EXPECT_EQ(score_of("let d = i - j; let e = d * d; e + d"), 0);
  EXPECT_EQ(score_of("let d = s; d + 1"), 3);
  EXPECT_EQ(score_of("b + 10 * h + 100 * hk + 1000 * p"), 5321);
  EXPECT_EQ(score_of("q_len + kv_len"), 20);
  EXPECT_EQ(score_of("$x * 4"), 2);
  EXPECT_EQ(score_of(" s\t+\n1.5e1 "), 17);
}

TEST(Expression, ReadsArraysAndClampsIndices) {
  EXPECT_EQ(score_of("t[1, 2]"), 12);
  EXPECT_EQ(score_of("t[j - i, n[0] - 3]"), 12);
  EXPECT_EQ(score_of("t[-5, 99]"), 3);
  EXPECT_EQ(score_of("n[9223372036854775807] + n[-9223372036854775807]"), 13);
}

TEST(Expression, HasTheValuesOfLogic) {
  EXPECT_TRUE(mask_of("j <= p"));
  EXPECT_TRUE(mask_of("0 <= j - i < 2"));
  EXPECT_FALSE(mask_of("0 < j - i < 1"));
  EXPECT_TRUE(mask_of("not i == j and (true or false)"));
  EXPECT_TRUE(mask_of("i == 3 and j != 3 or false"));
  EXPECT_TRUE(mask_of("(i < j) == true"));
  EXPECT_TRUE(mask_of("select(i > j, false, j >= 4)"));
  EXPECT_FALSE(mask_of("0 / 0.0 == 0 / 0.0"));
}

TEST(Expression, KeepsNaN) {
  for (const char* text : {"min(1, 0 / 0.0)", "max(0 / 0.0, 1)", "clamp(0 / 0.0, 0, 1)"}) {
    EXPECT_TRUE(std::isnan(score_of(text))) << text;
  }
}

TEST(Expression, SaysWhereATextIsWrong) {
  EXPECT_EQ(refusal_of("s + * 2"),
            "score has '*' where a value is expected, at column 5:\n  s + * 2\n      ^");
  EXPECT_THAT(refusal_of("s +"), HasSubstr("score ends where a value is expected, at column 4"));
  EXPECT_THAT(refusal_of("s + foo"), HasSubstr("unknown name 'foo'"));
  EXPECT_THAT(refusal_of("s 2"), HasSubstr("has '2' behind its end"));
  EXPECT_THAT(refusal_of("2x"), HasSubstr("letter behind a number, at column 2"));
  EXPECT_THAT(refusal_of("s + #"), HasSubstr("a character that is not in the language"));
  EXPECT_THAT(refusal_of("s + 99999999999999999999"), HasSubstr("does not fit"));
  EXPECT_THAT(refusal_of("s + 1e999"), HasSubstr("does not fit"));
  EXPECT_THAT(refusal_of("s + 1.2.3"), HasSubstr("does not fit"));
  EXPECT_THAT(refusal_of("i // 0"), HasSubstr("divides an integer by 0"));
  EXPECT_THAT(refusal_of("s % 2"), HasSubstr("// and % want integers"));
  EXPECT_THAT(refusal_of("t[s, 0]"), HasSubstr("an index is an integer"));
  EXPECT_THAT(refusal_of("$y"), HasSubstr("no scalar of this name"));
  EXPECT_THAT(refusal_of("x"), HasSubstr("a scalar: write $x"));
  EXPECT_THAT(refusal_of("min(s)"), HasSubstr("calls min with 1 values; it takes 2 to 4"));
  EXPECT_THAT(refusal_of("exp(s, 1)"), HasSubstr("calls exp with 2 values; it takes 1"));
  EXPECT_THAT(refusal_of("t[0,0,0,0,0]"), HasSubstr("more than 4 values"));
  EXPECT_THAT(refusal_of("let s = 1; s"), HasSubstr("let wants a new name"));
  EXPECT_THAT(refusal_of("let a = 1; let a = 2; a"), HasSubstr("let wants a new name"));
  EXPECT_THAT(refusal_of("i < j"), HasSubstr("a score is a number"));
  EXPECT_THAT(refusal_of("(i < j) + 1"), HasSubstr("computes with true or false"));
  EXPECT_THAT(refusal_of("not i"), HasSubstr("has a number (integer)"));
  EXPECT_THAT(refusal_of("s < 1", true), HasSubstr("mask has s, but a mask is decided before"));
  EXPECT_THAT(refusal_of("i + j", true), HasSubstr("mask is a number (integer)"));
  EXPECT_THAT(refusal_of(std::string("s\n+\x01")), EndsWith("s +?\n     ^"));
}

TEST(Expression, IsBounded) {
  const auto repeated = [](int count, const std::string& part) {
    std::string text;
    for (int i = 0; i < count; ++i) text += part;
    return text;
  };
  EXPECT_THAT(refusal_of(repeated(100000, "(")), StartsWith("score has 100000 characters"));
  EXPECT_THAT(refusal_of(repeated(9000, "(")), HasSubstr("nested more than 64 levels"));
  EXPECT_THAT(refusal_of(repeated(9000, "-") + "s"), HasSubstr("nested more than 64 levels"));
  EXPECT_THAT(refusal_of(repeated(2000, "not ") + "true"), HasSubstr("nested more than 64 levels"));
  EXPECT_THAT(refusal_of(repeated(300, "s + ") + "s"), HasSubstr("more than 256 operations"));
  EXPECT_EQ(refusal_of(repeated(60, "(") + "s" + repeated(60, ")")), "");
  EXPECT_EQ(refusal_of(repeated(63, "t[0, j] * ") + "s"), "");
}

TEST(Expression, HasOneNumberForEqualTexts) {
  const auto number = [](const char* score, std::vector<std::string> captures) {
    return expression::make(score, nullptr, {std::move(captures), {}});
  };
  const u64 first = number("s + a[h]", {"a"});
  EXPECT_EQ(number("s + a[h]", {"a"}), first);
  EXPECT_NE(number("s + a[i]", {"a"}), first);
  EXPECT_EQ(expression::find(first)->score.text, "s + a[h]");
  expression::release(first);
  EXPECT_NE(expression::find(first), nullptr);
  expression::release(first);
  EXPECT_THROW(expression::find(first), Error);
  expression::release(first);  // of none
}

TEST(Expression, ChecksNames) {
  const auto refusal = [](expression::Names names) -> std::string {
    try {
      expression::make("s", nullptr, std::move(names));
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(refusal({{"a"}, {}}), HasSubstr("'a' is given, but neither score nor mask has it"));
  EXPECT_THAT(refusal({{}, {"a"}}), HasSubstr("the scalar 'a' is given"));
  EXPECT_THAT(refusal({{"kv_len"}, {}}), HasSubstr("means something else"));
  EXPECT_THAT(refusal({{"a", "a"}, {}}), HasSubstr("two captures are named 'a'"));
  EXPECT_THAT(refusal({{"1a"}, {}}), HasSubstr("is not a letter"));
  EXPECT_THAT(refusal({std::vector<std::string>(9, "a"), {}}), HasSubstr("allowed are up to 8"));
}

// ---- Derivatives -------------------------------------------------------------------------------

double slope_of(const char* text, double s) {
  Sources sources;
  const auto program = compiled(text);
  return value_of(*program, program->slope, program->slope_goal, sources.operands(s, 3, 4)).real;
}

TEST(Expression, HasDerivativesOfWhatIsSmooth) {
  for (const char* text :
       {"s * s", "3 * s + 1", "tanh(s / 2) * 2", "exp(-s) + log(s + 3)", "sqrt(s + 2) / (s + 4)",
        "min(s, 2 * s) + max(s * s, 1)", "abs(s - 1) * s", "clamp(s * s, 0.1, 2)",
        "select(i < j, s * s * s, s)", "let d = s * t[1, 1]; d * d + $x * s"}) {
    for (const double s : {-0.9, 0.3, 0.7, 1.6}) {
      const double h = 1e-6;
      const double difference = (score_of(text, s + h) - score_of(text, s - h)) / (2 * h);
      EXPECT_NEAR(slope_of(text, s), difference, 1e-6 * (1 + std::abs(difference)))
          << text << " at " << s;
    }
  }
}

TEST(Expression, HasTheDerivativesThatAreAgreedOnWhereThereIsNone) {
  EXPECT_EQ(slope_of("abs(s)", 0), 0);
  EXPECT_EQ(slope_of("min(s, 3 * s)", 0), 1);
  EXPECT_EQ(slope_of("max(3 * s, s)", 0), 3);
  EXPECT_EQ(slope_of("clamp(s, 0, 1)", 0), 0);
  EXPECT_EQ(slope_of("clamp(s, 0, 1)", 1), 0);
  EXPECT_EQ(slope_of("clamp(s, 0, 1)", 0.5), 1);
  EXPECT_EQ(slope_of("floor(s) * 1.0", 0.5), 0);
  EXPECT_EQ(slope_of("select(s > 0, sqrt(s), 0)", 0), 0);  // of the branch taken
  EXPECT_EQ(slope_of("1.0 * i", 0), 0);
}

TEST(Expression, HasDerivativesByWhatItReads) {
  const char* const text = "s * t[1, j] + tanh(t[1, j] * t[0, i]) + 1.0 * n[0]";
  const auto program = compiled(text);
  ASSERT_EQ(program->derivatives.size(), 2u);  // one for each element that is read
  for (const expression::Derivative& one : program->derivatives) {
    Sources sources;
    std::vector<Value> values(program->steps.size());
    evaluate(*program, one.goal, sources.operands(0.3, 3, 2), values.data());
    const i64 element =
        offset_of(program->step(one.read), values.data(), sources.arrays[capture(0)]);
    const double derivative = values[static_cast<size_t>(one.value)].real;
    double moved[2];
    for (const int side : {0, 1}) {
      Sources other;
      other.t[element] += side == 0 ? -0x1p-8f : 0x1p-8f;
      moved[side] =
          value_of(*program, program->score, program->score_goal, other.operands(0.3, 3, 2)).real;
    }
    EXPECT_NEAR(derivative, (moved[1] - moved[0]) / 0x1p-7, 1e-3);
  }
}

// ---- Any text ----------------------------------------------------------------------------------

TEST(Expression, AnyTextEndsInAProgramOrASentence) {
  constexpr const char* kParts[] = {
      "s",       "i",      "j",    "p",  "t[",  "n[",    "]",
      "(",       ")",      "+",    "-",  "*",   "/",     "//",
      "%",       "<",      "<=",   "==", "!=",  "and",   "or",
      "not",     "let",    "=",    ";",  ",",   "min(",  "clamp(",
      "select(", "floor(", "1",    "0",  "2.5", "1e308", "9223372036854775807",
      "$x",      "$",      "true", "#",  " ",   "t",     "\xc3",
      "q_len"};
  std::mt19937 random(7);
  int num_good = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string text;
    for (auto part = random() % 12; part-- > 0;) {
      text += kParts[random() % std::size(kParts)];
      text += random() % 3 == 0 ? "" : " ";
    }
    const std::string refusal = refusal_of(text, round % 2 == 0);
    num_good += refusal.empty() ? 1 : 0;
    if (refusal.empty()) continue;
    EXPECT_THAT(refusal, StartsWith(round % 2 == 0 ? "mask " : "score "));
  }
  EXPECT_GT(num_good, 50);
}

TEST(Expression, DamagedTextsEndInAProgramOrASentence) {
  const std::string whole =
      "let d = clamp(j - p, -2, 2); select(not (i < j and n[j] == n[i]), s + t[1, d + 2], "
      "tanh(s / 30.0) * 30 - $x * abs(i - j) // 1)";
  std::mt19937 random(11);
  for (int round = 0; round < 20000; ++round) {
    std::string text = whole;
    for (auto change = random() % 4 + 1; change-- > 0 && !text.empty();) {
      const size_t at = random() % text.size();
      if (random() % 3 == 0)
        text.erase(at, random() % 9);
      else if (random() % 2 == 0)
        text[at] = static_cast<char>(random());
      else
        text.insert(at, whole.substr(random() % whole.size(), random() % 12));
    }
    refusal_of(text);
  }
}

}  // namespace
}  // namespace fulmen::test
