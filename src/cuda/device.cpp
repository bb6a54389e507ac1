// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Devices, contexts and the ownership of pointers.

#include "cuda/device.h"

#include <map>
#include <memory>
#include <mutex>

#include "cuda/compiler.h"

namespace fulmen::cuda {
namespace {

CUdeviceptr address_of(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

// Zero where the driver knows nothing of the pointer.
template <class Value>
Value pointer_attribute(Driver& driver, const void* pointer, int attribute) {
  Value value{};
  const CUresult result = driver->cuPointerGetAttribute(&value, attribute, address_of(pointer));
  return result == kCudaSuccess ? value : Value{};
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
  driver.check(driver->cuDevicePrimaryCtxRetain(&context_, handle),
               sentence("open a context on device ", ordinal, " (", name, ")"));
}

std::string Device::arch() const { return arch_name(facts_.compute_capability); }

Device& device(int ordinal) {
  static std::mutex mutex;
  static std::map<int, std::unique_ptr<Device>> devices;
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
  driver_.check(driver_->cuCtxPushCurrent_v2(device.context()),
                sentence("make device ", device.ordinal(), " current"));
  pushed_ = true;
}

CurrentContext::~CurrentContext() {
  CUcontext ours = nullptr;
  if (pushed_) driver_->cuCtxPopCurrent_v2(&ours);
}

int device_of(Driver& driver, const void* pointer) {
  const bool known = pointer_attribute<unsigned>(driver, pointer, kPointerMemoryType) != 0;
  return known ? pointer_attribute<int>(driver, pointer, kPointerDevice) : -1;
}

void check_pointer(const Device& device, const void* pointer, const char* array) {
  if (pointer == nullptr) return;
  Driver& driver = device.driver();
  const unsigned type = pointer_attribute<unsigned>(driver, pointer, kPointerMemoryType);
  if (type == 0) {
    throw Error(Status::kArgument,
                sentence(array, " is in ordinary host memory; the call runs on device ",
                         device.ordinal(), " (", device.facts().name,
                         "), which needs it in device memory: copy it there, or use "
                         "backend='cpu'"));
  }
  if (type == kMemoryHost) return;  // pinned: visible to every device
  if (pointer_attribute<unsigned>(driver, pointer, kPointerIsManaged) != 0) return;
  const int owner = pointer_attribute<int>(driver, pointer, kPointerDevice);
  if (owner == device.ordinal()) return;
  throw Error(Status::kArgument,
              sentence(array, " is on device ", owner, "; the call runs on device ",
                       device.ordinal(), ": all arrays must be on one device"));
}

}  // namespace fulmen::cuda
