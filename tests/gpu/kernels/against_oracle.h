// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What every general kernel must show on the host: agreement with the scalar oracle over drawn
// problems, and that hidden keys and values do not show. Forward<kDType>::run(p, run)
// and Backward<kDType>::run(p, run) launch the kernels; give them names of their own in each file,
// since g++ gives templates over unnamed namespaces one name in all files.
#pragma once

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
    run_on<Forward>(actual, seed);
    expect_close(actual, expected, {Array::kO, Array::kLse}, seed);
  }
}

// Over caches. The kernels are those that are compiled for them.
template <template <DType> class Forward>
void expect_caches_agree(unsigned first) {
  for (unsigned seed = first; seed < first + num_drawn(kProblemsOfATest); ++seed) {
    RandomProblem random(seed);
    const Request expected = random.draw_cache();
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
    run_on<Backward>(actual, seed);
    expect_close(actual, expected, outputs_of(Operation::kBackward), seed);
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

}  // namespace fulmen::test
