// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What every general kernel must show on the host: agreement with the scalar oracle over drawn
// problems, and that hidden keys and values do not show. Forward<kDType>::run(p, run)
// and Backward<kDType>::run(p, run) launch the kernels; give them names of their own in each file,
// since g++ gives templates over unnamed namespaces one name in all files.
#pragma once

#include <functional>

#include "../../cpu/drawn_parts.h"
#include "cpu/backend.h"
#include "kernel_support.h"
#include "planted.h"

namespace fulmen::test {

// Problems from `first` on, when all are drawn.
inline constexpr unsigned kProblemsOfATest = 25;

template <template <DType> class Run>
void run_on(const Request& request, unsigned seed) {
  KernelRun run{memory_of(request), seed};
  for_dtype<Run>(gpu::attention_params(validate(request, Pointers::kChecked)), run);
}

template <template <DType> class Forward>
void expect_forward_agrees(unsigned first) {
  for (unsigned seed = first; seed < first + num_drawn(kProblemsOfATest); ++seed) {
    RandomProblem random(seed);
    const Request expected = random.draw();
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run_on<Forward>(seed % 2 == 0 ? with_rng_array(random, actual) : actual, seed);
    expect_close(actual, expected, {Array::kO, Array::kLse}, seed);
  }
}

// Merged with a part of the rows that is there.
template <template <DType> class Forward>
void expect_parts_are_merged(unsigned seed) {
  for (unsigned left = num_drawn(kProblemsOfATest); left > 0; ++seed) {
    RandomProblem random(seed);
    const Request drawn = random.draw();
    const DType o = drawn.arrays[Array::kO].dtype;
    if (o != accumulator(o)) continue;
    --left;
    const Request expected = with_parts(random, drawn);
    const Request actual = with_parts_elsewhere(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run_on<Forward>(actual, seed);
    expect_close(actual, expected, {Array::kO, Array::kLse}, seed);
  }
}

// Over caches. The kernels are those that are compiled for them.
template <template <DType> class Forward>
void expect_caches_agree(unsigned first) {
  for (unsigned seed = first; seed < first + num_drawn(kProblemsOfATest); ++seed) {
    RandomProblem random(seed);
    Request expected = random.draw_cache();
    if (seed % 4 == 3) expected = with_blocks(random, expected);
    const Request actual = with_fresh_outputs(random, expected);
    const Problem problem = validate(expected, Pointers::kChecked);
    check_lengths(problem);
    check_pages(problem);
    cpu::scalar_forward(problem);
    run_on<Forward>(actual, seed);
    expect_close(actual, expected, {Array::kO, Array::kLse}, seed);
  }
}

template <template <DType> class Backward>
void expect_backward_agrees(unsigned first) {
  for (unsigned seed = first; seed < first + num_drawn(kProblemsOfATest); ++seed) {
    RandomProblem random(seed);
    const Request forward = random.draw();
    cpu::scalar_forward(validate(forward, Pointers::kChecked));
    const unsigned need = (seed % 31) | 1u << (seed % 3);  // at least one that is always there
    const Request expected = to_backward(random, forward, need);
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_backward(validate(expected, Pointers::kChecked));
    run_on<Backward>(seed % 2 == 0 ? with_rng_array(random, actual) : actual, seed);
    expect_close(actual, expected, outputs_of(Operation::kBackward), seed);
  }
}

// Lists of blocks beside whatever else is drawn.
template <template <DType> class Forward, template <DType> class Backward>
void expect_lists_agree() {
  for (unsigned seed = 300; seed < 300 + num_drawn(12); ++seed) {
    RandomProblem random(seed);
    const Request expected = with_blocks(random, random.draw());
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run_on<Forward>(actual, seed);
    expect_close(actual, expected, {Array::kO, Array::kLse}, seed);
    const Request gradients = to_backward(random, expected, 31);
    const Request others = with_fresh_outputs(random, gradients);
    cpu::scalar_backward(validate(gradients, Pointers::kChecked));
    run_on<Backward>(others, seed);
    expect_close(others, gradients, outputs_of(Operation::kBackward), seed);
  }
}

template <template <DType> class Forward, template <DType> class Backward>
void expect_hidden_does_not_show() {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    RandomProblem random(7);
    const Request expected = planted_request(random, dtype);
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run_on<Forward>(actual, 7);
    expect_close(actual, expected, {Array::kO, Array::kLse}, 7);

    const Request gradients = to_backward(random, expected, 7);
    const Request others = with_fresh_outputs(random, gradients);
    cpu::scalar_backward(validate(gradients, Pointers::kChecked));
    run_on<Backward>(others, 7);
    expect_close(others, gradients, outputs_of(Operation::kBackward), 7);
  }
}

// A problem of two heads that share their keys; rows are vectors of 16 bytes.
inline Request small_request(RandomProblem& random, DType dtype, i64 rows, i64 keys, i64 dim) {
  Request request;
  Arrays& arrays = request.arrays;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    const bool of_keys = array == Array::kK || array == Array::kV;
    arrays[array] = random.contiguous(dtype, {1, of_keys ? 1 : 2, of_keys ? keys : rows, dim});
    if (array != Array::kO) random.fill_normal(arrays[array]);
  }
  arrays[Array::kLse] = random.array(accumulator(dtype), {1, 2, rows});
  arrays[Array::kStats] = random.array(accumulator(dtype), {1, 2, rows, 2});
  request.options.scale = kNan;
  return request;
}

template <template <DType> class Forward, template <DType> class Backward>
void expect_both_agree(RandomProblem& random, const Request& expected, unsigned need,
                       const std::function<void(const Request&)>& spoil = {}) {
  const Request actual = with_fresh_outputs(random, expected);
  cpu::scalar_forward(validate(expected, Pointers::kChecked));
  run_on<Forward>(actual, 1);
  expect_close(actual, expected, {Array::kO, Array::kLse}, 1);

  const Request gradients = to_backward(random, expected, need);
  if (spoil) spoil(gradients);
  const Request others = with_fresh_outputs(random, gradients);
  cpu::scalar_backward(validate(gradients, Pointers::kChecked));
  run_on<Backward>(others, 1);
  expect_close(others, gradients, outputs_of(Operation::kBackward), 1);
}

// Rows of q and dout that see no key may hold anything.
template <template <DType> class Forward, template <DType> class Backward>
void expect_rows_without_keys_do_not_show() {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16}) {
    RandomProblem random(8);
    Request request = small_request(random, dtype, 40, 20, 24);
    request.options.causal = true;  // the first 20 rows see nothing
    const auto plant = [](const Tensor& tensor, i64 row, double value) {
      const i64 at[4] = {0, 1, row, 3};
      store_real(RandomProblem::address(tensor, at), tensor.dtype, value);
    };
    plant(request.arrays[Array::kQ], 7, kNan);
    expect_both_agree<Forward, Backward>(random, request, 7, [&](const Request& gradients) {
      plant(gradients.arrays[Array::kDOut], 11, std::numeric_limits<double>::infinity());
      plant(gradients.arrays[Array::kDOut], 18, kNan);
    });
  }
}

// A bias that is the same for all keys, all rows, or all heads: its gradient is their sum.
template <template <DType> class Forward, template <DType> class Backward>
void expect_sums_of_dbias() {
  const std::vector<i64> shapes[] = {{1, 2, 40, 1}, {1, 2, 1, 50}, {1, 1, 40, 50}, {1, 1, 1, 1}};
  for (const std::vector<i64>& shape : shapes) {
    RandomProblem random(9);
    Request request = small_request(random, DType::kFloat32, 40, 50, 24);
    request.arrays[Array::kBias] = random.array(DType::kFloat32, shape);
    random.fill_normal(request.arrays[Array::kBias]);
    expect_both_agree<Forward, Backward>(random, request, 15);
  }
}

// Arrays at addresses that are no multiple of an element's size.
template <template <DType> class Forward, template <DType> class Backward>
void expect_arrays_may_lie_anywhere() {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    RandomProblem random(10);
    Request request = small_request(random, dtype, 30, 40, 24);
    for (int array = 0; array < kNumArrays; ++array) {
      Tensor& tensor = request.arrays[static_cast<Array>(array)];
      if (tensor.present()) tensor = random.misplaced(tensor);
    }
    expect_both_agree<Forward, Backward>(random, request, 7);
  }
}

// Two heads that share their keys, and have lists of their own.
template <template <DType> class Forward>
void expect_lists_of_heads_agree() {
  RandomProblem random(12);
  Request expected = small_request(random, DType::kFloat32, 70, 130, 8);
  expected.options.block_q = expected.options.block_kv = 64;
  Tensor& lists = expected.arrays[Array::kBlocks] =
      random.indices(DType::kInt32, {0, -1, 2, 1, 1, 2, -1, 0});
  lists.rank = 3;
  for (int axis = 0; axis < 3; ++axis) {
    lists.shape[axis] = 2;
    lists.strides[axis] = i64{4} >> axis;
  }
  const Request actual = with_fresh_outputs(random, expected);
  cpu::scalar_forward(validate(expected, Pointers::kChecked));
  run_on<Forward>(actual, 12);
  expect_close(actual, expected, {Array::kO, Array::kLse}, 12);
}

}  // namespace fulmen::test
