// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// How long the host is busy with one call through C, on a GPU: B 1, H 8, S 128, D 64, where the
// kernel is shorter than its launch, and one row of 32 heads over a cache of 4,096 keys. Calls are
// made in bursts with a wait between them, so that the driver's queue is never full. Beside them,
// what the driver alone takes: a launch of an empty kernel with parameters of several sizes, a
// question about a pointer, the current context, memory from its pool and back. host.py builds and
// runs it.
//
//   host calls            one JSON object a line: case, operation, implementation, dtype, times
//   host first            the first forward and backward call of this process, and the second
#include <dlfcn.h>
#include <fulmen/fulmen.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr int kRounds = 60;
constexpr int kCallsOfRound = 50;

double now() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

[[noreturn]] void stop(const std::string& text) {
  std::fprintf(stderr, "host: %s\n", text.c_str());
  std::exit(1);
}

// A function of the driver by name: this program needs no CUDA headers.
template <class... Arguments>
using DriverFunction = int (*)(Arguments...);

template <class... Arguments>
DriverFunction<Arguments...> driver_function(const char* name) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver == nullptr) stop("no libcuda.so.1");
  const auto function = reinterpret_cast<DriverFunction<Arguments...>>(dlsym(driver, name));
  if (function == nullptr) stop(std::string("libcuda has no ") + name);
  return function;
}

template <class... Arguments>
void cuda(const char* name, Arguments... arguments) {
  if (const int result = driver_function<Arguments...>(name)(arguments...)) {
    stop(std::string(name) + " returned " + std::to_string(result));
  }
}

void check(fulmen_status status) {
  if (status != FULMEN_OK) stop(fulmen_last_error());
}

using DevicePointer = unsigned long long;

DevicePointer allocate(size_t bytes) {
  DevicePointer pointer = 0;
  cuda("cuMemAlloc_v2", &pointer, bytes);
  cuda("cuMemsetD8_v2", pointer, static_cast<unsigned char>(0), bytes);
  return pointer;
}

// Arrays of zeros: times do not depend on values.
struct Call {
  fulmen_problem problem;
  fulmen_tensors tensors;

  Call() {
    fulmen_problem_init(&problem);
    fulmen_tensors_init(&tensors);
  }

  Call(fulmen_dtype dtype, int64_t rows) : Call() {
    using Member = fulmen_tensor fulmen_tensors::*;
    for (const Member member :
         {&fulmen_tensors::q, &fulmen_tensors::k, &fulmen_tensors::v, &fulmen_tensors::o,
          &fulmen_tensors::dout, &fulmen_tensors::dq, &fulmen_tensors::dk, &fulmen_tensors::dv}) {
      put(tensors.*member, dtype, {1, 8, rows, 64});
    }
    put(tensors.stats, FULMEN_FLOAT32, {1, 8, rows, 2});
  }

  static void put(fulmen_tensor& tensor, fulmen_dtype dtype, const std::vector<int64_t>& shape) {
    size_t bytes = 4;
    for (const int64_t extent : shape) bytes *= static_cast<size_t>(extent);
    void* const memory = reinterpret_cast<void*>(allocate(bytes));
    check(fulmen_tensor_init(&tensor, memory, dtype, static_cast<int32_t>(shape.size()),
                             shape.data()));
  }
};

void copy_to(const fulmen_tensor& tensor, const void* source, size_t bytes) {
  cuda("cuMemcpyHtoD_v2", reinterpret_cast<DevicePointer>(tensor.data), source, bytes);
}

// Microseconds of one call, from bursts.
template <class Function>
void measure(const std::string& what, const Function& call) {
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) {
    cuda("cuCtxSynchronize");
    const double start = now();
    for (int i = 0; i < kCallsOfRound; ++i) call();
    times.push_back((now() - start) / kCallsOfRound * 1e6);
  }
  cuda("cuCtxSynchronize");
  std::sort(times.begin(), times.end());
  std::printf("{%s, \"p50_us\": %.3f, \"p99_us\": %.3f, \"min_us\": %.3f}\n", what.c_str(),
              times[kRounds / 2], times[kRounds - 1], times[0]);
}

std::string said(const char* path, const char* operation, const char* implementation,
                 const char* dtype) {
  return std::string("\"case\": \"") + path + "\", \"op\": \"" + operation +
         "\", \"implementation\": \"" + implementation + "\", \"dtype\": \"" + dtype + "\"";
}

struct Operation {
  const char* name;
  fulmen_operation of_plan;
  decltype(&fulmen_attention) simple;
  decltype(&fulmen_forward) planned;
};

constexpr Operation kForward = {"forward", FULMEN_OPERATION_FORWARD, fulmen_attention,
                                fulmen_forward};
constexpr Operation kBackward = {"backward", FULMEN_OPERATION_BACKWARD, fulmen_attention_backward,
                                 fulmen_backward};

std::string chosen_for(const Call& call, const Operation& operation) {
  char text[16384];
  check(
      fulmen_explain(&call.problem, &call.tensors, operation.of_plan, text, sizeof text, nullptr));
  const char* const key = "\"implementation\": \"";
  const char* at = std::strstr(text, key);
  if (at == nullptr) return "?";
  at += std::strlen(key);
  return std::string(at, std::strcspn(at, "\""));
}

// `of`: what call it is, where that is not one of whole sequences.
void measure_call(const Call& call, const char* dtype_name, const Operation& operation,
                  const std::string& of, void* stream) {
  fulmen_plan* plan = nullptr;
  check(fulmen_plan_create(&call.problem, &call.tensors, operation.of_plan, &plan));
  const size_t bytes = fulmen_plan_workspace_bytes(plan);
  void* const workspace = bytes == 0 ? nullptr : reinterpret_cast<void*>(allocate(bytes));
  const std::string implementation = chosen_for(call, operation);
  const auto what = [&](const std::string& path) {
    return said((path + of).c_str(), operation.name, implementation.c_str(), dtype_name);
  };
  check(operation.simple(&call.problem, &call.tensors, stream));
  measure(what("host time of a call, C, simple call"),
          [&] { operation.simple(&call.problem, &call.tensors, stream); });
  measure(what("host time of a call, C, planned run"),
          [&] { operation.planned(plan, &call.tensors, workspace, bytes, stream); });
  fulmen_plan_destroy(plan);
}

void measure_operation(fulmen_dtype dtype, const Operation& operation, void* stream) {
  Call call(dtype, 128);
  if (operation.of_plan == FULMEN_OPERATION_FORWARD) {
    fulmen_tensor_init(&call.tensors.stats, nullptr, FULMEN_FLOAT32, 0, nullptr);
  }
  measure_call(call, dtype == FULMEN_FLOAT32 ? "float32" : "bfloat16", operation, "", stream);
}

// One row over a cache: contiguous, with a length, in pages of 16 rows.
void measure_decode(void* stream) {
  constexpr int64_t kKeys = 4096, kPage = 16, kPages = kKeys / kPage;
  static int32_t pages[kPages];
  for (int32_t i = 0; i < kPages; ++i) pages[i] = i;
  const int32_t length = kKeys;
  for (const char* const of : {", decode", ", decode with a length", ", decode in pages"}) {
    Call call;
    const bool is_paged = std::strstr(of, "pages") != nullptr;
    const int64_t entries = is_paged ? kPages : 1, rows = is_paged ? kPage : kKeys;
    fulmen_tensors& arrays = call.tensors;
    for (fulmen_tensor* const x : {&arrays.q, &arrays.o}) {
      Call::put(*x, FULMEN_BFLOAT16, {1, 32, 1, 128});
    }
    for (fulmen_tensor* const x : {&arrays.k, &arrays.v}) {
      Call::put(*x, FULMEN_BFLOAT16, {entries, 8, rows, 128});
    }
    if (is_paged || std::strstr(of, "length") != nullptr) {
      Call::put(arrays.kv_lengths, FULMEN_INT32, {1});
      copy_to(arrays.kv_lengths, &length, sizeof length);
    }
    if (is_paged) {
      Call::put(arrays.page_table, FULMEN_INT32, {1, kPages});
      copy_to(arrays.page_table, pages, sizeof pages);
    }
    measure_call(call, "bfloat16", kForward, of, stream);
  }
}

// One thread that returns at once, with that many bytes of parameters.
void* empty_kernel(int bytes) {
  const std::string text = ".version 7.8\n.target sm_75\n.address_size 64\n.visible .entry e(" +
                           (".param .align 64 .b8 p[" + std::to_string(bytes) + "]") +
                           ")\n{\n  ret;\n}\n";
  void* module = nullptr;
  void* function = nullptr;
  cuda("cuModuleLoadData", &module, text.c_str());
  cuda("cuModuleGetFunction", &function, module, "e");
  return function;
}

void measure_driver(void* stream) {
  static char parameters[4096];
  void* arguments[] = {parameters};
  const auto launch = driver_function<void*, unsigned, unsigned, unsigned, unsigned, unsigned,
                                      unsigned, unsigned, void*, void**, void**>("cuLaunchKernel");
  for (const int bytes : {64, 1024, 2048, 3072}) {
    void* const kernel = empty_kernel(bytes);
    const auto what = "driver alone, launch with " + std::to_string(bytes) + " bytes of parameters";
    measure(said(what.c_str(), "", "", ""),
            [&] { launch(kernel, 8, 1, 1, 128, 1, 1, 0, stream, arguments, nullptr); });
  }
  const auto ask = driver_function<unsigned, int*, void**, DevicePointer>("cuPointerGetAttributes");
  const DevicePointer pointer = allocate(1 << 16);
  unsigned type = 0;
  unsigned managed = 0;
  int device = 0;
  void* values[] = {&type, &managed, &device};
  int attributes[] = {2, 8, 9};
  measure(said("driver alone, where a pointer is", "", "", ""),
          [&] { ask(3, attributes, values, pointer); });
  const auto current = driver_function<void**>("cuCtxGetCurrent");
  void* context = nullptr;
  measure(said("driver alone, the current context", "", "", ""), [&] { current(&context); });
  const auto take = driver_function<DevicePointer*, size_t, void*>("cuMemAllocAsync");
  const auto give = driver_function<DevicePointer, void*>("cuMemFreeAsync");
  measure(said("driver alone, memory from its pool and back", "", "", ""), [&] {
    DevicePointer memory = 0;
    take(&memory, size_t{1} << 22, stream);
    give(memory, stream);
  });
}

void measure_calls() {
  void* stream = nullptr;
  cuda("cuStreamCreate", &stream, 1u);
  for (const fulmen_dtype dtype : {FULMEN_BFLOAT16, FULMEN_FLOAT32}) {
    measure_operation(dtype, kForward, stream);
    measure_operation(dtype, kBackward, stream);
  }
  measure_decode(stream);
  measure_driver(stream);
}

void measure_first() {
  Call call(FULMEN_BFLOAT16, 512);
  call.problem.causal = 1;
  for (const Operation& operation : {kForward, kBackward}) {
    std::vector<double> times;
    for (int i = 0; i < 2; ++i) {
      const double start = now();
      check(operation.simple(&call.problem, &call.tensors, nullptr));
      cuda("cuCtxSynchronize");
      times.push_back((now() - start) * 1e6);
    }
    const std::string implementation = chosen_for(call, operation);
    for (const char* const path : {"first call of a process, C", "second call of a process, C"}) {
      const auto what = said(path, operation.name, implementation.c_str(), "bfloat16");
      std::printf("{%s, \"p50_us\": %.3f}\n", what.c_str(), times[path[0] == 's']);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) stop("say calls or first");
  int device = 0;
  void* context = nullptr;
  cuda("cuInit", 0u);
  cuda("cuDeviceGet", &device, 0);
  cuda("cuDevicePrimaryCtxRetain", &context, device);
  cuda("cuCtxSetCurrent", context);
  std::strcmp(argv[1], "first") == 0 ? measure_first() : measure_calls();
}
