// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Expressions of the process by number. The number is a hash of the content, so that calls, plans
// and kernels of equal texts are one, and a program that was saved finds its expression where the
// same text was made.

#include "core/expression.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "core/expression_tokens.h"
#include "core/program.h"

namespace fulmen::expression {
namespace {

struct Kept {
  std::shared_ptr<const Expression> expression;
  i64 count;  // of makes without a release
};

struct Register {
  std::mutex mutex;
  std::unordered_map<u64, Kept> by_number;
};

Register& the_register() {
  static Register all;
  return all;
}

// FNV-1a of the texts and names, each with a byte behind it that none of them has.
u64 number_of(const Expression& expression) {
  u64 hash = 0xcbf29ce484222325u;
  const auto add = [&hash](std::string_view text) {
    for (const char c : text) hash = (hash ^ static_cast<u8>(c)) * 0x100000001b3u;
    hash = (hash ^ 0xffu) * 0x100000001b3u;
  };
  add(expression.score.text);
  add(expression.mask.text);
  for (const std::string& name : expression.names.captures) add(name);
  add("$");
  for (const std::string& name : expression.names.scalars) add(name);
  return hash == 0 ? 1 : hash;
}

bool are_equal(const Expression& a, const Expression& b) {
  return a.score.text == b.score.text && a.mask.text == b.mask.text &&
         a.names.captures == b.names.captures && a.names.scalars == b.names.scalars;
}

void check_names(const std::vector<std::string>& names, const char* what) {
  if (names.size() > kMaxNames) {
    refuse(sentence("an expression has ", names.size(), " ", what, "s; allowed are up to ",
                    kMaxNames));
  }
  for (size_t index = 0; index < names.size(); ++index) {
    const std::string& name = names[index];
    if (!is_name(name)) {
      refuse(sentence("the name of ", what, " ", index,
                      " is not a letter with up to 63 letters, digits and _ behind it"));
    }
    if (is_reserved(name)) {
      refuse(
          sentence("a ", what, " is named '", name, "', which means something else: ", kAllNames));
    }
    if (std::count(names.begin(), names.end(), name) > 1) {
      refuse(sentence("two ", what, "s are named '", name, "'"));
    }
  }
}

void check_used(const Expression& expression, Op op, const std::vector<std::string>& names,
                const char* what) {
  for (size_t index = 0; index < names.size(); ++index) {
    bool is_used = false;
    for (const Text* text : {&expression.score, &expression.mask}) {
      for (const Node& node : text->nodes) {
        is_used = is_used || (node.op == op && static_cast<size_t>(node.index) == index);
      }
    }
    if (is_used) continue;
    refuse(sentence("the ", what, " '", names[index],
                    "' is given, but neither score nor mask has it: leave it out"));
  }
}

}  // namespace

u64 make(const char* score, const char* mask, Names names) {
  if (score == nullptr && mask == nullptr) {
    refuse("score and mask are both null; an expression has at least one of them");
  }
  check_names(names.captures, "capture");
  check_names(names.scalars, "scalar");
  auto made = std::make_shared<Expression>();
  if (score != nullptr) made->score = parse("score", score, names);
  if (mask != nullptr) made->mask = parse("mask", mask, names);
  made->names = std::move(names);
  check_used(*made, Op::kRead, made->names.captures, "capture");
  check_used(*made, Op::kScalar, made->names.scalars, "scalar");
  compile(made, {});  // what types alone say is refused here
  const u64 number = number_of(*made);
  Register& all = the_register();
  const std::lock_guard lock(all.mutex);
  Kept& kept = all.by_number[number];
  if (kept.expression == nullptr)
    kept.expression = std::move(made);
  else if (!are_equal(*kept.expression, *made)) {
    refuse("another expression of this process has the same number; change a space in the text");
  }
  ++kept.count;
  return number;
}

void release(u64 number) {
  Register& all = the_register();
  const std::lock_guard lock(all.mutex);
  const auto at = all.by_number.find(number);
  if (at != all.by_number.end() && --at->second.count == 0) all.by_number.erase(at);
}

std::shared_ptr<const Expression> find(u64 number) {
  Register& all = the_register();
  const std::lock_guard lock(all.mutex);
  const auto at = all.by_number.find(number);
  if (at == all.by_number.end()) {
    refuse(sentence("expression is ", number,
                    ", the number of none that this process has made; fulmen_expression_create "
                    "gives it, and it holds until fulmen_expression_destroy"));
  }
  return at->second.expression;
}

}  // namespace fulmen::expression
