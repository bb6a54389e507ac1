// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What Python calls: the C ABI of fulmen.h, one export each, in the calling convention of
// apache-tvm-ffi. Each reads its arguments in order (export.h), makes one call, and returns a
// number. An error is raised in Python under the name of its status; python/fulmen/errors.py has
// the one table from these names to classes. The interpreter lock is released during a call.

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ffi/arrays.h"
#include "ffi/export.h"

namespace fulmen::ffi {
namespace {

int64_t call(Arguments in, decltype(&fulmen_attention) function) {
  fulmen_problem problem = in.options();
  const int64_t stream = in.integer("stream");
  const Arrays arrays = in.arrays();
  arrays.resolve_device(&problem);
  check(function(&problem, &arrays.tensors, arrays.stream(stream)));
  return 0;
}

// (options, stream, arrays)
int64_t forward(Arguments in) { return call(in, fulmen_attention); }

// (options, stream, arrays)
int64_t backward(Arguments in) { return call(in, fulmen_attention_backward); }

// The arrays are where they are, or, where the options name a GPU, anywhere and never read.
fulmen_plan* make_plan(Arguments& in, fulmen_operation operation, const Planned& planned) {
  fulmen_problem problem = planned.problem;
  const bool is_named = problem.device >= 0 || !planned.device_name.empty();
  const Arrays arrays = is_named ? in.extents() : in.arrays();
  if (!planned.device_name.empty()) problem.device_name = planned.device_name.c_str();
  if (!is_named) arrays.resolve_device(&problem);
  if (is_named && problem.backend == FULMEN_BACKEND_AUTO) problem.backend = FULMEN_BACKEND_CUDA;
  fulmen_experiment experiment;
  fulmen_experiment_init(&experiment);
  experiment.without = planned.without;
  experiment.tile = planned.tile.c_str();
  fulmen_plan* plan = nullptr;
  check(fulmen_plan_create_experimental(&problem, &arrays.tensors, operation, &experiment, &plan));
  return plan;
}

// (operation, planned, arrays) -> the plan, as a number
int64_t plan_create(Arguments in) {
  const auto operation = static_cast<fulmen_operation>(in.integer("operation"));
  const Planned planned = in.planned();
  return reinterpret_cast<intptr_t>(make_plan(in, operation, planned));
}

// (plan)
int64_t plan_destroy(Arguments in) {
  fulmen_plan_destroy(in.plan());
  return 0;
}

// (plan) -> bytes
int64_t plan_workspace_bytes(Arguments in) {
  return static_cast<int64_t>(fulmen_plan_workspace_bytes(in.plan()));
}

using Run = fulmen_status (*)(const fulmen_plan*, const fulmen_tensors*, void*, size_t, void*);

int64_t run(Arguments in, Run function) {
  const fulmen_plan* plan = in.plan();
  const DLTensor* vector = in.array("workspace");
  const int64_t stream = in.integer("stream");
  const Arrays arrays = in.arrays();
  const Bytes workspace = workspace_of(vector, arrays.space);
  check(function(plan, &arrays.tensors, workspace.data, workspace.size, arrays.stream(stream)));
  return 0;
}

// (plan, workspace, stream, arrays)
int64_t plan_forward(Arguments in) { return run(in, fulmen_forward); }

// (plan, workspace, stream, arrays)
int64_t plan_backward(Arguments in) { return run(in, fulmen_backward); }

// (plan, text) -> bytes that the whole text takes
int64_t plan_explain(Arguments in) {
  const fulmen_plan* plan = in.plan();
  const Bytes text = in.host_bytes("text");
  size_t needed = 0;
  check(fulmen_plan_explain(plan, text.data, text.size, &needed));
  return static_cast<int64_t>(needed);
}

// (text, operation, planned, arrays) -> bytes that the whole text takes
int64_t explain(Arguments in) {
  const Bytes text = in.host_bytes("text");
  const auto operation = static_cast<fulmen_operation>(in.integer("operation"));
  const Planned planned = in.planned();
  fulmen_plan* plan = make_plan(in, operation, planned);
  size_t needed = 0;
  const fulmen_status status = fulmen_plan_explain(plan, text.data, text.size, &needed);
  fulmen_plan_destroy(plan);
  check(status);
  return static_cast<int64_t>(needed);
}

// (text) -> bytes that the whole text takes
int64_t build_info(Arguments in) {
  const Bytes text = in.host_bytes("text");
  size_t needed = 0;
  check(fulmen_build_info(text.data, text.size, &needed));
  return static_cast<int64_t>(needed);
}

// (text) -> bytes that the whole text takes
int64_t schema(Arguments in) {
  const Bytes text = in.host_bytes("text");
  size_t needed = 0;
  check(fulmen_schema(text.data, text.size, &needed));
  return static_cast<int64_t>(needed);
}

// (visible: uint8, options, arrays)
int64_t dense_mask(Arguments in) {
  const DLTensor* matrix = in.array("visible");
  if (matrix == nullptr) throw Refusal{FULMEN_ERROR_ARGUMENT, "visible is not given"};
  const fulmen_tensor visible = view("visible", *matrix, {false, FULMEN_BOOL});
  const fulmen_problem problem = in.options();
  const Arrays arrays = in.arrays();
  check(fulmen_dense_mask(&problem, &arrays.tensors, &visible));
  return 0;
}

// (kinds: int8, options, block_q, block_kv, exact, arrays)
int64_t block_map(Arguments in) {
  const DLTensor* map = in.array("kinds");
  if (map == nullptr) throw Refusal{FULMEN_ERROR_ARGUMENT, "kinds is not given"};
  const fulmen_tensor kinds = view("kinds", *map, {false, FULMEN_INT8});
  const fulmen_problem problem = in.options();
  const int64_t block_q = in.integer("block_q");
  const int64_t block_kv = in.integer("block_kv");
  const int64_t exact = in.integer("exact");
  const Arrays arrays = in.arrays();
  check(fulmen_block_map(&problem, &arrays.tensors, block_q, block_kv, exact != 0, &kinds));
  return 0;
}

// Names with commas between.
std::vector<std::string> names_in(const std::string& text) {
  std::vector<std::string> names;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    names.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return names;
}

std::vector<const char*> pointers_to(const std::vector<std::string>& names) {
  std::vector<const char*> pointers;
  for (const std::string& name : names) pointers.push_back(name.c_str());
  return pointers;
}

// (score, mask, names of captures, names of scalars) -> the number of the expression
int64_t expression_create(Arguments in) {
  const std::optional<std::string> score = in.optional_text("score");
  const std::optional<std::string> mask = in.optional_text("mask");
  const std::vector<std::string> captures = names_in(in.text("captures"));
  const std::vector<std::string> scalars = names_in(in.text("scalars"));
  uint64_t number = 0;
  check(fulmen_expression_create(score ? score->c_str() : nullptr, mask ? mask->c_str() : nullptr,
                                 pointers_to(captures).data(), captures.size(),
                                 pointers_to(scalars).data(), scalars.size(), &number));
  return static_cast<int64_t>(number);
}

// Arrays that follow the numbers of a call, one by one.
struct NextArray {
  Arguments& in;
  OwnDTypes dtypes;
  bool rows_before_heads;
  Arrays all{};

  fulmen_tensor operator()(const char* name, bool has_layout) {
    const uint8_t dtype = dtypes.next();
    fulmen_tensor tensor = all.tensors.q;  // absent
    if (const DLTensor* source = in.array(name); source != nullptr) {
      tensor = view(name, *source, {rows_before_heads && has_layout, dtype});
      all.space.add(name, source->device);
    }
    return tensor;
  }
};

// (stream, dtypes, layout, sinks, o, lse, then o and lse of each part)
int64_t merge(Arguments in) {
  const int64_t stream = in.integer("stream");
  const OwnDTypes dtypes = in.own_dtypes();
  NextArray next{in, dtypes, Layout::of(in.integer("layout")).rows_before_heads};
  const fulmen_tensor sinks = next("sinks", false);
  const fulmen_tensor o = next("o", true);
  const fulmen_tensor lse = next("lse", false);
  std::vector<fulmen_merge_part> parts;
  while (!in.empty()) {
    fulmen_merge_part& part = parts.emplace_back();
    fulmen_merge_part_init(&part);
    part.o = next("o of a part", true);
    part.lse = next("lse of a part", false);
  }
  check(fulmen_merge(parts.data(), parts.size(), &sinks, &o, &lse, next.all.stream(stream)));
  return 0;
}

// (interleaved, stream, dtypes, layout, then the arrays of kAppendRows)
int64_t append_kv(Arguments in) {
  fulmen_append append;
  fulmen_append_init(&append);
  append.interleaved = static_cast<int32_t>(in.integer("interleaved"));
  const int64_t stream = in.integer("stream");
  const OwnDTypes dtypes = in.own_dtypes();
  NextArray next{in, dtypes, Layout::of(in.integer("layout")).rows_before_heads};
  for (const AppendRow& row : kAppendRows) {
    append.*row.member = next(row.word, row.has_head_and_row);
  }
  const fulmen_status status = fulmen_append_kv(&append, next.all.stream(stream));
  if (status != FULMEN_OK) check_append_failed(status);
  return 0;
}

// (interleaved, stream, dtypes, layout, out, x, positions, cos, sin)
int64_t rotary(Arguments in) {
  const auto interleaved = static_cast<int32_t>(in.integer("interleaved"));
  const int64_t stream = in.integer("stream");
  const OwnDTypes dtypes = in.own_dtypes();
  NextArray next{in, dtypes, Layout::of(in.integer("layout")).rows_before_heads};
  const fulmen_tensor out = next("out", true);
  const fulmen_tensor x = next("x", true);
  const fulmen_tensor positions = next("positions", false);
  const fulmen_tensor cos = next("cos", false);
  const fulmen_tensor sin = next("sin", false);
  const fulmen_status status =
      fulmen_rotary(&x, &positions, &cos, &sin, interleaved, &out, next.all.stream(stream));
  if (status != FULMEN_OK) check_append_failed(status);
  return 0;
}

// (causal, stream, dtypes, layout, indices, q, k, weights, k_scale, kv_lengths, page_table);
// weights have the axes of q without its last one
int64_t mla_indexer(Arguments in) {
  fulmen_indexer indexer;
  fulmen_indexer_init(&indexer);
  indexer.causal = static_cast<int32_t>(in.integer("causal"));
  const int64_t stream = in.integer("stream");
  const OwnDTypes dtypes = in.own_dtypes();
  NextArray next{in, dtypes, Layout::of(in.integer("layout")).rows_before_heads};
  indexer.indices = next("indices", false);
  indexer.q = next("q", true);
  indexer.k = next("k", true);
  indexer.weights = next("weights", false);
  if (const int32_t last = indexer.weights.rank - 1; next.rows_before_heads && last > 0) {
    std::swap(indexer.weights.shape[last - 1], indexer.weights.shape[last]);
    std::swap(indexer.weights.strides[last - 1], indexer.weights.strides[last]);
  }
  indexer.k_scale = next("k_scale", true);
  indexer.kv_lengths = next("kv_lengths", false);
  indexer.page_table = next("page_table", false);
  check(fulmen_mla_indexer(&indexer, next.all.stream(stream)));
  return 0;
}

// (rotate, headroom as bits, stream, dtypes, layout, then the arrays of kQuantiseRows)
int64_t quantise(Arguments in) {
  const int64_t rotate = in.integer("rotate");
  fulmen_quantisation quantisation = quantisation_of(rotate, in.integer("headroom"));
  const int64_t stream = in.integer("stream");
  const OwnDTypes dtypes = in.own_dtypes();
  NextArray next{in, dtypes, Layout::of(in.integer("layout")).rows_before_heads};
  for (const QuantiseRow& row : kQuantiseRows) {
    set_array(quantisation, row, next(row.name, row.has_head_and_row));
  }
  check(fulmen_quantise(&quantisation, next.all.stream(stream)));
  return 0;
}

// ---- GPUs, the cache of kernels, bundles -------------------------------------------------------

// (text) -> bytes that the whole text takes
int64_t gpu_info(Arguments in) {
  const Bytes text = in.host_bytes("text");
  size_t needed = 0;
  check(fulmen_gpu_info(text.data, text.size, &needed));
  return static_cast<int64_t>(needed);
}

// (paths: with a zero byte between them)
int64_t set_nvrtc_candidates(Arguments in) {
  const std::string text = in.text("paths");
  std::vector<const char*> paths;
  for (size_t start = 0; start < text.size(); start += std::strlen(text.c_str() + start) + 1) {
    paths.push_back(text.c_str() + start);
  }
  check(fulmen_set_nvrtc_candidates(paths.data(), paths.size()));
  return 0;
}

// ()
int64_t cache_clear(Arguments) {
  check(fulmen_cache_clear());
  return 0;
}

// (path, plans...)
int64_t bundle_write(Arguments in) {
  const std::string path = in.text("path");
  std::vector<const fulmen_plan*> plans;
  while (!in.empty()) plans.push_back(in.plan());
  check(fulmen_bundle_write(plans.data(), plans.size(), path.c_str()));
  return 0;
}

// (path)
int64_t bundle_load(Arguments in) {
  const std::string path = in.text("path");
  check(fulmen_bundle_load(path.c_str()));
  return 0;
}

// (device) -> the faults, as bits
int64_t device_faults(Arguments in) {
  uint32_t faults = 0;
  check(fulmen_device_faults(static_cast<int32_t>(in.integer("device")), &faults));
  return faults;
}

// (loop, steps, buffer: uint8) -> floating-point operations, or bytes read
int64_t cpu_run_loop(Arguments in) {
  const auto loop = static_cast<fulmen_cpu_loop>(in.integer("loop"));
  const int64_t steps = in.integer("steps");
  const Bytes buffer = in.host_bytes("buffer");
  int64_t done = 0;
  check(fulmen_cpu_run_loop(loop, steps, buffer.data, static_cast<int64_t>(buffer.size), &done));
  return done;
}

}  // namespace
}  // namespace fulmen::ffi

FULMEN_FFI_EXPORT(forward)
FULMEN_FFI_EXPORT(backward)
FULMEN_FFI_EXPORT(plan_create)
FULMEN_FFI_EXPORT(plan_destroy)
FULMEN_FFI_EXPORT(plan_workspace_bytes)
FULMEN_FFI_EXPORT(plan_forward)
FULMEN_FFI_EXPORT(plan_backward)
FULMEN_FFI_EXPORT(plan_explain)
FULMEN_FFI_EXPORT(explain)
FULMEN_FFI_EXPORT(build_info)
FULMEN_FFI_EXPORT(schema)
FULMEN_FFI_EXPORT(block_map)
FULMEN_FFI_EXPORT(dense_mask)
FULMEN_FFI_EXPORT(merge)
FULMEN_FFI_EXPORT(expression_create)
FULMEN_FFI_EXPORT(append_kv)
FULMEN_FFI_EXPORT(rotary)
FULMEN_FFI_EXPORT(mla_indexer)
FULMEN_FFI_EXPORT(quantise)
FULMEN_FFI_EXPORT(gpu_info)
FULMEN_FFI_EXPORT(set_nvrtc_candidates)
FULMEN_FFI_EXPORT(cache_clear)
FULMEN_FFI_EXPORT(bundle_write)
FULMEN_FFI_EXPORT(bundle_load)
FULMEN_FFI_EXPORT(device_faults)
FULMEN_FFI_EXPORT(cpu_run_loop)
