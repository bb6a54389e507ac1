// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A cubin is an ELF file; its executable sections hold the instructions. The operations were read
// off nvdisasm 13.0's listings of fulmen's own kernels for sm_80 and sm_90a.

#include "gpu/jit/instructions.h"

#include <cstring>
#include <initializer_list>

#include "kernels/base.cuh"

namespace fulmen::gpu {
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

}  // namespace fulmen::gpu
