// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Happens-before by vector clocks. Agents are the threads of a world (block.h) and its asynchronous
// engines; each has a time of its own that grows when it hands something over. A clock says up to
// which time of every agent its owner is ordered after, and, as `fenced`, up to which time a proxy
// fence lies on the way: what the asynchronous proxy may rely on (PTX ISA 9.0, section 8.9).
#pragma once

#include <vector>

#include "kernels/base.cuh"

namespace fulmen::emulator {

// Times of agents; an agent that is not there yet stands at 0.
class Times {
 public:
  u32 operator[](u32 agent) const { return agent < times_.size() ? times_[agent] : 0; }
  void raise(u32 agent, u32 time) {
    if (agent >= times_.size()) times_.resize(agent + 1, 0);
    if (times_[agent] < time) times_[agent] = time;
  }
  void join(const Times& other) {
    if (other.times_.size() > times_.size()) times_.resize(other.times_.size(), 0);
    const u32* const theirs = other.times_.data();
    u32* const ours = times_.data();
    const size_t count = other.times_.size();
    for (size_t i = 0; i < count; ++i) ours[i] = ours[i] < theirs[i] ? theirs[i] : ours[i];
  }
  void meet(const Times& other) {  // what both are ordered after
    if (other.times_.size() < times_.size()) times_.resize(other.times_.size());
    for (size_t i = 0; i < times_.size(); ++i) times_[i] = min(times_[i], other.times_[i]);
  }
  void clear() { times_.clear(); }

 private:
  using size_t = decltype(sizeof(0));
  std::vector<u32> times_;
};

struct Clock {
  Times seen;
  Times fenced;

  void join(const Clock& other) {
    seen.join(other.seen);
    fenced.join(other.fenced);
  }
  void meet(const Clock& other) {
    seen.meet(other.seen);
    fenced.meet(other.fenced);
  }
  void clear() {
    seen.clear();
    fenced.clear();
  }
};

}  // namespace fulmen::emulator
