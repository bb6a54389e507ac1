// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// parallel_for over slots: the library's own small pool, or the caller's (fulmen_set_parallel_for).
// A slot is one worker with its own scratch; slots take tasks from a shared counter, so results
// may not depend on which slot does which task.
#pragma once

#include <atomic>
#include <functional>
#include <string>

#include "core/problem.h"

namespace fulmen::cpu {

using Body = void (*)(void* context, i64 index);
using ParallelFor = void (*)(i64 n, Body body, void* context, void* user);

// Process-wide settings; see fulmen.h section 8.
void set_num_threads(int num_threads);
void set_parallel_for(ParallelFor parallel_for, int max_threads, void* user);

// How many slots parallel_for will be called with: the plan sizes scratch by it.
int num_threads();

// How many threads this process may keep busy: the processors that the calling thread may run on,
// and no more than the quota of processor time of its control group, rounded up. root stands before
// /proc and /sys, which tests have their own of.
int usable_processors(const std::string& root = "");

// FULMEN_NUM_THREADS, else usable_processors. Throws Error for what is no number of threads.
int default_num_threads();

// Calls body(context, slot) once for each slot in [0, num_slots) and returns when all are done.
// Exceptions must not leave body. Safe to call from several threads at once and after fork.
void parallel_for(int num_slots, Body body, void* context);

// Runs task(slot, index) for each index in [0, num_tasks), in rising order of claims.
template <class Task>
void for_each_task(int num_slots, i64 num_tasks, const Task& task) {
  struct Shared {
    const Task* task;
    i64 num_tasks;
    std::atomic<i64> next{0};
  } shared{&task, num_tasks};
  parallel_for(
      num_slots,
      [](void* context, i64 slot) {
        auto& work = *static_cast<Shared*>(context);
        for (i64 i = work.next.fetch_add(1); i < work.num_tasks; i = work.next.fetch_add(1)) {
          (*work.task)(static_cast<int>(slot), i);
        }
      },
      &shared);
}

// Several tasks add to one accumulator, each exactly once, in a fixed order, so that the sum has
// the same bits whichever thread comes first: one waits until `counter` is its position, and sets
// it to the next one. A task may only wait for tasks of lower number: those were claimed before it
// (for_each_task), so the lowest unfinished one never waits, and there is progress on any number of
// threads.
void await_order(i64& counter, i64 position);
void advance_order(i64& counter, i64 next);

}  // namespace fulmen::cpu
