// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// cuLaunchKernelEx.

#include "gpu/driver/launch.h"

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
  CUlaunchAttribute attributes[2] = {};
  CUlaunchConfig config{};
  config.grid_x = static_cast<unsigned>(shape.num_blocks);
  config.grid_y = config.grid_z = 1;
  config.block_x = static_cast<unsigned>(kernel.spec.num_threads);
  config.block_y = config.block_z = 1;
  config.shared_bytes = static_cast<unsigned>(kernel.spec.shared_bytes);
  config.stream = stream;
  config.attributes = attributes;
  if (shape.cluster_size > 1) {
    CUlaunchAttribute& attribute = attributes[config.num_attributes++];
    attribute.id = kLaunchClusterDimension;
    attribute.value.cluster = {shape.cluster_size, 1, 1};
  }
  if (shape.overlap_previous) {
    CUlaunchAttribute& attribute = attributes[config.num_attributes++];
    attribute.id = kLaunchProgrammaticStreamSerialization;
    attribute.value.programmatic_stream_serialization = 1;
  }
  const CurrentContext current(*kernel.device);
  void* arguments[] = {const_cast<void*>(params)};
  const CUresult result = driver->cuLaunchKernelEx(&config, kernel.function, arguments, nullptr);
  if (result != kCudaSuccess) {
    driver.fail(result,
                sentence("launch ", kernel.spec.name, " on device ", kernel.device->ordinal()));
  }
}

}  // namespace fulmen::gpu
