// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen.h section 6: rows into caches, and the rotary embedding.

#include "core/append.h"

#include <iterator>

#include "api/boundary.h"
#include "cpu/backend.h"
#include "gpu/backend.h"
#include "gpu/driver/device.h"

namespace fulmen::api {
namespace {

constexpr const char* kAppendInit = "fulmen_append_init";

// In the order of kAppendArrays.
constexpr fulmen_tensor fulmen_append::* kAppendMembers[] = {
    &fulmen_append::k_cache,    &fulmen_append::v_cache,     &fulmen_append::k,
    &fulmen_append::v,          &fulmen_append::cu_new,      &fulmen_append::slots,
    &fulmen_append::page_table, &fulmen_append::page_indptr, &fulmen_append::kv_lengths,
    &fulmen_append::positions,  &fulmen_append::cos,         &fulmen_append::sin,
    &fulmen_append::q,          &fulmen_append::q_out,       &fulmen_append::k_scale,
    &fulmen_append::v_scale};
static_assert(std::size(kAppendMembers) == std::size(kAppendArrays));

constexpr fulmen_append no_append() {
  fulmen_append append{};
  append.struct_size = sizeof(fulmen_append);
  for (const auto member : kAppendMembers) append.*member = absent_tensor();
  return append;
}
constexpr fulmen_append kAbsentAppend = no_append();

bool to_flag(int32_t interleaved) {
  if (interleaved == 0 || interleaved == 1) return interleaved == 1;
  refuse(sentence("interleaved is ", interleaved, "; allowed is 0 or 1"));
}

void run(const AppendProblem& given, bool has_caches, void* stream) {
  const AppendProblem problem = validate_append(given, has_caches);
  const int device = gpu::device_of(problem);
  if (device >= 0) return gpu::append(problem, device, stream);
  for (const AppendArray& array : kAppendArrays) {
    gpu::require_host(problem.*array.member, name(array, has_caches),
                      has_caches ? "fulmen_append_kv" : "fulmen_rotary");
  }
  require_no_stream(stream);
  cpu::append(problem);
}

}  // namespace
}  // namespace fulmen::api

void fulmen_append_init_sized(fulmen_append* append, size_t struct_size) {
  fulmen::api::init_struct(append, struct_size, fulmen::api::kAbsentAppend);
}

fulmen_status fulmen_append_kv(const fulmen_append* append, void* stream) {
  return fulmen::api::guarded([&] {
    fulmen::api::require_struct(append, "append", fulmen::api::kAppendInit);
    fulmen_append room = fulmen::api::kAbsentAppend;
    const fulmen_append& known =
        fulmen::api::known_struct(*append, "append", fulmen::api::kAppendInit, room);
    fulmen::AppendProblem given;
    for (size_t i = 0; i < std::size(fulmen::kAppendArrays); ++i) {
      const fulmen::AppendArray& array = fulmen::kAppendArrays[i];
      given.*array.member =
          fulmen::api::to_tensor(known.*fulmen::api::kAppendMembers[i], array.name);
    }
    given.interleaved = fulmen::api::to_flag(known.interleaved);
    fulmen::api::run(given, true, stream);
  });
}

fulmen_status fulmen_rotary(const fulmen_tensor* x, const fulmen_tensor* positions,
                            const fulmen_tensor* cos, const fulmen_tensor* sin, int32_t interleaved,
                            const fulmen_tensor* out, void* stream) {
  return fulmen::api::guarded([&] {
    fulmen::AppendProblem given;
    given.q = fulmen::api::optional_tensor(x, "x");
    given.positions = fulmen::api::optional_tensor(positions, "positions");
    given.cos = fulmen::api::optional_tensor(cos, "cos");
    given.sin = fulmen::api::optional_tensor(sin, "sin");
    given.q_out = fulmen::api::optional_tensor(out, "out");
    given.interleaved = fulmen::api::to_flag(interleaved);
    fulmen::api::run(given, false, stream);
  });
}
