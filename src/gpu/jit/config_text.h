// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Specs of configs that have no for_each_field() yet: this file goes with the last of them.
// FULMEN_FIELD(x) is the field x of the config that is called `config` where it stands.
#pragma once

#include "core/dtype.h"
#include "gpu/jit/spec_of.h"

#define FULMEN_FIELD(field) \
  fulmen::gpu::ConfigField { #field, fulmen::gpu::text(config.field) }

#define FULMEN_KERNEL_TYPES(Config, Params) \
  fulmen::gpu::KernelTypes { "fulmen::" #Config, "fulmen::" #Params, sizeof(fulmen::Params) }

// "_field", a part of a name, where that field of `config` is true; else "".
#define FULMEN_SUFFIX(field) (config.field ? "_" #field : "")

namespace fulmen::gpu {

struct KernelTypes {
  const char* config;
  const char* params;
  std::size_t params_bytes;
};

// Of a bias array, where there is one.
inline std::string bias_suffix(DType bias) {
  return bias == DType::kNone ? "" : sentence("_bias_", name(bias));
}

inline KernelSpec spec_of(const std::string& folder, const std::string& entry,
                          const std::string& distinction, const KernelTypes& types,
                          std::vector<ConfigField> fields) {
  KernelSpec spec;
  spec.name = sentence(entry, "_", distinction);
  spec.include = sentence("kernels/", folder, "/", entry, ".cuh");
  spec.function = sentence("fulmen::", entry);
  spec.config_type = types.config;
  spec.config = std::move(fields);
  spec.params_type = types.params;
  spec.params_bytes = types.params_bytes;
  return spec;
}

}  // namespace fulmen::gpu
