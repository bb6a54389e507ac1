// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The CPU backend's one entry: what the host can see of lengths is checked before a byte is
// written, then the planned implementation runs. And which instruction set runs: the best one that
// was built and is present, or the one that FULMEN_CPU_ISA names, so that every level can be tested
// on one machine.

#include "cpu/backend.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include "core/error.h"
#include "core/request.h"
#include "core/validate.h"
#include "cpu/kernels.h"
#include "cpu/thread_pool.h"

namespace fulmen::cpu {
namespace {

struct Isa {
  const IsaTables* tables;
  bool (*present)();

  const char* name() const { return tables->float32.isa; }
};

#if defined(__x86_64__)
// __builtin_cpu_supports of clang 16 does not know it by name.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

// Tiles are large, so Linux wants to be asked before a process uses them: once, for all threads.
bool tiles_are_granted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// The processor has tiles and their products of bf16, the system saves them, and a product comes
// out right: a hypervisor may show what it does not run.
bool has_amx() {
  constexpr unsigned kTiles = 1u << 24 | 1u << 22;  // of leaf 7: AMX-TILE, AMX-BF16
  constexpr unsigned kSaved = 1u << 17 | 1u << 18;  // of XCR0: TILECFG, TILEDATA
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & kTiles) != kTiles) return false;
  asm volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  return (eax & kSaved) == kSaved && tiles_are_granted() && kTablesAmx.works();
}
#elif defined(__aarch64__)
bool has_neon_bf16() {
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16
  return (getauxval(AT_HWCAP2) & kBf16) != 0;
}
#endif

// Worst first.
constexpr Isa kIsas[] = {
    {&kTablesBaseline, [] { return true; }},
#if defined(__x86_64__)
    {&kTablesAvx2, has_avx2},
    {&kTablesAvx512, has_avx512},
    {&kTablesAvx512Bf16, has_avx512_bf16},
    {&kTablesAmx, has_amx},
#elif defined(__aarch64__)
    {&kTablesNeonBf16, has_neon_bf16},
#endif
};

[[noreturn]] void refuse(const char* asked) {
  std::string present;
  std::string built;
  for (const Isa& isa : kIsas) {
    built += std::string(built.empty() ? "" : ", ") + isa.name();
    if (isa.present()) present += std::string(present.empty() ? "" : ", ") + isa.name();
  }
  throw Error(Status::kUnsupported,
              sentence("FULMEN_CPU_ISA is \"", asked, "\"; this processor has ", present, " of ",
                       built, ", which this library was built with"));
}

const IsaTables& choose_tables() {
  const char* const asked = std::getenv("FULMEN_CPU_ISA");
  const bool any_will_do = !asked || !*asked;
  const IsaTables* best = nullptr;
  for (const Isa& isa : kIsas) {
    if ((any_will_do || std::strcmp(asked, isa.name()) == 0) && isa.present()) best = isa.tables;
  }
  if (!best) refuse(asked);
  return *best;
}

const IsaTables& tables() {
  static const IsaTables& chosen = choose_tables();  // tried again after a refusal
  return chosen;
}

}  // namespace

template <>
const Kernels<float>& kernels<float>() {
  return tables().float32;
}

template <>
const Kernels<double>& kernels<double>() {
  return tables().float64;
}

const PairKernels* pair_kernels(DType dtype) {
  if (dtype == DType::kBFloat16) return tables().pairs;
  return dtype == DType::kFloat16 ? tables().split_pairs : nullptr;
}

const IsaLoops& isa_loops() { return tables().loops; }

i64 run_loop(Loop loop, i64 steps, const void* buffer, i64 bytes) {
  const IsaLoops& loops = isa_loops();
  const int threads = num_threads();
  std::atomic<i64> done{0};
  if (loop == Loop::kPairProducts && !loops.pair_products) {
    throw Error(Status::kUnsupported, sentence("the instruction set in use, ", kernels<float>().isa,
                                               ", has no products of bfloat16"));
  }
  const i64 part = bytes / threads / loops.read_bytes * loops.read_bytes;
  for_each_task(threads, threads, [&](int, i64 thread) {
    if (loop == Loop::kMultiplyAdds) done += loops.multiply_adds(steps);
    if (loop == Loop::kPairProducts) done += loops.pair_products(steps);
    if (loop != Loop::kRead) return;
    for (i64 step = 0; step < steps; ++step) {
      loops.read(static_cast<const char*>(buffer) + thread * part, part);
      done += part;
    }
  });
  return done;
}

CpuDevice cpu_device() {
  const Kernels<float>& table = kernels<float>();
  const PairKernels* const pairs = pair_kernels(DType::kBFloat16);
  return {table.isa, static_cast<int>(table.vector_bytes), num_threads(),
          pairs && pairs->transposes_outputs};
}

std::vector<const char*> built_isas() {
  std::vector<const char*> names;
  for (const Isa& isa : kIsas) names.push_back(isa.name());
  return names;
}

namespace {

PlanCache<Plan>& plan_cache() {
  static PlanCache<Plan> cache;
  return cache;
}

void run_planned(const Plan& plan, const Problem& problem, void* workspace) {
  const bool forward = problem.operation == Operation::kForward;
  if (plan.implementation == Implementation::kScalar) {
    forward ? scalar_forward(problem) : scalar_backward(problem);
  } else {
    forward ? tiled_forward(plan, problem, workspace) : tiled_backward(plan, problem, workspace);
  }
}

}  // namespace

std::shared_ptr<const Plan> plan_of(const Request& request) {
  const CpuDevice device = cpu_device();
  const RequestKey key(request, device.num_threads);
  if (request.options.device_name == nullptr) {
    if (auto plan = plan_cache().find(key)) return plan;
  }
  auto plan = std::make_shared<const Plan>(choose(validate(request, Pointers::kChecked), device));
  plan_cache().insert(key, plan);
  return plan;
}

void run(const Plan& plan, const Problem& problem, void* workspace) {
  check_lengths(problem);
  check_pages(problem);
  check_blocks(problem);
  check_segments(problem);
  if (!problem.has(Array::kRng)) return run_planned(plan, problem, workspace);
  Problem drawn = problem;
  read_rng(drawn);
  run_planned(plan, drawn, workspace);
}

}  // namespace fulmen::cpu
