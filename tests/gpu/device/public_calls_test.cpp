// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Every implementation through the C ABI on a real GPU, forward and backward, simple calls and
// planned runs, against the scalar oracle; merge and append. The problems are small, so that
// compute-sanitizer can watch them: run it over --gtest_filter='*PublicCalls*' with its tools
// memcheck, initcheck and racecheck. Skipped without a GPU. FULMEN_TEST_SEEDS sets how many
// problems are drawn (12).
#include "public_calls.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <thread>

#include "../../cpu/drawn_append.h"
#include "../../cpu/tiled_support.h"
#include "../kernels/hopper_request.h"
#include "cpu/backend.h"
#include "device_memory.h"
#include "gpu/backend.h"
#include "gpu/jit/compiler.h"

namespace fulmen::test {
namespace {

unsigned num_seeds() {
  const char* text = std::getenv("FULMEN_TEST_SEEDS");
  return text != nullptr ? static_cast<unsigned>(std::atoi(text)) : 12;
}

// Options that tensor cores are asked for, a few at a time.
ForwardSm90Config options_of(unsigned seed) {
  constexpr i32 kDims[] = {64, 128, 256};
  constexpr MaskKind kMasks[] = {MaskKind::kNone, MaskKind::kRight, MaskKind::kBoth};
  ForwardSm90Config config;
  config.dtype = seed / 4 % 2 == 0 ? DType::kBFloat16 : DType::kFloat16;
  config.d_qk = config.d_v = kDims[seed % 3];
  ScoreOptions& score = config.score;
  score.mask_kind = kMasks[seed / 2 % 3];
  score.stats = true;
  const unsigned group = seed % 4;
  score.varlen = group == 1;
  score.score_mod = score.alibi = score.negative_scale = group == 2;
  score.documents = score.mask = score.dropout = group == 3;
  score.bias = group == 3 ? DType::kFloat32 : DType::kNone;
  return config;
}

class PublicCalls : public testing::TestWithParam<fulmen_implementation> {
 protected:
  void SetUp() override {
    const FoundDevice found = find_device();
    if (found.device == nullptr) GTEST_SKIP() << found.reason;
    device_ = found.device;
    const int needed = GetParam() == FULMEN_SM90 ? 90 : GetParam() == FULMEN_SM80 ? 80 : 75;
    const int sm = device_->facts().compute_capability;
    if (sm < needed || (needed == 90 && sm != 90)) GTEST_SKIP() << "sm_" << sm;
  }

  Request draw(RandomProblem& random, unsigned seed) const {
    if (GetParam() < FULMEN_SM80) return random.draw();
    for (;;) {  // Hopper's backward takes head dimensions in steps of 8
      Request request = HopperRequest(random, options_of(seed), 200).request;
      const Tensor& q = request.arrays[Array::kQ];
      if (GetParam() == FULMEN_SM80 || q.shape[q.rank - 1] % 8 == 0) return request;
    }
  }

  // Over a cache: for tensor cores what sm80 takes beside it.
  Request draw_over_cache(RandomProblem& random) const {
    for (;;) {
      Request request = random.draw_cache(GetParam() == FULMEN_SM90);
      if (GetParam() < FULMEN_SM80) return request;
      if (size_bytes(request.arrays[Array::kQ].dtype) != 2) continue;
      for (const Array array : {Array::kPositions, Array::kTree, Array::kBias, Array::kMask,
                                Array::kQIds, Array::kKvIds}) {
        request.arrays[array] = {};
      }
      return request;
    }
  }

  // Compiles on all cores what the calls would compile one by one.
  void make_plans(const std::vector<Request>& requests) const {
    std::atomic<std::size_t> next{0};
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < std::thread::hardware_concurrency(); ++i) {
      threads.emplace_back([&] {
        for (std::size_t at = next++; at < requests.size(); at = next++) {
          PublicCall call(requests[at], GetParam());
          call.problem.device = 0;
          fulmen_plan* plan = nullptr;
          fulmen_plan_create(&call.problem, &call.tensors, call.operation, &plan);
          fulmen_plan_destroy(plan);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  // A simple call, or a planned run in memory that nobody has written. False: refused.
  bool run(const Request& request, bool planned, DeviceMemory& memory) const {
    const PublicCall call(request, GetParam());
    fulmen_status status = FULMEN_OK;
    if (planned) {
      fulmen_plan* plan = nullptr;
      status = fulmen_plan_create(&call.problem, &call.tensors, call.operation, &plan);
      if (status == FULMEN_OK) {
        status = call.run(plan, memory.allocate(fulmen_plan_workspace_bytes(plan)));
        synchronize();
      }
      fulmen_plan_destroy(plan);
    } else {
      status = call.run();
      synchronize();
    }
    if (status == FULMEN_ERROR_UNSUPPORTED) return false;
    EXPECT_EQ(status, FULMEN_OK) << fulmen_last_error();
    return status == FULMEN_OK;
  }

  void synchronize() const {
    const gpu::CurrentContext current(*device_);
    device_->driver().check(device_->driver()->cuCtxSynchronize(), "finish a test");
  }

  // Operands of tensor cores are rounded to 16 bits once more than the oracle's.
  void expect_agreement(const Request& actual, const Request& expected, unsigned seed) const {
    const double factor = GetParam() >= FULMEN_SM80 ? 2 : 1;
    const DType dtype = expected.arrays[Array::kQ].dtype;
    for (const Array output : outputs_of(expected.operation)) {
      const Tensor& stored = actual.arrays[output];
      if (!stored.present() || output == Array::kStats) continue;
      const Difference difference = compare(stored, expected.arrays[output]);
      const double allowed = factor * max(tolerance(dtype, stored.dtype), tolerance(dtype, dtype));
      EXPECT_LE(difference.largest, allowed * max(difference.magnitude, 1.0))
          << "seed " << seed << ", " << name(output);
    }
  }

  template <class Draw>
  void check(Operation operation, const Draw& draw_one) const {
    std::vector<std::unique_ptr<RandomProblem>> owners;
    std::vector<Request> requests;
    for (unsigned seed = 0; seed < num_seeds(); ++seed) {
      RandomProblem& random = *owners.emplace_back(std::make_unique<RandomProblem>(seed));
      Request request = draw_one(random, seed);
      cpu::scalar_forward(validate(request, Pointers::kChecked));
      if (operation == Operation::kBackward) {
        const bool only_qkv = GetParam() == FULMEN_SM90 || seed % 4 == 0;
        request = to_backward(random, request, only_qkv ? 7 : 31);
        cpu::scalar_backward(validate(request, Pointers::kChecked));
      }
      requests.push_back(request);
    }
    make_plans(requests);
    unsigned num_run = 0;
    for (unsigned seed = 0; seed < num_seeds(); ++seed) {
      DeviceMemory memory(*device_);
      Request on_device = requests[seed];
      const Request fresh = with_fresh_outputs(*owners[seed], requests[seed]);
      for (const Array output : outputs_of(operation))
        on_device.arrays[output] = fresh.arrays[output];
      on_device = memory.copy(on_device);
      if (!run(on_device, seed % 2 == 1, memory)) continue;
      ++num_run;
      expect_agreement(memory.fetch(on_device), requests[seed], seed);
    }
    EXPECT_GE(2 * num_run, num_seeds()) << "too many refusals; the last: " << fulmen_last_error();
  }

  const gpu::Device* device_ = nullptr;
};

TEST_P(PublicCalls, ForwardAgreesWithTheOracle) {
  check(Operation::kForward, [this](auto& random, unsigned seed) { return draw(random, seed); });
}
TEST_P(PublicCalls, BackwardAgreesWithTheOracle) {
  check(Operation::kBackward, [this](auto& random, unsigned seed) { return draw(random, seed); });
}
TEST_P(PublicCalls, CachesAgreeWithTheOracle) {
  check(Operation::kForward, [this](auto& random, unsigned) { return draw_over_cache(random); });
}

std::string name_of_implementation(const testing::TestParamInfo<fulmen_implementation>& info) {
  constexpr const char* kNames[] = {"naive", "simt", "sm80", "sm90"};
  return kNames[info.param - FULMEN_NAIVE];
}

INSTANTIATE_TEST_SUITE_P(All, PublicCalls,
                         testing::Values(FULMEN_NAIVE, FULMEN_SIMT, FULMEN_SM80, FULMEN_SM90),
                         name_of_implementation);

// The same numbers in float64.
Tensor widened(RandomProblem& random, const Tensor& narrow) {
  const Tensor wide = random.array(DType::kFloat64, {narrow.shape, narrow.shape + narrow.rank});
  RandomProblem::for_each(narrow, [&](const i64* at) {
    store_real(RandomProblem::address(wide, at), wide.dtype,
               load_real(RandomProblem::address(narrow, at), narrow.dtype));
  });
  return wide;
}

// o and lse of a part that saw nothing in some rows.
MergePart draw_part(RandomProblem& random, DType dtype, i64 rows, i64 dim) {
  const MergePart part{random.array(dtype, {2, 3, rows, dim}),
                       random.array(DType::kFloat32, {2, 3, rows})};
  random.fill_normal(part.o);
  random.fill_normal(part.lse, 3);
  RandomProblem::for_each(part.lse, [&](const i64* at) {
    if (!random.chance(0.1)) return;
    store_real(RandomProblem::address(part.lse, at), part.lse.dtype,
               -std::numeric_limits<double>::infinity());
  });
  return part;
}

void expect_merge(const gpu::Device& device, unsigned seed) {
  RandomProblem random(seed);
  DeviceMemory memory(device);
  const DType dtype = random.one_of({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  const i64 rows = random.number(1, 90), dim = random.number(1, 300);
  const std::size_t num_parts = static_cast<std::size_t>(random.number(2, 6));
  MergeProblem wide;
  std::vector<fulmen_merge_part> parts(num_parts);
  Tensor o, lse;
  for (fulmen_merge_part& each : parts) {
    const MergePart part = draw_part(random, dtype, rows, dim);
    wide.parts.push_back({widened(random, part.o), widened(random, part.lse)});
    fulmen_merge_part_init(&each);
    each.o = PublicCall::view(o = memory.copy(part.o));
    each.lse = PublicCall::view(lse = memory.copy(part.lse));
  }
  if (seed % 3 != 2) {  // else the last part is written over
    o = memory.copy(random.array(dtype, {2, 3, rows, dim}));
    lse = memory.copy(random.array(DType::kFloat32, {2, 3, rows}));
  }
  const Tensor sinks = random.array(DType::kFloat32, {3});
  random.fill_normal(sinks);
  wide.sinks = widened(random, sinks);
  wide.o = random.array(DType::kFloat64, {2, 3, rows, dim});
  wide.lse = random.array(DType::kFloat64, {2, 3, rows});
  cpu::merge(validate_merge(wide));
  const fulmen_tensor c_sinks = PublicCall::view(memory.copy(sinks));
  const fulmen_tensor c_o = PublicCall::view(o), c_lse = PublicCall::view(lse);
  ASSERT_EQ(fulmen_merge(parts.data(), parts.size(), &c_sinks, &c_o, &c_lse, nullptr), FULMEN_OK)
      << fulmen_last_error();
  const Difference of_o = compare(memory.fetch(o), wide.o);
  const Difference of_lse = compare(memory.fetch(lse), wide.lse);
  EXPECT_LE(of_o.largest, tolerance(dtype, dtype) * max(of_o.magnitude, 1.0)) << "seed " << seed;
  EXPECT_LE(of_lse.largest, 1e-5 * max(of_lse.magnitude, 1.0)) << "seed " << seed;
}

TEST(PublicCallsOfMerge, AgreeWithFloat64) {
  const FoundDevice found = find_device();
  if (found.device == nullptr) GTEST_SKIP() << found.reason;
  for (unsigned seed = 0; seed < num_seeds(); ++seed) expect_merge(*found.device, seed);
}

// The caches and q as they were drawn, written by the kernel, and brought back.
void expect_append(const gpu::Device& device, unsigned seed) {
  const bool has_caches = seed % 3 != 0;
  const DrawnAppend drawn(seed, has_caches, seed % 2 == 1);
  DeviceMemory memory(device);
  AppendProblem there = drawn.given;
  for (const AppendArray& array : kAppendArrays) {
    Tensor& tensor = there.*array.member;
    const bool is_in_place =
        array.member == &AppendProblem::q_out && drawn.given.q.data == drawn.given.q_out.data;
    tensor = is_in_place ? there.q : memory.copy(tensor);
  }
  gpu::append(validate_append(there, has_caches), device.ordinal(), nullptr);
  for (const AppendArray& array : kAppendArrays) {
    if (array.is_written) there.*array.member = memory.fetch(there.*array.member);
  }
  EXPECT_EQ(drawn.wrong_after(there), "") << "seed " << seed;
  EXPECT_EQ(device.take_faults(), drawn.faults) << "seed " << seed;
}

TEST(PublicCallsOfAppend, RowsGoWhereTheyShould) {
  const FoundDevice found = find_device();
  if (found.device == nullptr) GTEST_SKIP() << found.reason;
  found.device->take_faults();
  for (unsigned seed = 0; seed < 5 * num_seeds(); ++seed) expect_append(*found.device, seed);
}

}  // namespace
}  // namespace fulmen::test
