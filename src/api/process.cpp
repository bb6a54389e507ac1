// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen.h section 8: the log and the threads of the process.

#include "api/boundary.h"
#include "api/log_file.h"
#include "core/log.h"
#include "cpu/thread_pool.h"

namespace fulmen::api {
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
}  // namespace fulmen::api

using fulmen::Error;
using fulmen::sentence;
using fulmen::Status;
using fulmen::api::caller;
using fulmen::api::guarded;

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
