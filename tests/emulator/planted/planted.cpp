// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// In a file that is not instrumented, so that the checker does not see the question.
#include "emulator/planted/planted.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace fulmen::planted {
namespace {

struct Fault {
  const char* name;
  int number;
};
constexpr Fault kFaults[] = {
#include "faults.inc"
};
constexpr int kNone = -1;

int find(const char* name) {
  for (const Fault& fault : kFaults) {
    if (std::strcmp(fault.name, name) == 0) return fault.number;
  }
  return kNone;
}

int chosen = [] {
  const char* const name = std::getenv("FULMEN_PLANTED");
  if (name == nullptr) return kNone;
  const int number = find(name);
  if (number == kNone) {
    std::fprintf(stderr, "FULMEN_PLANTED=%s: faults.toml has no such fault\n", name);
    std::_Exit(2);
  }
  return number;
}();

}  // namespace

bool choose(const char* name) {
  chosen = find(name);
  return chosen != kNone || *name == 0;
}
bool is_chosen(int number) { return chosen == number; }

}  // namespace fulmen::planted
