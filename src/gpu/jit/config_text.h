// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Values of a config's fields as the C++ text that the generated wrapper of a kernel sets them to.
// One overload for each type that a field can have. FULMEN_FIELD(x) is the field x of the
// config that is called `config` where it stands, with its name.
#pragma once

#include <string>

#include "core/error.h"
#include "gpu/jit/kernel_spec.h"
#include "kernels/forward_sm90/config.h"

#define FULMEN_FIELD(field) \
  fulmen::gpu::ConfigField { #field, fulmen::gpu::text(config.field) }

namespace fulmen::gpu {

inline std::string text(bool value) { return value ? "true" : "false"; }

inline std::string text(i32 value) { return std::to_string(value); }

inline std::string text(DType value) {
  constexpr const char* kNames[] = {"kNone",     "kFloat64", "kFloat32", "kFloat16",
                                    "kBFloat16", "kBool",    "kInt32",   "kInt64"};
  return sentence("fulmen::DType::", kNames[static_cast<int>(value)]);
}

inline std::string text(Precision value) {
  constexpr const char* kNames[] = {"kFloat32", "kTf32", "k3xTf32"};
  return sentence("fulmen::Precision::", kNames[static_cast<int>(value)]);
}

inline std::string text(MaskKind value) {
  constexpr const char* kNames[] = {"kLength", "kUpper", "kBoth"};
  return sentence("fulmen::MaskKind::", kNames[static_cast<int>(value)]);
}

inline std::string text(ShiftRule value) {
  constexpr const char* kNames[] = {"kEveryBlock", "kWhenGrown", "kWhenSumGrew", "kFirstBlock"};
  return sentence("fulmen::ShiftRule::", kNames[static_cast<int>(value)]);
}

}  // namespace fulmen::gpu
