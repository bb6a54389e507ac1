// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the GPU backend offers to the C ABI: plan a request, run a plan, do both at once. Requests
// have their device resolved (driver/device.h). Streams are void*, as in fulmen.h. Thread safe.
#pragma once

#include <memory>
#include <string>

#include "gpu/prepared_plan.h"

namespace fulmen::gpu {

// Compiles and loads all that runs of the plan will launch.
std::shared_ptr<const PreparedPlan> make_plan(const Request& request);

// Enqueues a run. problem: the plan's, with the arrays of this run. workspace: at least
// plan.workspace_bytes bytes on the device, any alignment and contents. Allocates, compiles and
// waits for nothing.
void run(const PreparedPlan& plan, const Problem& problem, void* workspace, void* stream);

// Plans where no call like this one came before, and runs; workspace comes from the stream's memory
// pool. space: what resolve_device returned.
void run_once(const Request& request, const MemorySpace& space, void* stream);

// Forgets and removes every compiled kernel.
void clear_cache();

// The faults of a device since the last call, as bits of Fault.
u32 take_faults(int device);

// The JSON object that fulmen_gpu_info documents.
std::string gpu_info();

}  // namespace fulmen::gpu
