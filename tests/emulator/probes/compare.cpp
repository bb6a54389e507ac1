// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A file of results is a line with name and number of words for each probe, its words behind it.
#include "compare.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>

#include "core/error.h"
#include "gpu/jit/sha256.h"

namespace fulmen::test {
namespace {

// The largest distance that passes, in units of the last place of a float; 0: the same bits.
// Results of lg2.approx near 0 have an absolute error, of 2^-22.
u32 allowed(const std::string& name) {
  const auto begins = [&name](const char* with) { return name.rfind(with, 0) == 0; };
  if (begins("lg2")) return 32;
  if (begins("ex2") || begins("rcp")) return 2;
  if (begins("expf") || begins("logf") || begins("tanhf")) return 3;
  return 0;
}

bool is_nan(u32 bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

u32 distance(u32 a, u32 b) {
  if (is_nan(a) && is_nan(b)) return 0;
  const auto line = [](u32 bits) {  // floats in order
    return static_cast<i64>(bits & 0x7fffffffu) * ((bits >> 31) != 0 ? -1 : 1);
  };
  return static_cast<u32>(std::min<i64>(std::abs(line(a) - line(b)), ~0u));
}

}  // namespace

void write(const ProbeResults& results, const std::string& path) {
  std::ofstream file(path, std::ios::binary);
  for (const auto& [name, words] : results) {
    file << name << '\t' << words.size() << '\n';
    file.write(reinterpret_cast<const char*>(words.data()),
               static_cast<std::streamsize>(4 * words.size()));
  }
}

ProbeResults read(const std::string& path) {
  ProbeResults results;
  std::ifstream file(path, std::ios::binary);
  for (std::string line; std::getline(file, line);) {
    const std::size_t tab = line.find('\t');
    std::vector<u32>& words = results[line.substr(0, tab)];
    words.resize(std::stoul(line.substr(tab + 1)));
    file.read(reinterpret_cast<char*>(words.data()),
              static_cast<std::streamsize>(4 * words.size()));
  }
  if (results.empty()) throw Error(Status::kArgument, sentence(path, " holds no probes"));
  return results;
}

std::string digests(const ProbeResults& results) {
  std::string lines;
  for (const auto& [name, words] : results) {
    if (allowed(name) > 0) continue;
    gpu::Sha256 hash;
    for (const u32 word : words) {
      const u32 kept = is_nan(word) ? 0x7fffffffu : word;  // all NaN are one
      hash.add({reinterpret_cast<const char*>(&kept), sizeof(kept)});
    }
    lines += gpu::hex(hash.finish()) + "  " + name + "\n";
  }
  return lines;
}

bool agrees_with_digests(const ProbeResults& results, const std::string& path) {
  std::string here("\n");  // g++ 12 warns of its own operator+ where a literal is on the left
  here.append(digests(results));
  std::ifstream file(path);
  std::size_t same = 0, others = 0;
  for (std::string line; std::getline(file, line);) {
    const bool is_same =
        here.find(std::string("\n").append(line).append("\n")) != std::string::npos;
    if (!is_same) std::printf("other bits: %s\n", line.substr(line.find("  ") + 2).c_str());
    ++(is_same ? same : others);
  }
  std::printf("%zu probes have the same bits, %zu others\n", same, others);
  return same > 0 && others == 0;
}

bool compare(const ProbeResults& here, const ProbeResults& there) {
  bool same = true;
  for (const auto& [name, words] : here) {
    const auto found = there.find(name);
    if (found == there.end() || found->second.size() != words.size()) {
      std::printf("%-34s absent\n", name.c_str());
      same = false;
      continue;
    }
    std::size_t different = 0;
    u32 most = 0;
    for (std::size_t i = 0; i < words.size(); ++i) {
      const u32 apart = distance(words[i], found->second[i]);
      different += apart > 0;
      most = std::max(most, apart);
    }
    const bool passes = most <= allowed(name);
    std::printf("%-34s %7zu words, %6zu differ, by at most %u units%s\n", name.c_str(),
                words.size(), different, most, passes ? "" : "  <- more than allowed");
    same = same && passes;
  }
  return same;
}

}  // namespace fulmen::test
