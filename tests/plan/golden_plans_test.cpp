// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What golden_plans.txt says each problem gets on each card: implementation, kernels, configs,
// launches, workspace. A line of that file that begins in the first column is a card and a problem;
// the lines below it, indented, are the choice. To add a row, write its first line; to accept other
// choices, and for the new row's, rewrite the file and read its diff:
//
//     FULMEN_REWRITE=1 build/release/tests/plan_test --gtest_filter='GoldenPlans.*'
#include <gmock/gmock.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>

#include "core/error.h"
#include "core/validate.h"
#include "gpu/implementations.h"

namespace fulmen {
namespace {

using gpu::KernelLaunch;

// The words of a problem, "q=512" or "causal"; each is taken once, what is left is not known.
class Words {
 public:
  explicit Words(const std::string& text) {
    std::istringstream stream(text);
    for (std::string word; stream >> word;) {
      const size_t equals = word.find('=');
      values_[word.substr(0, equals)] = equals == std::string::npos ? "" : word.substr(equals + 1);
    }
  }

  bool flag(const char* name) { return values_.erase(name) > 0; }

  std::string text(const char* name, const char* otherwise = "") {
    const auto found = values_.find(name);
    if (found == values_.end()) return otherwise;
    const std::string value = found->second;
    values_.erase(found);
    return value;
  }

  double number(const char* name, double otherwise) {
    const std::string value = text(name);
    return value.empty() ? otherwise : std::stod(value);
  }

  i64 integer(const char* name, i64 otherwise) {
    return static_cast<i64>(number(name, static_cast<double>(otherwise)));
  }

  // "8/2" is 8 and 2, "8" is 8 twice.
  std::pair<i64, i64> pair(const char* name, i64 otherwise) {
    const std::string value = text(name);
    if (value.empty()) return {otherwise, otherwise};
    const size_t slash = value.find('/');
    const i64 first = std::stoll(value);
    return {first, slash == std::string::npos ? first : std::stoll(value.substr(slash + 1))};
  }

  void expect_none_left(const std::string& row) const {
    for (const auto& [name, value] : values_) ADD_FAILURE() << row << ": what is " << name << "?";
  }

 private:
  std::map<std::string, std::string> values_;
};

DType dtype_named(const std::string& text) {
  for (size_t i = 0; i < std::size(kDTypeNames); ++i) {
    if (text == name(static_cast<DType>(i))) return static_cast<DType>(i);
  }
  throw Error(Status::kArgument, "no dtype " + text);
}

Tensor tensor(DType dtype, std::initializer_list<i64> shape, i64 row_padding = 0) {
  Tensor result;
  result.dtype = dtype;
  for (const i64 extent : shape) result.shape[result.rank++] = extent;
  i64 stride = 1;
  for (int axis = result.rank - 1; axis >= 0; --axis) {
    result.strides[axis] = stride;
    stride *= result.shape[axis] + (axis == result.rank - 1 ? row_padding : 0);
  }
  return result;
}

struct Extents {
  i64 batch, heads_q, heads_kv, q_rows, kv_rows, dim_qk, dim_v;
  i64 packed;  // sequences; 0 where each batch entry is one
};

// An array (batch, head, row, width); without the batch where sequences are packed.
Tensor rows(const Extents& extents, DType dtype, i64 heads, i64 num_rows, i64 width,
            i64 padding = 0) {
  if (extents.packed > 0) return tensor(dtype, {heads, num_rows, width}, padding);
  return tensor(dtype, {extents.batch, heads, num_rows, width}, padding);
}

void add_operands(Arrays& arrays, const Extents& extents, DType dtype, Words& words) {
  const i64 padding = words.integer("padding", 0);
  const auto& [batch, heads_q, heads_kv, q_rows, kv_rows, dim_qk, dim_v, packed] = extents;
  arrays[Array::kQ] = rows(extents, dtype, heads_q, q_rows, dim_qk, padding);
  arrays[Array::kK] = rows(extents, dtype, heads_kv, kv_rows, dim_qk, padding);
  arrays[Array::kV] = rows(extents, dtype, heads_kv, kv_rows, dim_v, padding);
  const std::string out = words.text("out");
  arrays[Array::kO] =
      rows(extents, out.empty() ? dtype : dtype_named(out), heads_q, q_rows, dim_v, padding);
  if (packed > 0) {
    arrays[Array::kCuQ] = arrays[Array::kCuKv] = tensor(DType::kInt32, {packed + 1});
  }
}

// Pools of pages of so many rows instead of k and v, with a table of as many keys; left padding;
// keys and values of another dtype, with a scale a head.
void add_caches(Arrays& arrays, const Extents& extents, DType dtype, Words& words) {
  const i64 sequences = extents.packed > 0 ? extents.packed : extents.batch;
  if (const std::string quantised = words.text("kv"); !quantised.empty()) {
    dtype = arrays[Array::kK].dtype = arrays[Array::kV].dtype = dtype_named(quantised);
  }
  if (words.flag("scales")) {
    const Tensor scales = tensor(DType::kFloat32, {extents.heads_kv, 1, 1});
    arrays[Array::kKScale] = arrays[Array::kVScale] = scales;
  }
  if (words.flag("kv_start")) arrays[Array::kKvStart] = tensor(DType::kInt32, {sequences});
  const i64 page_rows = words.integer("page", 0);
  if (page_rows == 0) return;
  const i64 pages = ceil_div(extents.kv_rows, page_rows);
  for (const auto& [array, dim] :
       {std::pair{Array::kK, extents.dim_qk}, std::pair{Array::kV, extents.dim_v}}) {
    arrays[array] = tensor(dtype, {sequences * pages, extents.heads_kv, page_rows, dim});
  }
  arrays[Array::kPageTable] = tensor(DType::kInt32, {sequences, pages});
  arrays[Array::kCuKv] = {};
}

// Arrays that change scores or hide pairs.
void add_terms(Arrays& arrays, const Extents& extents, DType dtype, Words& words) {
  const i64 sequences = extents.packed > 0 ? extents.packed : extents.batch;
  const DType sums = accumulator(dtype);
  if (const std::string bias = words.text("bias"); !bias.empty()) {
    arrays[Array::kBias] =
        tensor(dtype_named(bias), {extents.heads_q, extents.q_rows, extents.kv_rows});
  }
  if (words.flag("mask")) {
    arrays[Array::kMask] = tensor(DType::kBool, {1, extents.q_rows, extents.kv_rows});
  }
  if (words.flag("alibi")) arrays[Array::kAlibiSlopes] = tensor(sums, {extents.heads_q});
  if (words.flag("sinks")) arrays[Array::kSinks] = tensor(sums, {extents.heads_q});
  if (words.flag("q_lengths")) arrays[Array::kQLengths] = tensor(DType::kInt32, {sequences});
  if (words.flag("kv_lengths")) arrays[Array::kKvLengths] = tensor(DType::kInt32, {sequences});
  if (words.flag("documents")) {
    arrays[Array::kQIds] = tensor(DType::kInt32, {extents.q_rows});
    arrays[Array::kKvIds] = tensor(DType::kInt32, {extents.kv_rows});
  }
  if (words.flag("rng")) arrays[Array::kRng] = tensor(DType::kInt64, {2});
}

void add_results(Arrays& arrays, const Extents& extents, DType dtype, Operation operation,
                 Words& words) {
  const DType sums = accumulator(dtype);
  const Tensor lse = extents.packed > 0
                         ? tensor(sums, {extents.heads_q, extents.q_rows})
                         : tensor(sums, {extents.batch, extents.heads_q, extents.q_rows});
  const bool stats = words.flag("stats");
  if (stats) arrays[Array::kStats] = rows(extents, sums, extents.heads_q, extents.q_rows, 2);
  if (words.flag("lse") || (operation == Operation::kBackward && !stats)) {
    arrays[Array::kLse] = lse;
  }
  if (operation == Operation::kForward) return;
  arrays[Array::kDOut] = arrays[Array::kO];
  if (words.flag("dlse")) arrays[Array::kDLse] = lse;
  std::string gradients = words.text("gradients", "qkv");
  for (const char gradient : gradients) {
    if (gradient == 'q') arrays[Array::kDQ] = arrays[Array::kQ];
    if (gradient == 'k') arrays[Array::kDK] = arrays[Array::kK];
    if (gradient == 'v') arrays[Array::kDV] = arrays[Array::kV];
  }
  if (words.flag("dbias")) arrays[Array::kDBias] = arrays[Array::kBias];
  if (words.flag("dsinks")) arrays[Array::kDSinks] = arrays[Array::kSinks];
}

template <class Enum>
Enum enum_named(const std::string& text, int count) {
  for (int i = 0; i < count; ++i) {
    if (text == name(static_cast<Enum>(i))) return static_cast<Enum>(i);
  }
  throw Error(Status::kArgument, "no such name: " + text);
}

Options options_of(Words& words) {
  Options options;
  options.scale = words.number("scale", std::nan(""));
  options.softcap = words.number("softcap", 0);
  options.causal = words.flag("causal");
  if (words.flag("top_left")) options.alignment = Alignment::kTopLeft;
  std::tie(options.window_left, options.window_right) = words.pair("window", kNoLimit);
  options.prefix = words.integer("prefix", 0);
  options.chunk = words.integer("chunk", 0);
  options.dropout_p = words.number("dropout", 0);
  std::tie(options.max_q, options.max_kv) = words.pair("longest", 0);
  options.deterministic = words.flag("deterministic");
  options.batch_invariant = words.flag("batch_invariant");
  options.backend = Backend::kCuda;
  options.implementation = enum_named<Implementation>(words.text("implementation", "auto"), 7);
  options.precision = enum_named<Precision>(words.text("precision", "float32"), 4);
  return options;
}

Problem problem_of(const std::string& text, const std::string& row) {
  Words words(text);
  Request request;
  if (words.flag("backward"))
    request.operation = Operation::kBackward;
  else
    EXPECT_TRUE(words.flag("forward")) << row;
  const DType dtype = dtype_named(words.text("dtype", "bfloat16"));
  Extents extents{};
  std::tie(extents.heads_q, extents.heads_kv) = words.pair("heads", 16);
  std::tie(extents.q_rows, extents.kv_rows) = words.pair("rows", 4096);
  std::tie(extents.dim_qk, extents.dim_v) = words.pair("d", 128);
  extents.packed = words.integer("packed", 0);
  extents.batch = words.integer("batch", 1);
  add_operands(request.arrays, extents, dtype, words);
  add_caches(request.arrays, extents, dtype, words);
  add_terms(request.arrays, extents, dtype, words);
  add_results(request.arrays, extents, dtype, request.operation, words);
  request.options = options_of(words);
  const std::string without = words.text("without");
  for (u32 bit = 1; !without.empty() && bit < kAllOptimisations; bit *= 2) {
    if (without == name(static_cast<Optimisation>(bit))) request.experiment.without = bit;
  }
  const std::string tile = words.text("tile");  // "kv_rows:80,stages:2"
  std::string members = tile;
  std::replace(members.begin(), members.end(), ':', '=');
  std::replace(members.begin(), members.end(), ',', ' ');
  request.experiment.tile = members.c_str();
  Problem problem = validate(request, Pointers::kUnknown);
  problem.pointer_alignment = words.integer("alignment", kMaxPointerAlignment);
  words.expect_none_left(row);
  return problem;
}

// "h100", or "h100/114": one with so many multiprocessors.
Gpu card(const std::string& text) {
  const size_t slash = text.find('/');
  Gpu gpu = gpu_named(text.substr(0, slash));
  if (slash != std::string::npos) gpu.num_multiprocessors = std::stoi(text.substr(slash + 1));
  return gpu;
}

// What a plan decided; all that this file asks of the library.
struct Choice {
  Implementation implementation = Implementation::kAuto;  // none takes the problem
  std::unique_ptr<const gpu::GpuPlan> plan;
};

Choice choice_of(const Problem& problem, const Gpu& gpu) {
  for (const gpu::GpuImplementation& row : gpu::gpu_implementations()) {
    gpu::PlanOrRefusal made = gpu::plan_with(row, problem, gpu);
    if (made.plan != nullptr) return {row.implementation, std::move(made.plan)};
  }
  return {};
}

// "stages=2 causal": fields that are false, 0 or none are left out.
std::vector<std::string> field_words(const gpu::KernelSpec& spec) {
  std::vector<std::string> words;
  for (const gpu::ConfigField& field : spec.config) {
    const size_t colons = field.value.rfind("::");
    const std::string value =
        colons == std::string::npos ? field.value : field.value.substr(colons + 3);  // "::k"
    if (value == "false" || value == "0" || value == "None") continue;
    words.push_back(value == "true" ? field.name : field.name + "=" + value);
  }
  return words;
}

std::string wrapped(const std::vector<std::string>& words) {
  std::string text, line = "   ";
  for (const std::string& word : words) {
    if (line.size() + 1 + word.size() > 100) {
      text += line + "\n";
      line = "   ";
    }
    line += " " + word;
  }
  return words.empty() ? text : text + line + "\n";
}

std::string text_of(const KernelLaunch& launch) {
  const gpu::KernelSpec& spec = launch.spec;
  return sentence(
      "  ", spec.name, "\n    blocks ", launch.num_blocks, ", threads ", spec.num_threads,
      ", shared ", spec.shared_bytes, ", resident ", spec.min_blocks, ", cluster ",
      launch.cluster_size, launch.overlap_previous ? ", overlaps" : "",
      spec.spill_allowance_bytes ? sentence(", spills ", spec.spill_allowance_bytes) : "", "\n",
      wrapped(field_words(spec)));
}

std::string text_of(const Choice& choice) {
  if (choice.implementation == Implementation::kAuto) return "  none takes it\n";
  const gpu::GpuPlan& plan = *choice.plan;
  std::string text = sentence("  ", name(choice.implementation), ": tile ", plan.tile.rows, " x ",
                              plan.tile.columns, ", workspace ", plan.workspace_bytes, ", zeroed ",
                              plan.zeroed_bytes, ", alignment ", plan.alignment_bytes, "\n");
  for (const KernelLaunch& launch : plan.launches) text += text_of(launch);
  return text;
}

struct Row {
  std::string heading;  // "h100: forward rows=512 causal"
  std::string choice;   // as the file has it
};

// The lines before the first row are a comment.
struct GoldenFile {
  std::string preamble;
  std::vector<Row> rows;
};

GoldenFile read_golden() {
  std::ifstream stream(FULMEN_GOLDEN_PLANS);
  GoldenFile file;
  for (std::string line; std::getline(stream, line);) {
    const bool is_heading = !line.empty() && line[0] != ' ' && line[0] != '#';
    if (is_heading)
      file.rows.push_back({line, ""});
    else
      (file.rows.empty() ? file.preamble : file.rows.back().choice) += line + "\n";
  }
  return file;
}

std::string chosen(const Row& row) {
  const size_t colon = row.heading.find(':');
  const Problem problem = problem_of(row.heading.substr(colon + 1), row.heading);
  return text_of(choice_of(problem, card(row.heading.substr(0, colon))));
}

TEST(GoldenPlans, AreWhatProblemsGet) {
  const GoldenFile file = read_golden();
  const bool rewrites = std::getenv("FULMEN_REWRITE") != nullptr;
  ASSERT_GE(file.rows.size(), 150u) << "in " << FULMEN_GOLDEN_PLANS;
  std::string text = file.preamble;
  for (const Row& row : file.rows) {
    SCOPED_TRACE(row.heading);
    try {
      const std::string now = chosen(row);
      text += row.heading + "\n" + now;
      EXPECT_EQ(now, rewrites ? now : row.choice);
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
      text += row.heading + "\n" + row.choice;
    }
  }
  if (rewrites) std::ofstream(FULMEN_GOLDEN_PLANS) << text;
}

}  // namespace
}  // namespace fulmen
