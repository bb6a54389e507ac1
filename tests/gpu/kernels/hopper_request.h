// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Forward requests that a config of forward_sm90 computes, drawn from a seed: lengths, masks,
// strides and options as far as the config has them. What nobody may read holds NaN.
#pragma once

#include "../../cpu/random_problem.h"
#include "kernels/forward_sm90/config.h"

namespace fulmen::test {

class HopperRequest {
 public:
  HopperRequest(RandomProblem& random, const ForwardSm90Config& config, i64 longest)
      : random_(random), config_(config) {
    batch_ = random.number(1, 3);
    heads_kv_ = random.number(1, 2);
    heads_q_ =
        heads_kv_ * config.heads_per_tile * random.number(1, config.heads_per_tile > 1 ? 2 : 3);
    packed_ = config.score.varlen && random.chance(0.5);
    q_rows_ = random.one_of({random.number(1, 9), random.number(1, longest)});
    kv_rows_ = random.one_of({random.number(1, 9), random.number(1, longest)});
    draw_lengths();
    draw_arrays();
    draw_options();
  }

  Request request;

 private:
  // An array with strides that the copy engine takes: multiples of 16 bytes, rows and heads in
  // either order.
  Tensor array(DType dtype, i64 heads, i64 rows, i64 dim) {
    const i64 row = ceil_div(dim, 8) * 8 + (random_.chance(0.3) ? 8 : 0);
    const bool rows_first = random_.chance(0.5);
    Tensor tensor;
    tensor.dtype = dtype;
    tensor.rank = packed_ ? 3 : 4;
    const i64 shape[4] = {batch_, heads, rows, dim};
    const i64 strides[4] = {heads * rows * row, rows_first ? rows * row : row,
                            rows_first ? row : heads * row, 1};
    std::copy(shape + (packed_ ? 1 : 0), shape + 4, tensor.shape);
    std::copy(strides + (packed_ ? 1 : 0), strides + 4, tensor.strides);
    const i64 elements = (packed_ ? 1 : batch_) * heads * rows * row;
    char* data =
        static_cast<char*>(random_.memory(static_cast<size_t>(elements * size_bytes(dtype)) + 16));
    tensor.data = data + (16 - reinterpret_cast<u64>(data) % 16) % 16;
    return tensor;
  }

  void draw_lengths() {
    if (packed_) {
      std::vector<i64> cu_q{0}, cu_kv{0};
      for (i64 b = 0; b < batch_; ++b) {
        cu_q.push_back(cu_q.back() + random_.number(0, q_rows_));
        cu_kv.push_back(cu_kv.back() + random_.number(0, kv_rows_));
      }
      q_rows_ = max<i64>(cu_q.back() + random_.number(0, 3), 1);
      kv_rows_ = max<i64>(cu_kv.back() + random_.number(0, 3), 1);
      request.arrays[Array::kCuQ] = random_.indices(DType::kInt32, cu_q);
      request.arrays[Array::kCuKv] = random_.indices(DType::kInt64, cu_kv);
      kv_ends_ = cu_kv;
    } else if (config_.score.varlen) {
      std::vector<i64> q_lengths, kv_lengths;
      for (i64 b = 0; b < batch_; ++b) {
        q_lengths.push_back(random_.number(0, q_rows_));
        kv_lengths.push_back(random_.number(0, kv_rows_));
      }
      if (random_.chance(0.5)) {
        request.arrays[Array::kQLengths] = random_.indices(DType::kInt32, q_lengths);
      }
      request.arrays[Array::kKvLengths] = random_.indices(DType::kInt64, kv_lengths);
      kv_ends_ = kv_lengths;
    }
  }

  void draw_arrays() {
    Arrays& arrays = request.arrays;
    const i64 dim_qk = random_.number(1, config_.d_qk);
    const i64 dim_v = 8 * random_.number(1, config_.d_v / 8);
    const DType o = config_.score.fp32_out ? DType::kFloat32 : config_.dtype;
    arrays[Array::kQ] = array(config_.dtype, heads_q_, q_rows_, dim_qk);
    arrays[Array::kK] = array(config_.dtype, heads_kv_, kv_rows_, dim_qk);
    arrays[Array::kV] = array(config_.dtype, heads_kv_, kv_rows_, dim_v);
    arrays[Array::kO] = array(o, heads_q_, q_rows_, dim_v);
    for (const Array input : {Array::kQ, Array::kK, Array::kV}) {
      random_.fill_normal(arrays[input]);
    }
    // Scores far out of the range of the first block of keys now and then.
    if (random_.chance(0.3)) random_.fill_normal(arrays[Array::kK], 30);
    spoil(arrays[Array::kK]);
    spoil(arrays[Array::kV]);
    const Tensor lse = array(DType::kFloat32, heads_q_, q_rows_, 1);
    arrays[Array::kLse] = lse;
    arrays[Array::kLse].rank = lse.rank - 1;
    if (config_.score.stats) arrays[Array::kStats] = array(DType::kFloat32, heads_q_, q_rows_, 2);
  }

  // NaN in the rows past every length.
  void spoil(const Tensor& tensor) {
    if (kv_ends_.empty()) return;
    RandomProblem::for_each(tensor, [&](const i64* at) {
      const i64 row = at[packed_ ? 1 : 2];
      const i64 end = kv_ends_[packed_ ? kv_ends_.size() - 1 : static_cast<size_t>(at[0])];
      if (row >= end) store_real(RandomProblem::address(tensor, at), tensor.dtype, kNan);
    });
  }

  void draw_options() {
    Options& options = request.options;
    options.scale = config_.score.negative_scale ? random_.one_of({-0.2, 0.0, 0.3}) : kNan;
    options.alignment = random_.one_of({Alignment::kBottomRight, Alignment::kTopLeft});
    if (config_.score.mask_kind != MaskKind::kNone) options.causal = random_.chance(0.7);
    if (options.causal && random_.chance(0.3)) options.prefix = random_.number(1, 100);
    if (config_.score.mask_kind != MaskKind::kNone && !options.causal) {
      options.window_right = random_.number(0, 100);
    }
    if (config_.score.mask_kind == MaskKind::kBoth) {
      if (random_.chance(0.6)) options.window_left = random_.number(0, 100);
      if (random_.chance(0.3)) options.chunk = random_.number(1, 100);
    }
    if (config_.score.score_mod) options.softcap = random_.one_of({0.5, 3.0, 30.0});
    if (config_.score.alibi) {
      Tensor& slopes = request.arrays[Array::kAlibiSlopes];
      slopes = random_.array(DType::kFloat32, {batch_, heads_q_});
      random_.fill_normal(slopes, 0.1);
    }
    draw_pairs();
    if (config_.score.sinks) {
      Tensor& sinks = request.arrays[Array::kSinks];
      sinks = random_.array(DType::kFloat32, {heads_q_});
      random_.fill_normal(sinks, 2);
    }
  }

  // An array over pairs that the copy engine takes.
  Tensor pair_array(DType dtype) {
    const i64 heads = random_.chance(0.3) ? 1 : heads_q_, row = ceil_div(kv_rows_, 16) * 16;
    const i64 batch = random_.chance(0.3) ? 1 : batch_;
    Tensor tensor;
    tensor.dtype = dtype;
    tensor.rank = 4;
    const i64 shape[4] = {batch, heads, q_rows_, kv_rows_};
    const i64 strides[4] = {heads * q_rows_ * row, q_rows_ * row, row, 1};
    std::copy(shape, shape + 4, tensor.shape);
    std::copy(strides, strides + 4, tensor.strides);
    const i64 bytes = batch * heads * q_rows_ * row * size_bytes(dtype);
    char* const data = static_cast<char*>(random_.memory(static_cast<size_t>(bytes) + 16));
    tensor.data = data + (16 - reinterpret_cast<u64>(data) % 16) % 16;
    return tensor;
  }

  void draw_pairs() {
    Arrays& arrays = request.arrays;
    const auto one_or = [&](i64 extent) { return random_.chance(0.3) ? 1 : extent; };
    if (config_.score.bias != DType::kNone) {
      const Tensor bias = config_.tiled_bias ? pair_array(config_.score.bias)
                                             : random_.array(config_.score.bias,
                                                             {one_or(batch_), one_or(heads_q_),
                                                              one_or(q_rows_), one_or(kv_rows_)});
      random_.fill_normal(bias);
      RandomProblem::for_each(bias, [&](const i64* at) {
        if (random_.chance(0.1)) {
          store_real(RandomProblem::address(bias, at), bias.dtype,
                     -std::numeric_limits<double>::infinity());
        }
      });
      arrays[Array::kBias] = bias;
    }
    if (config_.score.mask) {
      const Tensor mask = config_.tiled_mask
                              ? pair_array(DType::kBool)
                              : random_.array(DType::kBool, {one_or(batch_), one_or(heads_q_),
                                                             one_or(q_rows_), kv_rows_});
      const double share = random_.one_of({0.05, 0.5, 0.9});
      RandomProblem::for_each(mask, [&](const i64* at) {
        store_bytes<u8>(RandomProblem::address(mask, at), random_.chance(share));
      });
      arrays[Array::kMask] = mask;
    }
    if (config_.score.documents) {
      std::vector<i64> q_ids, kv_ids;
      for (i64 i = 0; i < q_rows_; ++i) q_ids.push_back(i * 3 / q_rows_);
      for (i64 j = 0; j < kv_rows_; ++j) kv_ids.push_back(j * 4 / kv_rows_);
      arrays[Array::kQIds] = random_.indices(DType::kInt32, q_ids);
      arrays[Array::kKvIds] = random_.indices(DType::kInt64, kv_ids);
    }
    if (config_.score.dropout) {
      request.options.dropout_p = random_.one_of({0.1, 0.5, 1.0});
      request.options.rng_seed = 1234567890123ull;
      request.options.rng_offset = 77;
    }
  }

  RandomProblem& random_;
  ForwardSm90Config config_;
  i64 batch_, heads_q_, heads_kv_, q_rows_, kv_rows_;
  bool packed_;
  std::vector<i64> kv_ends_;
};

// NaN and infinity in a row of V of one head, NaN in one of K.
inline void plant_unusual(const Request& request, RandomProblem& random) {
  const auto plant = [&](Array array, double value) {
    const Tensor& tensor = request.arrays[array];
    i64 at[4] = {};
    for (int axis = 0; axis < tensor.rank; ++axis) at[axis] = tensor.shape[axis] / 2;
    at[tensor.rank - 2] = random.number(0, tensor.shape[tensor.rank - 2] - 1);
    store_real(RandomProblem::address(tensor, at), tensor.dtype, value);
  };
  plant(Array::kV, kNan);
  plant(Array::kV, std::numeric_limits<double>::infinity());
  plant(Array::kK, kNan);
}

}  // namespace fulmen::test
