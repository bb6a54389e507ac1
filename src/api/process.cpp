// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen.h section 8: the log and the threads of the process, and what only GPUs have. A log in a
// file is written line by line, each whole, by one write, so that those of several processes do not
// mix.

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "api/boundary.h"
#include "core/error.h"
#include "core/log.h"
#include "cpu/backend.h"
#include "cpu/thread_pool.h"
#include "gpu/backend.h"
#include "kernels/params.h"

namespace fulmen::api {
namespace {

std::atomic<int> destination_file{-1};

void write_line(LogLevel level, const char* message, void*) {
  constexpr const char* kNames[] = {"error", "warning", "info"};
  const std::string line =
      sentence("fulmen ", kNames[static_cast<int>(level)], ": ", message, "\n");
  // A log that cannot be written is no reason to fail a call.
  [[maybe_unused]] const auto written = ::write(destination_file, line.data(), line.size());
}

}  // namespace

void log_to(const char* destination) {
  int file = STDERR_FILENO;
  if (std::strcmp(destination, "stderr") != 0) {
    file = ::open(destination, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  }
  if (file < 0) {
    throw Error(Status::kArgument,
                sentence("FULMEN_LOG is '", destination, "', which cannot be opened (",
                         std::strerror(errno), "); name a file or stderr, or unset it"));
  }
  destination_file = file;
  if (!log_is_on()) restore_environment_log();
}

void follow_environment_log() {
  static const bool followed = [] {
    const char* named = std::getenv("FULMEN_LOG");
    if (named != nullptr && *named != '\0') log_to(named);
    return true;
  }();
  static_cast<void>(followed);
}

void restore_environment_log() { set_log(destination_file < 0 ? nullptr : write_line, nullptr); }

namespace {

static_assert(static_cast<int>(LogLevel::kError) == FULMEN_LOG_ERROR);
static_assert(static_cast<int>(LogLevel::kWarning) == FULMEN_LOG_WARNING);
static_assert(static_cast<int>(LogLevel::kInfo) == FULMEN_LOG_INFO);

// int64_t and i64 may be different types of one width, and so the callbacks' types: each side is
// called through a function of its own type.
struct Caller {
  fulmen_log_callback log = nullptr;
  void* log_user = nullptr;
  fulmen_parallel_for parallel_for = nullptr;
  void* parallel_user = nullptr;
};

Caller& caller() {
  static Caller the_caller;
  return the_caller;
}

void forward_log(LogLevel level, const char* message, void*) {
  caller().log(static_cast<fulmen_log_level>(level), message, caller().log_user);
}

struct Work {
  cpu::Body body;
  void* context;
};

void run_body(void* context, int64_t index) {
  const Work& work = *static_cast<const Work*>(context);
  work.body(work.context, index);
}

void forward_parallel_for(i64 n, cpu::Body body, void* context, void*) {
  Work work{body, context};
  caller().parallel_for(n, run_body, &work, caller().parallel_user);
}

}  // namespace

namespace {

static_assert(static_cast<int>(cpu::Loop::kMultiplyAdds) == FULMEN_LOOP_MULTIPLY_ADDS);
static_assert(static_cast<int>(cpu::Loop::kPairProducts) == FULMEN_LOOP_PAIR_PRODUCTS);
static_assert(static_cast<int>(cpu::Loop::kRead) == FULMEN_LOOP_READ);
static_assert(int{kFaultQOffsets} == FULMEN_FAULT_Q_OFFSETS);
static_assert(int{kFaultKvOffsets} == FULMEN_FAULT_KV_OFFSETS);
static_assert(int{kFaultQLengths} == FULMEN_FAULT_Q_LENGTHS);
static_assert(int{kFaultKvLengths} == FULMEN_FAULT_KV_LENGTHS);
static_assert(int{kFaultRng} == FULMEN_FAULT_RNG);
static_assert(int{kFaultPages} == FULMEN_FAULT_PAGES);
static_assert(int{kFaultBlocks} == FULMEN_FAULT_BLOCKS);
static_assert(int{kFaultSegments} == FULMEN_FAULT_SEGMENTS);
static_assert(int{kFaultSlots} == FULMEN_FAULT_SLOTS);
static_assert(int{kFaultPositions} == FULMEN_FAULT_POSITIONS);
static_assert(int{kFaultCaptures} == FULMEN_FAULT_CAPTURES);

void require_path(const char* path, const char* what) {
  if (path == nullptr || *path == '\0') {
    throw Error(Status::kArgument, sentence(what, " is null or empty; pass the path of a file"));
  }
}

std::vector<gpu::BundleEntry> entries_of(const fulmen_plan* plan, size_t index) {
  require_struct(plan, sentence("plans[", index, "]").c_str(), "fulmen_plan_create");
  if (plan->gpu == nullptr) {
    throw Error(Status::kArgument,
                sentence("plans[", index,
                         "] is for the CPU, which compiles nothing; make it with "
                         "device_name, such as sm_90a"));
  }
  return gpu::bundle_entries(*plan->gpu, plan->plan.problem);
}

}  // namespace

}  // namespace fulmen::api

using fulmen::Error;
using fulmen::sentence;
using fulmen::Status;
using fulmen::api::caller;
using fulmen::api::guarded;
using fulmen::api::require_path;

void fulmen_set_log(fulmen_log_callback callback, void* user) {
  caller().log = callback;
  caller().log_user = user;
  if (callback == nullptr) return fulmen::api::restore_environment_log();
  fulmen::set_log(fulmen::api::forward_log, nullptr);
}

fulmen_status fulmen_set_num_threads(int32_t num_threads) {
  return guarded([&] {
    if (num_threads < 0) {
      throw Error(Status::kArgument, sentence("num_threads is ", num_threads,
                                              "; allowed is 1 or more, or 0: default"));
    }
    fulmen::cpu::set_num_threads(num_threads);
  });
}

fulmen_status fulmen_set_parallel_for(fulmen_parallel_for parallel_for, int32_t max_threads,
                                      void* user) {
  return guarded([&] {
    if (parallel_for == nullptr) {
      fulmen::cpu::set_parallel_for(nullptr, 0, nullptr);
      return;
    }
    if (max_threads < 1) {
      throw Error(Status::kArgument,
                  sentence("max_threads is ", max_threads, "; allowed is 1 or more"));
    }
    caller().parallel_for = parallel_for;
    caller().parallel_user = user;
    fulmen::cpu::set_parallel_for(fulmen::api::forward_parallel_for, max_threads, nullptr);
  });
}

fulmen_status fulmen_cpu_run_loop(fulmen_cpu_loop loop, int64_t steps, const void* buffer,
                                  int64_t bytes, int64_t* done) {
  return guarded([&] {
    const int number = fulmen::api::number_of(loop);
    if (number < FULMEN_LOOP_MULTIPLY_ADDS || number > FULMEN_LOOP_READ) {
      throw Error(Status::kArgument,
                  sentence("loop is ", number,
                           "; allowed is 1 (multiply-adds), 2 (pair products) or 3 (read)"));
    }
    if (steps < 0 || bytes < 0) {
      throw Error(Status::kArgument, sentence("steps is ", steps, " and bytes ", bytes,
                                              "; allowed are numbers from 0 on"));
    }
    fulmen::api::require_pointer(done, "done", "the address of an int64_t");
    if (loop == FULMEN_LOOP_READ && bytes > 0) {
      fulmen::api::require_pointer(buffer, "buffer", "the address of `bytes` bytes");
    }
    *done = fulmen::cpu::run_loop(static_cast<fulmen::cpu::Loop>(loop), steps, buffer, bytes);
  });
}

fulmen_status fulmen_device_faults(int32_t device, uint32_t* faults) {
  return guarded([&] {
    fulmen::api::require_pointer(faults, "faults", "the address of a uint32_t");
    *faults = fulmen::gpu::take_faults(device);
  });
}

fulmen_status fulmen_bundle_write(const fulmen_plan* const* plans, size_t num_plans,
                                  const char* path) {
  return guarded([&] {
    require_path(path, "path");
    if (num_plans == 0) {
      throw Error(Status::kArgument, "num_plans is 0; a bundle needs at least one plan");
    }
    fulmen::api::require_pointer(plans, "plans", "an array of plans");
    std::vector<fulmen::gpu::BundleEntry> all;
    for (size_t index = 0; index < num_plans; ++index) {
      for (auto& entry : fulmen::api::entries_of(plans[index], index)) {
        all.push_back(std::move(entry));
      }
    }
    fulmen::gpu::write_bundle(all, path);
  });
}

fulmen_status fulmen_bundle_load(const char* path) {
  return guarded([&] {
    require_path(path, "path");
    fulmen::gpu::load_bundle(path);
  });
}

fulmen_status fulmen_cache_clear(void) {
  return guarded([] { fulmen::gpu::clear_cache(); });
}

fulmen_status fulmen_set_nvrtc_candidates(const char* const* paths, size_t num_paths) {
  return guarded([&] {
    if (num_paths > 0) {
      fulmen::api::require_pointer(paths, "paths", "an array of paths");
    }
    std::vector<std::string> candidates;
    for (size_t index = 0; index < num_paths; ++index) {
      require_path(paths[index], sentence("paths[", index, "]").c_str());
      candidates.emplace_back(paths[index]);
    }
    fulmen::gpu::set_nvrtc_candidates(std::move(candidates));
  });
}
