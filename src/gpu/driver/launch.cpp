// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// cuLaunchKernelEx; cuTensorMapEncodeTiled, and what a thread remembers of it.

#include "gpu/driver/launch.h"

#include <array>

namespace fulmen::gpu {
void launch(const LoadedKernel& kernel, const LaunchShape& shape, const void* params,
            CUstream stream) {
  if (shape.num_blocks == 0) return;
  Driver& driver = kernel.device->driver();
  driver.check_not_forked();
  if (shape.num_blocks < 0 || shape.num_blocks > kMaxBlocks) {
    throw Error(Status::kUnsupported,
                sentence(kernel.spec.name, " would need ", shape.num_blocks,
                         " blocks; a launch has at most ", kMaxBlocks, ": split the batch"));
  }
  const unsigned cluster = shape.cluster_size;
  if (cluster < 1 || cluster > kMaxClusterSize || shape.num_blocks % cluster != 0) {
    throw Error(Status::kUnsupported,
                sentence(kernel.spec.name, " would have ", shape.num_blocks,
                         " blocks in clusters of ", cluster, "; 1 to ", kPortableClusterSize,
                         " that divide the blocks work on every card with clusters"));
  }
  CUlaunchAttribute attributes[2] = {};
  CUlaunchConfig config{};
  config.grid_x = static_cast<unsigned>(shape.num_blocks);
  config.grid_y = config.grid_z = 1;
  config.block_x = static_cast<unsigned>(kernel.spec.num_threads);
  config.block_y = config.block_z = 1;
  config.shared_bytes = static_cast<unsigned>(kernel.spec.shared_bytes);
  config.stream = stream;
  config.attributes = attributes;
  if (cluster > 1) {
    CUlaunchAttribute& attribute = attributes[config.num_attributes++];
    attribute.id = kLaunchClusterDimension;
    attribute.value.cluster = {cluster, 1, 1};
  }
  if (shape.overlap_previous) {
    CUlaunchAttribute& attribute = attributes[config.num_attributes++];
    attribute.id = kLaunchProgrammaticStreamSerialization;
    attribute.value.programmatic_stream_serialization = 1;
  }
  const CurrentContext current(*kernel.device);
  if (cluster > kPortableClusterSize) {
    driver.check(driver->cuFuncSetAttribute(kernel.function, kFunctionNonPortableClusters, 1),
                 "allow clusters that are not portable");
  }
  void* arguments[] = {const_cast<void*>(params)};
  const CUresult result = driver->cuLaunchKernelEx(&config, kernel.function, arguments, nullptr);
  if (result != kCudaSuccess) {
    driver.fail(result,
                sentence("launch ", kernel.spec.name, " on device ", kernel.device->ordinal()));
  }
}

namespace {

constexpr int kTypeByte = 0;  // CUtensorMapDataType
constexpr int kTypeFloat16 = 6;
constexpr int kTypeFloat32 = 7;
constexpr int kTypeBFloat16 = 9;
constexpr int kNoSwizzle = 0;  // CUtensorMapSwizzle
constexpr int kSwizzle64B = 2;
constexpr int kSwizzle128B = 3;
constexpr int kPromoteToL2Of128B = 2;  // CUtensorMapL2promotion

TensorMap encoded(const Driver& driver, const TensorBox& box) {
  const unsigned shape[4] = {box.box_dims, box.box_rows, 1, 1};
  const unsigned steps[4] = {1, 1, 1, 1};
  const std::uint64_t extents[4] = {box.extents[0], box.extents[1], box.extents[2], box.extents[3]};
  const std::uint64_t strides[3] = {box.strides_bytes[0], box.strides_bytes[1],
                                    box.strides_bytes[2]};
  const i64 size = size_bytes(box.dtype);
  const int type = size == 1                      ? kTypeByte
                   : size == 4                    ? kTypeFloat32
                   : box.dtype == DType::kFloat16 ? kTypeFloat16
                                                  : kTypeBFloat16;
  const int swizzle = !box.swizzle                     ? kNoSwizzle
                      : i64{box.box_dims} * size == 64 ? kSwizzle64B
                                                       : kSwizzle128B;
  TensorMap map;
  driver.check(driver->cuTensorMapEncodeTiled(reinterpret_cast<CUtensorMap*>(&map), type, 4,
                                              box.data, extents, strides, shape, steps, 0, swizzle,
                                              kPromoteToL2Of128B, 0),
               "describe an array to the copy engine");
  return map;
}

struct Remembered {
  TensorBox box{};  // of no extents: none yet
  TensorMap map{};
};

// Maps whose boxes hash alike; the oldest goes. A forward pass takes 4 maps, so none of its own.
struct Set {
  std::array<Remembered, 4> maps;
  u32 oldest = 0;

  Remembered& next() { return maps[oldest++ % maps.size()]; }
};
constexpr u64 kNumSets = 16;  // a forward and backward pass take 10 maps

Set& set_of(const TensorBox& box) {
  thread_local std::array<Set, kNumSets> sets;
  u64 hash = reinterpret_cast<u64>(box.data) ^ u64 { box.box_rows } << 56;
  hash = (hash ^ hash >> 17) * 0x9E3779B97F4A7C15u;
  return sets[hash >> 32 & (kNumSets - 1)];
}

}  // namespace

TensorBox tensor_box(const Tensor& tensor, i32 box_rows) {
  TensorBox box{tensor.data, {static_cast<u64>(tensor.shape[3])}, {}, static_cast<u32>(box_rows)};
  const u64 size = static_cast<u64>(size_bytes(tensor.dtype));
  box.dtype = tensor.dtype;
  box.box_dims = static_cast<u32>(128 / size);
  for (int i = 0; i < 3; ++i) {
    const int axis = 2 - i;  // rows, heads, batch
    const u64 extent = static_cast<u64>(tensor.shape[axis]);
    box.extents[i + 1] = extent;
    // The stride of a single row, head or entry means nothing, but must be one that is allowed.
    box.strides_bytes[i] = extent == 1 ? 16 : static_cast<u64>(tensor.strides[axis]) * size;
  }
  return box;
}

void encode(const Driver& driver, const TensorBox& box, TensorMap& map) {
  Set& set = set_of(box);
  for (const Remembered& remembered : set.maps) {
    if (remembered.box == box) {
      map = remembered.map;
      return;
    }
  }
  map = encoded(driver, box);
  set.next() = {box, map};
}

}  // namespace fulmen::gpu
