// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A tile to be tried in place of the table's: what a search over tiles asks plans for. Members are
// those of a kernel's config (kernels/forward_sm90/config.h); what nobody names stays as the table
// has it.
#pragma once

#include <span>

#include "kernels/base.cuh"

namespace fulmen {

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
