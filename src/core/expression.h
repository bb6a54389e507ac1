// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a user writes of scores and masks: a text becomes a list of nodes, each of which names
// earlier ones. Types are not known here: those of captured arrays come with a call, and program.h
// makes a typed list of the nodes then.
//
//   text   := { "let" name "=" or ";" } or
//   or     := and { "or" and }          and  := not { "and" not }       not := "not" not | compared
//   compared := sum { ("<" | "<=" | ">" | ">=" | "==" | "!=") sum }     a < b < c: both hold
//   sum    := product { ("+" | "-") product }
//   product := signed { ("*" | "/" | "//" | "%") signed }               signed := "-" signed | atom
//   atom   := number | "true" | "false" | variable | "$" scalar | capture [ "[" or { "," or } "]" ]
//           | function "(" or { "," or } ")" | "(" or ")"
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "kernels/base.cuh"

namespace fulmen::expression {

inline constexpr int kMaxOperations = 256;
inline constexpr int kMaxNames = 8;  // captures of a call, and scalars
inline constexpr int kMaxIndices = 4;

// Operators take earlier values; those before kToFloat take none but the indices of a read.
enum class Op : u8 {
  kConstant,
  kVariable,
  kScalar,
  kRead,
  kToFloat,
  kAdd,
  kSubtract,
  kMultiply,
  kDivide,
  kFloorDivide,
  kModulo,
  kNegate,
  kMin,
  kMax,
  kAbs,
  kExp,
  kLog,
  kTanh,
  kSqrt,
  kFloor,
  kClamp,
  kLess,
  kLessEqual,
  kEqual,
  kNotEqual,
  kAnd,
  kOr,
  kNot,
  kSelect,
};

enum class Type : u8 { kUnknown, kBool, kInt, kFloat };

// The last two are not in the language: positions by the segments of a sequence (their one
// argument), -1 of a row or key that none has.
enum class Variable : u8 {
  kS,
  kB,
  kH,
  kHk,
  kI,
  kJ,
  kP,
  kQLen,
  kKvLen,
  kQPosition,
  kKvPosition,
  kCount
};

constexpr const char* name(Type type) {
  constexpr const char* kNames[] = {"unknown", "boolean", "integer", "float"};
  return kNames[static_cast<int>(type)];
}

struct Node {
  Op op;
  Type type;  // of a constant; else unknown
  u8 num_args;
  i32 args[kMaxIndices];
  i32 index;    // of a variable, a scalar or a capture
  i64 integer;  // of a constant that is no float
  double real;  // of a constant that is one
  i32 column;   // where it stands in the text, from 0
};

// One of the two texts.
struct Text {
  const char* subject = "";  // "score" or "mask"
  std::string text;          // "": none
  std::vector<Node> nodes;   // the last one is the value

  bool present() const { return !nodes.empty(); }
};

struct Names {
  std::vector<std::string> captures;
  std::vector<std::string> scalars;
};

// "score has ... at column 7" with the line and a caret below it. Throws Error.
[[noreturn]] void refuse_at(const Text& text, i32 column, const std::string& what);

// Throws Error with one sentence for any text that is not in the language.
Text parse(const char* subject, std::string_view text, const Names& names);

// Both texts of a call, immutable.
struct Expression {
  Text score;
  Text mask;
  Names names;
};

// Parses both (null: none) and checks the names. The number is that of the content: equal texts and
// names have the same one, also in another process. Each make wants one release. Thread safe.
u64 make(const char* score, const char* mask, Names names);
void release(u64 number);

// Throws Error where no expression has the number. Thread safe.
std::shared_ptr<const Expression> find(u64 number);

}  // namespace fulmen::expression
