// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Launches cubins of forward_sm90 made by compile.py: a shared library of three functions for
// forward.py, which checks and times them. Not part of the product: src/cuda does this for users.
//   nvcc -std=c++20 -O2 -shared -Xcompiler -fPIC -I ../../src forward.cpp -o forward.so
// Loads libcuda at run time, so that it also builds where there is no GPU.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <vector>

#include "kernels/config.h"

namespace {

using fulmen::AttentionConfig;
using fulmen::ForwardArguments;
using fulmen::ForwardParams;
using fulmen::ForwardTensorMaps;

struct Driver {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);

  template <class Function>
  Function get(const char* name) const {
    return reinterpret_cast<Function>(dlsym(library, name));
  }
  decltype(&cuModuleLoad) load_module = get<decltype(&cuModuleLoad)>("cuModuleLoad");
  decltype(&cuModuleGetFunction) get_function =
      get<decltype(&cuModuleGetFunction)>("cuModuleGetFunction");
  decltype(&cuFuncSetAttribute) set_attribute =
      get<decltype(&cuFuncSetAttribute)>("cuFuncSetAttribute");
  decltype(&cuLaunchKernel) launch = get<decltype(&cuLaunchKernel)>("cuLaunchKernel");
  decltype(&cuTensorMapEncodeTiled) encode =
      get<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
};

const Driver& driver() {
  static const Driver loaded;
  return loaded;
}

struct Kernel {
  CUfunction function;
  AttentionConfig config;
};

std::vector<Kernel>& kernels() {
  static std::vector<Kernel> all;
  return all;
}

// A contiguous (batch, heads, rows, dim) tensor of 16-bit elements, read in boxes of (box_dims,
// box_rows).
bool encode(fulmen::TensorMap& map, bool bf16, void* data, int dim, int rows, int heads, int batch,
            int box_dims, int box_rows, bool swizzle) {
  static_assert(sizeof(fulmen::TensorMap) == sizeof(CUtensorMap));
  const cuuint64_t dims[] = {cuuint64_t(dim), cuuint64_t(rows), cuuint64_t(heads),
                             cuuint64_t(batch)};
  const cuuint64_t row_bytes = cuuint64_t(dim) * 2;
  const cuuint64_t strides[] = {row_bytes, row_bytes * rows, row_bytes * rows * heads};
  const cuuint32_t box[] = {cuuint32_t(box_dims), cuuint32_t(box_rows), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  return driver().encode(reinterpret_cast<CUtensorMap*>(&map),
                         bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                         4, data, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                         swizzle ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                         CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

// What forward.py says of a call; all lengths in elements.
struct ForwardCall {
  void *q, *k, *v, *o, *lse, *counter, *stream;
  int batch, heads_q, heads_kv, q_len, kv_len, causal, window_left, heads_per_group;
  float scale;
  int num_multiprocessors;
  int num_sequences;  // of packed tensors, self attention; 0: not packed
  const int* offsets;
};

// Loads kernel `name`; only what the host must know of its configuration is given. Returns a
// handle, or a negative CUresult.
extern "C" int fulmen_bench_load(const char* cubin, const char* name, int bf16, int d_qk, int d_v,
                                 int warpgroups, int kv_rows, int stages, int q_slots,
                                 int stage_output, int sequences, int swizzle, int split_dims) {
  Kernel kernel{};
  kernel.config.dtype = bf16 ? fulmen::DType::kBFloat16 : fulmen::DType::kFloat16;
  kernel.config.d_qk = d_qk;
  kernel.config.d_v = d_v;
  kernel.config.warpgroups = warpgroups;
  kernel.config.kv_rows = kv_rows;
  kernel.config.stages = stages;
  kernel.config.q_slots = q_slots;
  kernel.config.stage_output = stage_output != 0;
  kernel.config.sequences = sequences != 0;
  kernel.config.swizzle = swizzle != 0;
  kernel.config.split_dims = split_dims != 0;
  CUmodule module;
  if (CUresult bad = driver().load_module(&module, cubin)) return -bad;
  if (CUresult bad = driver().get_function(&kernel.function, module, name)) return -bad;
  if (CUresult bad =
          driver().set_attribute(kernel.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                 kernel.config.shared_bytes())) {
    return -bad;
  }
  kernels().push_back(kernel);
  return static_cast<int>(kernels().size()) - 1;
}

// Enqueues one forward; 0 or a CUresult.
extern "C" int fulmen_bench_forward(int handle, const ForwardCall* call) {
  const Kernel& kernel = kernels()[handle];
  const AttentionConfig& config = kernel.config;
  const bool bf16 = config.dtype == fulmen::DType::kBFloat16;
  ForwardArguments arguments{};
  ForwardTensorMaps& maps = arguments.maps;
  const int box_dims = config.swizzle ? 64 : 8;
  const auto map = [&](fulmen::TensorMap& map, void* data, int dim, int rows, int heads,
                       int box_dims, int box_rows) {
    return encode(map, bf16, data, dim, rows, heads, call->batch, box_dims, box_rows,
                  config.swizzle);
  };
  if (!map(maps.q, call->q, config.d_qk, call->q_len, call->heads_q, box_dims, 64) ||
      !map(maps.k, call->k, config.d_qk, call->kv_len, call->heads_kv, box_dims, config.kv_rows) ||
      !map(maps.v, call->v, config.d_v, call->kv_len, call->heads_kv, box_dims, config.kv_rows) ||
      !map(maps.o, call->o, config.d_v, call->q_len, call->heads_q, 64, 64)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  ForwardParams& params = arguments.params;
  params.batch = call->batch;
  params.heads_q = call->heads_q;
  params.heads_kv = call->heads_kv;
  params.shape = {call->q_len, call->kv_len, call->kv_len - call->q_len};
  params.mask.causal = call->causal != 0;
  params.mask.window_left = call->window_left;
  params.scale_log2 = call->scale * 1.44269504088896f;
  params.num_q_blocks = static_cast<int>(fulmen::ceil_div(call->q_len, config.q_rows()));
  params.heads_per_group = call->heads_per_group;
  params.scale = call->scale;
  const auto view = [&](void* data, fulmen::i64 dims) {
    const fulmen::i64 head = call->q_len * dims;
    return fulmen::ArrayView{static_cast<fulmen::u8*>(data),
                             {head * call->heads_q, head, dims, 1},
                             fulmen::DType::kFloat32};
  };
  params.attention.o = view(call->o, config.d_v);
  params.attention.lse = view(call->lse, 1);
  params.attention.dim_v = config.d_v;
  params.next_block = static_cast<fulmen::u32*>(call->counter);
  int blocks = params.num_q_blocks * call->heads_q * call->batch;
  if (call->num_sequences > 0) {
    fulmen::AttentionParams& attention = params.attention;
    attention.cu_q = {
        static_cast<fulmen::u8*>(const_cast<void*>(static_cast<const void*>(call->offsets))),
        {0, 0, 0, 1},
        fulmen::DType::kInt32};
    attention.cu_kv = attention.cu_q;
    attention.packed = attention.bottom_right = true;
    attention.num_sequences = params.batch = call->num_sequences;
    attention.q_rows = attention.kv_rows = call->q_len;
    blocks += call->num_sequences * call->heads_q;
  }
  void* launched[] = {&arguments};
  return driver().launch(kernel.function, fulmen::min(blocks, call->num_multiprocessors), 1, 1,
                         config.threads(), 1, 1, config.shared_bytes(),
                         static_cast<CUstream>(call->stream), launched, nullptr);
}
