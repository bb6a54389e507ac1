// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The options of a call as the caller gave them, and their enumerations: made of the tables
// fulmen/options.def and fulmen/enums.def. fulmen.h documents each.
#pragma once

#include <array>
#include <iterator>
#include <limits>
#include <span>

#include "fulmen/fulmen.h"
#include "fulmen/fulmen_experimental.h"
#include "kernels/base.cuh"

namespace fulmen {

enum class Alignment {
#define FULMEN_ALIGNMENT(name, code, ...) name = code,
#include "fulmen/enums.def"
};

enum class Backend {
#define FULMEN_BACKEND(name, code, ...) name = code,
#include "fulmen/enums.def"
};

enum class Implementation {
#define FULMEN_IMPLEMENTATION(name, code, ...) name = code,
#include "fulmen/enums.def"
};

// What a GPU kernel can be made without, to measure what each idea buys; bits of
// Experiment::without.
enum class Optimisation : u32 {
#define FULMEN_OPTIMISATION(name, code, ...) name = code,
#include "fulmen/enums.def"
};

// Names in the order of the numbers.
inline constexpr const char* kAlignmentNames[] = {
#define FULMEN_ALIGNMENT(name, code, text) text,
#include "fulmen/enums.def"
};
inline constexpr const char* kBackendNames[] = {
#define FULMEN_BACKEND(name, code, text) text,
#include "fulmen/enums.def"
};
inline constexpr const char* kImplementationNames[] = {
#define FULMEN_IMPLEMENTATION(name, code, text, backend) text,
#include "fulmen/enums.def"
};
inline constexpr Backend kImplementationBackends[] = {
#define FULMEN_IMPLEMENTATION(name, code, text, backend) Backend::backend,
#include "fulmen/enums.def"
};
inline constexpr const char* kPrecisionNames[] = {
#define FULMEN_PRECISION(name, code, text) text,
#include "fulmen/enums.def"
};
inline constexpr const char* kOptimisationNames[] = {
#define FULMEN_OPTIMISATION(name, code, text) text,
#include "fulmen/enums.def"
};
inline constexpr u32 kAllOptimisations = (1u << std::size(kOptimisationNames)) - 1;

// The numbers are those of the rows; kernels/base.cuh has Precision.
#define FULMEN_PRECISION(name, code, ...) \
  static_assert(int{code} == static_cast<int>(Precision::name));
#include "fulmen/enums.def"
static_assert(FULMEN_TENSOR_CORES == (kAllOptimisations + 1) / 2);

constexpr const char* name(Backend backend) { return kBackendNames[static_cast<int>(backend)]; }
constexpr const char* name(Implementation implementation) {
  return kImplementationNames[static_cast<int>(implementation)];
}
constexpr const char* name(Precision precision) {
  return kPrecisionNames[static_cast<int>(precision)];
}
constexpr const char* name(Optimisation optimisation) {
  return kOptimisationNames[__builtin_ctz(static_cast<u32>(optimisation))];
}

// Where an implementation computes; kAuto where it is none.
constexpr Backend backend_of(Implementation implementation) {
  return kImplementationBackends[static_cast<int>(implementation)];
}

enum class OptionKind { kReal, kFlag, kChoice, kLimit, kCount, kWord, kIndex, kText };
enum class OptionUse { kPlan, kRun };

// The type of an option here, from that of its field in fulmen_problem.
template <OptionKind kKind, class Field>
struct OptionType {
  using Type = Field;
};
template <>
struct OptionType<OptionKind::kFlag, int32_t> {
  using Type = bool;
};
template <>
struct OptionType<OptionKind::kLimit, int64_t> {
  using Type = i64;  // as wide, not always the same type
};
template <>
struct OptionType<OptionKind::kCount, int64_t> {
  using Type = i64;
};
template <>
struct OptionType<OptionKind::kWord, uint64_t> {
  using Type = u64;
};
template <>
struct OptionType<OptionKind::kChoice, fulmen_alignment> {
  using Type = Alignment;
};
template <>
struct OptionType<OptionKind::kChoice, fulmen_backend> {
  using Type = Backend;
};
template <>
struct OptionType<OptionKind::kChoice, fulmen_implementation> {
  using Type = Implementation;
};
template <>
struct OptionType<OptionKind::kChoice, fulmen_precision> {
  using Type = Precision;
};
template <OptionKind kKind, class Field>
using OptionTypeOf = typename OptionType<kKind, Field>::Type;

struct Options {
#define FULMEN_OPTION(kind, type, name, initial, ...) \
  OptionTypeOf<OptionKind::kind, type> name =         \
      static_cast<OptionTypeOf<OptionKind::kind, type>>(initial);
#include "fulmen/options.def"
};

// The values of an expression's scalars.
inline constexpr int kNumScalars = 8;
inline std::array<double, kNumScalars> scalars_of(const Options& options) {
  return {options.scalar0, options.scalar1, options.scalar2, options.scalar3,
          options.scalar4, options.scalar5, options.scalar6, options.scalar7};
}

// What the table says of an option whose type here is T.
template <class T>
struct OptionRow {
  OptionKind kind;
  const char* name;
  T initial, least, most;
  const char* allowed;
  OptionUse use;
};

// Calls action(row, value) for each option, in order.
template <class Action>
constexpr void for_each_option(const Options& options, const Action& action) {
#define FULMEN_OPTION(kind, type, name, initial, least, most, allowed, use, ...)                 \
  {                                                                                              \
    using T = OptionTypeOf<OptionKind::kind, type>;                                              \
    action(OptionRow<T>{OptionKind::kind, #name, static_cast<T>(initial), static_cast<T>(least), \
                        static_cast<T>(most), allowed, OptionUse::use},                          \
           options.name);                                                                        \
  }
#include "fulmen/options.def"
}

// The options that a checked Problem has as they are.
struct OwnOptions {
#define FULMEN_MEMBER_kOwn(kind, type, name, initial) \
  OptionTypeOf<OptionKind::kind, type> name =         \
      static_cast<OptionTypeOf<OptionKind::kind, type>>(initial);
#define FULMEN_MEMBER_kMask(...)
#define FULMEN_MEMBER_kOther(...)
#define FULMEN_OPTION(kind, type, name, initial, least, most, allowed, use, normal, ...) \
  FULMEN_MEMBER_##normal(kind, type, name, initial)
#include "fulmen/options.def"
#undef FULMEN_MEMBER_kOwn
#undef FULMEN_MEMBER_kMask
#undef FULMEN_MEMBER_kOther
};

// What fulmen_experimental.h adds to a plan.
struct Experiment {
  u32 without = 0;             // of Optimisation
  const char* tile = nullptr;  // words of TileChoice; null: none
};

// A tile to be tried in place of the table's: what a search over tiles asks plans for. Members are
// those of a kernel's config (kernels/forward_sm90/config.h); what the search does not name stays
// as the table has it.
struct TileChoice {
  static constexpr i32 kOfTable = -1;

  i32 warpgroups = kOfTable;
  i32 kv_rows = kOfTable;
  i32 stages = kOfTable;
  i32 q_slots = kOfTable;
  i32 q_register_dims = kOfTable;
  i32 heads_per_group = kOfTable;  // the order of blocks: heads that share the L2
  i32 ping_pong = kOfTable;        // 0 or 1, and so on
  i32 overlap = kOfTable;
  i32 stage_output = kOfTable;
  i32 cache_hints = kOfTable;

  bool operator==(const TileChoice&) const = default;
  bool given() const { return *this != TileChoice{}; }
};

struct TileMember {
  const char* name;
  i32 TileChoice::* member;
  i32 least, most;
};

std::span<const TileMember> tile_members();

// From "kv_rows=80 stages=2"; null or empty: nothing is named. Throws Error (kArgument) for another
// name, or a number that no member can have.
TileChoice tile_choice(const char* text);

// Takes over a number where one is named.
template <class Member>
void choose_member(Member& member, i32 chosen) {
  if (chosen != TileChoice::kOfTable) member = static_cast<Member>(chosen);
}

}  // namespace fulmen
