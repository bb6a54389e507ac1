// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A plan as one JSON object: what was chosen and why, what was not, and the arithmetic behind it.

#include <algorithm>

#include "core/error.h"
#include "gpu/gpu_implementations.h"
#include "plan/json.h"
#include "plan/plan.h"

namespace fulmen {
namespace {

using json::list;
using json::number;
using json::quoted;

std::string field(const char* key, const std::string& value) {
  return sentence("\"", key, "\": ", value);
}

std::string tile_text(const Tile& tile) {
  if (tile.rows == 0) return "null";
  return sentence("{", field("rows", std::to_string(tile.rows)), ", ",
                  field("columns", std::to_string(tile.columns)), "}");
}

// From "operation" to "tile".
std::string choice_text(const Plan& plan, const char* backend,
                        const std::vector<Candidate>& candidates) {
  std::string reason;
  std::vector<std::string> rejected;
  for (const Candidate& candidate : candidates) {
    if (candidate.implementation == plan.implementation) {
      reason = candidate.reason;
      continue;
    }
    rejected.push_back(sentence("{",
                                field("implementation", quoted(name(candidate.implementation))),
                                ", ", field("reason", quoted(candidate.reason)), "}"));
  }
  return sentence(field("operation", quoted(name(plan.problem.operation))), ", ",
                  field("implementation", quoted(name(plan.implementation))), ", ",
                  field("backend", quoted(backend)), ", ", field("reason", quoted(reason)), ", ",
                  field("rejected", list(rejected)), ", ", field("tile", tile_text(plan.tile)));
}

// From "workspace_bytes" to "intensity".
std::string cost_text(const Plan& plan, const Cost& total) {
  const double intensity = total.bytes > 0 ? total.flops / total.bytes : 0.0;
  return sentence(field("workspace_bytes", std::to_string(plan.workspace_bytes)), ", ",
                  field("pairs", number(total.pairs)), ", ", field("flops", number(total.flops)),
                  ", ", field("bytes", number(total.bytes)), ", ",
                  field("intensity", number(intensity)));
}

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
std::string roofline_text(const Plan& plan, const Cost& total) {
  const bool tensor_cores = gpu_implementation(plan.implementation).tensor_cores;
  const double peak =
      peak_flops(plan.gpu, plan.problem.dtype, plan.problem.precision, tensor_cores);
  const double compute = total.flops / peak;
  const double memory = total.bytes / plan.gpu.bandwidth;
  return sentence("{", field("peak_tflops", number(peak / 1e12)), ", ",
                  field("bandwidth_gbps", number(plan.gpu.bandwidth / 1e9)), ", ",
                  field("bound", quoted(compute >= memory ? "compute" : "memory")), ", ",
                  field("time_us", number(1e6 * std::max(compute, memory))), "}");
}

}  // namespace

std::string explain(const Plan& plan) {
  const int threads = plan.implementation == Implementation::kScalar ? 1 : plan.device.num_threads;
  return sentence("{", choice_text(plan, "cpu", candidates(plan.problem)), ", ",
                  field("isa", quoted(plan.device.isa)), ", ",
                  field("threads", std::to_string(threads)), ", ",
                  cost_text(plan, cost(plan.problem)), "}");
}

std::string explain(const Plan& plan, const GpuReport& report) {
  const Cost total = cost(plan.problem);
  std::vector<std::string> kernels;
  for (const KernelReport& kernel : report.kernels) {
    kernels.push_back(kernel_text(kernel, plan.gpu));
  }
  std::vector<std::string> notes;
  for (const std::string& note : report.notes) notes.push_back(quoted(note));
  return sentence("{", choice_text(plan, "cuda", report.candidates), ", ",
                  field("device", device_text(plan.gpu, report.index)), ", ",
                  cost_text(plan, total), ", ", field("kernels", list(kernels)), ", ",
                  field("roofline", roofline_text(plan, total)), ", ", field("notes", list(notes)),
                  "}");
}

}  // namespace fulmen
