// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Failures, and the meetings that all barriers of threads are made of.
#include "emulator/block.h"

#include <sstream>
#include <utility>

namespace fulmen::emulator {

std::string name_warps(u32 warps) {
  if (warps == 0) return "nobody";
  std::ostringstream names;
  names << "warps";
  for (u32 warp = 0; warp < 32; ++warp) {
    if (warps >> warp & 1) names << ' ' << warp;
  }
  return names.str();
}

void fail(const std::string& what) {
  std::ostringstream said;
  said << "emulator: block " << block().index;
  if (const Thread* thread = block().running) {
    said << ", warp " << thread->warp() << ", lane " << thread->lane();
  }
  said << ": " << what;
  throw Error(said.str());
}

void ask_for_copy(std::function<void()> run) {
  block().copies.push_back({std::move(run), block().random() % 8 == 0});
}

namespace {

class MeetingWait final : public Wait {
 public:
  MeetingWait(const Meeting& meeting, const char* instruction)
      : meeting_(meeting), round_(meeting.round), instruction_(instruction) {}

  bool over() const override { return meeting_.round != round_; }
  std::string reason() const override {
    return std::string(instruction_) + ": " + std::to_string(meeting_.arrived) + " of " +
           std::to_string(meeting_.expected) + " threads have come, from " +
           name_warps(meeting_.arrived_warps);
  }

 private:
  const Meeting& meeting_;
  u64 round_;
  const char* instruction_;
};

}  // namespace

void arrive(Meeting& meeting, u32 threads, const char* instruction) {
  if (meeting.arrived > 0 && meeting.expected != threads) {
    fail(std::string(instruction) + " for " + std::to_string(threads) + " threads, others are at " +
         std::to_string(meeting.expected));
  }
  meeting.expected = threads;
  meeting.arrived_warps |= 1u << self().warp();
  if (++meeting.arrived < threads) return;
  meeting.arrived = 0;
  meeting.arrived_warps = 0;
  ++meeting.round;
}

void meet(Meeting& meeting, u32 threads, const char* instruction) {
  const MeetingWait others(meeting, instruction);  // before the arrival, which may end the round
  arrive(meeting, threads, instruction);
  wait(others);
}

}  // namespace fulmen::emulator
