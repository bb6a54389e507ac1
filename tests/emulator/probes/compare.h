// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Results of probes: a file of them, their hashes, and how two of them differ.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "kernels/base.cuh"

namespace fulmen::test {

using ProbeResults = std::map<std::string, std::vector<u32>>;

void write(const ProbeResults& results, const std::string& path);
ProbeResults read(const std::string& path);

// A line with a hash and a name for each probe that has the same bits everywhere.
std::string digests(const ProbeResults& results);
// Prints which probes have other hashes than the lines of a file say; true if none.
bool agrees_with_digests(const ProbeResults& results, const std::string& path);

// Prints a line for each probe; false if one differs that must not: all but approximations.
bool compare(const ProbeResults& here, const ProbeResults& there);

}  // namespace fulmen::test
