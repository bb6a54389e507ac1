// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen.h sections 4 and 5: the simple call, and plan and run.

#include <memory>
#include <new>

#include "api/boundary.h"
#include "core/arrays.h"
#include "core/log.h"
#include "core/request.h"
#include "core/validate.h"
#include "cpu/backend.h"
#include "gpu/driver/device.h"

namespace fulmen::api {
namespace {

std::unique_ptr<char[]> allocate(size_t bytes) {
  std::unique_ptr<char[]> memory(new (std::nothrow) char[bytes]);
  if (memory == nullptr) {
    throw Error(Status::kOutOfMemory, sentence("a workspace of ", bytes,
                                               " bytes could not be allocated; fewer threads "
                                               "(fulmen_set_num_threads) take less"));
  }
  return memory;
}

// The workspace of a simple call on the CPU. A thread keeps a small one for its next call: to
// allocate and free it each time costs as much as a small problem.
class Scratch {
 public:
  explicit Scratch(size_t bytes) {
    constexpr size_t kKept = size_t{1} << 20;
    thread_local std::unique_ptr<char[]> kept;
    thread_local size_t kept_bytes = 0;
    if (bytes > kKept) own_ = allocate(bytes);
    if (bytes <= kKept && bytes > kept_bytes) {
      kept = allocate(bytes);
      kept_bytes = bytes;
    }
    memory_ = own_ != nullptr ? own_.get() : kept.get();
  }

  char* get() const { return memory_; }

 private:
  std::unique_ptr<char[]> own_;
  char* memory_;
};

void run_once(const fulmen_problem* problem, const fulmen_tensors* tensors, Operation operation,
              void* stream) {
  Request request = to_request(problem, tensors, operation);
  const gpu::MemorySpace space = gpu::resolve_device(request);
  if (request.options.backend == Backend::kCuda) return gpu::run_once(request, space, stream);
  require_no_stream(stream);
  const auto plan = cpu::plan_of(request);
  const Scratch workspace(plan->workspace_bytes);
  cpu::run(*plan, bind(plan->problem, request), workspace.get());
}

void require_workspace(const Plan& plan, const void* workspace, size_t bytes) {
  if (bytes < plan.workspace_bytes) {
    throw Error(Status::kArgument,
                sentence("workspace_bytes is ", bytes, "; the plan needs ", plan.workspace_bytes));
  }
  if (workspace == nullptr && plan.workspace_bytes > 0) {
    throw Error(Status::kArgument,
                sentence("workspace is null; the plan needs ", plan.workspace_bytes, " bytes"));
  }
}

struct Run {
  const fulmen_tensors* tensors;
  void* workspace;
  size_t workspace_bytes;
  void* stream;
};

void run_plan(const fulmen_plan* handle, Operation operation, const Run& run) {
  require_struct(handle, "plan", "fulmen_plan_create");
  const Plan& plan = handle->plan;
  if (plan.problem.operation != operation) {
    throw Error(Status::kArgument,
                sentence("plan is for ", name(plan.problem.operation), "; fulmen_", name(operation),
                         " needs a plan for ", name(operation)));
  }
  const bool on_gpu = handle->gpu != nullptr;
  if (!on_gpu) require_no_stream(run.stream);
  const Arrays arrays = to_arrays(run.tensors);
  const Problem problem = same_layout(arrays, handle->arrays) ? bind(plan.problem, arrays)
                                                              : rebind(plan.problem, arrays);
  require_workspace(plan, run.workspace, run.workspace_bytes);
  check_workspace(problem, call_of(operation), run.workspace,
                  static_cast<i64>(plan.workspace_bytes));
  if (on_gpu) return gpu::run(*handle->gpu, problem, run.workspace, run.stream);
  for (int index = 0; index < kNumArrays; ++index) {
    const auto array = static_cast<Array>(index);
    gpu::require_host(problem.arrays[array], name(array), "the plan");
  }
  cpu::run(plan, problem, run.workspace);
}

}  // namespace

fulmen_plan make_plan(const fulmen_problem* problem, const fulmen_tensors* tensors,
                      const fulmen_operation& operation, const fulmen_experiment* experiment) {
  Request request = to_request(problem, tensors, to_operation(operation));
  request.experiment = to_experiment(experiment);
  gpu::resolve_device(request);
  if (request.options.backend == Backend::kCuda) {
    const auto prepared = gpu::make_plan(request);
    return {prepared->plan, prepared, request.arrays};
  }
  return {choose(validate(request, Pointers::kUnknown), cpu::cpu_device()), nullptr,
          request.arrays};
}

static fulmen_status create_plan(const fulmen_problem* problem, const fulmen_tensors* tensors,
                                 const fulmen_operation& operation,
                                 const fulmen_experiment* experiment, fulmen_plan** plan) {
  return guarded([&] {
    require_pointer(plan, "plan", "the address of a fulmen_plan*");
    *plan = nullptr;
    auto made = std::make_unique<fulmen_plan>(make_plan(problem, tensors, operation, experiment));
    if (log_is_on()) log(LogLevel::kInfo, explain(*made).c_str());
    *plan = made.release();
  });
}

std::string explain(const fulmen_plan& plan) {
  return plan.gpu != nullptr ? gpu::explain(*plan.gpu) : fulmen::explain(plan.plan);
}

}  // namespace fulmen::api

using fulmen::Operation;
using fulmen::api::guarded;

fulmen_status fulmen_attention(const fulmen_problem* problem, const fulmen_tensors* tensors,
                               void* stream) {
  return guarded([&] { fulmen::api::run_once(problem, tensors, Operation::kForward, stream); });
}

fulmen_status fulmen_attention_backward(const fulmen_problem* problem,
                                        const fulmen_tensors* tensors, void* stream) {
  return guarded([&] { fulmen::api::run_once(problem, tensors, Operation::kBackward, stream); });
}

fulmen_status fulmen_plan_create(const fulmen_problem* problem, const fulmen_tensors* tensors,
                                 fulmen_operation operation, fulmen_plan** plan) {
  return fulmen::api::create_plan(problem, tensors, operation, nullptr, plan);
}

fulmen_status fulmen_plan_create_experimental(const fulmen_problem* problem,
                                              const fulmen_tensors* tensors,
                                              fulmen_operation operation,
                                              const fulmen_experiment* experiment,
                                              fulmen_plan** plan) {
  return fulmen::api::create_plan(problem, tensors, operation, experiment, plan);
}

void fulmen_plan_destroy(fulmen_plan* plan) { delete plan; }

size_t fulmen_plan_workspace_bytes(const fulmen_plan* plan) {
  return plan == nullptr ? 0 : plan->plan.workspace_bytes;
}

fulmen_status fulmen_forward(const fulmen_plan* plan, const fulmen_tensors* tensors,
                             void* workspace, size_t workspace_bytes, void* stream) {
  return guarded([&] {
    fulmen::api::run_plan(plan, Operation::kForward, {tensors, workspace, workspace_bytes, stream});
  });
}

fulmen_status fulmen_backward(const fulmen_plan* plan, const fulmen_tensors* tensors,
                              void* workspace, size_t workspace_bytes, void* stream) {
  return guarded([&] {
    fulmen::api::run_plan(plan, Operation::kBackward,
                          {tensors, workspace, workspace_bytes, stream});
  });
}
