// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The general kernels compile for every architecture with a real NVRTC and pass the gate. Needs no
// GPU and no driver. FULMEN_TEST_NVRTC names the compiler, a file or a folder; without one the
// tests are skipped. Few of all kernels, but of each family each architecture and entry, and of
// each pass each dtype, head dimension and option of the sample that tools/machine_code.py lists;
// FULMEN_TEST_FULL=1 takes every kernel for every architecture. This is a program of its own
// because a real NVRTC calls into any library named libcuda.so.1 that is loaded, and the other
// tests load a fake one.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <thread>

#include "core/error.h"
#include "gpu/backend.h"
#include "gpu/backward_sm80/plan.h"
#include "gpu/backward_sm90/plan.h"
#include "gpu/cascade/plan.h"
#include "gpu/decode_sm80/plan.h"
#include "gpu/forward_sm80/plan.h"
#include "gpu/forward_sm90/plan.h"
#include "gpu/gradient_plans.h"
#include "gpu/jit/compiler.h"
#include "gpu/jit/module.h"
#include "gpu/simt/plan.h"

namespace fulmen::gpu {
namespace {

using Archs = std::vector<const char*>;
const Archs kArchs = {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"};
const Archs kNarrow = {"sm_86", "sm_89", "sm_120a", "sm_90a"};
const Archs kHopper = {"sm_90a"};

struct Job {
  KernelSpec spec;
  std::string arch;
};

// entries: the specs of one entry beside each other, of which the sample takes one in turn. Each
// meets every n-th architecture; an n that has no divisor in common with their number reaches all
// of them.
struct Group {
  std::vector<std::vector<KernelSpec>> entries;
  std::size_t every;
  Archs archs = kArchs;
};

// The sample, or all.
std::vector<Job> jobs_of(const Nvrtc& nvrtc, const Group& group) {
  const auto& [entries, every, archs] = group;
  const bool full = std::getenv("FULMEN_TEST_FULL") != nullptr;
  std::vector<Job> jobs;
  std::size_t turn = 0;
  std::size_t meeting = 0;
  for (const std::vector<KernelSpec>& specs : entries) {
    for (const char* arch : archs) {
      if (!full && meeting++ % every != 0) continue;
      if (!nvrtc.knows(arch_number(arch))) continue;
      const std::size_t first = full ? 0 : 5 * turn++ % specs.size();
      const std::size_t last = full ? specs.size() : first + 1;
      for (std::size_t i = first; i < last; ++i) jobs.push_back({specs[i], arch});
    }
  }
  return jobs;
}

// What a part of the jobs shall have too: the architecture, the entry, and of each pass every word
// of the kernels' names, such as bfloat16, d128 and dropout. Tiles follow from the others.
std::set<std::string> traits_of(const Job& job) {
  std::set<std::string> traits = {job.arch, job.spec.function};
  std::istringstream words(job.spec.name);
  std::string pass, word;  // the first word: forward, backward
  std::getline(words, pass, '_');
  while (std::getline(words, word, '_')) {
    if (word.find_first_of("0123456789") != 0) traits.insert(sentence(pass, " ", word));
  }
  return traits;
}

// Again and again the job with the most traits that none before it has.
std::vector<Job> covering(const std::vector<Job>& jobs) {
  std::vector<std::set<std::string>> missing;
  for (const Job& job : jobs) missing.push_back(traits_of(job));
  std::vector<Job> chosen;
  while (true) {
    const auto most = std::ranges::max_element(missing, {}, &std::set<std::string>::size);
    if (most == missing.end() || most->empty()) return chosen;
    chosen.push_back(jobs[static_cast<std::size_t>(most - missing.begin())]);
    const std::set<std::string> found = *most;
    for (std::set<std::string>& traits : missing) {
      for (const std::string& trait : found) traits.erase(trait);
    }
  }
}

// For tools/machine_code.py, in the folder that FULMEN_KEEP_CUBINS names: the cubin, and in a file
// beside it its registers and the larger of the bytes that it spills and those that it reads again.
void keep(const Job& job, const std::string& cubin, const ResourceUse& use) {
  if (const char* folder = std::getenv("FULMEN_KEEP_CUBINS")) {
    const std::string path = sentence(folder, "/", job.arch, ".", job.spec.name);
    std::ofstream(path + ".cubin", std::ios::binary) << cubin;
    std::ofstream(path + ".use") << use.registers << " "
                                 << std::max(use.spill_store_bytes, use.spill_load_bytes);
  }
}

// "" or what is wrong.
std::string problem_of(const Nvrtc& nvrtc, const Job& job) {
  try {
    const CompiledKernel kernel = compile(nvrtc, job.spec, job.arch);
    const ResourceUse use = resource_use(kernel.log, kernel.cubin);
    keep(job, kernel.cubin, use);
    const std::string rejected = gate(job.spec, use);
    if (!rejected.empty()) return rejected;
    if (kernel.cubin.substr(1, 3) != "ELF") return "the code is no ELF file";
    if (use.registers == 0) return "the log names no registers: " + kernel.log;
    if (kernel.log.find("warning") != std::string::npos) return kernel.log;
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

void expect_compile(const std::vector<Group>& groups) {
  const char* named = std::getenv("FULMEN_TEST_NVRTC");
  if (named == nullptr) GTEST_SKIP() << "FULMEN_TEST_NVRTC names no compiler";
  ::setenv("FULMEN_NVRTC", named, 1);
  const Nvrtc nvrtc = find_nvrtc({});
  std::vector<Job> jobs;
  for (const Group& group : groups) std::ranges::move(jobs_of(nvrtc, group), back_inserter(jobs));
  const bool takes_all = std::getenv("FULMEN_TEST_FULL") || std::getenv("FULMEN_KEEP_CUBINS");
  if (!takes_all) jobs = covering(jobs);
  std::vector<std::string> problems(jobs.size());
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < jobs.size(); i = next++) {
      problems[i] = problem_of(nvrtc, jobs[i]);
    }
  };
  {
    std::vector<std::jthread> threads;
    for (unsigned i = 0; i < std::thread::hardware_concurrency(); ++i) threads.emplace_back(work);
  }
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    EXPECT_EQ(problems[i], "") << jobs[i].spec.name << " for " << jobs[i].arch;
  }
  EXPECT_FALSE(jobs.empty());
}

TEST(CompileKernels, Naive) { expect_compile({{naive_specs(), 5}}); }

TEST(CompileKernels, Merge) { expect_compile({{{merge_specs()}, 3}}); }

TEST(CompileKernels, Cascade) { expect_compile({{{cascade_specs()}, 1}}); }

TEST(CompileKernels, Quantise) { expect_compile({{{quantise_specs()}, 1}}); }
TEST(CompileKernels, Append) { expect_compile({{{append_specs()}, 1}}); }

TEST(CompileKernels, Indexer) {
  std::vector<KernelSpec> plain, on_tensor_cores;
  for (const KernelSpec& spec : indexer_specs()) {
    (spec.tensor_cores ? on_tensor_cores : plain).push_back(spec);
  }
  expect_compile({{{plain}, 1}, {{on_tensor_cores}, 1, kNarrow}});
}

// Tiles for the least shared memory of the architectures, so that one list serves all.
TEST(CompileKernels, AddGradients) {
  std::vector<KernelSpec> specs;
  for (const DType dtype : kFloatTypes) specs.push_back(add_gradients(dtype, 1).spec);
  expect_compile({{{specs}, 1}});
}
TEST(CompileKernels, Simt) { expect_compile({{simt_specs(64 * 1024), 6}}); }

// A100 and H100 have room for wide tiles; those of a GeForce fit every architecture.
TEST(CompileKernels, Sm80Forward) {
  expect_compile(
      {{forward_sm80_specs(gpu_named("rtx4090")), 3, kNarrow},
       {forward_sm80_specs(gpu_named("a100")), 1, {"sm_80"}},
       {{forward_sm80_e4m3_specs(gpu_named("rtx4090"))}, 1, {"sm_89", "sm_120a", "sm_90a"}}});
}

TEST(CompileKernels, Sm80Decode) {
  expect_compile({{decode_sm80_specs(gpu_named("rtx4090")), 7, {"sm_89", "sm_120a", "sm_90a"}},
                  {decode_sm80_specs(gpu_named("rtx3090")), 5, {"sm_86"}},
                  {decode_sm80_specs(gpu_named("a100")), 3, {"sm_80"}},
                  {decode_sm80_specs(gpu_named("h200")), 9, kHopper}});
}

TEST(CompileKernels, Sm80Backward) {
  expect_compile({{backward_sm80_specs(gpu_named("rtx4090")), 3, kNarrow},
                  {backward_sm80_specs(gpu_named("a100")), 1, {"sm_80"}}});
}

TEST(CompileKernels, Sm90Forward) { expect_compile({{forward_sm90_specs(), 1, kHopper}}); }

TEST(CompileKernels, Sm90Backward) { expect_compile({{backward_sm90_specs(), 1, kHopper}}); }

}  // namespace
}  // namespace fulmen::gpu
