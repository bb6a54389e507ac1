// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen.h section 6: merge, and the mask as a matrix.

#include "api/boundary.h"
#include "core/arrays.h"
#include "core/block_map.h"
#include "core/validate.h"
#include "cpu/backend.h"
#include "gpu/backend.h"
#include "gpu/driver/device.h"

namespace fulmen::api {
namespace {

constexpr const char* kTensorInit = "fulmen_tensor_init";
constexpr const char* kPartInit = "fulmen_merge_part_init";

constexpr fulmen_merge_part kAbsentPart = {sizeof(fulmen_merge_part), absent_tensor(),
                                           absent_tensor()};

MergePart to_part(const fulmen_merge_part& given, size_t index) {
  const std::string subject = sentence("parts[", index, "]");
  fulmen_merge_part room = kAbsentPart;
  const fulmen_merge_part& part = known_struct(given, subject.c_str(), kPartInit, room);
  return {to_tensor(part.o, (subject + ".o").c_str()),
          to_tensor(part.lse, (subject + ".lse").c_str())};
}

// The caller's array: its structs are as large as the caller knows them.
std::vector<MergePart> to_parts(const fulmen_merge_part* parts, size_t num_parts) {
  std::vector<MergePart> converted;
  const char* next = reinterpret_cast<const char*>(parts);
  for (size_t index = 0; index < num_parts; ++index, next += parts->struct_size) {
    converted.push_back(to_part(*reinterpret_cast<const fulmen_merge_part*>(next), index));
  }
  return converted;
}

void require_merge_on_host(const MergeProblem& given) {
  constexpr const char* kCall = "fulmen_merge";
  for (const MergePart& part : given.parts) {
    gpu::require_host(part.o, "the o of a part", kCall);
    gpu::require_host(part.lse, "the lse of a part", kCall);
  }
  gpu::require_host(given.sinks, "sinks", kCall);
  gpu::require_host(given.o, "o", kCall);
  gpu::require_host(given.lse, "lse", kCall);
}

// Of q, k and v only extents count, wherever they are.
void require_masks_on_host(const Request& request, const Tensor& out, const char* out_name,
                           const char* call) {
  for (const ArrayRule& rule : rules::kTable) {
    if (use_of(rule, Call::kDenseMask) != Use::kInput) continue;
    gpu::require_host(request.arrays[rule.array], name(rule.array), call);
  }
  gpu::require_host(out, out_name, call);
}

}  // namespace
}  // namespace fulmen::api

using fulmen::api::guarded;
using fulmen::api::optional_tensor;
using fulmen::api::require_struct;

void fulmen_merge_part_init_sized(fulmen_merge_part* part, size_t struct_size) {
  fulmen::api::init_struct(part, struct_size, fulmen::api::kAbsentPart);
}

fulmen_status fulmen_merge(const fulmen_merge_part* parts, size_t num_parts,
                           const fulmen_tensor* sinks, const fulmen_tensor* o,
                           const fulmen_tensor* lse, void* stream) {
  return guarded([&] {
    require_struct(o, "o", fulmen::api::kTensorInit);
    if (num_parts > 0) require_struct(parts, "parts", fulmen::api::kPartInit);
    fulmen::MergeProblem given;
    given.parts = fulmen::api::to_parts(parts, num_parts);
    given.sinks = optional_tensor(sinks, "sinks");
    given.o = optional_tensor(o, "o");
    given.lse = optional_tensor(lse, "lse");
    const fulmen::MergeProblem problem = fulmen::validate_merge(given);
    const int device = fulmen::gpu::device_of(problem);
    if (device >= 0) return fulmen::gpu::merge(problem, device, stream);
    fulmen::api::require_merge_on_host(problem);
    fulmen::api::require_no_stream(stream);
    fulmen::cpu::merge(problem);
  });
}

fulmen_status fulmen_block_map(const fulmen_problem* problem, const fulmen_tensors* tensors,
                               int64_t block_q, int64_t block_kv, int32_t exact,
                               const fulmen_tensor* kinds) {
  return guarded([&] {
    require_struct(kinds, "kinds", fulmen::api::kTensorInit);
    const fulmen::Request request =
        fulmen::api::to_request(problem, tensors, fulmen::Operation::kForward);
    const fulmen::Tensor map = fulmen::api::to_tensor(*kinds, "kinds");
    fulmen::api::require_masks_on_host(request, map, "kinds", "fulmen_block_map");
    fulmen::block_map(fulmen::validate_dense_mask(request), {block_q, block_kv}, exact != 0, map);
  });
}

fulmen_status fulmen_dense_mask(const fulmen_problem* problem, const fulmen_tensors* tensors,
                                const fulmen_tensor* visible) {
  return guarded([&] {
    require_struct(visible, "visible", fulmen::api::kTensorInit);
    const fulmen::Request request =
        fulmen::api::to_request(problem, tensors, fulmen::Operation::kForward);
    const fulmen::Tensor matrix = fulmen::api::to_tensor(*visible, "visible");
    fulmen::api::require_masks_on_host(request, matrix, "visible", "fulmen_dense_mask");
    fulmen::dense_mask(fulmen::validate_dense_mask(request), matrix);
  });
}
