// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Pointers, the choice between CPU and GPU by them, and devices.

#include "gpu/driver/device.h"

#include <link.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <new>

#include "core/error.h"
#include "core/log.h"
#include "kernels/params.h"

namespace fulmen::gpu {
namespace {

using GetAttributes = decltype(DriverTable::cuPointerGetAttributes);

// How many libraries this process has loaded so far: a new libcuda must be among new ones.
unsigned long long num_libraries_loaded() {
  unsigned long long count = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* result) {
        *static_cast<unsigned long long*>(result) = info->dlpi_adds;
        return 1;  // the first tells all
      },
      &count);
  return count;
}

// Of a libcuda that someone has loaded, or null.
GetAttributes loaded_function() {
  static std::atomic<GetAttributes> function{nullptr};
  static std::atomic<unsigned long long> looked_at{0};
  if (const GetAttributes found = function.load(std::memory_order_acquire)) return found;
  const unsigned long long count = num_libraries_loaded();
  if (looked_at.load(std::memory_order_relaxed) == count) return nullptr;
  SharedLibrary library = SharedLibrary::find_loaded("libcuda.so.1");
  GetAttributes found = nullptr;
  if (library && library.bind(found, "cuPointerGetAttributes")) {
    library.keep();
    function.store(found, std::memory_order_release);
  }
  looked_at.store(count, std::memory_order_relaxed);
  return found;
}

MemorySpace ask(GetAttributes get, const void* pointer) {
  constexpr int kAttributes[] = {kPointerMemoryType, kPointerIsManaged, kPointerDevice,
                                 kPointerRangeBegin, kPointerRangeBytes};
  unsigned type = 0;
  unsigned is_managed = 0;
  int device = -1;
  u64 begin = 0;
  u64 bytes = 0;
  void* values[] = {&type, &is_managed, &device, &begin, &bytes};
  const auto address = reinterpret_cast<CUdeviceptr>(pointer);
  if (get(5, kAttributes, values, address) != kCudaSuccess || type == 0) return {};
  if (is_managed != 0) return {MemorySpace::kDevice, true, device};
  if (type == kMemoryHost) return {MemorySpace::kPinned, false, -1};
  return {MemorySpace::kDevice, false, device, begin, bytes};
}

bool is_on_device(const MemorySpace& space) {
  return space.kind == MemorySpace::kDevice && !space.is_managed;
}

// Where the first array of a call is that has elements.
MemorySpace space_of_arrays(const Arrays& arrays) {
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    const Tensor& tensor = arrays[array];
    if (tensor.present() && !tensor.empty()) return fulmen::gpu::memory_space_of(tensor.data);
  }
  return {};
}

void check_on_host(const Request& request) {
  if (loaded_function() == nullptr) return;
  for (int index = 0; index < kNumArrays; ++index) {
    const auto array = static_cast<Array>(index);
    const Tensor& tensor = request.arrays[array];
    if (!tensor.present() || tensor.empty()) continue;
    const MemorySpace space = memory_space_of(tensor.data);
    if (!is_on_device(space)) continue;
    throw Error(Status::kArgument,
                sentence(name(array), " is in the memory of device ", space.device,
                         "; the call runs on the CPU: copy it to the host, or use "
                         "backend='cuda' with all arrays there"));
  }
}

}  // namespace

MemorySpace memory_space_of(const DriverTable& driver, const void* pointer) {
  return ask(driver.cuPointerGetAttributes, pointer);
}

MemorySpace memory_space_of(const void* pointer) {
  const GetAttributes get = loaded_function();
  return get == nullptr || pointer == nullptr ? MemorySpace{} : ask(get, pointer);
}

MemorySpace resolve_device(Request& request) {
  Options& options = request.options;
  MemorySpace space;
  const bool is_named = options.device >= 0 || options.device_name != nullptr;
  if (options.backend == Backend::kAuto) options.backend = backend_of(options.implementation);
  if (options.backend == Backend::kAuto && is_named) options.backend = Backend::kCuda;
  const bool is_open = options.backend == Backend::kAuto ||
                       (options.backend == Backend::kCuda && !is_named && options.device == -1);
  if (is_open) {
    space = space_of_arrays(request.arrays);
    const bool is_device = space.kind == MemorySpace::kDevice;
    if (options.backend == Backend::kAuto) {
      options.backend = is_device ? Backend::kCuda : Backend::kCpu;
    }
    const bool to_set = options.backend == Backend::kCuda && options.device == -1;
    if (to_set) options.device = is_device ? space.device : 0;
  }
  if (options.backend == Backend::kCpu) check_on_host(request);
  return space;
}

void require_host(const Tensor& tensor, const char* array, const char* call) {
  if (!tensor.present() || !is_on_device(memory_space_of(tensor.data))) return;
  throw Error(Status::kUnsupported, sentence(call, " computes on the CPU, and ", array,
                                             " is in device memory; copy it to the host"));
}

namespace {

// Of the workspaces of simple calls, while none is in use.
constexpr std::uint64_t kPoolKeepsBytes = std::uint64_t{64} << 20;

// Peaks of the nearest card of the table, by multiprocessors; bandwidth from the memory's clock
// (kHz, two transfers each) and width.
void add_peaks(Gpu& gpu, double memory_khz, double bus_bits) {
  const Gpu& like = gpu_like(gpu.compute_capability);
  const double scale =
      static_cast<double>(gpu.num_multiprocessors) / static_cast<double>(like.num_multiprocessors);
  gpu.tensor_flops = scale * like.tensor_flops;
  gpu.float32_flops = scale * like.float32_flops;
  gpu.float64_flops = scale * like.float64_flops;
  const double bandwidth = 2 * memory_khz * 1e3 * bus_bits / 8;
  gpu.bandwidth = bandwidth > 0 ? bandwidth : like.bandwidth;
}

// Kernels may set the bytes meanwhile. read: of one byte.
template <class Read>
u32 bits_of(FaultBytes& faults, Read read) {
  FaultBytes seen;
  for (i32 i = 0; i < kNumFaults; ++i) seen.met[i] = read(std::atomic_ref<u8>(faults.met[i]));
  return seen.bits();
}

}  // namespace

Device::Device(Driver& driver, int ordinal) : driver_(driver) {
  CUdevice handle = 0;
  driver.check(driver->cuDeviceGet(&handle, ordinal), sentence("open device ", ordinal));
  const auto attribute = [&](int id) {
    int value = 0;
    driver.check(driver->cuDeviceGetAttribute(&value, id, handle),
                 sentence("read attribute ", id, " of device ", ordinal));
    return value;
  };
  char name[256] = "";
  driver.check(driver->cuDeviceGetName(name, sizeof(name) - 1, handle),
               sentence("name device ", ordinal));
  facts_.ordinal = ordinal;
  facts_.name = name;
  facts_.compute_capability =
      10 * attribute(kAttributeComputeMajor) + attribute(kAttributeComputeMinor);
  if (facts_.compute_capability < kMinComputeCapability) {
    throw Error(Status::kUnsupported,
                sentence("device ", ordinal, " (", name, ") has compute capability ",
                         facts_.compute_capability / 10, ".", facts_.compute_capability % 10,
                         "; fulmen needs 7.5 (Turing) or later: use another device or "
                         "backend='cpu'"));
  }
  facts_.num_multiprocessors = attribute(kAttributeNumMultiprocessors);
  facts_.l2_bytes = static_cast<std::size_t>(attribute(kAttributeL2Bytes));
  facts_.shared_bytes_per_block =
      static_cast<std::size_t>(attribute(kAttributeSharedBytesPerBlock));
  facts_.shared_bytes_per_multiprocessor =
      static_cast<std::size_t>(attribute(kAttributeSharedBytesPerMultiprocessor));
  facts_.registers_per_multiprocessor = attribute(kAttributeRegistersPerMultiprocessor);
  driver.check(driver->cuDeviceTotalMem_v2(&facts_.memory_bytes, handle),
               sentence("read the memory size of device ", ordinal));
  add_peaks(facts_, attribute(kAttributeMemoryClockKhz), attribute(kAttributeMemoryBusBits));
  driver.check(driver->cuDevicePrimaryCtxRetain(&context_, handle),
               sentence("open a context on device ", ordinal, " (", name, ")"));
  const CurrentContext current(*this);
  void* pinned = nullptr;
  driver.check(driver->cuMemHostAlloc(&pinned, sizeof(FaultBytes), kHostPortable | kHostMapped),
               sentence("pin memory for the faults of device ", ordinal));
  faults_ = new (pinned) FaultBytes{};
  open_pool();
}

// A pool of our own, since the default one, which others share, gives all memory back whenever the
// host waits for the device: the next call would then take it from the system again.
void Device::open_pool() {
  std::uint64_t kept_bytes = kPoolKeepsBytes;
  CUmemPoolProps properties{};
  properties.allocation_type = kAllocationPinned;
  properties.location_type = kLocationDevice;
  properties.location_id = ordinal();
  const CUresult result = driver_->cuMemPoolCreate(&pool_, &properties);
  if (result == kCudaNotSupported) return;
  driver_.check(result, sentence("make a memory pool on device ", ordinal()));
  driver_.check(driver_->cuMemPoolSetAttribute(pool_, kPoolReleaseThreshold, &kept_bytes),
                sentence("set up a memory pool on device ", ordinal()));
}

std::string Device::arch() const { return arch_name(facts_.compute_capability); }

u32 Device::take_faults() const {
  logged_faults_ = 0;
  return bits_of(*faults_, [](std::atomic_ref<u8> met) { return met.exchange(0); });
}

void Device::log_faults() const {
  const u32 faults = bits_of(*faults_, [](std::atomic_ref<u8> met) { return met.load(); });
  if (faults == 0 || !log_is_on() || logged_faults_.exchange(faults) == faults) return;
  log(LogLevel::kWarning,
      sentence("an earlier run on device ", ordinal(), " met lengths, offsets or an rng out of ",
               "range and counted them as empty; fulmen_device_faults says which")
          .c_str());
}

Device& device(int ordinal) {
  static std::mutex mutex;
  // Never destroyed: the driver may be gone before the last static object is.
  static auto& devices = *new std::map<int, std::unique_ptr<Device>>;
  Driver& loaded = driver();
  if (ordinal < 0 || ordinal >= loaded.num_devices()) {
    throw Error(Status::kDevice, sentence("there is no device ", ordinal, ": this process sees ",
                                          loaded.num_devices(), ", numbered from 0"));
  }
  const std::lock_guard lock(mutex);
  std::unique_ptr<Device>& slot = devices[ordinal];
  if (slot == nullptr) slot = std::make_unique<Device>(loaded, ordinal);
  return *slot;
}

CurrentContext::CurrentContext(const Device& device) : driver_(device.driver()) {
  CUcontext current = nullptr;
  driver_.check(driver_->cuCtxGetCurrent(&current), "read the current context");
  if (current == device.context()) return;
  const CUresult result = driver_->cuCtxPushCurrent_v2(device.context());
  if (result != kCudaSuccess) {  // texts are built where they are needed: this is on every path
    driver_.fail(result, sentence("make device ", device.ordinal(), " current"));
  }
  pushed_ = true;
}

CurrentContext::~CurrentContext() {
  CUcontext ours = nullptr;
  if (pushed_) driver_->cuCtxPopCurrent_v2(&ours);
}

MemorySpace check_pointer(const Device& device, const void* pointer, const char* array) {
  if (pointer == nullptr) return {};
  const MemorySpace space = memory_space_of(device.driver().table(), pointer);
  const bool every_device_sees_it = space.kind == MemorySpace::kPinned || space.is_managed;
  if (every_device_sees_it) return space;
  if (space.kind == MemorySpace::kHost) {
    throw Error(Status::kArgument,
                sentence(array, " is in ordinary host memory; the call runs on device ",
                         device.ordinal(), " (", device.facts().name,
                         "), which needs it in device memory: copy it there, or use "
                         "backend='cpu'"));
  }
  if (space.device == device.ordinal()) return space;
  throw Error(Status::kArgument,
              sentence(array, " is on device ", space.device, "; the call runs on device ",
                       device.ordinal(), ": all arrays must be on one device"));
}

}  // namespace fulmen::gpu
