// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// How order passes from thread to thread: every barrier and counter is a clock that arrivals add
// to and waits take from. Nothing happens while the checker is off.
#pragma once

#include "emulator/block.h"

namespace fulmen::emulator {

inline bool checking() { return world().grid->check; }

// All that the running thread has done and seen done comes before whoever takes `to` over.
inline void hand_over(Clock& to) {
  if (!checking()) return;
  Thread& thread = self();
  to.join(thread.clock);
  thread.clock.seen.raise(thread.agent, thread.clock.seen[thread.agent] + 1);
}

inline void take_over(const Clock& from) {
  if (checking()) self().clock.join(from);
}

// The same through a counter in global memory, also from one world to another.
inline void announce_on(const void* counter) {
  World& here = world();
  hand_over(here.announced[counter]);
  if (!checking()) return;
  std::set<u32>& by = (*here.announced_by)[counter];
  by.insert(here.number);
  by.insert(here.before.announced.begin(), here.before.announced.end());
}
inline void hear_of(const void* counter) {
  World& here = world();
  take_over(here.announced[counter]);
  if (!checking()) return;
  const std::set<u32>& by = (*here.announced_by)[counter];
  here.before.announced.insert(by.begin(), by.end());
}

// The launches before are over, for the running thread and who hears of it.
inline void await_launches() {
  world().has_waited = true;
  if (!checking()) return;
  Clock& clock = self().clock;
  clock.seen.raise(world().before.agent, 1);
  clock.fenced.raise(world().before.agent, 1);
}

// The launch behind may begin.
inline void release_launch() {
  World& here = world();
  if (self().clock.seen[here.before.agent] == 0) here.released_early = true;
}

// The asynchronous proxy may rely on all that is ordered before now.
inline void fence_proxy() {
  if (!checking()) return;
  Thread& thread = self();
  thread.clock.fenced.join(thread.clock.seen);
  thread.clock.seen.raise(thread.agent, thread.clock.seen[thread.agent] + 1);
}

}  // namespace fulmen::emulator
