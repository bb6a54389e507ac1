// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Host side of the Hopper backward: a shared library called by backward.py through ctypes.
// q, k, v, o, dO and the results are (batch * heads, row, dim), contiguous, bf16; lse is float32,
// natural logarithm. `work` must hold backward_workspace() bytes. group_heads: heads that are
// walked together; 1 without a mask, 8 under the causal one.
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "ptx.h"
#include "wgmma.h"
#define SHARED_RAW extern __shared__ __align__(1024) uint8_t raw[];
#include "backward.cuh"

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static EncodeTiled encode;
static CUtensorMap tensor_map(void* data, int dim, int seq, int heads, int rows) {
  CUtensorMap map;
  const cuuint64_t sizes[3] = {cuuint64_t(dim), cuuint64_t(seq), cuuint64_t(heads)};
  const cuuint64_t strides[2] = {cuuint64_t(dim) * 2, cuuint64_t(dim) * 2 * seq};
  const cuuint32_t box[3] = {64, cuuint32_t(rows), 1}, ones[3] = {1, 1, 1};
  const int error = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, data, sizes, strides, box,
                           ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error) printf("tensor map: %d\n", error);
  return map;
}

struct Plan {
  int num_blocks, group_heads, lag, slots;
  size_t sums, rows, counters, bytes;
};
static Plan make_plan(int D, int heads, int seq, int group_heads) {
  Plan p;
  p.num_blocks = (seq + 127) / 128;
  p.group_heads = std::min(group_heads, heads);
  p.lag = p.group_heads * p.num_blocks + 165;  // a grid of 132 items and a quarter
  const int groups = 2 + (330 + p.group_heads * p.num_blocks - 1) / (p.group_heads * p.num_blocks);
  p.slots = std::min(heads, p.group_heads * groups);
  p.sums = size_t(p.slots) * p.num_blocks * 128 * D;
  p.rows = size_t(heads) * p.num_blocks * 128;
  p.counters = 4 + 2 * size_t(heads);
  p.bytes = (p.sums + 2 * p.rows + p.counters) * 4;
  return p;
}

template <int D, bool kCausal, bool kRagged>
static int launch(const Plan& plan, void* q, void* k, void* v, void* o, void* d_o, const float* lse,
                  void* dq, void* dk, void* dv, float* work, int heads, int seq, cudaStream_t st) {
  using C = BackwardConfig<D, kCausal, kRagged>;
  float *sums = work, *lse2 = sums + plan.sums, *delta = lse2 + plan.rows;
  int* counters = reinterpret_cast<int*>(delta + plan.rows);
  const float scale = 1 / std::sqrt(float(D));
  const BackwardParams p{seq,
                         heads,
                         plan.num_blocks,
                         heads * plan.num_blocks,
                         plan.lag,
                         plan.group_heads,
                         plan.slots,
                         scale * 1.4426950408889634f,
                         scale,
                         lse2,
                         delta,
                         sums,
                         static_cast<uint32_t*>(dq),
                         counters,
                         counters + 4,
                         counters + 4 + heads};
  const CUtensorMap mq = tensor_map(q, D, seq, heads, C::M),
                    mk = tensor_map(k, D, seq, heads, C::N),
                    mv = tensor_map(v, D, seq, heads, C::N),
                    mdo = tensor_map(d_o, D, seq, heads, C::M),
                    mdk = tensor_map(dk, D, seq, heads, 64),
                    mdv = tensor_map(dv, D, seq, heads, 64);
  auto kernel = backward<C>;
  static const int error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::smem_bytes);
  if (error) return error;
  prepare<D><<<132 * 8, 256, 0, st>>>(static_cast<const uint4*>(o), static_cast<const uint4*>(d_o),
                                      lse, lse2, delta, seq, plan.num_blocks * 128, heads,
                                      reinterpret_cast<float4*>(sums), int(plan.sums / 4), counters,
                                      int(plan.counters));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(132);
  config.blockDim = dim3(384);
  config.dynamicSmemBytes = C::smem_bytes;
  config.stream = st;
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, mq, mk, mv, mdo, mdk, mdv, p);
}

extern "C" size_t backward_workspace(int D, int heads, int seq, int group_heads) {
  return make_plan(D, heads, seq, group_heads).bytes;
}
extern "C" int backward_run(int D, int causal, void* q, void* k, void* v, void* o, void* d_o,
                            float* lse, void* dq, void* dk, void* dv, float* work, int heads,
                            int seq, int group_heads, void* stream) {
  if (!encode) {
    void* lib = dlopen("libcuda.so.1", RTLD_NOW);
    encode = reinterpret_cast<EncodeTiled>(dlsym(lib, "cuTensorMapEncodeTiled"));
  }
  const Plan plan = make_plan(D, heads, seq, group_heads);
  auto st = static_cast<cudaStream_t>(stream);
#define CASE(d, c, r)                                       \
  if (D == d && bool(causal) == c && (seq % 128 != 0) == r) \
    return launch<d, c, r>(plan, q, k, v, o, d_o, lse, dq, dk, dv, work, heads, seq, st);
  CASE(64, false, false)
  CASE(64, true, false)
  CASE(128, false, false)
  CASE(128, true, false)
  CASE(64, false, true)
  CASE(64, true, true)
  CASE(128, false, true)
  CASE(128, true, true)
  return -1;
}
