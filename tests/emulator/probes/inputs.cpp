// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Numbers for probes: small integers, whose sums are exact in any order; normal ones, whose sums
// show how the hardware rounds; ones of many magnitudes, with zeros among them, or so small that
// float16 has them without a leading bit; special ones.
#include "inputs.h"

#include <cmath>
#include <numeric>
#include <random>

namespace fulmen::test {
namespace {

enum class Numbers { kIntegers, kNormal, kWide, kSparse, kTiny };
constexpr const char* kNumberNames[] = {"integers", "normal", "wide", "sparse", "tiny"};
constexpr Numbers kAllNumbers[] = {Numbers::kIntegers, Numbers::kNormal, Numbers::kWide,
                                   Numbers::kSparse, Numbers::kTiny};

class Source {
 public:
  explicit Source(u32 seed) : random_(seed) {}

  u32 word() { return static_cast<u32>(random_()); }

  // No distribution of the standard library: theirs differ between libraries.
  float number(Numbers numbers) {
    if (numbers == Numbers::kIntegers) return static_cast<float>(static_cast<i32>(word() % 17) - 8);
    float sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<float>(word() >> 8) * 0x1p-24f - 0.5f;
    if (numbers == Numbers::kNormal) return 2 * sum;
    if (numbers == Numbers::kTiny) return std::ldexp(sum, -12 - static_cast<int>(word() % 12));
    if (numbers == Numbers::kSparse && word() % 2 == 0) return 0;
    return std::ldexp(2 * sum, static_cast<int>(word() % 24) - 12);
  }
  // A word of them.
  u32 word(DType dtype, Numbers numbers) {
    if (dtype == DType::kFloat32) return accumulator(numbers);
    if (dtype == DType::kFloat8E4M3) return four(numbers);
    const float low = number(numbers), high = number(numbers);
    if (dtype == DType::kBFloat16) return u32{to_bf16(high).bits} << 16 | to_bf16(low).bits;
    return u32{to_f16(high).bits} << 16 | to_f16(low).bits;
  }
  // Tiny ones lie where e4m3 has numbers without a leading bit.
  u32 four(Numbers numbers) {
    u32 bytes = 0;
    for (int i = 0; i < 4; ++i) {
      const float x = number(numbers) * (numbers == Numbers::kTiny ? 0x1p8f : 1);
      bytes = bytes << 8 | to_e4m3(x).bits;
    }
    return bytes;
  }
  u32 accumulator(Numbers numbers) { return __builtin_bit_cast(u32, number(numbers)); }

 private:
  std::mt19937 random_;
};

void add_mma(std::vector<ProbeRun>& runs, Probe probe, DType dtype, const std::string& name) {
  constexpr i32 kProducts = 64;
  for (const Numbers numbers : kAllNumbers) {
    Source source(1);
    ProbeRun run{name + ", " + kNumberNames[static_cast<int>(numbers)],
                 probe,
                 ProbeFamily::kWarp,
                 {},
                 kProducts * 128,
                 kProducts};
    for (i32 i = 0; i < kProducts * 32; ++i) {
      for (int j = 0; j < 6; ++j) run.in.push_back(source.word(dtype, numbers));
      for (int j = 0; j < 4; ++j) run.in.push_back(source.accumulator(numbers));
    }
    runs.push_back(std::move(run));
  }
}

struct Wgmma {
  const char* name;
  Probe probe;
  DType dtype;
  u32 floats;
};

void add_wgmma(std::vector<ProbeRun>& runs, const Wgmma& wgmma) {
  constexpr i32 kSteps = 4;
  for (const Numbers numbers : kAllNumbers) {
    Source source(2);
    ProbeRun run{std::string(wgmma.name) + ", " + kNumberNames[static_cast<int>(numbers)],
                 wgmma.probe,
                 ProbeFamily::kWarpgroup,
                 {},
                 128 * wgmma.floats * kSteps,
                 kSteps};
    for (int i = 0; i < 10240; ++i) run.in.push_back(source.word(wgmma.dtype, numbers));
    for (u32 i = 0; i < 128 * wgmma.floats; ++i) run.in.push_back(source.accumulator(numbers));
    runs.push_back(std::move(run));
  }
}

std::vector<u32> random_words(u32 seed, std::size_t count) {
  Source source(seed);
  std::vector<u32> words(count);
  for (u32& word : words) word = source.word();
  return words;
}

// Rows of 16 bytes for 32 lanes: all different, in no order.
u32 row_of(u32 lane, u32 num_rows) { return (lane * 37 + 11) % num_rows; }

void add_matrices(std::vector<ProbeRun>& runs) {
  std::vector<u32> loads = random_words(3, 512);
  for (u32 lane = 0; lane < 32; ++lane) loads.push_back(row_of(lane, 128));
  runs.push_back({"ldmatrix", Probe::kLdmatrix, ProbeFamily::kWarp, loads, 128});
  runs.push_back({"ldmatrix.trans", Probe::kLdmatrixTransposed, ProbeFamily::kWarp, loads, 128});
  std::vector<u32> stores = random_words(4, 160);
  for (u32 lane = 0; lane < 32; ++lane) stores[5 * lane + 4] = row_of(lane, 128);
  runs.push_back({"stmatrix", Probe::kStmatrix, ProbeFamily::kWarp, stores, 512});
  runs.push_back({"stmatrix.trans", Probe::kStmatrixTransposed, ProbeFamily::kWarp, stores, 512});
}

// Every exponent and sign, random significands; then what is special.
std::vector<u32> floats(u32 seed, std::size_t count) {
  std::vector<u32> words = random_words(seed, count);
  const float special[] = {0,          -0.f,       INFINITY,
                           -INFINITY,  NAN,        0x1p-126f,
                           0x1p-149f,  -0x1p-130f, 0x1.fffffep127f,
                           65504.f,    65520.f,    0x1p-25f,
                           0x1.8p-24f, 1.f,        -1.f,
                           0x1.01p0f,  0x1.03p0f,  0x1.002p0f};
  for (std::size_t i = 0; i < std::size(special); ++i) {
    words[i] = __builtin_bit_cast(u32, special[i]);
    words[count - 1 - i] = words[i];
  }
  return words;
}

// In a range where the function says something.
std::vector<u32> arguments(u32 seed, std::size_t count, float low, float high) {
  std::vector<u32> words = random_words(seed, count);
  for (u32& word : words) {
    word = __builtin_bit_cast(u32, low + (high - low) * static_cast<float>(word >> 8) * 0x1p-24f);
  }
  return words;
}

void add_arithmetic(std::vector<ProbeRun>& runs) {
  constexpr i32 kCount = 12000;
  const auto add = [&runs](const char* name, Probe probe, std::vector<u32> in, std::size_t out) {
    runs.push_back({name, probe, ProbeFamily::kWarp, std::move(in), out, kCount});
  };
  add("cvt to bf16x2 and f16x2", Probe::kPack, floats(5, 2 * kCount), 2 * kCount);
  std::vector<u32> around = arguments(6, 2 * kCount, -70000, 70000);
  for (std::size_t i = 0; i < around.size(); i += 2) {  // into the subnormals of float16
    around[i] = __builtin_bit_cast(u32, __builtin_bit_cast(float, around[i]) * 0x1p-34f);
  }
  add("cvt in the range of f16", Probe::kPack, std::move(around), 2 * kCount);
  add("cvt to e4m3x2 and back", Probe::kPackE4M3, floats(23, 4 * kCount), 3 * kCount);
  add("cvt in the range of e4m3", Probe::kPackE4M3, arguments(24, 4 * kCount, -500, 500),
      3 * kCount);
  add("cvt in the subnormals of e4m3", Probe::kPackE4M3, arguments(25, 4 * kCount, -0.05f, 0.05f),
      3 * kCount);
  add("max, fma, mul", Probe::kExact, floats(7, 3 * kCount), 4 * kCount);
  add("max, fma, mul near 1", Probe::kExact, arguments(8, 3 * kCount, -2, 2), 4 * kCount);
  add("ex2.approx", Probe::kExp2, arguments(9, kCount, -130, 10), kCount);
  add("ex2.approx, special", Probe::kExp2, floats(10, kCount), kCount);
  add("lg2.approx", Probe::kLog2, arguments(11, kCount, 0.6f, 1000), kCount);
  add("rcp.approx", Probe::kReciprocal, arguments(12, kCount, 0.5f, 300), kCount);
  add("expf", Probe::kExp, arguments(13, kCount, -80, 80), kCount);
  add("logf", Probe::kLog, arguments(14, kCount, 0, 1000), kCount);
  add("tanhf", Probe::kTanh, arguments(15, kCount, -5, 5), kCount);
}

void add_copies(std::vector<ProbeRun>& runs) {
  const std::vector<i32> inside = {0, 0, 0, 0, 16, 8, 2, 1};
  const std::vector<i32> across = {0, 32, 1, 1, 64, 3, 2, 0, 16, 36, 0, 1};
  const std::vector<i32> before = {-8, -5, 1, 0};
  const std::vector<i32> beyond = {8, 4, 3, 0, 16, 4, 0, -1, 96, 0, 0, 0};
  std::vector<i32> corners = inside;
  for (const auto* more : {&across, &before, &beyond}) {
    corners.insert(corners.end(), more->begin(), more->end());
  }
  const i32 count = static_cast<i32>(corners.size() / 4);
  const std::size_t tensor_words =
      std::accumulate(std::begin(kProbeExtents), std::end(kProbeExtents), u64{1},
                      std::multiplies<>()) /
      2;
  std::vector<u32> loads(corners.begin(), corners.end());
  const std::vector<u32> tensor = random_words(16, tensor_words);
  loads.insert(loads.end(), tensor.begin(), tensor.end());
  const std::size_t row_words = static_cast<std::size_t>(count) * kProbeBoxRows;
  runs.push_back({"TMA load, 128-byte swizzle", Probe::kTensorLoad, ProbeFamily::kCopies, loads,
                  32 * row_words, count, 64, corners.size()});
  runs.push_back({"TMA load, no swizzle", Probe::kTensorLoadPlain, ProbeFamily::kCopies, loads,
                  4 * row_words, count, 8, corners.size()});
  runs.push_back(
      {"cp.async.bulk", Probe::kBulkLoad, ProbeFamily::kCopies, random_words(18, 256), 256});
  const auto add_store = [&](const char* name, const std::vector<i32>& at) {
    std::vector<u32> in(at.begin(), at.end());
    const std::size_t boxes = at.size() / 4;
    const std::vector<u32> numbers = random_words(17, boxes * kProbeBoxRows * 32);
    in.insert(in.end(), numbers.begin(), numbers.end());
    runs.push_back({name, Probe::kTensorStore, ProbeFamily::kCopies, std::move(in), tensor_words,
                    static_cast<i32>(boxes), 64, 0});
  };
  add_store("TMA store, inside", inside);
  add_store("TMA store, across the end", across);
}

void add_clusters(std::vector<ProbeRun>& runs) {
  const std::pair<const char*, Probe> probes[] = {
      {"ld.shared::cluster", Probe::kClusterAccess},
      {"st.shared::cluster", Probe::kClusterStore},
      {"st.async", Probe::kClusterStoreAsync},
      {"cp.async.bulk to shared::cluster", Probe::kClusterBulk},
      {"TMA multicast", Probe::kClusterMulticast}};
  const std::size_t tensor_words = 80 * 40 * 3 * 2 / 2;  // kProbeExtents
  for (const auto& [name, probe] : probes) {
    for (const i32 blocks : {2, 3, 8}) {
      const std::string sized = std::string(name) + ", cluster of " + std::to_string(blocks);
      runs.push_back({sized, probe, ProbeFamily::kCluster, random_words(22, tensor_words),
                      512 * static_cast<std::size_t>(blocks), blocks,
                      probe == Probe::kClusterMulticast ? 64u : 0u, 0});
    }
  }
}

}  // namespace

std::vector<ProbeRun> probe_runs() {
  std::vector<ProbeRun> runs;
  add_mma(runs, Probe::kMmaBFloat16, DType::kBFloat16, "mma m16n8k16 bf16");
  add_mma(runs, Probe::kMmaFloat16, DType::kFloat16, "mma m16n8k16 f16");
  add_mma(runs, Probe::kMmaTf32, DType::kFloat32, "mma m16n8k8 tf32");
  add_matrices(runs);
  std::vector<u32> lanes = random_words(19, 64);
  for (u32 lane = 0; lane < 32; ++lane) lanes[2 * lane + 1] %= 32;
  runs.push_back({"shuffles, votes", Probe::kShuffles, ProbeFamily::kWarp, lanes, 29 * 32});
  add_arithmetic(runs);
  std::vector<u32> addends;
  Source source(20);
  for (int i = 0; i < 32; ++i) addends.push_back(source.accumulator(Numbers::kIntegers));
  runs.push_back({"red, atom", Probe::kSums, ProbeFamily::kWarp, addends, 16});
  runs.push_back({"cp.async", Probe::kCpAsync, ProbeFamily::kWarp, random_words(21, 512), 512});
  add_wgmma(runs, {"wgmma n64, N x K", Probe::kWgmmaRows64, DType::kBFloat16, 32});
  add_wgmma(runs, {"wgmma n256, N x K", Probe::kWgmmaRows256, DType::kBFloat16, 128});
  add_wgmma(runs, {"wgmma n128, K x N", Probe::kWgmmaColumns, DType::kFloat16, 64});
  add_wgmma(runs, {"wgmma n128, registers", Probe::kWgmmaRegisters, DType::kFloat16, 64});
  add_wgmma(runs, {"wgmma n64, no swizzle", Probe::kWgmmaPlain, DType::kBFloat16, 32});
  add_wgmma(runs, {"wgmma e4m3 n128", Probe::kWgmmaE4M3, DType::kFloat8E4M3, 64});
  add_wgmma(runs,
            {"wgmma e4m3 n128, registers", Probe::kWgmmaE4M3Registers, DType::kFloat8E4M3, 64});
  add_copies(runs);
  add_clusters(runs);
  return runs;
}

}  // namespace fulmen::test
