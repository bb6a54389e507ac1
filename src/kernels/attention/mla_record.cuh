// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Records: rows of a cache of latent attention in bytes, as DeepSeek's models keep them (FlashMLA,
// 2025). A row's first numbers are e4m3 in groups that share a scale, its last 64, which carry the
// position, bfloat16. Two layouts, told apart by how many numbers a row has:
//
//   656 bytes, 576 numbers   512 e4m3, a float32 scale for each 128 of them, 64 bfloat16
//   584 bytes, 512 numbers   448 e4m3, 64 bfloat16; and behind all rows of the page, for each row 8
//                            bytes: a power of two for each 64 of them (e8m0: 2^(byte - 127)), one
//                            byte unused
#pragma once

#include "kernels/base.cuh"

namespace fulmen {

inline constexpr i64 kRecordRotary = 64;  // numbers of bfloat16

struct RecordLayout {
  i64 dims;
  i64 bytes;  // of a row, in all
  i64 group;  // numbers that share a scale

  constexpr i64 stored() const { return dims - kRecordRotary; }  // e4m3
  constexpr bool has_page_scales() const { return group == 64; }
};
inline constexpr RecordLayout kRecord656{576, 656, 128}, kRecord584{512, 584, 64};

constexpr bool is_record(DType dtype) { return dtype == DType::kUint8; }
constexpr bool is_record_dim(i64 dims) {
  return dims == kRecord656.dims || dims == kRecord584.dims;
}
constexpr const RecordLayout& record_layout(i64 dims) {
  return dims == kRecord584.dims ? kRecord584 : kRecord656;
}

// Where one record lies, in a page that begins at `page` and has `rows` rows; row_bytes: from a row
// to the next.
template <class Byte>
struct RecordRow {
  RecordLayout layout;
  Byte* stored;
  Byte* scales;
  Byte* rotary;

  constexpr RecordRow(i64 dims, Byte* page, i64 row, i64 rows, i64 row_bytes)
      : layout(record_layout(dims)) {
    if (layout.has_page_scales()) {
      stored = page + row * (layout.bytes - 8);
      scales = page + rows * (layout.bytes - 8) + row * 8;
      rotary = stored + layout.stored();
    } else {
      stored = page + row * row_bytes;
      scales = stored + layout.stored();
      rotary = scales + layout.stored() / layout.group * 4;
    }
  }
};

// 2^(byte - 127); 255 is NaN.
constexpr float power_of(u8 byte) {
  const u32 bits = byte == 0 ? 0x00400000u : byte == 255 ? 0x7fc00000u : u32{byte} << 23;
  return __builtin_bit_cast(float, bits);
}

// Bytes at any address.
constexpr u32 bytes_at(const u8* at, i32 count) {
  u32 word = 0;
  for (i32 i = 0; i < count; ++i) word |= u32{at[i]} << 8 * i;
  return word;
}

constexpr float record_scale(const RecordRow<const u8>& place, i64 group) {
  if (place.layout.has_page_scales()) return power_of(place.scales[group]);
  return __builtin_bit_cast(float, bytes_at(place.scales + 4 * group, 4));
}

// Number d of a record, in Real: exact in double.
template <class Real>
constexpr Real record_number(const RecordRow<const u8>& place, i64 d) {
  const i64 stored = place.layout.stored();
  if (d >= stored) {
    const u8* const at = place.rotary + 2 * (d - stored);
    return static_cast<Real>(to_float(bf16{static_cast<u16>(bytes_at(at, 2))}));
  }
  return static_cast<Real>(to_float(e4m3{place.stored[d]})) *
         static_cast<Real>(record_scale(place, d / place.layout.group));
}

// How a group of such magnitude is written: the smallest power of two by which it fits, from 2^-13
// on, so that every reader has the same scale; as the exponent of a float32.
constexpr u32 record_exponent(float largest) {
  constexpr float kLeast = 1e-4f, kMost = 0x1p120f;
  const u32 bits = __builtin_bit_cast(u32, clamp(largest / 448.0f, kLeast, kMost));
  return (bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1u : 0u);
}

}  // namespace fulmen
