// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// JSON by RFC 8259, sections 6 and 7. Plans as JSON: what was chosen and why, what was not, and the
// arithmetic behind it.

#include "plan/explain.h"

#include <cmath>
#include <locale>
#include <sstream>

#include "core/error.h"

namespace fulmen::json {

std::string quoted(const std::string& text) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string result = "\"";
  for (const char character : text) {
    const auto byte = static_cast<unsigned char>(character);
    if (character == '"' || character == '\\') {
      result += '\\';
      result += character;
    } else if (byte < 0x20) {
      result += "\\u00";
      result += kDigits[byte >> 4];
      result += kDigits[byte & 15];
    } else {
      result += character;
    }
  }
  return result + '"';
}

std::string number(double value) {
  if (!std::isfinite(value)) return "null";
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text.precision(17);
  text << value;
  return text.str();
}

std::string list(const std::vector<std::string>& items) {
  std::string text = "[";
  for (const std::string& item : items) text += (text.size() > 1 ? ", " : "") + item;
  return text + "]";
}

std::string field(const char* key, const std::string& value) {
  return std::string("\"") + key + "\": " + value;
}

}  // namespace fulmen::json

namespace fulmen {

using json::field;
using json::list;
using json::number;
using json::quoted;

std::string tile_text(const Tile& tile) {
  if (tile.rows == 0) return "null";
  return sentence("{", field("rows", std::to_string(tile.rows)), ", ",
                  field("columns", std::to_string(tile.columns)), "}");
}

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

std::string cost_text(const Plan& plan, const Cost& total) {
  const double intensity = total.bytes > 0 ? total.flops / total.bytes : 0.0;
  return sentence(field("workspace_bytes", std::to_string(plan.workspace_bytes)), ", ",
                  field("pairs", number(total.pairs)), ", ", field("flops", number(total.flops)),
                  ", ", field("bytes", number(total.bytes)), ", ",
                  field("intensity", number(intensity)));
}

std::string explain(const Plan& plan) {
  const int threads = plan.implementation == Implementation::kScalar ? 1 : plan.device.num_threads;
  return sentence("{", choice_text(plan, "cpu", candidates(plan.problem)), ", ",
                  field("isa", quoted(plan.device.isa)), ", ",
                  field("threads", std::to_string(threads)), ", ",
                  cost_text(plan, cost(plan.problem)), "}");
}

}  // namespace fulmen
