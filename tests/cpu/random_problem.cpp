// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Drawing problems, and comparing results.

#include "random_problem.h"

#include <algorithm>

namespace fulmen::test {

Request RandomProblem::draw() {
  Request request;
  Arrays& arrays = request.arrays;
  dtype_ = one_of(
      {DType::kFloat32, DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16});
  const i64 heads_kv = number(1, 3);
  heads_q_ = heads_kv * one_of<i64>({1, 1, 2, 3});
  batch_ = number(1, 3);
  packed_ = chance(0.25);
  longest_q_ = one_of<i64>({number(0, 20), number(1, 140), number(90, 210)});
  longest_kv_ = one_of<i64>({number(0, 20), number(1, 140), number(60, 200)});
  const i64 dim_qk = one_of<i64>({number(0, 20), 16, 32, 64, number(1, 80)});
  const i64 dim_v = one_of<i64>({number(1, 20), 16, 32, 64, number(1, 80)});
  i64 q_rows = longest_q_;
  i64 kv_rows = longest_kv_;
  if (packed_) {
    std::vector<i64> cu_q{0}, cu_kv{0};
    for (i64 b = 0; b < batch_; ++b) {
      cu_q.push_back(cu_q.back() + number(0, longest_q_));
      cu_kv.push_back(cu_kv.back() + number(0, longest_kv_));
    }
    const DType index = one_of({DType::kInt32, DType::kInt64});
    arrays[Array::kCuQ] = indices(index, cu_q);
    arrays[Array::kCuKv] = indices(index, cu_kv);
    q_rows = cu_q.back() + number(0, 3);
    kv_rows = cu_kv.back() + number(0, 3);
  } else {
    std::vector<i64> q_lengths, kv_lengths;
    for (i64 b = 0; b < batch_; ++b) {
      q_lengths.push_back(number(0, q_rows));
      kv_lengths.push_back(number(0, kv_rows));
    }
    if (chance(0.3)) arrays[Array::kQLengths] = indices(DType::kInt32, q_lengths);
    if (chance(0.3)) arrays[Array::kKvLengths] = indices(DType::kInt64, kv_lengths);
  }
  const auto shape = [&](i64 heads, i64 rows, i64 dim) {
    return packed_ ? std::vector<i64>{heads, rows, dim}
                   : std::vector<i64>{batch_, heads, rows, dim};
  };
  const DType sums = accumulator(dtype_);
  arrays[Array::kQ] = array(dtype_, shape(heads_q_, q_rows, dim_qk));
  arrays[Array::kK] = array(dtype_, shape(heads_kv, kv_rows, dim_qk));
  arrays[Array::kV] = array(dtype_, shape(heads_kv, kv_rows, dim_v));
  arrays[Array::kO] = array(chance(0.2) ? DType::kFloat32 : dtype_, shape(heads_q_, q_rows, dim_v));
  std::vector<i64> rows = shape(heads_q_, q_rows, 2);
  arrays[Array::kStats] = array(sums, rows);
  rows.pop_back();
  arrays[Array::kLse] = array(sums, rows);
  for (const Array input : {Array::kQ, Array::kK, Array::kV}) fill_normal(arrays[input]);
  draw_masks(request, q_rows, kv_rows);
  draw_score_terms(request);
  return request;
}

Tensor RandomProblem::contiguous(DType dtype, std::vector<i64> shape) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.rank = static_cast<int>(shape.size());
  i64 stride = 1;
  for (size_t axis = shape.size(); axis-- > 0;) {
    tensor.shape[axis] = shape[axis];
    tensor.strides[axis] = stride;
    stride *= max<i64>(shape[axis], 1);
  }
  tensor.data = memory(static_cast<size_t>(stride * size_bytes(dtype)));
  return tensor;
}

Tensor RandomProblem::misplaced(const Tensor& tensor) {
  Tensor other = tensor;
  other.data = memory(size_of(tensor) + 1) + 1;
  std::memcpy(other.data, tensor.data, size_of(tensor));
  return other;
}

void RandomProblem::draw_masks(Request& request, i64 q_rows, i64 kv_rows) {
  Options& options = request.options;
  Arrays& arrays = request.arrays;
  options.scale = chance(0.8) ? kNan : one_of({0.0, -0.3, 0.2});
  options.causal = chance(0.5);
  options.alignment = one_of({Alignment::kBottomRight, Alignment::kTopLeft});
  if (chance(0.3)) options.window_left = number(0, 70);
  if (chance(0.3) && !options.causal) options.window_right = number(0, 70);
  if (chance(0.3) && options.causal) options.prefix = number(0, 100);
  if (chance(0.2)) options.chunk = number(1, 70);
  if (chance(0.2)) {
    Tensor mask = array(DType::kBool, {chance(0.5) ? 1 : batch_, chance(0.5) ? 1 : heads_q_,
                                       chance(0.3) ? 1 : longest_q_, longest_kv_});
    const double share = one_of({0.05, 0.5, 0.9});
    for_each(mask, [&](const i64* at) { store_bytes<u8>(address(mask, at), chance(share)); });
    arrays[Array::kMask] = mask;
  }
  if (chance(0.2)) {
    std::vector<i64> q_ids, kv_ids;
    for (i64 i = 0; i < q_rows; ++i) q_ids.push_back(i * 3 / max<i64>(q_rows, 1));
    for (i64 j = 0; j < kv_rows; ++j) kv_ids.push_back(j * 4 / max<i64>(kv_rows, 1));
    arrays[Array::kQIds] = indices(DType::kInt32, q_ids);
    arrays[Array::kKvIds] = indices(DType::kInt32, kv_ids);
  }
}

void RandomProblem::draw_score_terms(Request& request) {
  Options& options = request.options;
  Arrays& arrays = request.arrays;
  const DType sums = accumulator(dtype_);
  if (chance(0.2)) options.softcap = one_of({0.5, 3.0, 30.0});
  if (chance(0.3)) {
    Tensor bias = array(one_of({dtype_, sums}),
                        {chance(0.5) ? 1 : batch_, chance(0.5) ? 1 : heads_q_,
                         chance(0.3) ? 1 : longest_q_, chance(0.2) ? 1 : longest_kv_});
    fill_normal(bias);
    for_each(bias, [&](const i64* at) {
      if (chance(0.1)) {
        store_real(address(bias, at), bias.dtype, -std::numeric_limits<double>::infinity());
      }
    });
    arrays[Array::kBias] = bias;
  }
  if (chance(0.2)) {
    arrays[Array::kAlibiSlopes] =
        chance(0.5) ? array(sums, {heads_q_}) : array(sums, {batch_, heads_q_});
    fill_normal(arrays[Array::kAlibiSlopes], 0.1);
  }
  if (chance(0.2)) {
    arrays[Array::kSinks] = array(one_of({dtype_, sums}), {heads_q_});
    fill_normal(arrays[Array::kSinks], 2);
  }
  if (chance(0.2)) {
    options.dropout_p = one_of({0.1, 0.5, 1.0});
    options.rng_seed = 1234567890123ull;
    options.rng_offset = 77;
  }
}

Request to_backward(RandomProblem& random, const Request& forward, unsigned need) {
  Request request = forward;
  request.operation = Operation::kBackward;
  Arrays& arrays = request.arrays;
  arrays[Array::kDOut] = random.twin(arrays[Array::kO]);
  random.fill_normal(arrays[Array::kDOut]);
  if (random.chance(0.3)) {
    arrays[Array::kDLse] = random.twin(arrays[Array::kLse]);
    random.fill_normal(arrays[Array::kDLse]);
  }
  if (random.chance(0.3)) arrays[Array::kStats] = Tensor{};
  constexpr std::pair<Array, Array> kGradients[] = {{Array::kDQ, Array::kQ},
                                                    {Array::kDK, Array::kK},
                                                    {Array::kDV, Array::kV},
                                                    {Array::kDBias, Array::kBias},
                                                    {Array::kDSinks, Array::kSinks}};
  for (unsigned i = 0; i < 5; ++i) {
    if (need >> i & 1u) arrays[kGradients[i].first] = random.twin(arrays[kGradients[i].second]);
  }
  return request;
}

namespace {

// Of one key of `rows`: whether it was never written.
bool is_unused(const Tensor& rows, const i64* at) {
  i64 first[kMaxRank];
  std::copy(at, at + kMaxRank, first);
  first[rows.rank - 1] = 0;
  return std::isnan(load_real(RandomProblem::address(rows, first), rows.dtype));
}

}  // namespace

Request quantised(RandomProblem& random, const Request& given, DType dtype, bool with_q) {
  Request request = given;
  const double spread = dtype == DType::kInt8 ? 40 : random.one_of({0.05, 1.0, 100.0});
  for (const auto& [array, scale_array] :
       {std::pair{Array::kQ, Array::kQScale}, std::pair{Array::kK, Array::kKScale},
        std::pair{Array::kV, Array::kVScale}}) {
    if (array == Array::kQ && !with_q) continue;
    const Tensor& wide = given.arrays[array];
    std::vector<i64> shape(wide.shape, wide.shape + wide.rank);
    const Tensor narrow = random.array(dtype, shape);
    for (i64& extent : shape) extent = random.chance(0.5) ? 1 : extent;
    shape[static_cast<size_t>(wide.rank) - 2] = wide.shape[wide.rank - 2];  // the rows
    shape.back() = 1;
    const Tensor scales = random.array(DType::kFloat32, shape);
    const auto scale_at = [&](const i64* at) {
      i64 place[kMaxRank];
      for (int axis = 0; axis < kMaxRank; ++axis) {
        place[axis] = axis < scales.rank && scales.shape[axis] > 1 ? at[axis] : 0;
      }
      return RandomProblem::address(scales, place);
    };
    RandomProblem::for_each(wide, [&](const i64* at) {
      if (is_unused(wide, at)) return;
      store_real(RandomProblem::address(narrow, at), dtype, spread * random.normal());
      const double scale = std::fabs(random.normal()) / spread;
      store_real(scale_at(at), DType::kFloat32, scale);
    });
    request.arrays[array] = narrow;
    request.arrays[scale_array] = scales;
  }
  return request;
}

Request with_blocks(RandomProblem& random, const Request& given) {
  Request request = given;
  const Problem problem = validate(given, Pointers::kChecked);
  request.options.block_q = random.one_of<i64>({64, 128});
  request.options.block_kv = random.one_of<i64>({64, 128});
  const i64 rows = ceil_div(problem.max_q, request.options.block_q);
  const i64 keys = ceil_div(problem.max_kv, request.options.block_kv);
  Tensor lists = random.array(random.one_of({DType::kInt32, DType::kInt64}),
                              {random.chance(0.5) ? 1 : problem.num_sequences,
                               random.one_of({i64{1}, problem.heads_kv, problem.heads_q}), rows,
                               random.number(0, keys + 1)});
  RandomProblem::for_each(lists, [&](const i64* at) {
    const i64 id = random.chance(0.3) ? -1 : random.number(-1, keys - 1);
    char* const to = RandomProblem::address(lists, at);
    lists.dtype == DType::kInt32 ? store_bytes(to, static_cast<i32>(id)) : store_bytes(to, id);
  });
  request.arrays[Array::kBlocks] = lists;
  return request;
}

Request with_rng_array(RandomProblem& random, const Request& given) {
  Request request = given;
  Options& options = request.options;
  if (options.dropout_p == 0) return request;
  request.arrays[Array::kRng] = random.indices(
      DType::kInt64, {static_cast<i64>(options.rng_seed), static_cast<i64>(options.rng_offset)});
  options.rng_seed = options.rng_offset = 0;
  return request;
}

bool RandomProblem::is_intact_around(const Tensor& tensor) const {
  if (!tensor.present()) return true;
  const char* const begin =
      static_cast<const char*>(tensor.data) - misplacement(tensor) - kMarginBytes;
  const auto own = std::find_if(owned_.begin(), owned_.end(), [&](const std::vector<char>& block) {
    return block.data() == begin;
  });
  std::vector<char> around = *own;
  for_each(tensor, [&](const i64* at) {
    std::memset(around.data() + (address(tensor, at) - begin), 0xff,
                static_cast<size_t>(size_bytes(tensor.dtype)));
  });
  return std::all_of(around.begin(), around.end(), [](char byte) { return byte == '\xff'; });
}

Difference compare(const Tensor& a, const Tensor& b) {
  Difference difference;
  RandomProblem::for_each(a, [&](const i64* at) {
    const double x = load_real(RandomProblem::address(a, at), a.dtype);
    const double y = load_real(RandomProblem::address(b, at), b.dtype);
    const bool same = x == y || (std::isnan(x) && std::isnan(y));
    if (std::isfinite(y)) difference.magnitude = max(difference.magnitude, std::fabs(y));
    if (same) return;
    const double apart = std::isfinite(x) && std::isfinite(y)
                             ? std::fabs(x - y)
                             : std::numeric_limits<double>::infinity();
    if (apart <= difference.largest) return;
    difference.largest = apart;
    difference.place.clear();
    for (int axis = 0; axis < a.rank; ++axis) {
      difference.place += "[" + std::to_string(at[axis]) + "]";
    }
  });
  return difference;
}

double tolerance(DType computed, DType stored) {
  const double sums = computed == DType::kFloat64 ? 1e-13 : 1e-5;
  const double rounding = stored == DType::kFloat16    ? 0x1p-10
                          : stored == DType::kBFloat16 ? 0x1p-7
                          : stored == DType::kFloat32  ? 0x1p-23
                                                       : 0x1p-52;
  return sums + rounding;
}

}  // namespace fulmen::test
