// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen.h section 7: what the header holds, as text for bindings. Made of the tables in
// include/fulmen.

#include <cmath>
#include <cstddef>
#include <span>
#include <string>

#include "api/boundary.h"
#include "core/arrays.h"
#include "core/options.h"
#include "plan/explain.h"

namespace fulmen::api {
namespace {

// {"name": value, ...} or [value, ...], as text.
class Json {
 public:
  explicit Json(const char* brackets) : close_(brackets[1]) { text_ += brackets[0]; }

  // A member that is text already: a number, true, null, another object.
  Json& raw(const char* name, const std::string& value) {
    if (text_.size() > 1) text_ += ", ";
    text_ += name == nullptr ? value : json::field(name, value);
    return *this;
  }
  Json& text(const char* name, const char* value) { return raw(name, json::quoted(value)); }
  template <class Number>
  Json& number(const char* name, Number value) {
    return raw(name, sentence(value));
  }
  Json& boolean(const char* name, bool value) { return raw(name, value ? "true" : "false"); }

  std::string done() const { return text_ + close_; }

 private:
  std::string text_;
  char close_;
};

std::string list_of(std::span<const char* const> names) {
  Json list("[]");
  for (const char* name : names) list.text(nullptr, name);
  return list.done();
}

template <class Field>
constexpr const char* type_name() {
  if constexpr (std::is_pointer_v<Field>) return "text";
  if constexpr (std::is_floating_point_v<Field>) return "float64";
  if constexpr (sizeof(Field) == sizeof(int32_t)) return "int32";
  return std::is_unsigned_v<Field> ? "uint64" : "int64";
}

constexpr const char* name(OptionKind kind) {
  constexpr const char* kNames[] = {"real",  "flag", "choice", "limit",
                                    "count", "word", "index",  "text"};
  return kNames[static_cast<int>(kind)];
}

std::span<const char* const> choices_of(fulmen_alignment) { return kAlignmentNames; }
std::span<const char* const> choices_of(fulmen_backend) { return kBackendNames; }
std::span<const char* const> choices_of(fulmen_implementation) { return kImplementationNames; }
std::span<const char* const> choices_of(fulmen_precision) { return kPrecisionNames; }

// Exact, and whole numbers without a point.
std::string digits(double value) {
  std::ostringstream text;
  text.precision(17);
  text << value;
  return std::isfinite(value) ? text.str() : "null";
}

template <class Field>
void add_bounds(Json& row, Field initial, Field least, Field most) {
  if constexpr (std::is_pointer_v<Field>) {
    row.raw("default", "null");
  } else if constexpr (std::is_enum_v<Field>) {
    row.number("default", static_cast<int>(initial)).raw("choices", list_of(choices_of(initial)));
  } else if constexpr (std::is_floating_point_v<Field>) {
    row.raw("default", digits(initial));
    row.raw("least", digits(least)).raw("most", digits(most));
  } else {
    row.number("default", initial).number("least", least).number("most", most);
  }
}

std::string options_json() {
  Json list("[]");
#define FULMEN_OPTION(kind, type, option, initial, least, most, allowed, use, normal, doc) \
  {                                                                                        \
    Json row("{}");                                                                        \
    row.text("name", #option)                                                              \
        .text("type", type_name<type>())                                                   \
        .text("kind", name(OptionKind::kind));                                             \
    row.number("offset", offsetof(fulmen_problem, option)).number("bytes", sizeof(type));  \
    add_bounds<type>(row, static_cast<type>(initial), static_cast<type>(least),            \
                     static_cast<type>(most));                                             \
    list.raw(nullptr, row.text("doc", doc).done());                                        \
  }
#include "fulmen/options.def"
  return list.done();
}

const char* role_of(const ArrayRule& rule) {
  if (use_of(rule, Call::kForward) == Use::kOutput) return "result";
  if (use_of(rule, Call::kBackward) == Use::kOutput) return "gradient";
  return use_of(rule, Call::kForward) == Use::kIgnored ? "upstream" : "input";
}

bool is_differentiable(Array array) {
  for (const ArrayRule& rule : rules::kTable) {
    if (rule.param == array && rule.array != array) return true;
  }
  return false;
}

std::string array_json(const ArrayRule& rule, size_t offset, bool replaceable) {
  const auto index = static_cast<size_t>(rule.array);
  Json axes("[]");
  for (int axis = 0; axis < rule.list.count; ++axis) {
    axes.text(nullptr, fulmen::name(rule.list.axes[axis]));
  }
  Json row("{}");
  row.text("name", kArrayMembers[index]).text("word", kArrayWords[index]).number("offset", offset);
  row.raw("axes", axes.done()).number("min_rank", rule.list.min_rank);
  row.number("broadcast", rule.list.num_broadcast).text("dtypes", fulmen::name(rule.dtypes));
  row.text("role", role_of(rule)).boolean("differentiable", is_differentiable(rule.array));
  row.boolean("forward_only", is_forward_only(rule.array));
  row.boolean("replaceable", replaceable).boolean("has_head_and_row", has_head_and_row(rule.list));
  if (rule.param == rule.array) return row.raw("of", "null").done();
  return row.text("of", kArrayWords[static_cast<size_t>(rule.param)]).done();
}

std::string arrays_json() {
  constexpr bool kReplaceable = true, kFixed = false;
  Json list("[]");
#define FULMEN_ARRAY(array, member, word, axes, dtypes, use, run, param) \
  list.raw(nullptr, array_json(rule_of(Array::array), offsetof(fulmen_tensors, member), run));
#include "fulmen/arrays.def"
  return list.done();
}

std::string dtypes_json() {
  constexpr const char* kClasses[] = {"none", "float", "bool", "int", "quantised"};
  Json list("[]");
  for (size_t number = 1; number < std::size(kDTypeNames); ++number) {
    Json row("{}");
    row.text("name", kDTypeNames[number]).number("number", number);
    row.number("bytes", size_bytes(static_cast<DType>(number)));
    row.text("kind", kClasses[static_cast<int>(kDTypeClasses[number])]);
    list.raw(nullptr, row.done());
  }
  return list.done();
}

std::string statuses_json() {
  Json list("[]");
#define FULMEN_STATUS(status, code) \
  list.raw(nullptr, Json("{}").text("name", #code).number("number", int{code}).done());
#include "fulmen/enums.def"
  return list.done();
}

std::string implementations_json() {
  Json list("[]");
  for (size_t number = 1; number < std::size(kImplementationNames); ++number) {
    Json row("{}");
    row.text("name", kImplementationNames[number]).number("number", number);
    row.text("backend", fulmen::name(kImplementationBackends[number]));
    list.raw(nullptr, row.done());
  }
  return list.done();
}

std::string tile_json() {
  Json list("[]");
  for (const TileMember& member : tile_members()) {
    Json row("{}");
    row.text("name", member.name).number("least", member.least).number("most", member.most);
    list.raw(nullptr, row.done());
  }
  return list.done();
}

std::string sizes_json() {
  Json sizes("{}");
  sizes.number("problem", sizeof(fulmen_problem)).number("tensors", sizeof(fulmen_tensors));
  sizes.number("tensor", sizeof(fulmen_tensor)).number("merge_part", sizeof(fulmen_merge_part));
  sizes.number("append", sizeof(fulmen_append)).number("indexer", sizeof(fulmen_indexer));
  sizes.number("quantisation", sizeof(fulmen_quantisation));
  return sizes.done();
}

std::string initial_problem() {
  constexpr const char* kDigits = "0123456789abcdef";
  fulmen_problem problem;
  fulmen_problem_init(&problem);
  unsigned char bytes[sizeof problem];
  std::memcpy(bytes, &problem, sizeof problem);
  std::string text;
  for (const unsigned char byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::string schema() {
  Json all("{}");
  all.text("version", fulmen_version()).text("problem", initial_problem().c_str());
  all.raw("sizes", sizes_json()).raw("options", options_json()).raw("arrays", arrays_json());
  all.raw("dtypes", dtypes_json()).raw("statuses", statuses_json());
  all.raw("backends", list_of(kBackendNames)).raw("implementations", implementations_json());
  all.raw("optimisations", list_of(kOptimisationNames)).raw("tile", tile_json());
  return all.done();
}

}  // namespace
}  // namespace fulmen::api

fulmen_status fulmen_schema(char* buffer, size_t capacity, size_t* needed) {
  return fulmen::api::guarded(
      [&] { fulmen::api::copy_text(fulmen::api::schema(), buffer, capacity, needed); });
}
