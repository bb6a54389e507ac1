// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The text of a tile: words "name=number" with spaces between.

#include "core/tile_choice.h"

#include <charconv>
#include <string_view>

#include "core/error.h"

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

[[noreturn]] void refuse(std::string_view word) {
  std::string allowed;
  for (const TileMember& member : kMembers) {
    allowed +=
        sentence(allowed.empty() ? "" : ", ", member.name, "=", member.least, "..", member.most);
  }
  throw Error(Status::kArgument,
              sentence("tile has '", word, "'; allowed are ", allowed, ", with spaces between"));
}

void read(std::string_view word, TileChoice& choice) {
  const size_t equals = word.find('=');
  if (equals == std::string_view::npos) refuse(word);
  const std::string_view digits = word.substr(equals + 1);
  i32 number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (error != std::errc{} || end != digits.data() + digits.size()) refuse(word);
  for (const TileMember& member : kMembers) {
    if (word.substr(0, equals) != member.name) continue;
    if (number < member.least || number > member.most) break;
    choice.*member.member = number;
    return;
  }
  refuse(word);
}

}  // namespace

std::span<const TileMember> tile_members() { return kMembers; }

TileChoice tile_choice(const char* text) {
  TileChoice choice;
  std::string_view rest = text == nullptr ? "" : text;
  while (!rest.empty()) {
    const size_t end = rest.find(' ');
    const std::string_view word = rest.substr(0, end);
    if (!word.empty()) read(word, choice);
    rest = end == std::string_view::npos ? "" : rest.substr(end + 1);
  }
  return choice;
}

}  // namespace fulmen
