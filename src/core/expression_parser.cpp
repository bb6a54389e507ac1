// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A parser that descends by the grammar of expression.h. Depth and length are bounded,
// so that any text ends in a list of nodes or in one sentence.

#include <algorithm>
#include <charconv>
#include <locale>
#include <sstream>

#include "core/expression_tokens.h"

namespace fulmen::expression {
namespace {

constexpr size_t kMaxText = 16384;  // characters
constexpr int kMaxDepth = 64;

template <class List>
int index_in(const List& list, std::string_view name) {
  const auto at = std::find(std::begin(list), std::end(list), name);
  return at == std::end(list) ? -1 : static_cast<int>(at - std::begin(list));
}

class Parser {
 public:
  // of: its subject and text are there already; nodes are added.
  Parser(Text& of, const Names& names) : names_(names), result_(of), tokens_(of) {}

  void run() {
    while (accept("let")) definition();
    const i32 value = disjunction();
    if (token().kind != TokenKind::kEnd) fail(token().column, sentence(found(), " behind its end"));
    if (value + 1 != count()) {  // a name of let alone: the value is last
      const Node copy = node(value);
      result_.nodes.push_back(copy);
    }
  }

 private:
  // One level of recursion.
  class Level {
   public:
    explicit Level(Parser& parser) : parser_(parser) {
      if (++parser_.depth_ <= kMaxDepth) return;
      parser_.fail(parser_.token().column,
                   sentence("is nested more than ", kMaxDepth, " levels deep"));
    }
    ~Level() { --parser_.depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    Parser& parser_;
  };

  [[noreturn]] void fail(i32 column, const std::string& what) const {
    refuse_at(result_, column, what);
  }

  // What the text does at the token.
  std::string found() const {
    return token().kind == TokenKind::kEnd ? std::string("ends")
                                           : sentence("has '", token().text, "'");
  }

  const Token& token() const { return tokens_.now(); }
  void next() { tokens_.next(); }
  bool sees(std::string_view text) const { return tokens_.sees(text); }
  bool accept(std::string_view text) { return tokens_.accept(text); }
  void expect(std::string_view text, const char* where) {
    if (accept(text)) return;
    fail(token().column, sentence(found(), " where '", text, "' ", where, " is expected"));
  }

  // ---- Nodes
  // -------------------------------------------------------------------------------------

  i32 count() const { return static_cast<i32>(result_.nodes.size()); }
  const Node& node(i32 index) const { return result_.nodes[static_cast<size_t>(index)]; }

  i32 add(Node made) {
    if (count() >= kMaxOperations) {
      fail(made.column, sentence("has more than ", kMaxOperations, " operations"));
    }
    result_.nodes.push_back(made);
    return static_cast<i32>(count() - 1);
  }
  i32 add(Op op, i32 column, std::initializer_list<i32> args, i32 index = 0) {
    Node made{op, Type::kUnknown, static_cast<u8>(args.size()), {}, index, 0, 0, column};
    std::copy(args.begin(), args.end(), made.args);
    return add(made);
  }
  i32 add_constant(i32 column, Type type, i64 integer, double real) {
    return add(Node{Op::kConstant, type, 0, {}, 0, integer, real, column});
  }

  // ---- The grammar
  // -------------------------------------------------------------------------------

  void definition() {
    const Token name = token();
    const bool is_free = name.kind == TokenKind::kName && !is_reserved(name.text) &&
                         index_in(names_.captures, name.text) < 0 && find_local(name.text) < 0;
    if (!is_free) fail(name.column, sentence(found(), " where let wants a new name"));
    next();
    expect("=", "of let");
    const i32 value = disjunction();
    expect(";", "behind the value of let");
    locals_.push_back({name.text, value});
  }

  i32 disjunction() {
    const Level level(*this);
    i32 value = conjunction();
    for (i32 column = token().column; accept("or"); column = token().column) {
      value = add(Op::kOr, column, {value, conjunction()});
    }
    return value;
  }

  i32 conjunction() {
    i32 value = negation();
    for (i32 column = token().column; accept("and"); column = token().column) {
      value = add(Op::kAnd, column, {value, negation()});
    }
    return value;
  }

  i32 negation() {
    const i32 column = token().column;
    if (!accept("not")) return comparison();
    const Level level(*this);
    return add(Op::kNot, column, {negation()});
  }

  i32 comparison() {
    i32 left = sum();
    i32 all = -1;
    while (token().kind == TokenKind::kSymbol) {
      const Token symbol = token();
      const bool is_one = accept("<") || accept("<=") || accept(">") || accept(">=") ||
                          accept("==") || accept("!=");
      if (!is_one) break;
      const i32 right = sum();
      const i32 one = compared(symbol, left, right);
      all = all < 0 ? one : add(Op::kAnd, symbol.column, {all, one});
      left = right;
    }
    return all < 0 ? left : all;
  }

  i32 compared(const Token& symbol, i32 left, i32 right) {
    if (symbol.text[0] == '>') std::swap(left, right);
    const bool is_order = symbol.text[0] == '<' || symbol.text[0] == '>';
    const Op op = is_order ? (symbol.text.size() == 1 ? Op::kLess : Op::kLessEqual)
                           : (symbol.text[0] == '=' ? Op::kEqual : Op::kNotEqual);
    return add(op, symbol.column, {left, right});
  }

  i32 sum() {
    i32 value = product();
    while (sees("+") || sees("-")) {
      const Token symbol = token();
      next();
      const Op op = symbol.text == "+" ? Op::kAdd : Op::kSubtract;
      value = add(op, symbol.column, {value, product()});
    }
    return value;
  }

  i32 product() {
    i32 value = negative();
    while (sees("*") || sees("/") || sees("//") || sees("%")) {
      const Token symbol = token();
      next();
      const Op op = symbol.text == "*"   ? Op::kMultiply
                    : symbol.text == "/" ? Op::kDivide
                    : symbol.text == "%" ? Op::kModulo
                                         : Op::kFloorDivide;
      value = add(op, symbol.column, {value, negative()});
    }
    return value;
  }

  i32 negative() {
    const i32 column = token().column;
    if (!accept("-")) return atom();
    const Level level(*this);
    return add(Op::kNegate, column, {negative()});
  }

  i32 atom() {
    const Token first = token();
    if (accept("(")) {
      const i32 value = disjunction();
      expect(")", "that closes a parenthesis");
      return value;
    }
    if (first.kind == TokenKind::kEnd || first.kind == TokenKind::kSymbol) {
      fail(first.column, sentence(found(), " where a value is expected"));
    }
    next();
    if (first.kind == TokenKind::kNumber) return number(first);
    return first.kind == TokenKind::kScalar ? scalar(first) : named(first);
  }

  i32 number(const Token& token) {
    const bool is_integer = token.text.find_first_not_of("0123456789") == std::string_view::npos;
    i64 integer = 0;
    double real = 0;
    bool fits;
    if (is_integer) {
      const char* const end = token.text.data() + token.text.size();
      const auto [stop, error] = std::from_chars(token.text.data(), end, integer);
      fits = error == std::errc{} && stop == end;
    } else {
      std::istringstream in{std::string(token.text)};
      in.imbue(std::locale::classic());
      fits = static_cast<bool>(in >> real) && in.peek() == std::istringstream::traits_type::eof();
    }
    if (!fits) fail(token.column, "has a number that does not fit a 64-bit integer or float");
    return add_constant(token.column, is_integer ? Type::kInt : Type::kFloat, integer, real);
  }

  i32 scalar(const Token& token) {
    const int index = index_in(names_.scalars, token.text.substr(1));
    if (index < 0) {
      fail(token.column, sentence("has '", token.text, "', but no scalar of this name is given"));
    }
    return add(Op::kScalar, token.column, {}, index);
  }

  int find_local(std::string_view name) const {
    for (size_t index = 0; index < locals_.size(); ++index) {
      if (locals_[index].name == name) return static_cast<int>(index);
    }
    return -1;
  }

  i32 named(const Token& token) {
    if (token.text == "true" || token.text == "false") {
      return add_constant(token.column, Type::kBool, token.text == "true", 0);
    }
    if (const Function* function = function_of(token.text)) return call(token, *function);
    if (const int local = find_local(token.text); local >= 0) {
      return locals_[static_cast<size_t>(local)].value;
    }
    if (const int variable = variable_of(token.text); variable >= 0) {
      const bool is_score = variable == static_cast<int>(Variable::kS);
      if (is_score && std::string_view(result_.subject) == "mask") {
        fail(token.column, "has s, but a mask is decided before there is a score");
      }
      return add(Op::kVariable, token.column, {}, variable);
    }
    const int capture = index_in(names_.captures, token.text);
    if (capture >= 0) return read(token, capture);
    const bool is_scalar = index_in(names_.scalars, token.text) >= 0;
    fail(token.column, is_scalar ? sentence("has '", token.text, "', a scalar: write $", token.text)
                                 : sentence("has the unknown name '", token.text, "'; ", kAllNames,
                                            ", and captures are given with the text"));
  }

  // Values up to the closing bracket.
  std::vector<i32> list(std::string_view close, const char* where) {
    std::vector<i32> values;
    do {
      values.push_back(disjunction());
      if (values.size() > kMaxIndices) {
        fail(token().column, sentence("has more than ", kMaxIndices, " values in a list"));
      }
    } while (accept(","));
    expect(close, where);
    return values;
  }

  i32 read(const Token& token, int capture) {
    Node made{Op::kRead, Type::kUnknown, 0, {}, capture, 0, 0, token.column};
    if (accept("[")) {
      const std::vector<i32> indices = list("]", "behind the indices of an array");
      std::copy(indices.begin(), indices.end(), made.args);
      made.num_args = static_cast<u8>(indices.size());
    }
    return add(made);
  }

  i32 call(const Token& token, const Function& function) {
    expect("(", "behind the name of a function");
    const std::vector<i32> args = list(")", "behind the arguments of a function");
    const int given = static_cast<int>(args.size());
    if (given < function.least || given > function.most) {
      fail(token.column,
           sentence("calls ", function.name, " with ", given, " values; it takes ", function.least,
                    function.most > function.least ? sentence(" to ", function.most) : ""));
    }
    if (function.least == 1) return add(function.op, token.column, {args[0]});
    if (function.least == 3) return add(function.op, token.column, {args[0], args[1], args[2]});
    i32 value = args[0];
    for (size_t i = 1; i < args.size(); ++i)
      value = add(function.op, token.column, {value, args[i]});
    return value;
  }

  struct Local {
    std::string_view name;
    i32 value;
  };

  const Names& names_;
  Text& result_;
  Tokens tokens_;
  int depth_ = 0;
  std::vector<Local> locals_;
};

}  // namespace

void refuse_at(const Text& text, i32 column, const std::string& what) {
  constexpr i32 kShown = 60;  // characters on each side
  const auto size = static_cast<i32>(text.text.size());
  const i32 begin = max(0, column - kShown), end = min(size, column + kShown);
  std::string line;
  for (i32 i = begin; i < end; ++i) {
    const char c = text.text[static_cast<size_t>(i)];
    line += c >= ' ' && c <= '~' ? c : c == '\n' || c == '\t' || c == '\r' ? ' ' : '?';
  }
  refuse(sentence(text.subject, " ", what, ", at column ", column + 1, ":\n  ", line, "\n  ",
                  std::string(static_cast<size_t>(column - begin), ' '), "^"));
}

Text parse(const char* subject, std::string_view text, const Names& names) {
  if (text.size() > kMaxText) {
    refuse(sentence(subject, " has ", text.size(), " characters; allowed are up to ", kMaxText));
  }
  Text result{subject, std::string(text), {}};
  Parser(result, names).run();
  return result;
}

}  // namespace fulmen::expression
