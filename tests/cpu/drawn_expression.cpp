// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// See drawn_expression.h.

#include "drawn_expression.h"

#include <algorithm>

#include "core/expression.h"
#include "core/validate.h"

namespace fulmen::test {
namespace {

class Drawer {
 public:
  explicit Drawer(RandomProblem& random) : random_(random) {}

  // Of moderate size and slope.
  std::string score() {
    std::string text = random_.chance(0.9) ? "s" : "0.5 * s";
    for (i64 terms = random_.number(0, 3); terms-- > 0;) text = term(text);
    return random_.chance(0.2) ? "let y = " + text + "; y * 0.5 + 0.25 * y" : text;
  }

  std::string mask() {
    std::string text = condition();
    if (random_.chance(0.4)) text += (random_.chance(0.5) ? " and " : " or ") + condition();
    return random_.chance(0.2) ? "not (" + text + ")" : text;
  }

 private:
  std::string integer() {
    return random_.one_of<std::string>({"i", "j", "p", "(j - p)", "(i // 3)", "(j % 5)", "h", "b",
                                        "hk", "abs(i - j)", "min(i, j)", "(q_len - i)",
                                        "clamp(j - p, -7, 7)", "floor(j / 4.0)", "ids[j]"});
  }

  std::string condition() {
    return random_.one_of<std::string>(
        {"j <= p + 3", "(i + 2 * j) % 5 != 0", "ids[i] == ids[j]", "0 <= j - p + 20 < 40", "i != j",
         integer() + " < " + integer(), "j < kv_len - 2", "flags[h, j]"});
  }

  std::string read() {
    return random_.one_of<std::string>({"table[h, clamp(j - p, -9, 9) + 9]", "table[h % 2, j]",
                                        "row[i]", "row[j]", "one", "table[0, i // 2]", "row[h]"});
  }

  std::string term(const std::string& y) {
    switch (random_.number(0, 9)) {
      case 0:
        return y + " + " + read();
      case 1:
        return y + " - 0.1 * abs(" + integer() + " - " + integer() + ")";
      case 2:
        return "tanh((" + y + ") / 3) * 3";
      case 3:
        return "select(" + condition() + ", " + y + ", 0.5 * (" + y + ") - 1)";
      case 4:
        return "(" + y + ") * (1 + 0.2 * " + read() + ")";
      case 5:
        return "max(min(" + y + ", 2.5), -40) + 0.3 * exp(-abs(" + y + "))";
      case 6:
        return "clamp(" + y + ", -3.3, 4.1) + sqrt(abs(" + y + ") + 1)";
      case 7:
        return y + " + $a * log(2 + abs(" + integer() + ") / 7)";
      case 8:
        return "(" + y + ") / (1.5 + abs(0.1 * " + read() + "))";
      default:
        return "-(" + y + ") * 0.5 + 0.01 * " + integer();
    }
  }

  RandomProblem& random_;
};

bool has_word(const std::string& text, const std::string& word) {
  return text.find(word) != std::string::npos;
}

void fill_integers(RandomProblem& random, const Tensor& tensor, i64 most) {
  RandomProblem::for_each(tensor, [&](const i64* at) {
    char* const to = RandomProblem::address(tensor, at);
    const i64 value = random.number(0, most);
    if (tensor.dtype == DType::kBool) store_bytes(to, static_cast<u8>(value));
    if (tensor.dtype == DType::kInt32) store_bytes(to, static_cast<i32>(value));
    if (tensor.dtype == DType::kInt64) store_bytes(to, value);
  });
}

}  // namespace

Request with_expression(RandomProblem& random, const Request& forward) {
  Request request = forward;
  Drawer drawer(random);
  const i64 kind = random.number(0, 3);
  const std::string score = kind == 0 ? "" : drawer.score();
  const std::string mask = kind == 1 ? "" : drawer.mask();
  const std::string both = score + " | " + mask;
  const DType dtype = request.arrays[Array::kQ].dtype;
  const auto table_dtype = [&] {
    return random.one_of({accumulator(dtype), DType::kFloat32, dtype, DType::kFloat64});
  };
  expression::Names names;
  const auto add = [&](const char* name, const Tensor& tensor) {
    request.arrays[capture(static_cast<int>(names.captures.size()))] = tensor;
    names.captures.emplace_back(name);
  };
  for (const auto& [name, shape] :
       {std::pair{"table[", std::vector<i64>{2, 19}}, std::pair{"row[", std::vector<i64>{33}},
        std::pair{"one", std::vector<i64>{}}}) {
    if (!has_word(both, name)) continue;
    const Tensor tensor = shape.empty() ? random.contiguous(table_dtype(), shape)
                                        : random.array(table_dtype(), shape);
    random.fill_normal(tensor);
    add(std::string(name).substr(0, std::string(name).find('[')).c_str(), tensor);
  }
  if (has_word(both, "ids[")) {
    const Tensor ids = random.array(random.one_of({DType::kInt32, DType::kInt64}), {50});
    fill_integers(random, ids, 2);
    add("ids", ids);
  }
  if (has_word(both, "flags[")) {
    const Tensor flags = random.array(DType::kBool, {3, 40});
    fill_integers(random, flags, 1);
    add("flags", flags);
  }
  if (has_word(both, "$a")) {
    names.scalars.emplace_back("a");
    request.options.scalar0 = random.normal();
  }
  request.options.expression =
      expression::make(score.empty() ? nullptr : score.c_str(),
                       mask.empty() ? nullptr : mask.c_str(), std::move(names));
  return request;
}

namespace {

Tensor drawn_segments(RandomProblem& random, const Problem& problem, Array offsets, i64 rows) {
  const Tensor& cu = problem.arrays[offsets];
  const i64 count = random.number(1, 3);
  const Tensor segments = random.array(random.one_of({DType::kInt32, DType::kInt64}),
                                       {problem.num_sequences, count, 3});
  std::vector<i64> cuts;
  RandomProblem::for_each(segments, [&](const i64* at) {
    const bool is_packed = cu.present();
    const i64 own = is_packed ? cu.index(0, 0, 0, at[0] + 1) - cu.index(0, 0, 0, at[0]) : rows;
    if (at[1] == 0 && at[2] == 0) {
      cuts.clear();
      for (i64 cut = 0; cut < 2 * count; ++cut) cuts.push_back(random.number(0, own));
      std::ranges::sort(cuts);
    }
    const i64 first = cuts[static_cast<size_t>(2 * at[1])];
    const i64 words[] = {first, cuts[static_cast<size_t>(2 * at[1] + 1)] - first,
                         random.number(0, 60)};
    char* const to = RandomProblem::address(segments, at);
    if (segments.dtype == DType::kInt32) store_bytes(to, static_cast<i32>(words[at[2]]));
    if (segments.dtype == DType::kInt64) store_bytes(to, words[at[2]]);
  });
  return segments;
}

}  // namespace

Request with_segments(RandomProblem& random, const Request& given) {
  const Problem problem = validate(given, Pointers::kChecked);
  if (problem.has_caches() || problem.has(Array::kBlocks) || random.chance(0.6)) return given;
  Request request = given;
  request.arrays[Array::kQSegments] = drawn_segments(random, problem, Array::kCuQ, problem.q_rows);
  if (random.chance(0.3)) return request;
  request.arrays[Array::kKvSegments] =
      drawn_segments(random, problem, Array::kCuKv, problem.kv_rows);
  return request;
}

bool add_capture_gradients(RandomProblem& random, Request& backward) {
  bool has_any = false;
  for (int index = 0; index < kNumCaptures; ++index) {
    const Tensor& tensor = backward.arrays[capture(index)];
    if (tensor.present() && is_float(tensor.dtype)) {
      backward.arrays[capture_gradient(index)] = random.twin(tensor);
      has_any = true;
    }
  }
  return has_any;
}

std::string expression_text(const Request& request) {
  const auto expression = expression::find(request.options.expression);
  return expression->score.text + " | " + expression->mask.text;
}

}  // namespace fulmen::test
