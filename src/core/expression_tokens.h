// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The words of the language, and a text token by token.
#pragma once

#include "core/expression.h"

namespace fulmen::expression {

struct Function {
  const char* name;
  Op op;
  int least, most;  // arguments
};

const Function* function_of(std::string_view name);  // null: none
int variable_of(std::string_view name);              // a Variable; -1: none

// Whether a name means something in the language; and a sentence of what means something.
bool is_reserved(std::string_view name);
inline constexpr const char* kAllNames =
    "variables are s, b, h, hk, i, j, p, q_len and kv_len, functions min, max, abs, exp, log, "
    "tanh, "
    "sqrt, floor, clamp and select";

// A letter, and letters, digits and _ behind it.
bool is_name(std::string_view name);

enum class TokenKind { kEnd, kNumber, kName, kScalar, kSymbol };

struct Token {
  TokenKind kind;
  std::string_view text;
  i32 column;
};

class Tokens {
 public:
  // of: outlives the tokens.
  explicit Tokens(const Text& of) : text_(of), source_(of.text) { next(); }

  const Token& now() const { return token_; }
  void next();  // throws Error where there is no token

  bool sees(std::string_view text) const {
    return token_.text == text && token_.kind != TokenKind::kEnd;
  }
  bool accept(std::string_view text) {
    if (!sees(text)) return false;
    next();
    return true;
  }

 private:
  char at(size_t index) const { return index < source_.size() ? source_[index] : '\0'; }
  size_t end_of_name(size_t index) const;
  size_t end_of_number(size_t index) const;
  size_t end_of_symbol(size_t index) const;

  const Text& text_;
  std::string_view source_;
  Token token_{};
  size_t end_ = 0;
};

}  // namespace fulmen::expression
