// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Warp-wide exchange, and on top of it ldmatrix, stmatrix and the matrix product. Registers that
// warpgroups hand over: PTX ISA 9.0, section 9.7.19.5.
#include "emulator/warp.h"

#include <algorithm>

#include "emulator/shared_memory.h"
#include "emulator/tensor_core.h"

namespace fulmen::emulator {

const std::array<u64, kWarpSize>& exchange(const char* instruction, u64 value, bool ordered) {
  if (std::string_view(instruction).starts_with("shfl")) count(&Counters::shuffles);
  Warp& warp = block().warps[self().warp()];
  if (warp.meeting.arrived == 0) {
    warp.instruction = instruction;
  } else if (warp.instruction != instruction) {
    fail(std::string(instruction) + " where other lanes of the warp are at " +
         std::string(warp.instruction));
  }
  warp.given[self().lane()] = value;
  if (warp.meeting.arrived + 1 == kWarpSize) warp.received = warp.given;
  meet(warp.meeting, kWarpSize, instruction, ordered);
  return warp.received;  // not replaced before this lane comes again
}

namespace {

// The word of matrix i that the lane moves between shared memory and the warp: whose it will be
// does not matter to order and banks. `rows`: addresses of rows, eight to a matrix.
u32 unit_word(const std::array<u64, kWarpSize>& rows, u32 i) {
  const u32 lane = self().lane();
  return static_cast<u32>(rows[i * 8 + lane / 4]) + lane % 4 * 4 - kSharedBase;
}

}  // namespace

std::array<u32, 4> load_transposed_matrices(u32 row_address, Site site) {
  shared_at(row_address, 16, 16);
  const std::array<u64, kWarpSize> rows = exchange("ldmatrix.trans", row_address);
  const u32 lane = self().lane();
  std::array<u32, 4> words{};
  for (u32 i = 0; i < 4; ++i) {
    on_shared(unit_word(rows, i), 4, Kind::kMatrixRead, site);
    for (u32 half = 0; half < 2; ++half) {
      const u32 address = static_cast<u32>(rows[i * 8 + lane % 4 * 2 + half]) + lane / 4 * 2;
      words[i] |= static_cast<u32>(load_raw<u16>(address)) << (16 * half);
    }
  }
  exchange("ldmatrix.trans", 0);  // no thread writes before all have read
  return words;
}

std::array<u32, 4> load_matrices(u32 row_address, Site site) {
  shared_at(row_address, 16, 16);
  const std::array<u64, kWarpSize> rows = exchange("ldmatrix", row_address);
  std::array<u32, 4> words;
  for (u32 i = 0; i < 4; ++i) {
    on_shared(unit_word(rows, i), 4, Kind::kMatrixRead, site);
    words[i] = load_raw<u32>(unit_word(rows, i) + kSharedBase);
  }
  exchange("ldmatrix", 0);  // no thread writes before all have read
  return words;
}

void store_matrices(u32 row_address, const std::array<u32, 4>& words, Site site) {
  shared_at(row_address, 16, 16);
  const std::array<u64, kWarpSize> rows = exchange("stmatrix", row_address);
  const u32 lane = self().lane();
  for (u32 i = 0; i < 4; ++i) {
    store_shared(static_cast<u32>(rows[i * 8 + lane / 4]) + lane % 4 * 4, words[i], site);
  }
  exchange("stmatrix", 0);
}

void store_transposed_matrices(u32 row_address, const std::array<u32, 4>& words, Site site) {
  shared_at(row_address, 16, 16);
  const std::array<u64, kWarpSize> rows = exchange("stmatrix.trans", row_address);
  const u32 lane = self().lane();
  for (u32 i = 0; i < 4; ++i) {
    on_shared(unit_word(rows, i), 4, Kind::kWrite, site);
    for (u32 c = 0; c < 2; ++c) {  // row lane / 4, column 2 (lane % 4) + c of the fragment
      const u32 address = static_cast<u32>(rows[i * 8 + lane % 4 * 2 + c]) + lane / 4 * 2;
      store_raw(address, static_cast<u16>(words[i] >> (16 * c)));
    }
  }
  exchange("stmatrix.trans", 0);
}

namespace {

// Number `part` of a word.
float widen(u32 word, u32 part, DType dtype) {
  if (dtype == DType::kFloat32) return __builtin_bit_cast(float, word & 0xffffe000u);
  if (dtype == DType::kFloat8E4M3) return to_float(e4m3{static_cast<u8>(word >> (8 * part))});
  const u16 bits = static_cast<u16>(word >> (16 * part));
  return dtype == DType::kBFloat16 ? to_float(bf16{bits}) : to_float(f16{bits});
}

}  // namespace

void multiply_fragments(const std::array<WarpOperands, kWarpSize>& operands, DType dtype,
                        float* d) {
  const u32 of_word = 4 / static_cast<u32>(size_bytes(dtype));  // numbers
  const u32 depth = 8 * of_word;
  const u32 rows = self().lane() / 4 * 4, columns = self().lane() % 4 * 8;  // their first lanes
  TensorCoreMatrix right(2, dtype);
  float left[2][32];
  for (u32 k = 0; k < depth; ++k) {
    const u32 quad = k / of_word % 4, part = k / of_word / 4, half = k % of_word;
    for (u32 i = 0; i < 2; ++i) {
      left[i][k] = widen(operands[rows + quad].a[i + 2 * part], half, dtype);
      right.set(k, i, widen(operands[columns + 4 * i + quad].b[part], half, dtype));
    }
  }
  for (u32 i = 0; i < 2; ++i) right.row(left[i], d + 2 * i, d + 2 * i);
}

namespace {

constexpr u32 kRegisters = 65536;         // of a multiprocessor
constexpr u32 kMaxThreadRegisters = 256;  // what a thread with 255 holds

u32 share_of_registers() {
  const u32 share = kRegisters / static_cast<u32>(block().threads.size()) / 8 * 8;
  return std::min(share, kMaxThreadRegisters);
}

[[noreturn]] void fail_to_set(const char* instruction, u32 count, u32 held) {
  fail(std::string(instruction) + " to " + std::to_string(count) +
       " registers, an illegal instruction where a thread has " + std::to_string(held) +
       " at launch");
}

}  // namespace

void increase_registers(u32 count) {
  Block& own = block();
  own.most_registers = std::max(own.most_registers, count);
  own.least_increase = std::min(own.least_increase, count);
  const u32 held = std::min(share_of_registers(), own.most_registers);
  if (own.least_increase < held) fail_to_set("setmaxnreg.inc", own.least_increase, held);
}

void decrease_registers(u32 count) {
  if (count > share_of_registers()) fail_to_set("setmaxnreg.dec", count, share_of_registers());
}

}  // namespace fulmen::emulator
