// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The arrays of a call in the order in which every binding passes them: that of fulmen_tensors.
#pragma once

#include <cstddef>

#include "fulmen/fulmen.h"

namespace fulmen::ffi {

struct NamedArray {
  const char* name;
  fulmen_tensor fulmen_tensors::* member;
  bool has_head_and_row;  // axes (.., head, row, dim): the layout of the call applies
};

inline constexpr NamedArray kArrays[] = {
    {"q", &fulmen_tensors::q, true},
    {"k", &fulmen_tensors::k, true},
    {"v", &fulmen_tensors::v, true},
    {"bias", &fulmen_tensors::bias, false},
    {"mask", &fulmen_tensors::mask, false},
    {"alibi_slopes", &fulmen_tensors::alibi_slopes, false},
    {"sinks", &fulmen_tensors::sinks, false},
    {"q_lengths", &fulmen_tensors::q_lengths, false},
    {"kv_lengths", &fulmen_tensors::kv_lengths, false},
    {"cu_q", &fulmen_tensors::cu_q, false},
    {"cu_kv", &fulmen_tensors::cu_kv, false},
    {"q_ids", &fulmen_tensors::q_ids, false},
    {"kv_ids", &fulmen_tensors::kv_ids, false},
    {"rng", &fulmen_tensors::rng, false},
    {"o", &fulmen_tensors::o, true},
    {"lse", &fulmen_tensors::lse, false},
    {"stats", &fulmen_tensors::stats, false},
    {"do", &fulmen_tensors::dout, true},
    {"dlse", &fulmen_tensors::dlse, false},
    {"dq", &fulmen_tensors::dq, true},
    {"dk", &fulmen_tensors::dk, true},
    {"dv", &fulmen_tensors::dv, true},
    {"dbias", &fulmen_tensors::dbias, false},
    {"dsinks", &fulmen_tensors::dsinks, false},
};

// Places in it.
enum ArrayPlace : size_t {
  kQ,
  kK,
  kV,
  kBias,
  kSinks = 6,
  kQIds = 11,
  kKvIds,
  kRng,
  kO,
  kLse,
  kStats,
  kDout,
  kDlse,
  kDq,
  kDk,
  kDv,
  kDbias,
  kDsinks
};

inline constexpr size_t kNumInputs = kO;  // from q to rng

}  // namespace fulmen::ffi
