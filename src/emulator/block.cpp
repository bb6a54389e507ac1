// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The meetings that all barriers of threads are made of, and the names of agents.
#include "emulator/block.h"

#include <sstream>
#include <utility>

#include "emulator/order.h"

namespace fulmen::emulator {

std::string name_warps(u32 warps) {
  if (warps == 0) return "no warp";
  std::ostringstream names;
  names << "warps";
  for (u32 warp = 0; warp < 32; ++warp) {
    if (warps >> warp & 1) names << ' ' << warp;
  }
  return names.str();
}

u32 World::new_engine(std::string name) {
  engines.push_back(std::move(name));
  return num_thread_agents + static_cast<u32>(engines.size()) - 1;
}

std::string World::name_agent(u32 agent) const {
  if (agent >= num_thread_agents) return engines.at(agent - num_thread_agents);
  const u32 threads = static_cast<u32>(blocks[0]->threads.size());
  std::ostringstream name;
  if (blocks.size() > 1) name << "block " << blocks[agent / threads]->index << ", ";
  const u32 thread = agent % threads;
  name << "warp " << thread / kWarpSize << ", lane " << thread % kWarpSize;
  return name.str();
}

void ask_for_copy(std::function<void()> run) {
  const bool late = world().random() % 8 == 0;
  world().copies.push_back({current_block, std::move(run), late});
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

void arrive(Meeting& meeting, u32 threads, const char* instruction, bool ordered) {
  if (meeting.arrived > 0 && meeting.expected != threads) {
    fail(std::string(instruction) + " for " + std::to_string(threads) + " threads, others are at " +
         std::to_string(meeting.expected));
  }
  if (meeting.who[self().index]) {
    fail(std::string(instruction) + ": the thread comes twice to one round, of which " +
         std::to_string(meeting.arrived) + " of " + std::to_string(meeting.expected) +
         " threads have come, from " + name_warps(meeting.arrived_warps));
  }
  if (ordered) hand_over(meeting.arriving);
  meeting.expected = threads;
  meeting.arrived_warps |= 1u << self().warp();
  meeting.who.set(self().index);
  if (++meeting.arrived < threads) return;
  meeting.arrived = 0;
  meeting.arrived_warps = 0;
  meeting.who.reset();
  meeting.over[meeting.round % 2] = std::exchange(meeting.arriving, {});
  ++meeting.round;
}

void meet(Meeting& meeting, u32 threads, const char* instruction, bool ordered) {
  const u64 round = meeting.round;
  const MeetingWait others(meeting, instruction);  // before the arrival, which may end the round
  arrive(meeting, threads, instruction, ordered);
  wait(others);
  if (ordered) take_over(meeting.over[round % 2]);
}

}  // namespace fulmen::emulator
