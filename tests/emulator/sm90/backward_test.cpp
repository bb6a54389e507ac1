// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The Hopper backward's own text on the host, against the scalar oracle, over drawn problems: from
// a Problem through the workspace, the tensor maps and the params that a run would launch with.
#include "../../cuda/kernels/expect_close.h"
#include "../../cuda/kernels/hopper_request.h"
#include "cpu/backend.h"
#include "cuda/params.h"
#include "cuda/sm90_backward.h"
#include "emulator/launch.h"
#include "kernels/backward_careful.cuh"
#include "kernels/backward_prepare_sm90.cuh"
#include "kernels/backward_sm90.cuh"
#include "plan/sm90_backward.h"
#include "tensor_map.h"

namespace fulmen::test {
namespace {

constexpr BackwardConfig kCausal{.dims = 64, .q_rows = 128, .mask = MaskKind::kUpper};
constexpr BackwardConfig kStats{
    .dtype = DType::kFloat16, .mask = MaskKind::kBoth, .has_stats = true};

template <BackwardConfig kConfig>
void run(const Problem& problem, u32 seed) {
  const Gpu gpu = gpu_named("h100");
  const Sm90BackwardPlan plan = sm90_backward_plan(problem, gpu);
  std::vector<char> memory(static_cast<size_t>(plan.workspace_bytes) + 256, '\xff');
  char* const workspace = memory.data() + (256 - reinterpret_cast<u64>(memory.data()) % 256);

  constexpr BackwardPrepareConfig kPrepare{
      .dtype = kConfig.dtype, .dims = kConfig.dims, .has_stats = kConfig.has_stats};
  const BackwardPrepareParams prepare =
      cuda::sm90_prepare_params(problem, plan, workspace, nullptr);
  emulator::launch({2, kPrepare.threads(), 0, seed},
                   [&] { backward_prepare_sm90<kPrepare>(prepare); });
  BackwardParams params = cuda::sm90_backward_params(problem, plan, workspace);
  const Arrays& arrays = problem.arrays;
  params.maps = {map_of(arrays[Array::kQ], kConfig.q_rows),
                 map_of(arrays[Array::kK], BackwardConfig::kKvRows),
                 map_of(arrays[Array::kV], BackwardConfig::kKvRows),
                 map_of(arrays[Array::kDOut], kConfig.q_rows),
                 map_of(arrays[Array::kDK], 64),
                 map_of(arrays[Array::kDV], 64)};
  emulator::launch({1, kConfig.threads(), kConfig.shared_bytes(), seed},
                   [&] { backward_sm90<kConfig>(params); });
  const BackwardCarefulParams careful{params.spoiled, cuda::attention_params(problem)};
  emulator::launch({2, BackwardCarefulConfig::kThreads, 0, seed},
                   [&] { backward_careful<BackwardCarefulConfig{kConfig.dtype}>(careful); });
}

// Head dimensions that the backward pass takes: multiples of 8.
void widen_rows(const Tensor& tensor) {
  RandomProblem::for_each(tensor, [&](const i64* at) {
    char* const x = RandomProblem::address(tensor, at);
    if (std::isnan(load_real(x, tensor.dtype))) store_real(x, tensor.dtype, 0.25);
  });
}

template <BackwardConfig kConfig>
Request drawn_request(RandomProblem& random) {
  const AttentionConfig like{.dtype = kConfig.dtype,
                             .d_qk = kConfig.dims,
                             .d_v = kConfig.dims,
                             .mask = kConfig.mask,
                             .stats = kConfig.has_stats};
  Request request = HopperRequest(random, like, 140).request;
  for (const Array array : {Array::kQ, Array::kK}) {
    Tensor& tensor = request.arrays[array];
    i64& dim = tensor.shape[tensor.rank - 1];
    dim = ceil_div(dim, 8) * 8;
    widen_rows(tensor);
  }
  return request;
}

template <BackwardConfig kConfig>
void expect_agreement(const Request& forward, RandomProblem& random, unsigned seed) {
  cpu::scalar_forward(validate(forward, Pointers::kChecked));
  Request expected = to_backward(random, forward, 7);
  if (!kConfig.has_stats) expected.arrays[Array::kStats] = Tensor{};
  if (kConfig.has_stats) expected.arrays[Array::kStats] = forward.arrays[Array::kStats];
  Request actual = expected;
  for (const Array output : {Array::kDQ, Array::kDK, Array::kDV}) {
    actual.arrays[output] = random.twin(expected.arrays[output]);
  }
  cpu::scalar_backward(validate(expected, Pointers::kChecked));
  run<kConfig>(validate(actual, Pointers::kChecked), seed);
  expect_close(actual, expected, {Array::kDQ, Array::kDK, Array::kDV}, seed);
}

// Values that are NaN or infinite in every input, seen by some rows of a block and hidden from
// others. Seeds from `first` on, as many as draw this config `count` times.
template <BackwardConfig kConfig>
void expect_hidden_does_not_show(unsigned first, int count) {
  for (unsigned seed = first; count > 0; ++seed) {
    RandomProblem random(seed);
    const Request request = drawn_request<kConfig>(random);
    const BackwardConfig chosen =
        sm90_backward_config(validate(to_backward(random, request, 7), Pointers::kChecked));
    if (chosen.dims != kConfig.dims || chosen.mask != kConfig.mask) continue;
    plant_unusual(request, random);
    expect_agreement<kConfig>(request, random, seed);
    --count;
  }
}

TEST(Sm90BackwardOnHost, HiddenNanDoesNotShow) {
  expect_hidden_does_not_show<kCausal>(1, 3);
  expect_hidden_does_not_show<kStats>(101, 3);
}

}  // namespace
}  // namespace fulmen::test
