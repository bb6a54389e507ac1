// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One comparison of an access with the accesses before it.
#include "emulator/shadow.h"

namespace fulmen::emulator {
namespace {

// Whether `earlier` is ordered before whoever owns `clock`.
bool is_ordered(const Access& earlier, const Access& access, const Clock& clock,
                const Earlier& before) {
  if (earlier.world != access.world) return before.has(earlier.world, clock);
  return earlier.agent == access.agent || earlier.time <= clock.seen[earlier.agent];
}

Fault fault_between(const Access& earlier, const Access& access, const Clock& clock,
                    const Earlier& before) {
  if ((earlier.bytes & access.bytes) == 0) return Fault::kNone;
  if (!earlier.writes() && !access.writes()) return Fault::kNone;
  if (earlier.kind == Access::Kind::kAtomic && access.kind == Access::Kind::kAtomic) {
    return Fault::kNone;
  }
  if (!is_ordered(earlier, access, clock, before)) return Fault::kRace;
  const bool needs_fence = earlier.writes() || earlier.kind == Access::Kind::kMatrixRead;
  if (earlier.world == access.world && needs_fence && !earlier.async && access.async &&
      earlier.time > clock.fenced[earlier.agent]) {
    return Fault::kProxy;
  }
  return Fault::kNone;
}

// How well `access` may replace `earlier`: 0 not without forgetting something.
u32 replaceable(const Access& earlier, const Access& access, bool ordered) {
  if (earlier.kind == Access::Kind::kNone) return 2;
  if ((earlier.bytes & ~access.bytes) != 0) return 0;
  if (earlier.writes() && !access.writes()) return 0;
  if (earlier.agent == access.agent && earlier.world == access.world) return 3;
  return ordered ? 1 : 0;
}

}  // namespace

Finding Granule::touch(const Access& access, const Clock& clock, const Earlier& before,
                       u32 random) {
  Finding finding;
  u32 best = 0;
  u32 at = random % kKept;
  if (!access.writes() && kept_[at].writes()) at = (at + 1) % kKept;
  for (u32 i = 0; i < kKept; ++i) {
    const Access& earlier = kept_[i];
    if (earlier.kind != Access::Kind::kNone && finding.fault == Fault::kNone) {
      finding = {fault_between(earlier, access, clock, before), earlier,
                 static_cast<u16>(earlier.bytes & access.bytes)};
    }
    const u32 rank = replaceable(earlier, access, is_ordered(earlier, access, clock, before));
    if (rank > best) {
      best = rank;
      at = i;
    }
    if (earlier.kind == Access::Kind::kNone) break;  // they are filled from the front
  }
  if (finding.fault == Fault::kNone && access.kind != Access::Kind::kWrite &&
      (access.bytes & ~written_) != 0) {
    finding = {Fault::kUninitialised, {}, static_cast<u16>(access.bytes & ~written_)};
  }
  if (access.writes()) written_ = static_cast<u16>(written_ | access.bytes);
  kept_[at] = access;
  return finding;
}

}  // namespace fulmen::emulator
