// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The fields of a kernel's config as the C++ text that its generated wrapper sets them to, from the
// for_each_field() beside the config. A field that is not listed there does not compile.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/error.h"
#include "gpu/jit/kernel_spec.h"
#include "kernels/base.cuh"

namespace fulmen::gpu {

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

// "fulmen::MaskKind::kUpper", as compilers write it in the name of a function.
template <auto kValue>
constexpr std::string_view enumerator() {
  const std::string_view name = __PRETTY_FUNCTION__;
  const std::size_t begin = name.find("kValue = ") + 9;
  return name.substr(begin, name.find_first_of(";]", begin) - begin);
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

// Those of a member that is a struct follow one by one: "score.softcap".
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

}  // namespace fulmen::gpu
