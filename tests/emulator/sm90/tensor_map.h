// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The tensor map of an array, as a run would encode it, for the emulator's copy engine.
#pragma once

#include "emulator/copies.h"
#include "gpu/driver/launch.h"

namespace fulmen::test {

inline TensorMap map_of(const gpu::TensorBox& box) {
  emulator::HostTensorMap map{
      static_cast<u8*>(box.data),     {size_bytes(box.dtype)},        {},
      static_cast<i32>(box.box_rows), static_cast<i32>(box.box_dims), box.swizzle};
  for (int axis = 0; axis < 4; ++axis) {
    map.extents[axis] = static_cast<i32>(box.extents[axis]);
    if (axis > 0) map.strides_bytes[axis] = static_cast<i64>(box.strides_bytes[axis - 1]);
  }
  return emulator::encode(map);
}

inline TensorMap map_of(const Tensor& tensor, i32 box_rows) {
  return map_of(gpu::tensor_box(tensor, box_rows));
}

}  // namespace fulmen::test
