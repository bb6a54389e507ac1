// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Results of probes: a file of them, and how two of them differ.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "kernels/base.cuh"

namespace fulmen::test {

using ProbeResults = std::map<std::string, std::vector<u32>>;

void write(const ProbeResults& results, const std::string& path);
ProbeResults read(const std::string& path);

// Prints a line for each probe; false if one differs that must not: all but approximations, which
// may differ by their documented error, and sums of products that are not integers, by rounding.
bool compare(const ProbeResults& here, const ProbeResults& there);

}  // namespace fulmen::test
