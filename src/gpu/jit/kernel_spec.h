// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One instance of a kernel as data: the entry, the fields of its config, and what a block of it
// takes; and how it is launched. Plans make specs; gpu/jit compiles them. Pure.
//
// A spec from a config: its fields as the C++ text that the generated wrapper sets them to come
// from the for_each_field() beside the config, and one that is not listed there does not compile.
// What is written where a spec is made is its own: what distinguishes its name, threads, memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/error.h"
#include "kernels/expression.h"
#include "kernels/score_options.h"

namespace fulmen::gpu {

struct ConfigField {
  std::string name;
  std::string value;  // C++ text: "128", "true", "fulmen::DType::kFloat32"
};

// One kernel, completely: what is compiled and how it is launched.
struct KernelSpec {
  std::string name;         // "forward_naive_float32": in messages and file names, [a-z0-9_] only
  std::string include;      // "kernels/naive/naive.cuh"
  std::string function;     // a template over the config: void f<kConfig>(const Params&)
  std::string config_type;  // "fulmen::NaiveConfig"; default-constructible, of literal type
  std::vector<ConfigField> config;
  std::string params_type;  // "fulmen::AttentionParams"
  std::size_t params_bytes = 0;
  int num_threads = 0;           // of a block
  int min_blocks = 1;            // resident on a multiprocessor, as a bound on registers
  std::size_t shared_bytes = 0;  // dynamic, of a block
  std::string
      shared_bytes_text;      // constant expression that must equal it, in terms of kConfig; or ""
  bool tensor_cores = false;  // spills reject it
  std::size_t spill_allowance_bytes = 0;  // that plan's table grants, with its reason there
  bool reads_expression = false;          // its parameters are those of WithExpression
  std::string expression;    // the text of a user's, which stands behind the kernel's; or ""
  bool is_ablation = false;  // made to measure what leaving something out costs: nothing rejects it
};

// Blocks of a cluster that every GPU with clusters takes; and the most, which a processing cluster
// (GPC) of Hopper takes that has so many multiprocessors.
inline constexpr unsigned kPortableClusterSize = 8, kMaxClusterSize = 16;

struct LaunchShape {
  std::int64_t num_blocks = 0;    // in x; 0: nothing is launched
  unsigned cluster_size = 1;      // blocks of a cluster, 1 .. kMaxClusterSize; divides num_blocks
  bool overlap_previous = false;  // may start while the kernel before it in the stream drains
};

namespace fields {

// Converts to anything, so that Aggregate{Anything, Anything} compiles for up to as many as it has
// members.
struct Anything {
  template <class Member>
  constexpr operator Member() const;
};

template <class Aggregate, std::size_t... kIndex>
constexpr bool takes(std::index_sequence<kIndex...>) {
  return requires { Aggregate{(static_cast<void>(kIndex), Anything{})...}; };
}

template <class Aggregate, std::size_t kCount = 1>
constexpr int num_members() {
  if constexpr (takes<Aggregate>(std::make_index_sequence<kCount>{})) {
    return num_members<Aggregate, kCount + 1>();
  } else {
    return static_cast<int>(kCount) - 1;
  }
}

template <class Config>
constexpr int num_listed() {
  int count = 0;
  for_each_field(Config{}, [&count](const char*, const auto&) { ++count; });
  return count;
}

// What stands behind `parameter` in the name that compilers give to an instance of a template.
constexpr std::string_view argument(std::string_view function, std::string_view parameter) {
  const std::size_t begin = function.find(parameter) + parameter.size();
  return function.substr(begin, function.find_first_of(";]", begin) - begin);
}

template <auto kValue>
constexpr std::string_view enumerator() {  // "fulmen::MaskKind::kRight"
  return argument(__PRETTY_FUNCTION__, "kValue = ");
}

template <class Struct>
std::string type_name() {  // "fulmen::ScoreOptions"
  return std::string(argument(__PRETTY_FUNCTION__, "Struct = "));
}

template <class Enum, std::size_t... kIndex>
std::string_view enumerator_of(Enum value, std::index_sequence<kIndex...>) {
  constexpr std::string_view kNames[] = {enumerator<static_cast<Enum>(kIndex)>()...};
  return kNames[static_cast<std::size_t>(value)];
}

}  // namespace fields

template <class Value>
std::string text(Value value) {
  if constexpr (std::is_same_v<Value, bool>) {
    return value ? "true" : "false";
  } else if constexpr (std::is_enum_v<Value>) {
    return std::string(fields::enumerator_of(value, std::make_index_sequence<16>{}));
  } else {
    return std::to_string(value);
  }
}

// Those of a member that is a struct follow one by one: "score.score_mod".
template <class Config>
std::vector<ConfigField> fields_of(const Config& config) {
  static_assert(fields::num_listed<Config>() == fields::num_members<Config>(),
                "for_each_field() of this config does not list every field");
  std::vector<ConfigField> all;
  for_each_field(config, [&all](const char* name, const auto& value) {
    if constexpr (std::is_class_v<std::remove_cvref_t<decltype(value)>>) {
      for (ConfigField& field : fields_of(value)) {
        all.push_back({sentence(name, ".", field.name), std::move(field.value)});
      }
    } else {
      all.push_back({name, text(value)});
    }
  });
  return all;
}

// What a config knows of a user's expression: itself, in its part for scores, or nothing.
template <class Config>
constexpr UserTerms user_terms_of(const Config& config) {
  if constexpr (requires { config.user; }) {
    return config.user;
  } else if constexpr (requires { config.score.user; }) {
    return config.score.user;
  } else {
    return {};
  }
}

// What the kernel is launched with.
template <class Params>
void set_params(KernelSpec& spec) {
  spec.params_type = fields::type_name<Params>();
  spec.params_bytes = sizeof(Params);
  if (!spec.reads_expression) return;
  spec.params_type = sentence("fulmen::WithExpression<", spec.params_type, ">");
  spec.params_bytes = sizeof(WithExpression<Params>);
}

// The file kernels/FILE.cuh defines the template fulmen::ENTRY<kConfig>(const Params&); the
// kernel's name begins with ENTRY.
template <class Params, class Config>
KernelSpec spec_of(const std::string& file, const std::string& entry,
                   const std::string& distinction, const Config& config) {
  KernelSpec spec;
  spec.name = sentence(entry, "_", distinction);
  spec.include = sentence("kernels/", file, ".cuh");
  spec.function = sentence("fulmen::", entry);
  spec.config_type = fields::type_name<Config>();
  spec.config = fields_of(config);
  spec.reads_expression = user_terms_of(config).any();
  set_params<Params>(spec);
  return spec;
}

// What a kernel on the tensor cores takes, whose config has threads() and shared_bytes().
template <class Config>
KernelSpec on_tensor_cores(KernelSpec spec, const Config& config,
                           std::size_t spill_allowance_bytes) {
  spec.num_threads = config.threads();
  spec.shared_bytes = static_cast<std::size_t>(config.shared_bytes());
  spec.shared_bytes_text = "kConfig.shared_bytes()";
  spec.tensor_cores = true;
  spec.spill_allowance_bytes = spill_allowance_bytes;
  return spec;
}

}  // namespace fulmen::gpu
