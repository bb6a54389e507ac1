// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A call of the C ABI whose arrays are in the memory of the fake driver's devices.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "fulmen/fulmen.h"
#include "gpu/driver/device.h"
#include "support.h"

namespace fulmen::gpu {

using Member = fulmen_tensor fulmen_tensors::*;

class DeviceCall {
 public:
  // q, k, v, o, lse and stats: (batch, heads, rows, dim).
  explicit DeviceCall(int ordinal = 0, fulmen_dtype dtype_ = FULMEN_FLOAT32) : dtype(dtype_) {
    fulmen_problem_init(&problem);
    fulmen_tensors_init(&tensors);
    for (const Member member :
         {&fulmen_tensors::q, &fulmen_tensors::k, &fulmen_tensors::v, &fulmen_tensors::o}) {
      add(member, dtype, {2, 4, 96, 64}, ordinal);
    }
    add(&fulmen_tensors::lse, FULMEN_FLOAT32, {2, 4, 96}, ordinal);
    add(&fulmen_tensors::stats, FULMEN_FLOAT32, {2, 4, 96, 2}, ordinal);
  }
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;
  ~DeviceCall() {
    for (const CUdeviceptr pointer : owned_) driver()->cuMemFree_v2(pointer);
  }

  void add_backward(int ordinal = 0) {
    for (const Member member :
         {&fulmen_tensors::dout, &fulmen_tensors::dq, &fulmen_tensors::dk, &fulmen_tensors::dv}) {
      add(member, dtype, {2, 4, 96, 64}, ordinal);
    }
  }

  // A contiguous array, `offset` bytes into memory of a device.
  fulmen_tensor& add(Member member, fulmen_dtype type, const std::vector<int64_t>& shape,
                     int ordinal = 0, std::size_t offset = 0) {
    std::size_t elements = 1;
    for (const int64_t extent : shape) elements *= static_cast<std::size_t>(extent);
    void* const data = static_cast<char*>(allocate(elements * 8 + offset, ordinal)) + offset;
    fulmen_tensor& tensor = tensors.*member;
    fulmen_tensor_init(&tensor, data, type, static_cast<int32_t>(shape.size()), shape.data());
    return tensor;
  }

  void* allocate(std::size_t bytes, int ordinal) {
    const CurrentContext current(device(ordinal));
    CUdeviceptr pointer = 0;
    driver()->cuMemAlloc_v2(&pointer, bytes);
    owned_.push_back(pointer);
    return reinterpret_cast<void*>(pointer);
  }

  fulmen_status forward(void* stream = nullptr) {
    return fulmen_attention(&problem, &tensors, stream);
  }
  fulmen_status backward(void* stream = nullptr) {
    return fulmen_attention_backward(&problem, &tensors, stream);
  }

  // Null where it failed; destroyed by the caller.
  fulmen_plan* plan(fulmen_operation operation = FULMEN_OPERATION_FORWARD) {
    fulmen_plan* made = nullptr;
    fulmen_plan_create(&problem, &tensors, operation, &made);
    return made;
  }

  std::string explanation(fulmen_operation operation = FULMEN_OPERATION_FORWARD) {
    std::string text(1 << 14, '\0');
    std::size_t needed = 0;
    const fulmen_status status =
        fulmen_explain(&problem, &tensors, operation, text.data(), text.size(), &needed);
    if (status != FULMEN_OK) return std::string("failed: ") + fulmen_last_error();
    text.resize(needed - 1);
    return text;
  }

  fulmen_dtype dtype;
  fulmen_problem problem;
  fulmen_tensors tensors;

 private:
  std::vector<CUdeviceptr> owned_;
};

// The call failed so, and said each of these words.
inline void expect_refused(fulmen_status got, fulmen_status status,
                           std::initializer_list<const char*> words) {
  EXPECT_STREQ(fulmen_status_name(got), fulmen_status_name(status)) << fulmen_last_error();
  const std::string said = fulmen_last_error();
  for (const char* word : words) {
    EXPECT_NE(said.find(word), std::string::npos) << "'" << word << "' is missing in: " << said;
  }
}

inline bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace fulmen::gpu
