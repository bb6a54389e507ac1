// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Options, one check and one sentence each; what is mechanical is made of the table. And the text
// of a tile: words "name=number" with spaces between.

#include "core/options.h"

#include <charconv>
#include <cmath>
#include <string_view>
#include <type_traits>

#include "core/validate.h"

namespace fulmen {
namespace {

constexpr TileMember kMembers[] = {
    {"warpgroups", &TileChoice::warpgroups, 1, 3},
    {"kv_rows", &TileChoice::kv_rows, 16, 256},
    {"stages", &TileChoice::stages, 1, 6},
    {"q_slots", &TileChoice::q_slots, 1, 6},
    {"q_register_dims", &TileChoice::q_register_dims, 0, 512},
    {"heads_per_group", &TileChoice::heads_per_group, 1, 1 << 20},
    {"ping_pong", &TileChoice::ping_pong, 0, 1},
    {"overlap", &TileChoice::overlap, 0, 1},
    {"stage_output", &TileChoice::stage_output, 0, 1},
    {"cache_hints", &TileChoice::cache_hints, 0, 1},
};

[[noreturn]] void refuse_word(std::string_view word) {
  std::string allowed;
  for (const TileMember& member : kMembers) {
    allowed +=
        sentence(allowed.empty() ? "" : ", ", member.name, "=", member.least, "..", member.most);
  }
  throw Error(Status::kArgument,
              sentence("tile has '", word, "'; allowed are ", allowed, ", with spaces between"));
}

void read_word(std::string_view word, TileChoice& choice) {
  const size_t equals = word.find('=');
  if (equals == std::string_view::npos) refuse_word(word);
  const std::string_view digits = word.substr(equals + 1);
  i32 number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (error != std::errc{} || end != digits.data() + digits.size()) refuse_word(word);
  for (const TileMember& member : kMembers) {
    if (word.substr(0, equals) != member.name) continue;
    if (number < member.least || number > member.most) break;
    choice.*member.member = number;
    return;
  }
  refuse_word(word);
}

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

// Kernels have these numbers, and their quotients, in the type of sums: one that is infinite, 0 or
// without all its digits there would mean another score.
void check_range(const char* subject, double value, DType sums) {
  const double most = sums == DType::kFloat64 ? 0x1p1022 : 0x1p126;
  const double magnitude = std::abs(value);
  if (value == 0 || (magnitude >= 1 / most && magnitude <= most)) return;
  refuse(sentence(subject, " is ", value, "; allowed is 0, or ", 1 / most, " to ", most,
                  " in magnitude, the range of ", name(sums), " sums"));
}

void check_ranges(const ScoreMap<double>& map, DType sums) {
  check_range("scale", map.scale, sums);
  check_range("softcap", map.softcap, sums);
  if (map.is_modified()) check_range("scale / softcap", map.scale / map.softcap, sums);
}

// A limit beyond all rows is no limit, exactly: positions stay within 32 bits.
i32 window_limit(i64 limit) { return limit > kMaxExtent ? kNoLimit : static_cast<i32>(limit); }

i32 key_count(i64 count) { return static_cast<i32>(min(count, kMaxExtent)); }

// One option as IntervalMask has it: positions are numbers of 32 bits.
template <OptionKind kKind, class T>
auto mask_member(const T& value) {
  if constexpr (kKind == OptionKind::kLimit) {
    return window_limit(value);
  } else if constexpr (kKind == OptionKind::kCount) {
    return key_count(value);
  } else {
    return value;
  }
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

i64 upper_bound(const char* option, i64 bound, i64 rows, const char* missing) {
  if (bound > 0 && missing != nullptr) {
    refuse(sentence(option, " is ", bound, " without ", missing,
                    "; it bounds what only they know: leave it 0"));
  }
  return bound > 0 ? min(bound, rows) : rows;
}

// Upper bounds of the lengths of a sequence. Keys of a cache beyond max_kv do not exist.
void apply_bounds(Problem& problem, const Options& options) {
  const bool knows_keys = problem.packed.kv || problem.is_paged();
  if (problem.has(Array::kPageIndptr) && options.max_kv == 0) {
    refuse(
        "max_kv is 0 with page_indptr; only the caller knows how many keys a request may have: "
        "pass an upper bound");
  }
  problem.max_q =
      upper_bound("max_q", options.max_q, problem.q_rows, problem.packed.q ? nullptr : "cu_q");
  problem.max_kv = upper_bound("max_kv", options.max_kv, problem.kv_rows,
                               knows_keys ? nullptr : "cu_kv or page_table");
  if (problem.is_paged()) problem.kv_rows = problem.max_kv;
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

void check_precision(Precision asked, const Problem& problem) {
  const DType dtype = problem.dtype;
  if (asked == Precision::kFp8) {
    if (problem.is_quantised() || (dtype != DType::kFloat16 && dtype != DType::kBFloat16)) {
      refuse(
          sentence("precision is fp8, a choice for q, k and v of float16 and bfloat16, but "
                   "they are ",
                   name(problem.kv_dtype()), "; leave it float32"));
    }
  } else if (asked != Precision::kFloat32 && dtype != DType::kFloat32) {
    refuse(sentence("precision is ", name(asked),
                    ", a choice for float32 inputs, but q, k and v "
                    "are ",
                    name(dtype), "; leave it float32, which changes nothing for them"));
  }
}

}  // namespace

std::span<const TileMember> tile_members() { return kMembers; }

TileChoice tile_choice(const char* text) {
  TileChoice choice;
  std::string_view rest = text == nullptr ? "" : text;
  while (!rest.empty()) {
    const size_t end = rest.find(' ');
    const std::string_view word = rest.substr(0, end);
    if (!word.empty()) read_word(word, choice);
    rest = end == std::string_view::npos ? "" : rest.substr(end + 1);
  }
  return choice;
}

void apply_options(Problem& problem, const Options& options, const Experiment& experiment) {
  for_each_option(options, [](const auto& row, const auto& value) { check_bounds(row, value); });
#define FULMEN_RULE(name, refused, text) \
  if (refused) refuse(sentence(#name, " is ", options.name, " ", text));
#include "fulmen/options.def"
#define FULMEN_COPY_kOwn(kind, name) problem.name = options.name;
#define FULMEN_COPY_kMask(kind, name) \
  problem.mask.name = mask_member<OptionKind::kind>(options.name);
#define FULMEN_COPY_kOther(...)
#define FULMEN_OPTION(kind, type, name, initial, least, most, allowed, use, normal, ...) \
  FULMEN_COPY_##normal(kind, name)
#include "fulmen/options.def"
  problem.score_map = score_map(options, problem.dim_qk);
  check_ranges(problem.score_map, accumulator(problem.dtype));
  problem.dropout = dropout(problem, options);
  apply_bounds(problem, options);
  problem.backend = backend_from(options);
  problem.without = without(experiment.without, problem.backend);
  problem.tile = tile(experiment.tile, problem.backend);
  check_precision(options.precision, problem);
}

}  // namespace fulmen
