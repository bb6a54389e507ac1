// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// See expression_tokens.h.

#include "core/expression_tokens.h"

#include <algorithm>

namespace fulmen::expression {
namespace {

constexpr Function kFunctions[] = {
    {"min", Op::kMin, 2, kMaxIndices}, {"max", Op::kMax, 2, kMaxIndices},
    {"abs", Op::kAbs, 1, 1},           {"exp", Op::kExp, 1, 1},
    {"log", Op::kLog, 1, 1},           {"tanh", Op::kTanh, 1, 1},
    {"sqrt", Op::kSqrt, 1, 1},         {"floor", Op::kFloor, 1, 1},
    {"clamp", Op::kClamp, 3, 3},       {"select", Op::kSelect, 3, 3}};

constexpr std::string_view kVariables[] = {"s", "b", "h", "hk", "i", "j", "p", "q_len", "kv_len"};
static_assert(std::size(kVariables) == static_cast<size_t>(Variable::kQPosition));
constexpr std::string_view kWords[] = {"let", "and", "or", "not", "true", "false"};

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

template <class List>
bool has(const List& list, std::string_view name) {
  return std::find(std::begin(list), std::end(list), name) != std::end(list);
}

}  // namespace

const Function* function_of(std::string_view name) {
  for (const Function& function : kFunctions) {
    if (name == function.name) return &function;
  }
  return nullptr;
}

int variable_of(std::string_view name) {
  const auto* const at = std::find(std::begin(kVariables), std::end(kVariables), name);
  return at == std::end(kVariables) ? -1 : static_cast<int>(at - std::begin(kVariables));
}

bool is_reserved(std::string_view name) {
  return variable_of(name) >= 0 || has(kWords, name) || function_of(name) != nullptr;
}

bool is_name(std::string_view name) {
  if (name.empty() || name.size() > 64 || !is_letter(name[0])) return false;
  return std::all_of(name.begin(), name.end(), [](char c) { return is_letter(c) || is_digit(c); });
}

size_t Tokens::end_of_name(size_t index) const {
  while (is_letter(at(index)) || is_digit(at(index))) ++index;
  return index;
}

size_t Tokens::end_of_number(size_t index) const {
  while (is_digit(at(index)) || at(index) == '.') ++index;
  if (at(index) != 'e' && at(index) != 'E') return index;
  const size_t sign = at(index + 1) == '+' || at(index + 1) == '-' ? 1 : 0;
  if (!is_digit(at(index + 1 + sign))) return index;
  index += 1 + sign;
  while (is_digit(at(index))) ++index;
  return index;
}

size_t Tokens::end_of_symbol(size_t index) const {
  constexpr std::string_view kTwo[] = {"//", "<=", ">=", "==", "!="};
  constexpr std::string_view kOne = "+-*/%<>()[],;=";
  if (has(kTwo, source_.substr(index, 2))) return index + 2;
  if (kOne.find(at(index)) != std::string_view::npos) return index + 1;
  refuse_at(text_, static_cast<i32>(index), "has a character that is not in the language");
}

void Tokens::next() {
  size_t begin = end_;
  while (is_space(at(begin))) ++begin;
  const char c = at(begin);
  TokenKind kind = TokenKind::kEnd;
  end_ = begin;
  if (begin == source_.size()) {
  } else if (is_digit(c) || (c == '.' && is_digit(at(begin + 1)))) {
    kind = TokenKind::kNumber;
    end_ = end_of_number(begin);
  } else if (is_letter(c)) {
    kind = TokenKind::kName;
    end_ = end_of_name(begin);
  } else if (c == '$') {
    kind = TokenKind::kScalar;
    end_ = end_of_name(begin + 1);
  } else {
    kind = TokenKind::kSymbol;
    end_ = end_of_symbol(begin);
  }
  token_ = {kind, source_.substr(begin, end_ - begin), static_cast<i32>(begin)};
  if (kind == TokenKind::kNumber && is_letter(at(end_))) {
    refuse_at(text_, static_cast<i32>(end_), "has a letter behind a number");
  }
}

}  // namespace fulmen::expression
