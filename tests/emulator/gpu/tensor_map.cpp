// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// libcuda's function that describes a tensor to the copy engine.
#include <cstdint>
#include <cstring>

#include "emulator/copies.h"
#include "emulator/gpu/gpu.h"
#include "gpu/driver/driver.h"

using namespace fulmen::gpu;  // NOLINT: the types of the interface under their own names
namespace emulator = fulmen::emulator;

// Refuses what the real one refuses: CUDA Driver API 13.0, section 6.33, cuTensorMapEncodeTiled.
FULMEN_DRIVER(cuTensorMapEncodeTiled, CUtensorMap* map, int type, unsigned rank, void* address,
              const std::uint64_t* extents, const std::uint64_t* stride_bytes, const unsigned* box,
              const unsigned* element_strides, int interleave, int swizzle, int, int) {
  constexpr int kTypeByte = 0;
  constexpr int kTypeFloat16 = 6;
  constexpr int kTypeFloat32 = 7;
  constexpr int kTypeBFloat16 = 9;
  constexpr int kNoSwizzle = 0;
  constexpr int kSwizzle64B = 2;
  constexpr int kSwizzle128B = 3;
  const bool known = (type == kTypeByte || type == kTypeFloat16 || type == kTypeFloat32 ||
                      type == kTypeBFloat16) &&
                     rank == 4 && interleave == 0 &&
                     (swizzle == kNoSwizzle || swizzle == kSwizzle64B || swizzle == kSwizzle128B);
  if (!known) return kCudaNotSupported;
  if (reinterpret_cast<std::uint64_t>(address) % 16 != 0) return kCudaInvalidValue;
  emulator::HostTensorMap host{};
  host.data = static_cast<fulmen::u8*>(address);
  const unsigned size = type == kTypeByte ? 1 : type == kTypeFloat32 ? 4 : 2;
  host.strides_bytes[0] = size;
  for (unsigned axis = 0; axis < rank; ++axis) {
    if (extents[axis] == 0 || extents[axis] > 1ull << 31) return kCudaInvalidValue;
    if (box[axis] == 0 || box[axis] > 256 || element_strides[axis] != 1) return kCudaInvalidValue;
    host.extents[axis] = static_cast<int>(extents[axis]);
    if (axis == 0) continue;
    const std::uint64_t stride = stride_bytes[axis - 1];
    if (stride % 16 != 0 || stride >= 1ull << 40) return kCudaInvalidValue;
    host.strides_bytes[axis] = static_cast<fulmen::i64>(stride);
  }
  const unsigned row_bytes = size * box[0];
  if (row_bytes % 16 != 0 || (swizzle == kSwizzle128B && row_bytes > 128)) return kCudaInvalidValue;
  // Rows of 64 bytes are the one case of that swizzle in use, and are of no other.
  if ((swizzle == kSwizzle64B) != (swizzle != kNoSwizzle && row_bytes == 64))
    return kCudaNotSupported;
  if (box[2] != 1 || box[3] != 1) return kCudaNotSupported;
  host.box_rows = static_cast<int>(box[1]);
  host.box_columns = static_cast<int>(box[0]);
  host.swizzled = swizzle != kNoSwizzle;
  const fulmen::TensorMap encoded = emulator::encode(host);
  static_assert(sizeof(encoded) == sizeof(*map));
  std::memcpy(static_cast<void*>(map), &encoded, sizeof(encoded));
  return kCudaSuccess;
}
