// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One instance of a kernel as data: the entry, the fields of its config, and what a block of it
// takes; and how it is launched. Plans make specs; gpu/jit compiles them. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fulmen::gpu {

struct ConfigField {
  std::string name;
  std::string value;  // C++ text: "128", "true", "fulmen::DType::kFloat32"
};

// One kernel, completely: what is compiled and how it is launched.
struct KernelSpec {
  std::string name;         // "forward_naive_float32": in messages and file names, [a-z0-9_] only
  std::string include;      // "kernels/naive/forward_naive.cuh"
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
  bool is_ablation = false;  // made to measure what leaving something out costs: nothing rejects it
};

struct LaunchShape {
  std::int64_t num_blocks = 0;    // in x; 0: nothing is launched
  unsigned cluster_size = 1;      // blocks of a cluster, 1 .. 8
  bool overlap_previous = false;  // may start while the kernel before it in the stream drains
};

}  // namespace fulmen::gpu
