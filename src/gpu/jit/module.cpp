// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Modules, loaded lazily and kept. They are not unloaded at exit: the driver may be gone by then.
// And the gate before them: reading what ptxas says, line by line, judging it, and counting
// instructions in a cubin.

#include "gpu/jit/module.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstring>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <utility>
#include <vector>

#include "core/error.h"
#include "gpu/jit/bundle.h"
#include "kernels/base.cuh"

namespace fulmen::gpu {
namespace {

// ptxas findings after which wgmma instructions wait for each other, or run with registers other
// than asked for: 7508 setmaxnreg ignored; 7510 call in the pipeline; 7511, 7512 not enough
// registers; 7513 ill-formed stage; 7514, 7515 accumulator touched in flight; 7517 wait injected.
constexpr int kRejectedFindings[] = {7508, 7510, 7511, 7512, 7513, 7514, 7515, 7517};

// The number before `unit` in a line such as "  8 bytes stack frame, 4 bytes spill stores".
std::size_t number_before(const std::string& line, const std::string& unit) {
  std::size_t at = line.find(unit);
  if (at == std::string::npos) return 0;
  while (at > 0 && std::isspace(static_cast<unsigned char>(line[at - 1]))) --at;
  std::size_t begin = at;
  while (begin > 0 && std::isdigit(static_cast<unsigned char>(line[begin - 1]))) --begin;
  std::size_t value = 0;
  std::from_chars(line.data() + begin, line.data() + at, value);
  return value;
}

// The number of a finding such as "ptxas info : (C7510) Potential ..."; 0 when the line has none.
int finding_number(const std::string& line) {
  const std::size_t at = line.find("(C7");
  if (at == std::string::npos) return 0;
  int number = 0;
  const char* begin = line.data() + at + 2;
  const auto [end, error] = std::from_chars(begin, line.data() + line.size(), number);
  return error == std::errc() && end < line.data() + line.size() && *end == ')' ? number : 0;
}

}  // namespace

ResourceUse parse_log(const std::string& log) {
  ResourceUse use;
  std::istringstream lines(log);
  for (std::string line; std::getline(lines, line);) {
    if (const int number = finding_number(line); number != 0) {
      const std::string text = line.substr(line.find("(C7") + 7);
      const std::string finding = sentence("C", number, ":", text);
      if (std::find(use.findings.begin(), use.findings.end(), finding) == use.findings.end()) {
        use.findings.push_back(finding);
      }
    }
    if (line.find("bytes stack frame") != std::string::npos) {
      use.stack_bytes = std::max(use.stack_bytes, number_before(line, "bytes stack frame"));
      use.spill_store_bytes += number_before(line, "bytes spill stores");
      use.spill_load_bytes += number_before(line, "bytes spill loads");
    }
    if (line.find(" registers") != std::string::npos) {
      use.registers = std::max(use.registers, static_cast<int>(number_before(line, "registers")));
    }
  }
  return use;
}

ResourceUse resource_use(const std::string& log, std::string_view cubin) {
  ResourceUse use = parse_log(log);
  use.instructions = count_instructions(cubin);
  return use;
}

std::string gate(const KernelSpec& spec, const ResourceUse& use) {
  if (spec.is_ablation) return "";
  for (const std::string& finding : use.findings) {
    const bool rejected =
        std::any_of(std::begin(kRejectedFindings), std::end(kRejectedFindings),
                    [&](int number) { return finding.rfind(sentence("C", number, ":"), 0) == 0; });
    if (rejected) return sentence(spec.name, " is rejected by the assembler's finding ", finding);
  }
  const std::size_t spills = std::max(use.spill_store_bytes, use.spill_load_bytes);
  if (spec.tensor_cores && spills > spec.spill_allowance_bytes) {
    return sentence(spec.name, " spills ", spills, " bytes of registers; ",
                    spec.spill_allowance_bytes, " are allowed");
  }
  return "";
}

namespace {

constexpr std::size_t kInstructionBytes = 16;
constexpr int kNop = 0x118;  // fills a section up

struct Class {
  int InstructionCounts::* count;
  std::initializer_list<int> operations;
};

const Class kClasses[] = {
    {&InstructionCounts::tensor, {0x03c, 0x03f, 0x1f0}},  // HMMA, DMMA, HGMMA
    {&InstructionCounts::arithmetic,
     {0x009, 0x020, 0x021, 0x023, 0x028, 0x029, 0x02b, 0x030, 0x031, 0x032}},  // FFMA, DFMA, ...
    {&InstructionCounts::special, {0x108}},                                    // MUFU: exp2, 1/x
    {&InstructionCounts::conversion,
     {0x03e, 0x045, 0x104, 0x105, 0x106, 0x110, 0x111, 0x112}},         // F2FP, F2F, I2F, F2I
    {&InstructionCounts::shared, {0x03b, 0x044, 0x184, 0x188, 0x18c}},  // LDSM, STSM, LDS, STS
    {&InstructionCounts::global,
     {0x180, 0x181, 0x185, 0x186, 0x18e, 0x1a6, 0x1a8, 0x1ae, 0x1b4, 0x1b5, 0x1b6}},  // LDG, UTMA*
    {&InstructionCounts::local, {0x183, 0x187}},                                      // LDL, STL
    {&InstructionCounts::synchronisation,
     {0x11a, 0x11d, 0x148, 0x192, 0x1a7, 0x1af, 0x1b2, 0x1c5, 0x1c6}},  // BAR, SYNCS, WARPGROUP
};

int InstructionCounts::* class_of(int operation) {
  for (const Class& one : kClasses) {
    for (const int member : one.operations) {
      if (member == operation) return one.count;
    }
  }
  return &InstructionCounts::other;
}

template <typename T>
T read(std::string_view bytes, std::size_t at) {
  T value{};
  if (at <= bytes.size() && sizeof(T) <= bytes.size() - at) {
    std::memcpy(&value, bytes.data() + at, sizeof(T));
  }
  return value;
}

// The contents of section number `index`, if it holds instructions.
std::string_view code_of(std::string_view elf, std::size_t index) {
  constexpr u64 kExecutable = 4;
  const std::size_t header = read<u64>(elf, 0x28) + index * read<u16>(elf, 0x3a);
  if ((read<u64>(elf, header + 0x08) & kExecutable) == 0) return {};
  const std::size_t offset = read<u64>(elf, header + 0x18);
  return offset > elf.size() ? std::string_view{}
                             : elf.substr(offset, read<u64>(elf, header + 0x20));
}

}  // namespace

InstructionCounts count_instructions(std::string_view cubin) {
  InstructionCounts counts;
  if (cubin.substr(0, 4) != "\177ELF") return counts;
  const std::size_t num_sections = read<u16>(cubin, 0x3c);
  for (std::size_t index = 0; index < num_sections; ++index) {
    const std::string_view code = code_of(cubin, index);
    for (std::size_t at = 0; at + kInstructionBytes <= code.size(); at += kInstructionBytes) {
      const int operation = read<u16>(code, at) & 0x1ff;
      if (operation != kNop) ++(counts.*class_of(operation));
    }
  }
  return counts;
}

namespace {

void check_shared_memory(const Device& device, const KernelSpec& spec) {
  const std::size_t available = device.facts().shared_bytes_per_block;
  if (spec.shared_bytes <= available) return;
  throw Error(Status::kUnsupported,
              sentence(spec.name, " needs ", spec.shared_bytes, " bytes of shared memory a block; ",
                       device.facts().name, " has ", available));
}

// Machine code that the driver cannot load, on a device that works.
class RefusedCode : public Error {
 public:
  using Error::Error;
};

void check_code(const Driver& driver, CUresult result, const std::string& what) {
  constexpr CUresult kOfTheCode[] = {kCudaInvalidImage,   kCudaNoBinaryForGpu, kCudaInvalidPtx,
                                     kCudaUnsupportedPtx, kCudaInvalidSource,  kCudaNotFound};
  try {
    driver.check(result, what);
  } catch (const Error& error) {
    if (std::ranges::find(kOfTheCode, result) == std::end(kOfTheCode)) throw;
    throw RefusedCode(error.status(), error.what());
  }
}

// 48 KB need no asking; beyond that a kernel opts in.
constexpr std::size_t kSharedBytesWithoutOptIn = 48 * 1024;

// The entry of a loaded module, and how many of its blocks a multiprocessor holds.
void finish(LoadedKernel& kernel, const std::string& what) {
  Driver& driver = kernel.device->driver();
  const KernelSpec& spec = kernel.spec;
  check_code(driver, driver->cuModuleGetFunction(&kernel.function, kernel.module, kEntryName),
             "find the entry of " + what);
  if (spec.shared_bytes > kSharedBytesWithoutOptIn) {
    driver.check(driver->cuFuncSetAttribute(kernel.function, kFunctionMaxDynamicSharedBytes,
                                            static_cast<int>(spec.shared_bytes)),
                 "give shared memory to " + what);
  }
  driver.check(driver->cuOccupancyMaxActiveBlocksPerMultiprocessor(
                   &kernel.blocks_resident, kernel.function, spec.num_threads, spec.shared_bytes),
               "find how many blocks fit a multiprocessor of " + what);
}

struct Slot {
  std::mutex mutex;
  std::unique_ptr<const LoadedKernel> kernel;
};

struct Slots {
  using Map = std::map<std::pair<const Device*, std::string>, std::unique_ptr<Slot>>;

  std::mutex mutex;
  Map by_kernel;
  std::vector<Map> forgotten;
};

Slots& slots() {
  static Slots the_slots;
  return the_slots;
}

Slot& slot_of(const Device& device, const std::string& identity) {
  const std::lock_guard lock(slots().mutex);
  std::unique_ptr<Slot>& slot = slots().by_kernel[{&device, identity}];
  if (slot == nullptr) slot = std::make_unique<Slot>();
  return *slot;
}

}  // namespace

KernelCache::Kernel compile_or_load(KernelCache& cache, const Nvrtc& nvrtc, const KernelSpec& spec,
                                    const std::string& arch, const KernelCache::Kernel& refused) {
  const KernelKey key = kernel_key(spec, arch, nvrtc.version());
  const auto build = [&] { return compile(nvrtc, spec, arch); };
  KernelCache::Kernel kernel =
      refused == nullptr ? cache.get(key, build) : cache.replace(key, refused, build);
  const std::string reason = gate(spec, parse_log(kernel->log));
  if (!reason.empty()) throw Rejected(reason);
  return kernel;
}

KernelCache::Kernel machine_code(const KernelSpec& spec, const std::string& arch) {
  if (KernelCache::Kernel kernel = bundled_kernel(spec, arch)) return kernel;
  return compile_or_load(kernel_cache(), nvrtc(), spec, arch);
}

LoadedKernel load_module(const Device& device, const KernelSpec& spec,
                         const CompiledKernel& compiled) {
  check_shared_memory(device, spec);
  Driver& driver = device.driver();
  const CurrentContext current(device);
  const std::string what = sentence("the kernel ", spec.name, " on device ", device.ordinal(), " (",
                                    device.facts().name, ", ", device.arch(), ")");
  LoadedKernel kernel;
  kernel.device = &device;
  kernel.spec = spec;
  kernel.use = resource_use(compiled.log, compiled.cubin);
  kernel.origin = compiled.origin;
  check_code(driver, driver->cuModuleLoadData(&kernel.module, compiled.cubin.data()),
             "load " + what);
  try {
    finish(kernel, what);
  } catch (...) {
    driver->cuModuleUnload(kernel.module);
    throw;
  }
  return kernel;
}

namespace {

// Whole as a file, an entry of the cache may still hold what this driver cannot load: it is
// compiled again, once.
LoadedKernel compile_and_load(const Device& device, const KernelSpec& spec) {
  const KernelCache::Kernel compiled = machine_code(spec, device.arch());
  try {
    return load_module(device, spec, *compiled);
  } catch (const RefusedCode&) {
    if (compiled->origin != Origin::kDisk) throw;
  }
  return load_module(device, spec,
                     *compile_or_load(kernel_cache(), nvrtc(), spec, device.arch(), compiled));
}

}  // namespace

const LoadedKernel& prepare(const Device& device, const KernelSpec& spec) {
  Slot& slot = slot_of(device, sentence(wrapper_text(spec), spec.shared_bytes));
  const std::lock_guard lock(slot.mutex);
  if (slot.kernel == nullptr) {
    slot.kernel = std::make_unique<const LoadedKernel>(compile_and_load(device, spec));
  }
  return *slot.kernel;
}

void forget_prepared_kernels() {
  const std::lock_guard lock(slots().mutex);
  slots().forgotten.push_back(std::exchange(slots().by_kernel, {}));
}

}  // namespace fulmen::gpu
