// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The library's own pool: workers start at the first need, spin briefly for the next job and then
// sleep. One job runs at a time; a caller that finds the pool busy runs its job alone, on its own
// thread, which is correct (slots share a task counter) and keeps callers from waiting for each
// other. After fork the child has none of the workers, so a pool belongs to the process that made
// it.

#include "cpu/thread_pool.h"

#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "core/error.h"

namespace fulmen::cpu {
namespace {

constexpr int kMaxThreads = 1024;

// About 10 to 20 microseconds: longer than the gap between two passes of one call, shorter than
// anyone would notice as load.
constexpr int kSpins = 400;

void pause_briefly() {
#if defined(__x86_64__)
  for (int i = 0; i < 8; ++i) __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

struct Job {
  Body body = nullptr;
  void* context = nullptr;
  i64 size = 0;
};

class Pool {
 public:
  Pool() : process_(getpid()) {}
  ~Pool() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      generation_.fetch_add(1);
    }
    wake_workers_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  bool belongs_here() const { return process_ == getpid(); }

  // False, and nothing done, while another caller's job runs.
  bool run(const Job& job) {
    const std::unique_lock owner(busy_, std::try_to_lock);
    if (!owner) return false;
    {
      const std::lock_guard lock(mutex_);
      start_workers(job.size - 1);
      job_ = job;
      next_.store(0);
      open_ = true;
      generation_.fetch_add(1);
    }
    wake_workers_.notify_all();
    work_on(job);
    close();
    return true;
  }

 private:
  // Fewer than wanted when the system gives no more: slots then share the threads there are.
  void start_workers(i64 wanted) {
    try {
      while (static_cast<i64>(workers_.size()) < wanted) {
        workers_.emplace_back([this, seen = generation_.load()] { serve(seen); });
      }
    } catch (const std::system_error&) {
    }
  }

  void serve(unsigned seen) {
    for (;;) {
      for (int spin = 0; spin < kSpins && generation_.load() == seen; ++spin) pause_briefly();
      Job job;
      {
        std::unique_lock lock(mutex_);
        wake_workers_.wait(lock, [&] { return generation_.load() != seen; });
        seen = generation_.load();
        if (stopping_) return;
        if (!open_) continue;
        job = job_;
        active_.fetch_add(1);
      }
      work_on(job);
      const std::lock_guard lock(mutex_);
      if (active_.fetch_sub(1) == 1) all_left_.notify_one();
    }
  }

  void work_on(const Job& job) {
    for (i64 i = next_.fetch_add(1); i < job.size; i = next_.fetch_add(1)) {
      job.body(job.context, i);
    }
  }

  // No worker joins any more; returns when those that did have left.
  void close() {
    {
      const std::lock_guard lock(mutex_);
      open_ = false;
    }
    for (int spin = 0; spin < kSpins && active_.load() > 0; ++spin) pause_briefly();
    std::unique_lock lock(mutex_);
    all_left_.wait(lock, [&] { return active_.load() == 0; });
  }

  const pid_t process_;
  std::mutex busy_;   // held by the caller whose job runs
  std::mutex mutex_;  // guards all below; the atomics are also read while spinning
  std::condition_variable wake_workers_;
  std::condition_variable all_left_;
  std::atomic<unsigned> generation_{0};
  std::atomic<int> active_{0};  // workers inside the job
  std::atomic<i64> next_{0};    // the next index of the job
  bool open_ = false;
  bool stopping_ = false;
  Job job_;
  std::vector<std::thread> workers_;
};

// Ends the workers when the library is unloaded. In a forked child they do not exist.
struct PoolOwner {
  std::atomic<Pool*> pool{nullptr};
  ~PoolOwner() {
    Pool* const mine = pool.load();
    if (mine && mine->belongs_here()) delete mine;
  }
};

Pool& current_pool() {
  static PoolOwner owner;
  Pool* pool = owner.pool.load();
  while (!pool || !pool->belongs_here()) {
    Pool* const fresh = new Pool;
    if (owner.pool.compare_exchange_strong(pool, fresh))
      return *fresh;  // the parent's is left alone
    delete fresh;
  }
  return *pool;
}

// Processors in the calling thread's affinity mask; 0 where the system does not say. Masks are as
// long as the kernel's, which may be longer than cpu_set_t.
int affine_processors() {
  for (size_t most = CPU_SETSIZE; most <= (size_t{1} << 20); most *= 2) {
    cpu_set_t* const mask = CPU_ALLOC(most);
    if (mask == nullptr) return 0;
    const size_t bytes = CPU_ALLOC_SIZE(most);
    const bool is_known = sched_getaffinity(0, bytes, mask) == 0;
    const int count = is_known ? CPU_COUNT_S(bytes, mask) : 0;
    CPU_FREE(mask);
    if (is_known || errno != EINVAL) return count;
  }
  return 0;
}

// Microseconds of processor time in a period, over the period: of cpu.max (version 2), or of two
// files (version 1). Infinite where there is no limit.
double quota_of(const std::string& folder) {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  double quota = 0, period = 0;
  std::ifstream both(folder + "/cpu.max");
  if (both >> quota >> period) return period > 0 ? quota / period : kNone;
  std::ifstream quota_file(folder + "/cpu.cfs_quota_us");
  std::ifstream period_file(folder + "/cpu.cfs_period_us");
  const bool is_limited = quota_file >> quota && period_file >> period && quota > 0 && period > 0;
  return is_limited ? quota / period : kNone;
}

// The least quota of a group and those above it. A container may see the path of its group from
// outside and its own group at the top: folders that are not there have no limit.
double least_quota(const std::string& top, std::string path) {
  double least = quota_of(top);
  while (!path.empty()) {
    least = std::fmin(least, quota_of(top + path));
    path.resize(path.find_last_of('/'));
  }
  return least;
}

// Lines of /proc/self/cgroup are number:controllers:path; without controllers, version 2.
double quota_of_process(const std::string& root) {
  double least = std::numeric_limits<double>::infinity();
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos || line[second + 1] != '/') continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    const bool has_cpu = ("," + controllers + ",").find(",cpu,") != std::string::npos;
    const std::string top = root + "/sys/fs/cgroup";
    if (controllers.empty()) least = std::fmin(least, least_quota(top, path));
    if (!has_cpu) continue;
    for (const std::string& name : {controllers, std::string("cpu")}) {  // the latter may be a link
      least = std::fmin(least, least_quota(top + "/" + name, path));
    }
  }
  return least;
}

std::atomic<int> threads_asked{0};  // 0: the default

// Set while no other call runs (fulmen.h section 8).
struct CallersPool {
  ParallelFor parallel_for = nullptr;
  int max_threads = 1;
  void* user = nullptr;
} callers_pool;

}  // namespace

int usable_processors(const std::string& root) {
  const int affine = affine_processors();
  const int present = affine > 0 ? affine : static_cast<int>(std::thread::hardware_concurrency());
  const double quota = std::ceil(quota_of_process(root));
  return clamp(quota < present ? static_cast<int>(quota) : present, 1, kMaxThreads);
}

int default_num_threads() {
  const char* const text = std::getenv("FULMEN_NUM_THREADS");
  if (!text || !*text) return usable_processors();
  char* end = nullptr;
  const long threads = std::strtol(text, &end, 10);
  if (*end != '\0' || threads < 1 || threads > kMaxThreads) {
    throw Error(Status::kArgument, sentence("FULMEN_NUM_THREADS is \"", text,
                                            "\"; allowed is a number from 1 to ", kMaxThreads));
  }
  return static_cast<int>(threads);
}

void set_num_threads(int num_threads) {
  if (num_threads < 0 || num_threads > kMaxThreads) {
    throw Error(Status::kArgument, sentence("num_threads is ", num_threads,
                                            "; allowed is 0 (the default) to ", kMaxThreads));
  }
  threads_asked.store(num_threads);
}

void set_parallel_for(ParallelFor parallel_for, int max_threads, void* user) {
  if (parallel_for && (max_threads < 1 || max_threads > kMaxThreads)) {
    throw Error(Status::kArgument,
                sentence("max_threads is ", max_threads, "; allowed is 1 to ", kMaxThreads));
  }
  callers_pool = {parallel_for, max_threads, user};
}

int num_threads() {
  if (callers_pool.parallel_for) return callers_pool.max_threads;
  const int asked = threads_asked.load();
  if (asked > 0) return asked;
  static const int by_default = default_num_threads();
  return by_default;
}

void parallel_for(int num_slots, Body body, void* context) {
  if (num_slots > 1) {
    if (callers_pool.parallel_for) {
      return callers_pool.parallel_for(num_slots, body, context, callers_pool.user);
    }
    if (current_pool().run({body, context, num_slots})) return;
  }
  for (i64 slot = 0; slot < num_slots; ++slot) body(context, slot);
}

void await_order(i64& counter, i64 position) {
  constexpr int kSpins = 1000;
  const std::atomic_ref<i64> shared(counter);
  for (int spin = 0; shared.load(std::memory_order_acquire) != position; ++spin) {
    if (spin > kSpins) std::this_thread::yield();
  }
}

void advance_order(i64& counter, i64 next) {
  std::atomic_ref<i64>(counter).store(next, std::memory_order_release);
}

}  // namespace fulmen::cpu
