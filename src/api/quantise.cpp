// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen.h section 6: numbers of 8 bits for caches.

#include <iterator>

#include "api/boundary.h"
#include "core/quantisation.h"
#include "cpu/backend.h"
#include "gpu/backend.h"
#include "gpu/driver/device.h"

namespace fulmen::api {
namespace {

constexpr const char* kQuantiseInit = "fulmen_quantisation_init";

// In the order of kQuantiseArrays.
constexpr fulmen_tensor fulmen_quantisation::* kQuantiseMembers[] = {
    &fulmen_quantisation::x, &fulmen_quantisation::values, &fulmen_quantisation::constant,
    &fulmen_quantisation::scale, &fulmen_quantisation::lengths};
static_assert(std::size(kQuantiseMembers) == std::size(kQuantiseArrays));

constexpr fulmen_quantisation no_quantisation() {
  fulmen_quantisation quantisation{};
  quantisation.struct_size = sizeof(fulmen_quantisation);
  for (const auto member : kQuantiseMembers) quantisation.*member = absent_tensor();
  quantisation.headroom = 1;
  return quantisation;
}
constexpr fulmen_quantisation kAbsentQuantisation = no_quantisation();

bool to_bool(int32_t value, const char* option) {
  if (value == 0 || value == 1) return value == 1;
  refuse(sentence(option, " is ", value, "; allowed is 0 or 1"));
}

QuantiseProblem to_quantise(const fulmen_quantisation& known) {
  QuantiseProblem given;
  for (size_t i = 0; i < std::size(kQuantiseArrays); ++i) {
    const QuantiseArray& array = kQuantiseArrays[i];
    given.*array.member = to_tensor(known.*kQuantiseMembers[i], array.name);
  }
  given.extents.rotate = to_bool(known.rotate, "rotate");
  given.extents.find_constant = to_bool(known.find_constant, "find_constant");
  given.extents.find_scale = to_bool(known.find_scale, "find_scale");
  given.headroom = known.headroom;
  return given;
}

void run(const QuantiseProblem& problem, void* stream) {
  const int device = gpu::device_of(problem);
  if (device >= 0) return gpu::quantise(problem, device, stream);
  for (const QuantiseArray& array : kQuantiseArrays) {
    gpu::require_host(problem.*array.member, array.name, "fulmen_quantise");
  }
  require_no_stream(stream);
  cpu::quantise(problem);
}

}  // namespace
}  // namespace fulmen::api

void fulmen_quantisation_init_sized(fulmen_quantisation* quantisation, size_t struct_size) {
  fulmen::api::init_struct(quantisation, struct_size, fulmen::api::kAbsentQuantisation);
}

fulmen_status fulmen_quantise(const fulmen_quantisation* quantisation, void* stream) {
  return fulmen::api::guarded([&] {
    fulmen::api::require_struct(quantisation, "quantisation", fulmen::api::kQuantiseInit);
    fulmen_quantisation room = fulmen::api::kAbsentQuantisation;
    const fulmen_quantisation& known =
        fulmen::api::known_struct(*quantisation, "quantisation", fulmen::api::kQuantiseInit, room);
    fulmen::api::run(fulmen::validate_quantise(fulmen::api::to_quantise(known)), stream);
  });
}
