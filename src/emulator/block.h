// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One thread block as the emulator sees it: its threads, shared memory, barriers and the work of
// its asynchronous engines. Every thread is a fiber; one runs at a time and gives way only where it
// waits (wait), so nothing here needs a lock. The functions of kernels/ptx read and change this
// state through block() and self(); launch.cpp makes it and scheduler.cpp decides who goes on.
// Misuse of an instruction ends in an Error that says which thread did what.
#pragma once

#include <array>
#include <bitset>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "emulator/clock.h"
#include "emulator/global_memory.h"
#include "emulator/launch.h"
#include "emulator/shadow.h"
#include "emulator/site.h"
#include "kernels/forward_sm90/config.h"

namespace fulmen::emulator {

// One thread's part of a wgmma m64nNk16.
struct Product {
  float* accumulator;  // N / 2 floats in the thread's registers
  u32 columns;         // N
  DType dtype;         // of A and B
  bool transpose_b;
  bool a_in_registers;
  bool accumulate;
  std::array<u32, 4> a;  // registers, or a descriptor in a[0]
  u32 b;                 // descriptor
  u32 upper;             // word of the descriptors
  Site site = {};
};

// Registers that products write. `touched`: when the thread last used them otherwise, on the clock
// of WgmmaThread::events.
struct Accumulator {
  const float* begin;
  const float* end;
  u64 touched;
  u32 product;  // number of the last one that writes it
};

struct WgmmaThread {
  std::vector<Product> open;                 // issued, not committed
  std::vector<std::vector<Product>> groups;  // committed, oldest first
  std::vector<u32> group_ends;               // number of the last product of each group
  u32 issued = 0;                            // products are numbered from 1
  u32 complete = 0;                          // the last one that was waited for
  u64 events = 1;
  u64 fenced = 0;     // event of the last wgmma.fence
  u64 committed = 1;  // event of the last commit: before it, other registers were in use
  std::vector<Accumulator> accumulators;
};

// A product before all four warps have issued it, and the order that all of them guarantee.
struct PendingProduct {
  u32 warps = 0;
  Clock clock;
};

// One cp.async that has not landed.
struct ThreadCopy {
  u32 shared;
  u32 num_bytes;
  std::array<u8, 16> bytes;
};

struct ThreadCopyGroup {
  std::vector<ThreadCopy> copies;
  u32 last;  // number of the last copy before it was committed
};

struct ThreadCopies {
  std::vector<ThreadCopy> open;        // not committed
  std::deque<ThreadCopyGroup> groups;  // oldest first
  u32 issued = 0;                      // copies are numbered from 1
  u32 agent = ~0u;                     // the engine's
};

// One lane's operands of mma.sync.
struct WarpOperands {
  std::array<u32, 4> a;
  std::array<u32, 2> b;
};

// Two threads may write the same value without order: what lay there before a write that is not
// ordered after another one, and the complaint if it changes.
struct SameValue {
  const void* address = nullptr;
  std::vector<u8> before;
  std::string complaint;
};

inline constexpr u32 kWarpSize = 32;
inline constexpr u32 kWarpgroupSize = 128;
inline constexpr u32 kMaxThreads = 1024;
inline constexpr u32 kNumNamedBarriers = 16;
inline constexpr u32 kSharedBase = 1024;  // the first shared address, so that 0 is never valid
inline constexpr u32 kNoAgent = ~0u;

// What a thread waits for. It lives on the stack of the waiting thread.
class Wait {
 public:
  virtual bool over() const = 0;
  virtual std::string reason() const = 0;  // for the report of a deadlock

 protected:
  ~Wait() = default;
};

// Warps as bits, for reports: "warps 0 4" or "no warp".
std::string name_warps(u32 warps);

struct Block;

struct Thread {
  Block* block = nullptr;
  u32 index = 0;
  u32 agent = 0;  // in the clocks of the world
  bool done = false;
  const Wait* waits_for = nullptr;
  Site at;  // of the last function of kernels/ptx
  const u8* stack_begin = nullptr;
  const u8* stack_end = nullptr;
  Clock clock;
  const GlobalMemory::Array* last_array = nullptr;  // where its last global access went
  SameValue same_value;  // a write that is right only if it changes nothing
  WgmmaThread wgmma;
  ThreadCopies copies;
  u32 stores_issued = 0;         // tensor stores, numbered from 1
  u32 stores_committed = 0;      // number of the last committed one
  std::set<u32> stores_running;  // numbers of those not complete
  u32 store_agent = kNoAgent;    // the engine's, for this thread
  u32 init_agent = kNoAgent;     // its mbarrier.init, each at a time of its own
  u32 inits = 0;
  u32 fenced_inits = 0;      // covered by fence.mbarrier_init
  u64 cluster_arrivals = 0;  // at the barrier of the cluster
  u64 cluster_waits = 0;

  u32 warp() const { return index / kWarpSize; }
  u32 lane() const { return index % kWarpSize; }
  u32 warpgroup() const { return index / kWarpgroupSize; }
};

// What ended a phase: an agent, at a time of its own.
struct Ending {
  u32 agent;
  u32 time;
};

// Arrivals and copies that count towards an mbarrier, of one origin.
struct Arrivals {
  u32 agent = kNoAgent;       // its copies
  u32 copies = 0;             // so many asked for
  Clock arriving;             // of this phase
  std::array<Clock, 2> over;  // of the last two phases, by parity
};

// Phases are counted, so that the parity of one names it.
struct Mbarrier {
  u32 arrivals = 0;  // that make a phase
  u32 pending = 0;   // arrivals missing
  i64 bytes = 0;     // bytes missing; below 0 while data is early
  u32 phase = 0;
  u32 arrived_warps = 0;  // since it was made
  u32 made_by = 0;
  bool reached_by_others = false;
  bool known_to_engine = false;  // fence_mbarrier_init
  Arrivals own;                  // of its block
  Arrivals others;               // of other blocks of the cluster
  u32 phase_agent = kNoAgent;    // whose time is the number of phases, where others end them
  std::deque<Ending> endings;    // of the last phases, the newest last
};

// A meeting of threads: who comes last opens it for all and begins the next round.
struct Meeting {
  u32 expected = 0;  // threads of this round; 0: no thread has arrived
  u32 arrived = 0;
  u64 round = 0;
  u32 arrived_warps = 0;  // in this round
  std::bitset<kMaxThreads> who;
  Clock arriving;
  std::array<Clock, 2> over;  // of the last two rounds
};

struct Warp {
  Meeting meeting;
  std::string_view instruction;  // that its lanes meet in
  std::array<u64, kWarpSize> given{};
  std::array<u64, kWarpSize> received{};
  // Of mma.sync, two sets by turns: a lane may be one product ahead of another.
  std::array<std::array<WarpOperands, kWarpSize>, 2> operands;
};

struct Warpgroup {
  Meeting meeting;
  u32 agent = kNoAgent;   // its products
  u32 first_pending = 1;  // number of pending[0]
  std::vector<PendingProduct> pending;
};

// How a copy lays rows of 64 elements out in shared memory.
enum class Layout : u8 { kUnknown, kSwizzled, kPlain };
inline constexpr u32 kLayoutBytes = 1024;

struct World;
struct Block;

// The blocks of a cluster, and their barrier: threads that have ended need not come to it.
struct Cluster {
  std::vector<Block*> blocks;
  u32 running = 0;  // threads that have not ended
  u32 missing = 0;  // of those, who have not arrived in this round
  u64 round = 0;
  Clock arriving;
  std::array<Clock, 2> over;  // of the last two rounds
};

// The last access of an agent of another block to a block's shared memory.
struct FarAccess {
  u32 time = 0;
  Access::Kind kind = Access::Kind::kNone;
  Site site;
};

struct Block {
  World* world = nullptr;
  u32 index = 0;
  u32 num_blocks = 0;
  Cluster* cluster = nullptr;
  u32 rank = 0;                             // in the cluster
  u32 begin_agent = kNoAgent;               // seen by who knows that the block has begun
  u32 num_ended = 0;                        // threads
  Clock at_end;                             // what those have seen
  std::map<u32, FarAccess> far_accesses{};  // by agent
  std::vector<u8> memory;                   // shared lies in it, on a multiple of 1,024
  u8* shared = nullptr;
  u32 shared_bytes = 0;
  std::vector<Granule> shadow;
  std::vector<Layout> layouts;  // of each kilobyte, as the last copy left it
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  std::array<Meeting, kNumNamedBarriers> named_barriers;
  std::map<u32, Mbarrier> mbarriers;  // by shared address
  u32 most_registers = 0;             // that a setmaxnreg names
  u32 least_increase = ~0u;           // of the setmaxnreg.inc
  Thread* running = nullptr;

  bool has_ended() const { return num_ended == threads.size(); }
};

// A byte of shared memory, of the running thread's block or of another one of its cluster.
struct Location {
  Block* block;
  u32 address;

  Location operator+(u32 bytes) const { return {block, address + bytes}; }
};

// Work of the copy engine. Every eighth is late: it is done when all threads wait and not before.
struct Copy {
  Block* block;
  std::function<void()> run;
  bool late;
};

// The blocks that run together on one thread of the host, in one order drawn from one seed.
struct World {
  const Grid* grid = nullptr;
  u32 number = 0;  // worlds are numbered on, from launch to launch
  Earlier before;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::vector<Copy> copies;  // asked for, not done
  std::mt19937 random;
  u32 num_thread_agents = 0;
  std::vector<std::string> engines;        // names of the agents after the threads
  bool has_waited = false;                 // some thread of it, for the launches before
  bool released_early = false;             // the launch behind, without having heard of that
  std::map<const void*, Clock> announced;  // by counter in global memory
  // The same between the worlds of a launch: who has announced something there, or knew of it.
  std::map<const void*, std::set<u32>>* announced_by = nullptr;

  u32 new_engine(std::string name);
  std::string name_agent(u32 agent) const;
};

// Read by every function of kernels/ptx: not looked up by a call, though it lies in a library.
extern constinit thread_local Block* current_block __attribute__((tls_model("initial-exec")));
inline Block& block() { return *current_block; }
inline Thread& self() { return *block().running; }
inline World& world() { return *block().world; }

// Stops the launch with an Error that begins with kernel, block, warp, lane and line.
[[noreturn]] void fail(const std::string& what);

// Returns once wait.over(); other threads run meanwhile.
void wait(const Wait& wait);

// Leaves a copy to the copy engine.
void ask_for_copy(std::function<void()> run);

// What becomes of a cluster and of a block when the running thread ends: its last act.
void leave_cluster();

// Comes to a meeting of `threads` threads. `instruction` names it in a report. ordered: what those
// who come did before is done for those who leave.
void arrive(Meeting& meeting, u32 threads, const char* instruction, bool ordered);
void meet(Meeting& meeting, u32 threads, const char* instruction, bool ordered);

// Whether a thread of a block runs on this thread of the host whose loads and stores through
// pointers anybody wants to know of.
extern constinit thread_local bool watching __attribute__((tls_model("initial-exec")));

void run_world(World& world, const std::function<void()>& kernel);

}  // namespace fulmen::emulator
