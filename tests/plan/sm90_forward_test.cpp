// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which config of forward_sm90 a problem gets, and the order of its blocks, where a rule decides
// and not a measurement.
#include <gmock/gmock.h>

#include <numeric>

#include "core/error.h"
#include "gpu/forward_sm90/plan.h"

namespace fulmen::gpu {
namespace {

Problem problem_of(i64 batch, i64 heads_q, i64 heads_kv, i64 q_rows, i64 kv_rows, i64 dim) {
  Problem problem;
  problem.dtype = problem.arrays[Array::kO].dtype = DType::kBFloat16;
  problem.num_sequences = batch;
  problem.heads_q = heads_q;
  problem.heads_kv = heads_kv;
  problem.q_rows = problem.max_q = q_rows;
  problem.kv_rows = problem.max_kv = kv_rows;
  problem.dim_qk = problem.dim_v = dim;
  problem.score_map.scale = 1;
  problem.mask.causal = true;
  return problem;
}

TEST(Sm90Forward, NoGroupOfHeadsIsMuchSmallerThanTheOthers) {
  Gpu gpu = gpu_named("h100");
  for (const i64 l2_mib : {30, 40, 50, 60, 96}) {
    gpu.l2_bytes = static_cast<size_t>(l2_mib) << 20;
    for (const i64 rows : {2048, 4096, 8192, 16384}) {
      for (const i64 dim : {64, 128, 256}) {
        const Problem problem = problem_of(16384 / rows, 2048 / dim, 2048 / dim, rows, rows, dim);
        const i64 heads = problem.heads_q * problem.num_sequences;
        const i64 size = heads_per_group(problem, forward_sm90_config(problem, gpu), gpu);
        const i64 last = heads - (ceil_div(heads, size) - 1) * size;
        EXPECT_GE(2 * last, size) << heads << " heads in groups of " << size;
      }
    }
  }
}

const Gpu kGpu = gpu_named("h100");

TEST(Sm90Forward, HeadsShareATileWhenTheirQueriesFitIt) {
  const auto heads = [](i64 heads_q, i64 heads_kv, i64 q_rows) {
    return forward_sm90_config(problem_of(8, heads_q, heads_kv, q_rows, 4096, 128), kGpu)
        .heads_per_tile;
  };
  EXPECT_EQ(heads(32, 8, 1), 4);
  EXPECT_EQ(heads(32, 8, 16), 4);
  EXPECT_EQ(heads(32, 8, 17), 2);
  EXPECT_EQ(heads(32, 8, 33), 1);
  EXPECT_EQ(heads(24, 8, 1), 1) << "three heads do not divide a tile";
  EXPECT_EQ(heads(24, 4, 1), 2);
  EXPECT_EQ(heads(64, 1, 1), 8);
  Problem alibi = problem_of(8, 32, 8, 1, 4096, 128);
  alibi.arrays[Array::kAlibiSlopes].dtype = DType::kFloat32;
  EXPECT_EQ(forward_sm90_config(alibi, kGpu).heads_per_tile, 1);
  Problem invariant = problem_of(8, 32, 8, 1, 4096, 128);
  invariant.batch_invariant = true;
  EXPECT_EQ(forward_sm90_config(invariant, kGpu).heads_per_tile, 1);
}

TEST(Sm90Forward, ATileThatIsAskedForReplacesMembersOfTheTables) {
  Problem problem = problem_of(1, 8, 8, 16384, 16384, 256);
  const ForwardSm90Config whole = forward_sm90_config(problem, kGpu);
  problem.tile = tile_choice(" kv_rows=80  q_slots=2 overlap=0 heads_per_group=3 ");
  ForwardSm90Config expected = whole;
  expected.kv_rows = 80;
  expected.q_slots = 2;
  expected.overlap = false;
  EXPECT_TRUE(forward_sm90_config(problem, kGpu) == expected);
  const Gpu gpu = gpu_named("h100");
  EXPECT_EQ(heads_per_group(problem, forward_sm90_config(problem, gpu), gpu), 3);
  EXPECT_EQ(plan_forward_sm90(problem, gpu).refusal, "");
  problem.tile = tile_choice("kv_rows=80");  // with three slots of Q
  EXPECT_THAT(plan_forward_sm90(problem, gpu).refusal,
              testing::HasSubstr("128 x 80 with 2 stages"));
}

TEST(Sm90Forward, DocumentsTakeWorkspaceForTheirRanges) {
  Problem problem = problem_of(2, 16, 16, 4096, 4096, 128);
  const Gpu gpu = gpu_named("h100");
  const size_t without = plan_forward_sm90(problem, gpu).plan->workspace_bytes;
  problem.arrays[Array::kQIds].dtype = problem.arrays[Array::kKvIds].dtype = DType::kInt32;
  const ForwardSm90Config config = forward_sm90_config(problem, kGpu);
  EXPECT_TRUE(config.skips_documents);
  const size_t ranges = 2 * 4096 / static_cast<size_t>(config.kv_rows);
  EXPECT_EQ(plan_forward_sm90(problem, gpu).plan->workspace_bytes,
            ForwardSm90Plan::kKeyRangesOffset + ranges * sizeof(IdRange));
  EXPECT_LE(without, ForwardSm90Plan::kKeyRangesOffset) << "the counter lies before the ranges";
}

// No box of the copy engine lies in two pages, or in two blocks of keys.
TEST(Sm90Forward, BoxesDividePagesAndBlocksOfKeys) {
  for (const i32 kv_rows : {48, 64, 80, 112, 128, 176}) {
    for (i64 page_rows = 1; page_rows <= 600; ++page_rows) {
      AttentionParams p{};
      p.cache_layout.page_rows = page_rows;
      const i32 rows = key_box_rows(p, kv_rows);
      EXPECT_EQ(rows, std::gcd(page_rows, i64{kv_rows}));
      p.kv_start.dtype = DType::kInt32;  // begins anywhere
      EXPECT_EQ(key_box_rows(p, kv_rows), 1);
    }
  }
}

TEST(Sm90Forward, TakesCachesWithoutTermsOfPairs) {
  Problem problem = problem_of(8, 32, 8, 2048, 8192, 128);
  problem.page_rows = 16;
  problem.num_pages = 100;
  problem.arrays[Array::kPageTable].dtype = DType::kInt32;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    problem.arrays[array].strides[3] = 1;
  }
  EXPECT_EQ(plan_forward_sm90(problem, kGpu).refusal, "");
  for (const Array array :
       {Array::kPositions, Array::kTree, Array::kBias, Array::kMask, Array::kQIds}) {
    Problem other = problem;
    other.arrays[array].dtype = DType::kInt32;
    EXPECT_EQ(plan_forward_sm90(other, kGpu).refusal,
              sentence("takes page_table without ", name(array)));
  }
  EXPECT_FALSE(forward_sm90_config(problem, kGpu).gathers);
  Problem odd = problem;
  odd.page_rows = 17;
  EXPECT_EQ(plan_forward_sm90(odd, kGpu).refusal, "");
  EXPECT_TRUE(forward_sm90_config(odd, kGpu).gathers);
  odd.dim_qk = 100;
  EXPECT_THAT(plan_forward_sm90(odd, kGpu).refusal,
              testing::HasSubstr("that of k a multiple of 8"));
  Problem padded = problem;
  padded.arrays[Array::kKvStart].dtype = DType::kInt32;
  EXPECT_TRUE(forward_sm90_config(padded, kGpu).gathers);
  Problem none = problem;
  none.num_pages = 0;
  EXPECT_EQ(plan_forward_sm90(none, kGpu).refusal, "needs at least one page");
  Problem many = problem;
  many.num_pages = i64{1} << 31;
  EXPECT_EQ(plan_forward_sm90(many, kGpu).refusal, "counts pages and their rows in 31 bits");
  Problem ablation = problem;  // a warp of its own looks up pages, and boxes are swizzled
  ablation.without = static_cast<u32>(Optimisation::kWarpSpecialisation) |
                     static_cast<u32>(Optimisation::kSwizzle);
  EXPECT_EQ(forward_sm90_switches(problem, kGpu) & ablation.without, 0u);
}

// Single rows beside chunks, over pages, on a part of the card; not where these kernels were asked
// for by name, nor where all rows of a request fit decode_sm80's row tile anyway.
TEST(Sm90Forward, ChunksAndSingleRowsAreTwoKernels) {
  Problem problem = problem_of(66, 32, 8, 4160, 8192, 128);
  problem.packed.q = true;
  problem.max_q = 2048;
  problem.page_rows = 16;
  problem.num_pages = 100;
  problem.arrays[Array::kPageTable].dtype = problem.arrays[Array::kCuQ].dtype = DType::kInt32;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    problem.arrays[array].dtype = DType::kBFloat16;
    problem.arrays[array].strides[3] = 1;
  }
  const PlanOrRefusal made = plan_forward_sm90(problem, kGpu);
  ASSERT_NE(made.plan, nullptr) << made.refusal;
  const std::vector<KernelLaunch>& launches = made.plan->launches;
  ASSERT_EQ(launches.size(), 2u);
  EXPECT_THAT(launches[0].spec.name, testing::StartsWith("decode_sm80"));
  EXPECT_LT(launches[0].num_blocks, kGpu.num_multiprocessors);
  EXPECT_FALSE(launches[0].overlap_previous);
  EXPECT_THAT(launches[1].spec.name, testing::StartsWith("forward_sm90"));
  EXPECT_TRUE(launches[1].overlap_previous);
  EXPECT_EQ(made.plan->zeroed_bytes, sizeof(u32));
  EXPECT_GT(made.plan->workspace_bytes, kWorkspaceAlignment);
  problem.implementation = Implementation::kSm90;
  EXPECT_EQ(plan_forward_sm90(problem, kGpu).plan->launches.size(), 1u);
  problem.implementation = Implementation::kAuto;
  problem.max_q = 16;
  EXPECT_EQ(plan_forward_sm90(problem, kGpu).plan, nullptr);
}

// A problem of 16 bits that may be rounded to e4m3, with arrays one row behind the other.
Problem permitted(i64 rows, i64 dim) {
  Problem problem = problem_of(2, 8, 4, rows, rows, dim);
  problem.precision = Precision::kFp8;
  const auto set = [&](Array array, i64 heads, i64 last) {
    Tensor& x = problem.arrays[array];
    x = {nullptr,
         DType::kBFloat16,
         4,
         {2, heads, rows, last},
         {heads * rows * last, rows * last, last, 1}};
  };
  set(Array::kQ, 8, dim);
  set(Array::kK, 4, dim);
  set(Array::kV, 4, dim);
  set(Array::kO, 8, dim);
  return problem;
}

std::vector<std::string> entries_of(const PlanOrRefusal& made) {
  std::vector<std::string> entries;
  for (const KernelLaunch& launch : made.plan->launches) entries.push_back(launch.spec.function);
  return entries;
}

TEST(Sm90Fp8, Rounds16BitsWhereThatIsFaster) {
  using testing::ElementsAre;
  using testing::HasSubstr;
  Problem problem = permitted(16384, 256);
  const PlanOrRefusal made = plan_forward_sm90(problem, kGpu);
  EXPECT_THAT(entries_of(made), ElementsAre("fulmen::sample_operands", "fulmen::quantise_operands",
                                            "fulmen::transpose_values_sm90", "fulmen::forward_sm90",
                                            "fulmen::forward_sm90"));
  EXPECT_THAT(made.plan->note, HasSubstr("rounded to e4m3"));
  problem.arrays[Array::kLse].dtype = DType::kFloat32;
  EXPECT_THAT(entries_of(plan_forward_sm90(problem, kGpu)),
              testing::Contains("fulmen::restore_constant"));
  EXPECT_THAT(plan_forward_sm90(permitted(16384, 128), kGpu).plan->note,
              HasSubstr("rounded to e4m3"));
  EXPECT_THAT(plan_forward_sm90(permitted(16384, 64), kGpu).plan->note,
              HasSubstr("fewer than 128 dims"));
  const PlanOrRefusal few = plan_forward_sm90(permitted(512, 256), kGpu);
  EXPECT_THAT(entries_of(few), ElementsAre("fulmen::forward_sm90"));
  EXPECT_THAT(few.plan->note, HasSubstr("not used: 16 bits are as fast"));
}

TEST(Sm90Fp8, Computes16BitsWhereE4M3DoesNotServe) {
  const auto note_of = [](auto change) {
    Problem problem = permitted(16384, 256);
    problem.implementation = Implementation::kSm90;
    change(problem);
    const PlanOrRefusal made = plan_forward_sm90(problem, kGpu);
    EXPECT_EQ(entries_of(made).back(), "fulmen::forward_sm90");
    return made.plan->note;
  };
  using testing::HasSubstr;
  EXPECT_THAT(note_of([](Problem& p) { p.batch_invariant = true; }), HasSubstr("one answer"));
  EXPECT_THAT(note_of([](Problem& p) { p.dim_qk = 248; }), HasSubstr("multiples of 16"));
  EXPECT_THAT(note_of([](Problem& p) { p.score_map.softcap = 5; }),
              HasSubstr("takes float8_e4m3fn with positive scales"));
  EXPECT_THAT(note_of([](Problem& p) { p.packed.q = true; }), HasSubstr("not packed alike"));
}

}  // namespace
}  // namespace fulmen::gpu
