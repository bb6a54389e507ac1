// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which fault of faults.toml is planted at the moment: the text of kernels that
// tools/plant_faults.py writes asks so wherever one could be. Not at compile time: a constant keeps
// its right value.
#pragma once

namespace fulmen {
namespace planted {

// By name; "" for none. False if there is no such fault. At the start: what FULMEN_PLANTED names.
bool choose(const char* name);
bool is_chosen(int number);  // of a fault, as tools/plant_faults.py numbers them

}  // namespace planted

constexpr bool is_planted(int number) {
  return !__builtin_is_constant_evaluated() && planted::is_chosen(number);
}

}  // namespace fulmen
