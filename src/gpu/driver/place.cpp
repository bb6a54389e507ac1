// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Pointers, and the choice between CPU and GPU by them.

#include "gpu/driver/place.h"

#include <link.h>

#include <atomic>
#include <mutex>

#include "core/error.h"

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

PointerPlace ask(GetAttributes get, const void* pointer) {
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
  if (is_managed != 0) return {PointerPlace::kDevice, true, device};
  if (type == kMemoryHost) return {PointerPlace::kPinned, false, -1};
  return {PointerPlace::kDevice, false, device, begin, bytes};
}

bool is_on_device(const PointerPlace& place) {
  return place.kind == PointerPlace::kDevice && !place.is_managed;
}

// Where the first array of a call is that has elements.
PointerPlace place_of_arrays(const Arrays& arrays) {
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    const Tensor& tensor = arrays[array];
    if (tensor.present() && !tensor.empty()) return fulmen::gpu::place_of(tensor.data);
  }
  return {};
}

void check_on_host(const Request& request) {
  if (loaded_function() == nullptr) return;
  for (int index = 0; index < kNumArrays; ++index) {
    const auto array = static_cast<Array>(index);
    const Tensor& tensor = request.arrays[array];
    if (!tensor.present() || tensor.empty()) continue;
    const PointerPlace place = place_of(tensor.data);
    if (!is_on_device(place)) continue;
    throw Error(Status::kArgument,
                sentence(name(array), " is in the memory of device ", place.device,
                         "; the call runs on the CPU: copy it to the host, or use "
                         "backend='cuda' with all arrays there"));
  }
}

}  // namespace

PointerPlace place_of(const DriverTable& driver, const void* pointer) {
  return ask(driver.cuPointerGetAttributes, pointer);
}

PointerPlace place_of(const void* pointer) {
  const GetAttributes get = loaded_function();
  return get == nullptr || pointer == nullptr ? PointerPlace{} : ask(get, pointer);
}

PointerPlace settle_place(Request& request) {
  Options& options = request.options;
  PointerPlace place;
  const bool is_named = options.device >= 0 || options.device_name != nullptr;
  if (options.backend == Backend::kAuto) options.backend = backend_of(options.implementation);
  if (options.backend == Backend::kAuto && is_named) options.backend = Backend::kCuda;
  const bool is_open = options.backend == Backend::kAuto ||
                       (options.backend == Backend::kCuda && !is_named && options.device == -1);
  if (is_open) {
    place = place_of_arrays(request.arrays);
    const bool is_device = place.kind == PointerPlace::kDevice;
    if (options.backend == Backend::kAuto) {
      options.backend = is_device ? Backend::kCuda : Backend::kCpu;
    }
    const bool to_set = options.backend == Backend::kCuda && options.device == -1;
    if (to_set) options.device = is_device ? place.device : 0;
  }
  if (options.backend == Backend::kCpu) check_on_host(request);
  return place;
}

void require_host(const Tensor& tensor, const char* array, const char* call) {
  if (!tensor.present() || !is_on_device(place_of(tensor.data))) return;
  throw Error(Status::kUnsupported, sentence(call, " computes on the CPU, and ", array,
                                             " is in device memory; copy it to the host"));
}

}  // namespace fulmen::gpu
