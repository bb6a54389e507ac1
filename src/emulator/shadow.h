// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the checker remembers of memory: for every 16 bytes, which bytes were written, and the last
// accesses with who, when, where. A new access is compared with them: two accesses of which one
// writes must be ordered by the clocks, and what the generic proxy wrote, or read as matrices, must
// have passed a proxy fence before the asynchronous proxy touches or overwrites the bytes. Eight
// accesses are kept; where more would matter a read is dropped at random, so that a race can be
// missed in one schedule and not in another, and nothing is reported that is none.
#pragma once

#include <array>
#include <set>
#include <vector>

#include "emulator/clock.h"
#include "emulator/site.h"

namespace fulmen::emulator {

inline constexpr u32 kGranuleBytes = 16;

struct Access {
  // kOrdered: an atomic one whose result depends on which came before it.
  // kMatrixRead: by ldmatrix, for products to come: it may be under way after barriers.
  enum class Kind : u8 { kNone, kRead, kWrite, kAtomic, kOrdered, kMatrixRead };

  u32 time = 0;
  u16 agent = 0;
  u16 bytes = 0;  // of the granule, as bits
  u32 world = 0;
  Kind kind = Kind::kNone;
  bool async = false;  // by the asynchronous proxy
  Site site;

  bool reads() const { return kind == Kind::kRead || kind == Kind::kMatrixRead; }
  bool writes() const { return kind != Kind::kNone && !reads(); }
};

// Which worlds a world comes after as a whole. Worlds are numbered from launch to launch: its own
// launch begins at `first`, and what lies below `over` had ended when that began. The others before
// `first` come before those only who have waited for them (grid_dependency_wait): an agent that
// stands for all from `awaited` on has then been seen. Of its own launch come before it those whose
// announcements it has waited for.
struct Earlier {
  u32 first = 0;
  u32 over = 0;
  u32 awaited = 0;
  u32 agent = 0;
  std::set<u32> announced = {};

  bool has(u32 world, const Clock& clock) const {
    if (world >= first) return announced.contains(world);
    return world < over || (world >= awaited && clock.seen[agent] > 0);
  }
};

enum class Fault : u8 { kNone, kUninitialised, kRace, kProxy };

struct Finding {
  Fault fault = Fault::kNone;
  Access earlier;
  u16 bytes = 0;  // of the granule, that it is about
};

class Granule {
 public:
  // Compares `access` with what is remembered, then remembers it. Accesses of `before` are over;
  // those of other worlds are not ordered.
  Finding touch(const Access& access, const Clock& clock, const Earlier& before, u32 random);
  void initialise(u16 bytes) { written_ = static_cast<u16>(written_ | bytes); }

 private:
  static constexpr u32 kKept = 8;
  u16 written_ = 0;
  std::array<Access, kKept> kept_{};
};

// Calls call(granule number, bytes as bits) for the bytes [begin, begin + count).
template <class Call>
void for_each_granule(u64 begin, u64 count, const Call& call) {
  for (u64 at = begin; at < begin + count;) {
    const u64 number = at / kGranuleBytes;
    const u64 last = min(begin + count, (number + 1) * kGranuleBytes);
    const u32 bits = ((1u << (last - at)) - 1) << (at % kGranuleBytes);
    call(number, static_cast<u16>(bits));
    at = last;
  }
}

}  // namespace fulmen::emulator
