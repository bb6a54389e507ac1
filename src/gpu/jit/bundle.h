// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Machine code of many kernels in one file, made ahead of time, for machines without a compiler.
// An entry is found by a hash of the kernel's text and architecture, whichever NVRTC made it.
//
// File: "fulmen bundle 2\n" | SHA-256 of the rest | SHA-256 of the kernel sources | number of
// entries (u64) | for each: its key (64 characters), bytes (u64), the kernel as cache_file.h
// writes it.
#pragma once

#include <string>
#include <vector>

#include "gpu/jit/cache.h"
#include "gpu/jit/sha256.h"

namespace fulmen::gpu {

// Of the text of all kernels, which no entry outlives: SHA-256 over name and text of each file.
Sha256::Digest digest_of_sources();

struct BundleEntry {
  KernelSpec spec;
  std::string arch;
  KernelCache::Kernel kernel;
};

// Throws Error kArgument when the file cannot be written; it is whole or absent.
void write_bundle(const std::vector<BundleEntry>& entries, const std::string& path);

// Adds the kernels of a file to those that bundled_kernel finds. Throws Error kArgument when it
// cannot be read, is damaged, or was made from other sources.
void load_bundle(const std::string& path);

// The kernel, if a bundle holds it; the first call loads the file that FULMEN_BUNDLE names. Thread
// safe.
KernelCache::Kernel bundled_kernel(const KernelSpec& spec, const std::string& arch);

// What is loaded.
struct BundleInfo {
  std::string path;  // of the last one; "" when there is none
  std::size_t num_kernels = 0;
};
BundleInfo bundle_info();

}  // namespace fulmen::gpu
