// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Runs every probe on the GPU of this process and writes what came out to a file; given what came
// out on another one, or hashes of it, compares. With FULMEN_EMULATOR set the GPU is the emulator:
//   FULMEN_EMULATOR=.../libfulmen_emulated_gpu.so probes SOURCES emulator.probes
//   probes SOURCES card.probes emulator.probes        on the card; exit code 1 if they differ
//   probes digests card.probes > h200.txt             what the test compares the emulator with
// SOURCES is the folder tests/emulator.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

#include "compare.h"
#include "gpu/driver/launch.h"
#include "gpu/jit/module.h"
#include "inputs.h"

namespace fulmen::test {
namespace {

using gpu::CUdeviceptr;
using gpu::KernelSpec;
using gpu::SourceFile;

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (text.str().empty()) throw Error(Status::kArgument, sentence(path, " is empty or missing"));
  return text.str();
}

// Device memory with copies of words in it.
class Words {
 public:
  Words(const gpu::Device& device, const std::vector<u32>& words) : device_(device) {
    const gpu::CurrentContext current(device);
    library_ = gpu::SharedLibrary::open("libcuda.so.1");
    library_.bind(to_device_, "cuMemcpyHtoD_v2");
    library_.bind(to_host_, "cuMemcpyDtoH_v2");
    device.driver().check(device.driver()->cuMemAlloc_v2(&pointer_, 4 * words.size()), "allocate");
    device.driver().check(to_device_(pointer_, words.data(), 4 * words.size()), "copy");
  }
  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;
  ~Words() {
    const gpu::CurrentContext current(device_);
    device_.driver()->cuMemFree_v2(pointer_);
  }
  u32* data() const { return reinterpret_cast<u32*>(pointer_); }
  std::vector<u32> fetch(std::size_t count) const {
    const gpu::CurrentContext current(device_);
    std::vector<u32> words(count);
    device_.driver().check(device_.driver()->cuCtxSynchronize(), "run a probe");
    device_.driver().check(to_host_(words.data(), pointer_, 4 * count), "copy");
    return words;
  }

 private:
  const gpu::Device& device_;
  gpu::SharedLibrary library_;
  int (*to_device_)(CUdeviceptr, const void*, std::size_t) = nullptr;
  int (*to_host_)(void*, CUdeviceptr, std::size_t) = nullptr;
  CUdeviceptr pointer_ = 0;
};

KernelSpec spec_of(ProbeFamily family) {
  constexpr const char* kNames[] = {"kWarp", "kWarpgroup", "kCopies", "kCluster"};
  const char* const name = kNames[static_cast<int>(family)];
  KernelSpec spec;
  spec.name = sentence("probe_", static_cast<int>(family));
  spec.include = "probes/probes.cuh";
  spec.function = "fulmen::probe";
  spec.config_type = "fulmen::ProbeConfig";
  spec.config = {{"family", sentence("fulmen::ProbeFamily::", name)}};
  spec.params_type = "fulmen::ProbeParams";
  spec.params_bytes = sizeof(ProbeParams);
  spec.num_threads = family == ProbeFamily::kWarp ? 32 : 128;
  spec.shared_bytes = kProbeSharedBytes;
  return spec;
}

class Runner {
 public:
  explicit Runner(const std::string& sources) : files_(gpu::kernel_sources()) {
    for (const char* const name : {"probes/probes.cuh", "probes/probes.h"}) {
      texts_[name] = read_file(sources + "/" + name);
      files_.push_back({texts_.find(name)->first, texts_[name]});
    }
  }

  std::vector<u32> run(const ProbeRun& probe) {
    const Words in(device_, probe.in);
    const Words out(device_, std::vector<u32>(probe.out_words));
    ProbeParams params{{}, in.data(), out.data(), probe.probe, probe.count};
    if (probe.box_columns > 0) {
      const gpu::CurrentContext current(device_);
      const bool stores = probe.probe == Probe::kTensorStore;
      gpu::encode(device_.driver(), box_of(probe, stores ? out.data() : in.data()), params.map);
    }
    const bool is_cluster = probe.family == ProbeFamily::kCluster;
    const i64 blocks = is_cluster ? probe.count : 1;
    gpu::launch(kernel(probe.family),
                {.num_blocks = blocks, .cluster_size = static_cast<unsigned>(blocks)}, &params,
                nullptr);
    return out.fetch(probe.out_words);
  }

 private:
  static gpu::TensorBox box_of(const ProbeRun& probe, u32* words) {
    gpu::TensorBox box{};
    box.data = words + probe.tensor_at;
    std::copy(std::begin(kProbeExtents), std::end(kProbeExtents), box.extents);
    u64 stride = 2;
    for (int i = 0; i < 3; ++i) box.strides_bytes[i] = stride *= kProbeExtents[i];
    box.box_rows = kProbeBoxRows;
    box.box_dims = probe.box_columns;
    box.swizzle = probe.box_columns == 64;
    return box;
  }

  const gpu::LoadedKernel& kernel(ProbeFamily family) {
    const auto found = kernels_.find(family);
    if (found != kernels_.end()) return found->second;
    const KernelSpec spec = spec_of(family);
    const auto compiled = gpu::compile(gpu::nvrtc(), spec, device_.arch(), files_);
    return kernels_.emplace(family, gpu::load_module(device_, spec, compiled)).first->second;
  }

  std::map<std::string, std::string> texts_;
  std::vector<SourceFile> files_;
  const gpu::Device& device_ = gpu::device(0);
  std::map<ProbeFamily, gpu::LoadedKernel> kernels_;
};

void use_emulator() {
  const char* const path = std::getenv("FULMEN_EMULATOR");
  if (path == nullptr) return;
  if (::dlopen(path, RTLD_NOW | RTLD_LOCAL) == nullptr) throw Error(Status::kNotFound, ::dlerror());
  ::setenv("FULMEN_NVRTC", path, 1);
}

int main_of(const std::vector<std::string>& arguments) {
  if (arguments.size() < 2) {
    std::fprintf(stderr, "usage: probes SOURCES WRITTEN [COMPARED], probes digests WRITTEN\n");
    return 2;
  }
  if (arguments[0] == "digests") {
    std::fputs(digests(read(arguments[1])).c_str(), stdout);
    return 0;
  }
  use_emulator();
  Runner runner(arguments[0]);
  ProbeResults results;
  try {
    for (const ProbeRun& probe : probe_runs()) results[probe.name] = runner.run(probe);
  } catch (const Error& error) {  // the device is lost: what came before is kept
    std::printf("after %zu probes: %s\n", results.size(), error.what());
  }
  write(results, arguments[1]);
  std::printf("%zu probes on %s\n", results.size(), gpu::device(0).facts().name.c_str());
  if (arguments.size() < 3) return 0;
  const bool has_hashes = arguments[2].ends_with(".txt");
  return (has_hashes ? agrees_with_digests(results, arguments[2])
                     : compare(results, read(arguments[2])))
             ? 0
             : 1;
}

}  // namespace
}  // namespace fulmen::test

int main(int argc, char** argv) {
  try {
    return fulmen::test::main_of({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
