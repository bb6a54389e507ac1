// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Options, one check and one sentence each.

#include "core/check_options.h"

#include <cmath>
#include <type_traits>

#include "core/refuse.h"
#include "core/validate.h"

namespace fulmen {
namespace {

constexpr u64 kMaxWord = 0xffffffffu;  // what one 32-bit word of a Philox counter holds

// One number against its row. A NaN passes where it is the default.
template <class T>
void check_bounds(const OptionRow<T>& row, const T& value) {
  if constexpr (std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) {
    if (value >= row.least && value <= row.most) return;
    if (value != value && row.initial != row.initial) return;
    refuse(sentence(row.name, " is ", value, "; allowed is ", row.allowed));
  }
}

ScoreMap<double> score_map(const Options& options, i64 dim_qk) {
  const double natural = 1.0 / std::sqrt(static_cast<double>(max<i64>(dim_qk, 1)));
  return {std::isnan(options.scale) ? natural : options.scale, options.softcap};
}

// A limit beyond all rows is no limit, exactly: positions stay within 32 bits.
i32 window_limit(i64 limit) { return limit > kMaxExtent ? kNoLimit : static_cast<i32>(limit); }

i32 key_count(i64 count) { return static_cast<i32>(min(count, kMaxExtent)); }

IntervalMask interval_mask(const Options& options) {
  if (options.causal && options.window_right > 0) {
    refuse(sentence("window_right is ", options.window_right,
                    " with causal, which hides those keys; pass window_right = 0 (or -1), or drop "
                    "causal"));
  }
  if (options.prefix > 0 && !options.causal) {
    refuse(sentence("prefix is ", options.prefix,
                    " without causal; a prefix widens what causal leaves visible: set causal"));
  }
  return {options.causal, window_limit(options.window_left), window_limit(options.window_right),
          key_count(options.prefix), key_count(options.chunk)};
}

// The array rng against the numbers that it replaces.
void check_rng(const Tensor& rng, const Options& options) {
  if (!rng.present()) return;
  if (options.rng_seed != 0 || options.rng_offset != 0) {
    refuse(sentence("rng is given beside rng_seed = ", options.rng_seed, " and rng_offset = ",
                    options.rng_offset, "; an array replaces both: leave them 0"));
  }
  if (rng.strides[3] != 1) {
    refuse(sentence("rng has stride ", rng.strides[3], "; its two numbers must be neighbours"));
  }
}

Dropout dropout(const Problem& problem, const Options& options) {
  check_rng(problem.arrays[Array::kRng], options);
  if (options.dropout_p == 0) return {};
  const i64 batch_heads = problem.num_sequences * problem.heads_q;
  if (batch_heads > static_cast<i64>(kMaxWord)) {
    throw Error(Status::kShape,
                sentence("batch * heads is ", batch_heads, " with dropout; allowed is up to ",
                         kMaxWord, ": split the batch and give each part its own rng_offset"));
  }
  return {dropout_threshold(options.dropout_p), options.rng_seed,
          static_cast<u32>(options.rng_offset)};
}

i64 upper_bound(const char* option, i64 bound, i64 rows, bool packed) {
  if (bound > 0 && !packed) {
    refuse(sentence(option, " is ", bound,
                    " without cu_q and cu_kv; it bounds packed sequences only: leave it 0"));
  }
  return bound > 0 ? min(bound, rows) : rows;
}

// Backend, implementation and device against each other. Automatic means the CPU here: who can look
// at pointers has decided before (gpu/driver/device.h).
Backend backend_from(const Options& options) {
  const Backend named = backend_of(options.implementation);
  Backend backend = options.backend;
  if (backend == Backend::kAuto) backend = named;
  if (named != Backend::kAuto && backend != named) {
    refuse(sentence("implementation ", name(options.implementation), " computes on ", name(named),
                    ", but backend is ", name(backend), "; leave one of them automatic"));
  }
  if (options.device >= 0 && options.device_name != nullptr) {
    refuse(
        sentence("device is ", options.device, " and device_name ", options.device_name,
                 "; pass one: a number for a GPU that is here, a name for one that need not be"));
  }
  const bool is_device_named = options.device >= 0 || options.device_name != nullptr;
  if (backend == Backend::kAuto) return is_device_named ? Backend::kCuda : Backend::kCpu;
  if (backend == Backend::kCpu && is_device_named) {
    refuse(sentence(options.device_name != nullptr ? "device_name" : "device",
                    " names a GPU, but the call is for the CPU; leave it out, or pass backend "
                    "cuda"));
  }
  return backend;
}

u32 without(u32 optimisations, Backend backend) {
  if (optimisations > kAllOptimisations) {
    refuse(sentence("without is ", optimisations, "; allowed are sums of FULMEN_SWIZZLE = 1 to ",
                    "FULMEN_TENSOR_CORES = 512"));
  }
  if (optimisations != 0 && backend == Backend::kCpu) {
    refuse(sentence("without is ", optimisations,
                    ", optimisations of GPU kernels, but the call is for the CPU; leave it 0"));
  }
  return optimisations;
}

TileChoice tile(const char* text, Backend backend) {
  const TileChoice choice = tile_choice(text);
  if (choice.given() && backend == Backend::kCpu) {
    refuse(sentence("tile is '", text,
                    "', a choice for GPU kernels, but the plan is for the CPU; leave it empty"));
  }
  return choice;
}

Precision precision(Precision asked, DType dtype) {
  if (asked != Precision::kFloat32 && dtype != DType::kFloat32) {
    refuse(sentence("precision is ", name(asked),
                    ", a choice for float32 inputs, but q, k and v "
                    "are ",
                    name(dtype), "; leave it float32, which changes nothing for them"));
  }
  return asked;
}

}  // namespace

void apply_options(Problem& problem, const Options& options, const Experiment& experiment) {
  for_each_option(options, [](const auto& row, const auto& value) { check_bounds(row, value); });
  problem.score_map = score_map(options, problem.dim_qk);
  problem.mask = interval_mask(options);
  problem.alignment = options.alignment;
  problem.dropout = dropout(problem, options);
  problem.max_q = upper_bound("max_q", options.max_q, problem.q_rows, problem.packed);
  problem.max_kv = upper_bound("max_kv", options.max_kv, problem.kv_rows, problem.packed);
  problem.deterministic = options.deterministic;
  problem.batch_invariant = options.batch_invariant;
  problem.backend = backend_from(options);
  problem.implementation = options.implementation;
  problem.without = without(experiment.without, problem.backend);
  problem.tile = tile(experiment.tile, problem.backend);
  problem.precision = precision(options.precision, problem.dtype);
}

}  // namespace fulmen
