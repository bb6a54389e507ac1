// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// How a good call is drawn.

#include "fuzz/drawn_call.h"

#include <cstring>
#include <limits>

#include "core/error.h"

namespace fulmen::test {
namespace {

std::vector<i64> drawn_lengths(Random& random, i64 count, i64 longest) {
  std::vector<i64> lengths;
  for (i64 i = 0; i < count; ++i) {
    lengths.push_back(random.chance(0.2) ? 0 : random.number(0, longest));
  }
  return lengths;
}

i64 sum_of(const std::vector<i64>& lengths) {
  i64 sum = 0;
  for (const i64 length : lengths) sum += length;
  return sum;
}

i64 longest_of(const std::vector<i64>& lengths) {
  return lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
}

template <class Struct>
Struct* between_guards(DrawnCall& call) {
  return reinterpret_cast<Struct*>(call.add_block(sizeof(Struct)).begin());
}

}  // namespace

DrawnCall::DrawnCall(u64 seed) : random(seed) {
  blocks.reserve(64);  // blocks stay where they are
  problem = between_guards<fulmen_problem>(*this);
  tensors = between_guards<fulmen_tensors>(*this);
  fulmen_problem_init(problem);
  fulmen_tensors_init(tensors);
  operation = random.chance(0.5) ? Operation::kForward : Operation::kBackward;
  draw_sizes();
  if (random.chance(0.3)) draw_expression();
  adds = operation == Operation::kBackward && random.chance(0.3);
  draw_arrays();
  draw_options();
}

Block& DrawnCall::add_block(size_t bytes) {
  Block& block = blocks.emplace_back(bytes);
  std::memset(block.begin(), 0xff, bytes);
  return block;
}

std::string DrawnCall::text() const {
  std::string lines = sentence(name(operation), "\n");
  for (int index = 0; index < kNumArrays; ++index) {
    const fulmen_tensor& t = at(static_cast<Array>(index));
    if (t.data == nullptr && t.rank == 0) continue;
    lines += sentence("  ", name(static_cast<Array>(index)), ": ", t.data, ", dtype ",
                      dtype_number(t), ", rank ", t.rank, ", shape");
    for (const int64_t extent : t.shape) lines += sentence(" ", extent);
    lines += ", strides";
    for (const int64_t stride : t.strides) lines += sentence(" ", stride);
    lines += "\n";
  }
  for (const Block& block : blocks) {
    lines += sentence("  block at ", static_cast<const void*>(block.begin()), ", ", block.bytes,
                      " bytes\n");
  }
  return lines;
}

void DrawnCall::draw_sizes() {
  dtype =
      random.one_of<DType>({DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  packed = random.chance(0.3);
  Problem p;
  p.packed = {packed, packed};
  p.num_sequences = random.number(1, 3);
  p.heads_kv = random.number(1, 3);
  p.heads_q = p.heads_kv * random.number(1, 3);
  p.dim_qk = random.chance(0.1) ? 0 : random.number(1, 20);
  p.dim_v = random.number(1, 20);
  p.q_rows = random.chance(0.05) ? 0 : random.number(1, 20);
  p.kv_rows = random.chance(0.05) ? 0 : random.number(1, 40);
  if (packed) {
    q_lengths = drawn_lengths(random, p.num_sequences, 12);
    kv_lengths = drawn_lengths(random, p.num_sequences, 20);
    p.q_rows = sum_of(q_lengths) + random.number(0, 2);
    p.kv_rows = sum_of(kv_lengths) + random.number(0, 2);
  }
  sizes = sizes_of(p);
  sizes[Axis::kSegment] = random.number(1, 3);
  if (packed) {
    sizes[Axis::kMaskQRow] = longest_of(q_lengths);
    sizes[Axis::kMaskKvRow] = longest_of(kv_lengths);
  }
}

void DrawnCall::draw_options() {
  fulmen_problem& p = *problem;
  if (random.chance(0.3)) p.scale = random.normal();
  if (random.chance(0.2)) p.softcap = 0.5 + random.chance(0.5) * 30;
  p.causal = random.chance(0.4);
  p.alignment = random.chance(0.3) ? FULMEN_TOP_LEFT : FULMEN_BOTTOM_RIGHT;
  if (random.chance(0.2)) p.window_left = random.number(0, 9);
  if (random.chance(0.2)) p.window_right = p.causal ? 0 : random.number(0, 9);
  if (p.causal && random.chance(0.2)) p.prefix = random.number(0, 9);
  if (random.chance(0.1)) p.chunk = random.number(1, 9);
  if (random.chance(0.2)) p.dropout_p = 0.25;
  if (!has(Array::kRng)) {
    p.rng_seed = random.word();
    p.rng_offset = random.word() >> 32;
  }
  if (packed && random.chance(0.3)) p.max_q = longest_of(q_lengths) + random.number(1, 3);
  if (packed && random.chance(0.3)) p.max_kv = longest_of(kv_lengths) + random.number(1, 3);
  const bool may_merge = operation == Operation::kForward && has(Array::kStats) &&
                         dtype_number(at(Array::kO)) == static_cast<int>(accumulator(dtype)) &&
                         !has(Array::kKvStart) && !has(Array::kPositions) && !has(Array::kTree);
  p.accumulate = adds || (may_merge && random.chance(0.5));
  p.deterministic = random.chance(0.2);
  p.batch_invariant = random.chance(0.2);
  p.implementation = random.one_of<fulmen_implementation>(
      {FULMEN_IMPLEMENTATION_AUTO, FULMEN_IMPLEMENTATION_AUTO, FULMEN_SCALAR, FULMEN_TILED});
}

void DrawnCall::draw_expression() {
  constexpr const char* kNames[] = {"table", "ids"};
  constexpr const char* kScalars[] = {"x"};
  has_two_captures = random.chance(0.5);
  const char* const score =
      random.one_of<const char*>({"s + table[h, j - p] * $x",
                                  "tanh(s * $x) + exp(-abs(table[b, j]))", "s - table[i, 0] / $x"});
  const char* const mask = has_two_captures ? "ids[i] == ids[j] or j <= p" : "j <= p + 3";
  fulmen_expression_create(score, random.chance(0.5) || has_two_captures ? mask : nullptr, kNames,
                           has_two_captures ? 2 : 1, kScalars, 1, &problem->expression);
  if (problem->expression != 0) problem->scalar0 = 0.5;
}

// Gradients need what they are the gradient of, and come after it in the table.
bool DrawnCall::is_wanted(const ArrayRule& rule) {
  switch (rule.array) {
    case Array::kQ:
    case Array::kK:
    case Array::kV:
    case Array::kO:
    case Array::kStats:
    case Array::kDOut:
    case Array::kDQ:
      return true;
    case Array::kCuQ:
    case Array::kCuKv:
      return packed;
    case Array::kQIds:
      return random.chance(0.2);
    case Array::kKvIds:
      return has(Array::kQIds);
    case Array::kPageTable:
    case Array::kPageIndptr:
    case Array::kKvShared:
    case Array::kBlocks:
      return false;
    case Array::kCapture0:
      return problem->expression != 0;
    case Array::kCapture1:
      return problem->expression != 0 && has_two_captures;
    case Array::kDCapture0:
      return has(Array::kCapture0) && random.chance(0.6);
    case Array::kQScale:
      return is_quantised(static_cast<DType>(at(Array::kQ).dtype)) && random.chance(0.6);
    case Array::kKScale:
    case Array::kVScale:
      return is_quantised(static_cast<DType>(at(Array::kK).dtype)) && random.chance(0.6);
    case Array::kKvStart:
    case Array::kPositions:
    case Array::kTree:
      return operation == Operation::kForward && random.chance(0.15);
    case Array::kQSegments:
      return !has(Array::kKvStart) && !has(Array::kPositions) && !has(Array::kTree) &&
             random.chance(0.2);
    case Array::kKvSegments:
      return has(Array::kQSegments) && random.chance(0.6);
    default:
      if (rule.list.axes[0] == Axis::kCaptured) return false;
      return has(rule.param) ? random.chance(0.6) : rule.param == rule.array && random.chance(0.3);
  }
}

void DrawnCall::draw_arrays() {
  for (const ArrayRule& rule : rules::kTable) {
    if (is_wanted(rule)) at(rule.array) = drawn(rule);
  }
}

DType DrawnCall::dtype_of(const ArrayRule& rule) {
  const DType wide = accumulator(dtype);
  switch (rule.dtypes) {
    case DTypes::kFloatOrQuantised:
      return dtype;
    case DTypes::kTOrQuantised:
      if (operation == Operation::kBackward || dtype == DType::kFloat64) return dtype;
      return random.chance(0.7)
                 ? dtype
                 : random.one_of<DType>({DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt8});
    case DTypes::kOfK:
      return static_cast<DType>(at(Array::kK).dtype);
    case DTypes::kFloat32:
      return DType::kFloat32;
    case DTypes::kTOrFloat32:
      return random.one_of<DType>({dtype, DType::kFloat32});
    case DTypes::kTOrFloat32OrC:
      return random.one_of<DType>({dtype, DType::kFloat32, wide});
    case DTypes::kFloat32OrC:
      return random.one_of<DType>({DType::kFloat32, wide});
    case DTypes::kC:
      return wide;
    case DTypes::kAnyNumber:
      return random.one_of<DType>(rule.array == Array::kCapture0
                                      ? std::initializer_list<DType>{dtype, DType::kFloat32, wide}
                                      : std::initializer_list<DType>{DType::kInt32, DType::kInt64});
    case DTypes::kBool:
      return DType::kBool;
    case DTypes::kIndex:
      return random.one_of<DType>({DType::kInt32, DType::kInt64});
    case DTypes::kInt64:
      return DType::kInt64;
    case DTypes::kSameAs:
      if (adds &&
          (rule.array == Array::kDQ || rule.array == Array::kDK || rule.array == Array::kDV)) {
        return wide;
      }
      return static_cast<DType>(at(rule.param).dtype);
  }
  return dtype;
}

std::vector<i64> DrawnCall::shape_of(const ArrayRule& rule) {
  if (rule.dtypes == DTypes::kSameAs) {
    const fulmen_tensor& parameter = at(rule.param);
    return {parameter.shape, parameter.shape + parameter.rank};
  }
  if (rule.list.axes[0] == Axis::kCaptured) {
    const i64 first = random.number(1, 4);
    return rule.array == Array::kCapture0 ? std::vector<i64>{first, random.number(1, 30)}
                                          : std::vector<i64>{first};
  }
  std::vector<i64> shape;
  for (int axis = rule.list.count - max_rank(rule.list, {packed, packed}); axis < rule.list.count;
       ++axis) {
    const bool is_broadcast = axis < rule.list.num_broadcast && random.chance(0.3);
    shape.push_back(is_broadcast ? 1 : sizes[rule.list.axes[axis]]);
  }
  const bool has_channels = rule.array == Array::kVScale && shape.back() != 1;
  if (has_channels) shape[shape.size() - 2] = 1;  // scales of dims or of rows
  while (static_cast<int>(shape.size()) > rule.list.min_rank && shape[0] == 1 &&
         random.chance(0.3)) {
    shape.erase(shape.begin());
  }
  return shape;
}

fulmen_tensor DrawnCall::drawn(const ArrayRule& rule) {
  const std::vector<i64> shape = shape_of(rule);
  fulmen_tensor tensor{};
  const std::vector<int64_t> extents(shape.begin(), shape.end());
  fulmen_tensor_init(&tensor, nullptr, static_cast<fulmen_dtype>(dtype_of(rule)),
                     static_cast<int32_t>(shape.size()), extents.data());
  const bool is_index = rule.dtypes == DTypes::kIndex || rule.dtypes == DTypes::kInt64;
  const Uses& uses = rule.uses;
  const bool is_output = uses.by_call[static_cast<int>(call_of(operation))] == Use::kOutput;
  place(tensor, is_output || operation == Operation::kBackward, is_index);
  if (!is_output) fill(tensor, rule.array);
  return tensor;
}

// Strides and memory. Indices have neither gaps nor an order of axes.
void DrawnCall::place(fulmen_tensor& tensor, bool is_output, bool is_index) {
  if (!is_index) {
    std::vector<int> order;
    for (int axis = 0; axis < tensor.rank; ++axis) order.push_back(axis);
    if (tensor.rank > 2 && random.chance(0.4)) std::swap(order[1], order[order.size() - 2]);
    if (tensor.rank > 1 && random.chance(0.1)) std::swap(order[0], order.back());
    i64 stride = random.chance(0.1) ? 2 : 1;
    for (size_t place = order.size(); place-- > 0;) {
      tensor.strides[order[place]] = stride;
      stride *= max<i64>(tensor.shape[order[place]], 1);
      if (random.chance(0.2)) stride += random.number(1, 5);
    }
    const bool repeats = !is_output && tensor.rank > 0 && random.chance(0.1);
    if (repeats) tensor.strides[random.number(0, tensor.rank - 1)] = 0;
  }
  i64 last = 0;
  bool is_empty = false;
  for (int axis = 0; axis < tensor.rank; ++axis) {
    is_empty |= tensor.shape[axis] == 0;
    if (tensor.shape[axis] > 1) last += (tensor.shape[axis] - 1) * tensor.strides[axis];
  }
  const i64 elements = is_empty ? 0 : last + 1;
  const Block& block =
      add_block(Block::kMarginBytes +
                static_cast<size_t>(elements * size_bytes(static_cast<DType>(tensor.dtype))));
  tensor.data = block.begin() + Block::kMarginBytes;
}

void DrawnCall::fill(const fulmen_tensor& tensor, Array array) {
  const DType type = static_cast<DType>(tensor.dtype);
  if (is_index(type)) return fill_index(tensor, array);
  for_each_element(tensor, [&](char* element) {
    if (type == DType::kBool) {
      *element = static_cast<char>(random.chance(0.7));
    } else {
      store_real(element, type, random.normal());
    }
  });
}

// Of any sequence; kv_lengths are drawn before whatever asks for it.
i64 DrawnCall::fewest_keys() {
  if (!has(Array::kKvLengths)) {
    return packed ? *std::min_element(kv_lengths.begin(), kv_lengths.end()) : sizes[Axis::kKvRow];
  }
  const fulmen_tensor& lengths = at(Array::kKvLengths);
  i64 fewest = std::numeric_limits<i64>::max();
  for_each_element(lengths, [&](const char* element) {
    i64 length = 0;
    std::memcpy(&length, element,
                static_cast<size_t>(size_bytes(static_cast<DType>(lengths.dtype))));
    fewest = min(fewest, length);
  });
  return fewest;
}

// Word `word` of segment n: the rows that every sequence has are cut into as many as there are.
i64 DrawnCall::word_of_segment(i64 rows, i64 n, i64 word) {
  const i64 count = sizes[Axis::kSegment];
  const i64 first = rows * n / count;
  if (word == 0) return first;
  return word == 1 ? rows * (n + 1) / count - first : random.number(0, 40);
}

void DrawnCall::fill_index(const fulmen_tensor& tensor, Array array) {
  const bool is_q = array == Array::kQLengths || array == Array::kCuQ || array == Array::kQSegments;
  const std::vector<i64>& lengths = is_q ? q_lengths : kv_lengths;
  i64 offset = 0;
  size_t index = 0;
  for_each_element(tensor, [&](char* element) {
    i64 value = random.number(0, 2);  // a document
    if (array == Array::kCuQ || array == Array::kCuKv) {
      value = offset;
      if (index < lengths.size()) offset += lengths[index];
    } else if (array == Array::kQLengths || array == Array::kKvLengths) {
      value = random.number(0, packed ? lengths[index] : sizes[is_q ? Axis::kQRow : Axis::kKvRow]);
    } else if (array == Array::kKvStart) {
      value = random.number(0, min<i64>(2, fewest_keys()));
    } else if (array == Array::kQSegments || array == Array::kKvSegments) {
      const i64 rows = packed ? *std::min_element(lengths.begin(), lengths.end())
                              : sizes[is_q ? Axis::kQRow : Axis::kKvRow];
      const i64 at = static_cast<i64>(index);
      value = word_of_segment(rows, at / 3 % sizes[Axis::kSegment], at % 3);
    } else if (array == Array::kRng) {
      value = static_cast<i64>(random.word() >> 32);
    }
    ++index;
    if (static_cast<DType>(tensor.dtype) == DType::kInt64) {
      store_bytes(element, value);
    } else {
      store_bytes(element, static_cast<i32>(value));
    }
  });
}

}  // namespace fulmen::test
