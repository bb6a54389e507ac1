// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Reading what ptxas says, line by line, and judging it.

#include "gpu/jit/gate.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <sstream>

#include "core/error.h"
#include "gpu/jit/instructions.h"

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

}  // namespace fulmen::gpu
