// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The append kernel's own text, run in the emulator over drawn problems: in vectors and one element
// at a time, with entries out of range, and by strides that leave 32 bits.
#include "kernels/append/append.cuh"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include "../../cpu/quantised_append.h"
#include "cpu/backend.h"
#include "emulator/global_memory.h"
#include "emulator/launch.h"
#include "emulator/schedules.h"
#include "gpu/backend.h"

namespace fulmen::test {
namespace {

emulator::GlobalMemory memory_of(const AppendProblem& problem) {
  std::vector<emulator::GlobalArray> arrays;
  for (const AppendArray& array : kAppendArrays) {
    const Tensor& tensor = problem.*array.member;
    if (!tensor.present() || tensor.empty()) continue;
    const bool is_in_place = problem.q.data == problem.q_out.data;
    if (array.member == &AppendProblem::q && is_in_place) continue;
    emulator::GlobalArray made;
    made.name = array.name;
    made.data = tensor.data;
    made.element_bytes = size_bytes(tensor.dtype);
    for (size_t axis = 0; axis < 4; ++axis) {
      made.extents[axis] = tensor.shape[axis];
      made.strides[axis] = tensor.strides[axis];
    }
    made.writable = array.is_written;
    made.initialised = !array.is_written || is_in_place;
    arrays.push_back(made);
  }
  return emulator::GlobalMemory(arrays);
}

struct AppendRun {
  const AppendProblem& problem;
  u32 seed;
  FaultBytes faults{};

  template <AppendConfig kConfig>
  void launch() {
    AppendParams params = gpu::append_params(problem, kConfig, &faults);
    params.rows_of_block = 1 + static_cast<i32>(seed % 5);  // few rows have blocks of their own
    emulator::GlobalMemory memory = memory_of(problem);
    const bool is_checked = seed % 4 == 0 || tests_everything();
    emulator::launch({.blocks = gpu::num_blocks(params),
                      .threads = kConfig.num_threads,
                      .shared_bytes = kAppendSharedBytes,
                      .seed = seed,
                      .kernel = "append",
                      .check = is_checked,
                      .memory = is_checked ? &memory : nullptr},
                     [&] { append<kConfig>(params); });
  }

  // Fewer threads than on a GPU, so that small problems have several steps.
  template <DType kDType, DType kTable, Rotation kRotation, DType kQuantised = DType::kNone>
  void with_vectors(bool vectors) {
    vectors ? launch<AppendConfig{kDType, kQuantised, kTable, kRotation, true, 64}>()
            : launch<AppendConfig{kDType, kQuantised, kTable, kRotation, false, 64}>();
  }

  // A choice of combinations; false: not among them.
  bool run_quantised(const AppendConfig& config) {
    using enum DType;
    const auto is = [&](DType dtype, DType stored, DType table, Rotation rotation) {
      return config.dtype == dtype && config.quantised == stored && config.rotation == rotation &&
             (config.table == table || rotation == Rotation::kNone);
    };
    const bool vectors = config.vectors;
    if (is(kFloat16, kFloat8E4M3, kFloat32, Rotation::kHalves)) {
      with_vectors<kFloat16, kFloat32, Rotation::kHalves, kFloat8E4M3>(vectors);
    } else if (is(kBFloat16, kFloat8E5M2, kFloat32, Rotation::kInterleaved)) {
      with_vectors<kBFloat16, kFloat32, Rotation::kInterleaved, kFloat8E5M2>(vectors);
    } else if (is(kFloat32, kInt8, kFloat32, Rotation::kNone)) {
      with_vectors<kFloat32, kFloat32, Rotation::kNone, kInt8>(vectors);
    } else {
      return false;
    }
    return true;
  }

  // A choice of combinations; false: not among them.
  bool run_records(const AppendConfig& config) {
    using enum DType;
    const auto is = [&](DType dtype, DType table, Rotation rotation) {
      return config.dtype == dtype && config.rotation == rotation && config.table == table;
    };
    if (is(kBFloat16, kFloat32, Rotation::kInterleaved)) {
      with_vectors<kBFloat16, kFloat32, Rotation::kInterleaved, kUint8>(config.vectors);
    } else if (is(kFloat16, kFloat16, Rotation::kHalves)) {
      with_vectors<kFloat16, kFloat16, Rotation::kHalves, kUint8>(config.vectors);
    } else if (is(kFloat32, kFloat32, Rotation::kNone)) {
      with_vectors<kFloat32, kFloat32, Rotation::kNone, kUint8>(config.vectors);
    } else {
      return false;
    }
    return true;
  }

  template <DType kDType>
  void with_dtype(const AppendConfig& config) {
    const bool is_float32 = config.table == DType::kFloat32;
    switch (config.rotation) {
      case Rotation::kNone:
        return with_vectors<kDType, kDType, Rotation::kNone>(config.vectors);
      case Rotation::kHalves:
        return is_float32 ? with_vectors<kDType, DType::kFloat32, Rotation::kHalves>(config.vectors)
                          : with_vectors<kDType, kDType, Rotation::kHalves>(config.vectors);
      default:
        return is_float32
                   ? with_vectors<kDType, DType::kFloat32, Rotation::kInterleaved>(config.vectors)
                   : with_vectors<kDType, kDType, Rotation::kInterleaved>(config.vectors);
    }
  }

  void run(const AppendConfig& config) {
    switch (problem.dtype) {
      case DType::kFloat64:
        return with_dtype<DType::kFloat64>(config);
      case DType::kFloat32:
        return with_dtype<DType::kFloat32>(config);
      case DType::kFloat16:
        return with_dtype<DType::kFloat16>(config);
      default:
        return with_dtype<DType::kBFloat16>(config);
    }
  }
};

constexpr unsigned kDrawn = 120;

TEST(AppendKernel, RowsGoWhereTheyShould) {
  int in_vectors = 0;
  for (unsigned seed = 0; seed < num_drawn(kDrawn); ++seed) {
    const bool has_caches = seed % 3 != 0;
    const DrawnAppend drawn(seed, has_caches);
    const AppendProblem problem = validate_append(drawn.given, has_caches);
    AppendRun run{problem, seed};
    run.run(gpu::append_config(problem));
    in_vectors += gpu::append_config(problem).vectors;
    ASSERT_EQ(drawn.wrong(), "") << "seed " << seed;
    ASSERT_EQ(run.faults.bits(), 0u) << "seed " << seed;
  }
  EXPECT_GT(in_vectors, 10);
}

TEST(AppendKernel, QuantisesAsTheCpuDoes) {
  int compared = 0, in_vectors = 0;
  for (unsigned seed = 0; compared < static_cast<int>(num_drawn(60)); ++seed) {
    const DrawnAppend drawn(seed, true);
    if (drawn.given.k.dtype == DType::kFloat64) continue;
    for (const DType stored : {DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt8}) {
      QuantisedAppend call(seed, drawn.given, stored);
      const AppendProblem on_device = validate_append(call.with_fresh_caches(), true);
      AppendRun run{on_device, seed};
      if (!run.run_quantised(gpu::append_config(on_device))) continue;
      ++compared;
      in_vectors += gpu::append_config(on_device).vectors;
      cpu::append(validate_append(call.wide, true));
      ASSERT_EQ(call.wrong(on_device), "") << "seed " << seed;
    }
  }
  EXPECT_GT(in_vectors, 2);
}

// The append that was drawn, but into records: numbers of every magnitude, some beyond all of them.
AppendProblem into_records(RandomProblem& random, const AppendProblem& drawn,
                           const RecordLayout& layout) {
  AppendProblem made = drawn;
  made.v = made.v_cache = Tensor{};
  const auto with_dims = [&](const Tensor& tensor, DType dtype, i64 dims, bool in_vectors) {
    std::vector<i64> shape(tensor.shape, tensor.shape + tensor.rank);
    shape.back() = dims;
    return in_vectors ? random.contiguous(dtype, shape) : random.array(dtype, shape);
  };
  const bool in_vectors = random.chance(0.5);
  made.k = with_dims(drawn.k, drawn.k.dtype, layout.dims, in_vectors);
  RandomProblem::for_each(made.k, [&](const i64* at) {
    const double number = random.normal() * std::exp2(static_cast<double>(at[made.k.rank - 2] % 9));
    store_real(RandomProblem::address(made.k, at), made.k.dtype,
               random.chance(0.001)   ? kNan
               : random.chance(0.001) ? 1e30
                                      : number);
  });
  if (drawn.q.present()) {
    made.q = with_dims(drawn.q, drawn.q.dtype, layout.dims, in_vectors);
    random.fill_normal(made.q);
    made.q_out = random.twin(made.q);
  }
  if (drawn.cos.present()) {
    for (Tensor* const table : {&made.cos, &made.sin}) {
      *table = with_dims(drawn.cos, drawn.cos.dtype, kRecordRotary / 2, in_vectors);
      random.fill_normal(*table, 0.5);
    }
  }
  made.k_cache = with_dims(drawn.k_cache, DType::kUint8, layout.bytes, true);
  if (!layout.has_page_scales() && random.chance(0.3)) {  // elsewhere, and no element aligned
    made.k_cache = random.misplaced(made.k_cache);
  }
  return made;
}

std::string differing(const Tensor& got, const Tensor& expected, const char* name) {
  std::string found;
  if (!expected.present()) return found;
  RandomProblem::for_each(expected, [&](const i64* at) {
    const bool equal =
        std::memcmp(RandomProblem::address(got, at), RandomProblem::address(expected, at),
                    static_cast<size_t>(size_bytes(expected.dtype))) == 0;
    if (!equal) found = sentence(name, " [", at[0], "][", at[1], "][", at[2], "][", at[3], "]");
  });
  return found;
}

TEST(AppendKernel, WritesTheRecordsOfTheCpu) {
  int compared = 0, in_vectors = 0;
  for (unsigned seed = 0; compared < static_cast<int>(num_drawn(40)); ++seed) {
    const DrawnAppend drawn(seed, true);
    if (drawn.given.k.dtype == DType::kFloat64) continue;
    RandomProblem random(seed);
    const AppendProblem on_cpu =
        into_records(random, drawn.given, seed % 2 == 0 ? kRecord656 : kRecord584);
    AppendProblem given = on_cpu;
    given.k_cache = random.twin(on_cpu.k_cache);
    if (given.q_out.present()) given.q_out = random.twin(on_cpu.q_out);
    const AppendProblem problem = validate_append(given, true);
    AppendRun run{problem, seed};
    if (!run.run_records(gpu::append_config(problem))) continue;
    ++compared;
    in_vectors += gpu::append_config(problem).vectors;
    cpu::append(validate_append(on_cpu, true));
    ASSERT_EQ(differing(given.k_cache, on_cpu.k_cache, "k_cache"), "") << "seed " << seed;
    ASSERT_EQ(differing(given.q_out, on_cpu.q_out, "q_out"), "") << "seed " << seed;
    ASSERT_EQ(run.faults.bits(), 0u) << "seed " << seed;
  }
  EXPECT_GT(in_vectors, 4);
  EXPECT_LT(in_vectors, compared);
}

// Of four rows one is skipped, and one has a slot behind the last: the host hears of that one.
TEST(AppendKernel, RecordsOutOfRangeGoNowhere) {
  for (const RecordLayout& layout : {kRecord656, kRecord584}) {
    RandomProblem random(static_cast<unsigned>(layout.bytes));
    AppendProblem given;
    given.k = random.contiguous(DType::kFloat32, {1, 1, 4, layout.dims});
    random.fill_normal(given.k);
    given.k_cache = random.contiguous(DType::kUint8, {2, 1, 3, layout.bytes});
    given.slots = random.indices(DType::kInt64, {4, -1, 6, 0});
    const AppendProblem problem = validate_append(given, true);
    AppendRun run{problem, 4};
    ASSERT_TRUE(run.run_records(gpu::append_config(problem)));
    EXPECT_EQ(run.faults.bits(), u32{kFaultSlots});
    given.slots = random.indices(DType::kInt64, {4, -1, -1, 0});
    AppendProblem on_cpu = given;
    on_cpu.k_cache = random.contiguous(DType::kUint8, {2, 1, 3, layout.bytes});
    cpu::append(validate_append(on_cpu, true));
    EXPECT_EQ(differing(given.k_cache, on_cpu.k_cache, "k_cache"), "");
  }
}

// A page as far away as a large pool's: its bytes are never touched but for one row.
TEST(AppendKernel, PagesBeyond32BitsOfElements) {
  constexpr i64 kPageStride = i64{1} << 24, kPages = 300;  // 10 GB, of which a few KB exist
  const size_t bytes = static_cast<size_t>(kPages * kPageStride * 2);
  void* const pool = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(pool, MAP_FAILED);
  std::vector<u16> rows(16, 7);
  std::vector<i64> slots{kPages * 4 - 1};
  AppendProblem given;
  given.k_cache = {pool, DType::kFloat16, 4, {kPages, 1, 4, 8}, {kPageStride, 8, 8, 1}};
  given.v_cache = given.k_cache;
  given.v_cache.data = static_cast<u16*>(pool) + 1024;
  given.k = {rows.data(), DType::kFloat16, 3, {1, 1, 8}, {8, 8, 1}};
  given.v = {rows.data() + 8, DType::kFloat16, 3, {1, 1, 8}, {8, 8, 1}};
  given.slots = {slots.data(), DType::kInt64, 1, {1}, {1}};
  const AppendProblem problem = validate_append(given, true);
  for (const bool vectors : {true, false}) {
    u16* const last = static_cast<u16*>(pool) + (kPages - 1) * kPageStride + 3 * 8;
    last[7] = last[1024 + 7] = 0;
    const AppendConfig config{
        .dtype = DType::kFloat16, .table = DType::kFloat16, .vectors = vectors};
    const AppendParams params = gpu::append_params(problem, config);
    const emulator::Grid grid{.blocks = 1,
                              .threads = 256,
                              .shared_bytes = kAppendSharedBytes,
                              .seed = 1,
                              .kernel = "append",
                              .check = false};
    vectors
        ? emulator::launch(
              grid,
              [&] {
                append<AppendConfig{.dtype = DType::kFloat16, .table = DType::kFloat16}>(params);
              })
        : emulator::launch(grid, [&] {
            append<AppendConfig{
                .dtype = DType::kFloat16, .table = DType::kFloat16, .vectors = false}>(params);
          });
    EXPECT_EQ(last[7], 7);
    EXPECT_EQ(last[1024 + 7], 7);
  }
  ::munmap(pool, bytes);
}

// Of four rows behind the six of a request, two have a place in its table of two pages: the others
// go nowhere, and the host is told. Of float32, four elements of int8 at a time.
TEST(AppendKernel, RowsBeyondTheTableGoNowhere) {
  constexpr i64 kDims = 16;
  alignas(16) float rows[4][kDims];
  for (i64 row = 0; row < 4; ++row) {
    for (i64 d = 0; d < kDims; ++d) rows[row][d] = static_cast<float>(10 * row + d - 20);
  }
  alignas(16) signed char pools[2][2][4][kDims];  // k and v
  std::memset(pools, 77, sizeof(pools));
  std::vector<i64> table{1, 0}, lengths{6};
  AppendProblem given;
  given.k = {rows, DType::kFloat32, 4, {1, 1, 4, kDims}, {0, 0, kDims, 1}};
  given.v = given.k;
  given.k_cache = {pools[0], DType::kInt8, 4, {2, 1, 4, kDims}, {4 * kDims, 0, kDims, 1}};
  given.v_cache = given.k_cache;
  given.v_cache.data = pools[1];
  given.page_table = {table.data(), DType::kInt64, 2, {1, 2}, {2, 1}};
  given.kv_lengths = {lengths.data(), DType::kInt64, 1, {1}, {1}};
  const AppendProblem problem = validate_append(given, true);
  const AppendConfig config = gpu::append_config(problem);
  EXPECT_TRUE(config.vectors);
  AppendRun run{problem, 4};
  ASSERT_TRUE(run.run_quantised(config));
  EXPECT_EQ(run.faults.bits(), u32{kFaultSlots});
  for (const auto& pool : pools) {
    for (i64 row = 0; row < 8; ++row) {
      for (i64 d = 0; d < kDims; ++d) {
        const bool is_new = row == 2 || row == 3;  // of page 0, the request's second
        EXPECT_EQ(pool[row / 4][row % 4][d], is_new ? 10 * (row - 2) + d - 20 : 77);
      }
    }
  }
}

TEST(AppendKernel, EntriesOutOfRangeWriteNothingAndAreRecorded) {
  u32 seen = 0;
  for (unsigned seed = 0; seed < num_drawn(kDrawn); ++seed) {
    const bool has_caches = seed % 3 != 0;
    const DrawnAppend drawn(seed, has_caches, true);
    const AppendProblem problem = validate_append(drawn.given, has_caches);
    AppendRun run{problem, seed};
    run.run(gpu::append_config(problem));
    ASSERT_EQ(drawn.wrong(), "") << "seed " << seed;
    ASSERT_EQ(run.faults.bits(), drawn.faults) << "seed " << seed;
    seen |= run.faults.bits();
  }
  EXPECT_EQ(seen,
            u32{kFaultSlots | kFaultPages | kFaultPositions | kFaultKvLengths | kFaultKvOffsets});
}

}  // namespace
}  // namespace fulmen::test
