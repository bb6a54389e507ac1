// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a request whose device is resolved to launches.

#include "gpu/backend.h"

#include "core/request.h"
#include "core/validate.h"
#include "gpu/implementations.h"

namespace fulmen::gpu {
namespace {

PlanCache<PreparedPlan>& plan_cache() {
  static PlanCache<PreparedPlan> cache;
  return cache;
}

std::shared_ptr<const PreparedPlan> plan_for(const Problem& problem, const Options& options) {
  if (options.device_name != nullptr) {
    return std::make_shared<const PreparedPlan>(
        prepare_plan(problem, gpu_named(options.device_name)));
  }
  return std::make_shared<const PreparedPlan>(prepare_plan(problem, device(options.device)));
}

const Device& device_of(const PreparedPlan& prepared) {
  if (prepared.device != nullptr) return *prepared.device;
  throw Error(Status::kUnsupported,
              sentence("the plan was made for '", prepared.gpu.name,
                       "' by device_name and does not run; make one with device for a GPU that "
                       "is here"));
}

// space: of one of the arrays, or unknown. Arrays often share an allocation, and the driver takes
// its time to answer.
void check_arrays(const PreparedPlan& prepared, const Device& device, const Problem& problem,
                  MemorySpace space = {}) {
  if (space.device != device.ordinal()) space = {};
  for (int index = 0; index < kNumArrays; ++index) {
    const auto array = static_cast<Array>(index);
    const Tensor& tensor = problem.arrays[array];
    if (!tensor.present() || tensor.empty() || space.has_around(tensor.data)) continue;
    space = check_pointer(device, tensor.data, name(array));
  }
  if (problem.pointer_alignment >= prepared.decision->alignment_bytes) return;
  throw Error(Status::kArgument,
              sentence("an array begins at a multiple of ", problem.pointer_alignment,
                       " bytes only; the plan's kernels (", name(prepared.plan.implementation),
                       ") need multiples of ", prepared.decision->alignment_bytes,
                       ": align it, or plan with another "
                       "implementation"));
}

// Enqueues a run whose arrays were checked.
void enqueue(const PreparedPlan& prepared, const Device& device, const Problem& problem,
             void* workspace, CUstream stream) {
  const CurrentContext current(device);
  const Driver& driver = device.driver();
  auto base = reinterpret_cast<CUdeviceptr>(workspace);
  base += (kWorkspaceAlignment - base % kWorkspaceAlignment) % kWorkspaceAlignment;
  if (const size_t zeroed = prepared.decision->zeroed_bytes; zeroed > 0) {
    driver.check(driver->cuMemsetD8Async(base, 0, zeroed, stream),
                 "clear the counters in the workspace");
  }
  char* const start = workspace == nullptr ? nullptr : reinterpret_cast<char*>(base);
  prepared.decision->run({problem, driver, prepared.kernels, start, device.faults(), stream});
  device.log_faults();
}

// Memory that is ordered with the work of a stream; freed in its order too.
class StreamMemory {
 public:
  StreamMemory(const Device& device, std::size_t bytes, CUstream stream)
      : device_(device), stream_(stream) {
    if (bytes == 0) return;
    if (device_.pool() == nullptr) {
      throw Error(Status::kUnsupported,
                  sentence("device ", device_.ordinal(), " (", device_.facts().name,
                           ") has no memory pools, which the simple call takes its workspace "
                           "from; make a plan and pass it a workspace"));
    }
    const CurrentContext current(device_);
    const CUresult result =
        device_.driver()->cuMemAllocFromPoolAsync(&pointer_, bytes, device_.pool(), stream_);
    if (result == kCudaSuccess) return;
    device_.driver().fail(result, sentence("allocate a workspace of ", bytes, " bytes on device ",
                                           device_.ordinal()));
  }
  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;
  ~StreamMemory() {
    if (pointer_ == 0) return;
    const CurrentContext current(device_);
    device_.driver()->cuMemFreeAsync(pointer_, stream_);
  }
  void* get() const { return reinterpret_cast<void*>(pointer_); }

 private:
  const Device& device_;
  CUstream stream_;
  CUdeviceptr pointer_ = 0;
};

}  // namespace

std::shared_ptr<const PreparedPlan> make_plan(const Request& request) {
  return plan_for(validate(request, Pointers::kUnknown), request.options);
}

void run(const PreparedPlan& prepared, const Problem& problem, void* workspace, void* stream) {
  const Device& device = device_of(prepared);
  device.driver().check_not_forked();
  check_arrays(prepared, device, problem);
  check_pointer(device, workspace, "workspace");
  enqueue(prepared, device, problem, workspace, static_cast<CUstream>(stream));
}

void run_once(const Request& request, const MemorySpace& space, void* stream) {
  const RequestKey key(request);
  std::shared_ptr<const PreparedPlan> prepared;
  if (request.options.device_name == nullptr) prepared = plan_cache().find(key);
  if (prepared == nullptr) {
    prepared = plan_for(validate(request, Pointers::kChecked), request.options);
    if (prepared->device != nullptr) plan_cache().insert(key, prepared);
  }
  const Device& device = device_of(*prepared);
  device.driver().check_not_forked();
  const Problem problem = bind(prepared->plan.problem, request);
  check_arrays(*prepared, device, problem, space);
  const auto ordered = static_cast<CUstream>(stream);
  const StreamMemory workspace(device, prepared->plan.workspace_bytes, ordered);
  enqueue(*prepared, device, problem, workspace.get(), ordered);
}

void clear_cache() {
  plan_cache().clear();
  forget_prepared_kernels();
  kernel_cache().clear();
}

u32 take_faults(int ordinal) { return device(ordinal).take_faults(); }

}  // namespace fulmen::gpu
