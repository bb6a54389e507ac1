// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A plan for a GPU as one JSON object: the choice of implementation and tile, and what is known of
// its kernels.
// fulmen_gpu_info: what there is of driver, devices, compiler, cache and bundle, as JSON.

#include "plan/explain.h"

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "gpu/backend.h"
#include "gpu/implementations.h"
#include "gpu/jit/cache.h"

namespace fulmen::gpu {
namespace {

using json::field;
using json::list;
using json::number;
using json::quoted;

std::string device_text(const Gpu& gpu, int index) {
  return sentence("{", field("name", quoted(gpu.name)), ", ",
                  field("arch", quoted(arch_name(gpu.compute_capability))), ", ",
                  field("index", index < 0 ? "null" : std::to_string(index)), ", ",
                  field("multiprocessors", std::to_string(gpu.num_multiprocessors)), "}");
}

std::string instructions_text(const InstructionCounts& counts) {
  const auto count = [](const char* name, int value) { return field(name, std::to_string(value)); };
  return sentence("{", count("tensor", counts.tensor), ", ", count("arithmetic", counts.arithmetic),
                  ", ", count("special", counts.special), ", ",
                  count("conversion", counts.conversion), ", ", count("shared", counts.shared),
                  ", ", count("global", counts.global), ", ", count("local", counts.local), ", ",
                  count("synchronisation", counts.synchronisation), ", ",
                  count("other", counts.other), "}");
}

std::string kernel_text(const KernelReport& kernel, const Gpu& gpu) {
  const auto known = [&kernel](const std::string& value) {
    return kernel.compiled ? value : std::string("null");
  };
  const double at_once = static_cast<double>(kernel.blocks_resident) * gpu.num_multiprocessors;
  std::vector<std::string> findings;
  for (const std::string& finding : kernel.findings) findings.push_back(quoted(finding));
  return sentence(
      "{", field("name", quoted(kernel.name)), ", ",
      field("registers", known(std::to_string(kernel.registers))), ", ",
      field("spill_bytes", known(std::to_string(kernel.spill_bytes))), ", ",
      field("shared_bytes", std::to_string(kernel.shared_bytes)), ", ",
      field("threads", std::to_string(kernel.num_threads)), ", ",
      field("blocks", std::to_string(kernel.num_blocks)), ", ",
      field("blocks_per_multiprocessor", known(std::to_string(kernel.blocks_resident))), ", ",
      field("waves", known(number(static_cast<double>(kernel.num_blocks) / at_once))), ", ",
      field("instructions", known(instructions_text(kernel.instructions))), ", ",
      field("origin", known(quoted(kernel.origin))), ", ", field("findings", list(findings)), "}");
}

// Which of arithmetic and memory keeps a card busier at its peaks, and for how long.
std::string roofline_text(const Plan& plan, const Gpu& gpu, const Cost& total) {
  const bool tensor_cores = gpu_implementation(plan.implementation).tensor_cores;
  const double peak = peak_flops(gpu, plan.problem.dtype, plan.problem.precision, tensor_cores);
  const double compute = total.flops / peak;
  const double memory = total.bytes / gpu.bandwidth;
  return sentence("{", field("peak_tflops", number(peak / 1e12)), ", ",
                  field("bandwidth_gbps", number(gpu.bandwidth / 1e9)), ", ",
                  field("bound", quoted(compute >= memory ? "compute" : "memory")), ", ",
                  field("time_us", number(1e6 * std::max(compute, memory))), "}");
}

// Those before the chosen implementation were tried; those after it are asked now.
std::vector<Candidate> all_candidates(const PreparedPlan& prepared) {
  const Plan& plan = prepared.plan;
  std::vector<Candidate> all = prepared.tried;
  for (const GpuImplementation& row : gpu_implementations().subspan(all.size())) {
    const PlanOrRefusal made = plan_with(row, plan.problem, prepared.gpu);
    all.push_back({row.implementation, false,
                   made.plan == nullptr
                       ? made.refusal
                       : sentence("slower than ", name(plan.implementation), "; ", row.merit)});
  }
  return all;
}

std::string tiles_text(const std::vector<TileCandidate>& compared) {
  std::vector<std::string> tiles;
  for (const TileCandidate& each : compared) {
    tiles.push_back(sentence("{", field("tile", tile_text(each.tile)), ", ",
                             field("chosen", each.chosen ? "true" : "false"), ", ",
                             field("reason", quoted(each.reason)), "}"));
  }
  return list(tiles);
}

}  // namespace

std::string explain(const PreparedPlan& prepared) {
  const Plan& plan = prepared.plan;
  const Cost total = cost(plan.problem);
  std::vector<std::string> kernels;
  for (const KernelReport& kernel : prepared.reports) {
    kernels.push_back(kernel_text(kernel, prepared.gpu));
  }
  const int index = prepared.device == nullptr ? -1 : prepared.device->ordinal();
  std::vector<std::string> notes;
  for (const std::string& note : {prepared.decision->note, prepared.note}) {
    if (!note.empty()) notes.push_back(quoted(note));
  }
  if (plan.problem.has_segments()) {
    notes.push_back(
        quoted("pairs are counted as if all were visible: what segments hide only the "
               "device knows"));
  }
  const std::string cache_note = kernel_cache().note();
  if (!cache_note.empty()) notes.push_back(quoted(cache_note));
  return sentence("{", choice_text(plan, "cuda", all_candidates(prepared)), ", ",
                  field("tiles", tiles_text(prepared.decision->compared)), ", ",
                  field("device", device_text(prepared.gpu, index)), ", ", cost_text(plan, total),
                  ", ", field("kernels", list(kernels)), ", ",
                  field("roofline", roofline_text(plan, prepared.gpu, total)), ", ",
                  field("notes", list(notes)), "}");
}

namespace {

using json::list;
using json::quoted;

// What one part says of itself, or why it is not there.
struct Part {
  std::string text = "null";
  std::string reason;
};

template <class Describe>
Part part_of(const Describe& describe) {
  try {
    return {describe(), ""};
  } catch (const Error& error) {
    return {"null", error.what()};
  }
}

std::string driver_text() {
  const Driver& loaded = driver();
  return sentence("{\"version\": ", quoted(cuda_version_name(loaded.version())),
                  ", \"path\": ", quoted(loaded.path()), "}");
}

std::string device_text(int index) {
  const DeviceFacts& facts = device(index).facts();
  return sentence("{\"index\": ", std::to_string(index), ", \"name\": ", quoted(facts.name),
                  ", \"arch\": ", quoted(device(index).arch()),
                  ", \"multiprocessors\": ", std::to_string(facts.num_multiprocessors),
                  ", \"memory_bytes\": ", std::to_string(facts.memory_bytes),
                  ", \"shared_bytes\": ", std::to_string(facts.shared_bytes_per_block), "}");
}

// Those that cannot be opened are left out.
std::string devices_text() {
  std::vector<std::string> devices;
  const Part count = part_of([] { return std::to_string(driver().num_devices()); });
  const int num_devices = count.reason.empty() ? std::stoi(count.text) : 0;
  for (int index = 0; index < num_devices; ++index) {
    const Part one = part_of([index] { return device_text(index); });
    if (one.reason.empty()) devices.push_back(one.text);
  }
  return list(devices);
}

std::string nvrtc_text() {
  const Nvrtc& compiler = nvrtc();
  std::vector<std::string> archs;
  for (const int arch : compiler.archs()) archs.push_back(std::to_string(arch));
  return sentence("{\"version\": ", quoted(cuda_version_name(compiler.version())),
                  ", \"path\": ", quoted(compiler.path()), ", \"archs\": ", list(archs), "}");
}

std::string cache_text() {
  const KernelCache& cache = kernel_cache();
  return sentence("{\"folder\": ", quoted(cache.folder().settings().folder),
                  ", \"bytes\": ", std::to_string(cache.folder().bytes()),
                  ", \"entries\": ", std::to_string(cache.folder().num_entries()),
                  ", \"limit_bytes\": ", std::to_string(cache.folder().settings().limit_bytes),
                  ", \"note\": ", quoted(cache.note()), "}");
}

std::string bundle_text() {
  const BundleInfo bundle = bundle_info();
  if (bundle.path.empty()) return "null";
  return sentence("{\"path\": ", quoted(bundle.path),
                  ", \"kernels\": ", std::to_string(bundle.num_kernels), "}");
}

}  // namespace

std::string gpu_info() {
  const Part of_driver = part_of(driver_text);
  const Part of_nvrtc = part_of(nvrtc_text);
  std::vector<std::string> names;
  for (const Gpu& gpu : known_gpus()) names.push_back(quoted(gpu.name));
  return sentence("{\"driver\": ", of_driver.text,
                  ", \"driver_reason\": ", quoted(of_driver.reason),
                  ", \"devices\": ", devices_text(), ", \"nvrtc\": ", of_nvrtc.text,
                  ", \"nvrtc_reason\": ", quoted(of_nvrtc.reason), ", \"cache\": ", cache_text(),
                  ", \"bundle\": ", bundle_text(), ", \"device_names\": ", list(names), "}");
}

}  // namespace fulmen::gpu
