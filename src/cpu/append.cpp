// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// New rows of keys and values into caches, row by row: pairs of the first rotary_dim elements
// rotate in float32 (float64 for float64) and are rounded once, all others are copied as they are;
// of quantised caches all are divided by a scale and rounded, once too.
// A pair is read before it is written, so that q may be rotated in place.

#include "core/append.h"

#include <cmath>
#include <cstring>

#include "cpu/backend.h"
#include "cpu/thread_pool.h"

namespace fulmen::cpu {
namespace {

constexpr i64 kRowsPerTask = 16;  // enough work to claim a task for, few enough to share

// `count` elements that lie one stride apart.
struct Elements {
  char* data;
  i64 stride_bytes;
  i64 count;

  char* at(i64 index) const { return data + index * stride_bytes; }
};

Elements elements_of(const Tensor& tensor, i64 a, i64 b, i64 c) {
  return {tensor.address(a, b, c, 0), tensor.strides[3] * size_bytes(tensor.dtype),
          tensor.shape[3]};
}

template <class T>
void copy_each(const Elements& from, const Elements& to, i64 begin) {
  for (i64 d = begin; d < from.count; ++d) store_bytes(to.at(d), load_bytes<T>(from.at(d)));
}

// Elements from `begin` on, bit by bit.
void copy(const Elements& from, const Elements& to, i64 begin, i64 size) {
  if (from.data == to.data || begin >= from.count) return;  // in place
  if (from.stride_bytes == size && to.stride_bytes == size) {
    std::memcpy(to.at(begin), from.at(begin), static_cast<size_t>((from.count - begin) * size));
  } else if (size == 8) {
    copy_each<u64>(from, to, begin);
  } else if (size == 4) {
    copy_each<u32>(from, to, begin);
  } else {
    copy_each<u16>(from, to, begin);
  }
}

struct Float64 {
  using Real = double;
  using Type = double;
  static Real widen(Type x) { return x; }
  static Type narrow(Real x) { return x; }
};
struct Float32 {
  using Real = float;
  using Type = float;
  static Real widen(Type x) { return x; }
  static Type narrow(Real x) { return x; }
};
struct Float16 {
  using Real = float;
  using Type = f16;
  static Real widen(Type x) { return to_float(x); }
  static Type narrow(Real x) { return to_f16(x); }
};
struct BFloat16 {
  using Real = float;
  using Type = bf16;
  static Real widen(Type x) { return to_float(x); }
  static Type narrow(Real x) { return to_bf16(x); }
};

// Calls call(Element()) for the type of k, v and q.
template <class Call>
void with_element(DType dtype, const Call& call) {
  switch (dtype) {
    case DType::kFloat64:
      return call(Float64());
    case DType::kFloat32:
      return call(Float32());
    case DType::kFloat16:
      return call(Float16());
    default:
      return call(BFloat16());
  }
}

// (x0, x1) = (x0 cos - x1 sin, x1 cos + x0 sin);  put(d, element d) of each.
template <class Element, class Put>
void rotate_pairs(const AppendProblem& problem, const Elements& from, i64 position,
                  const Put& put) {
  using Real = typename Element::Real;
  using Type = typename Element::Type;
  const i64 pairs = problem.cos.shape[3];
  for (i64 j = 0; j < pairs; ++j) {
    const i64 first = problem.rotary_begin() + (problem.interleaved ? 2 * j : j);
    const i64 second = first + (problem.interleaved ? 1 : pairs);
    const Real cos = static_cast<Real>(problem.cos.real(0, 0, position, j));
    const Real sin = static_cast<Real>(problem.sin.real(0, 0, position, j));
    const Real x0 = Element::widen(load_bytes<Type>(from.at(first)));
    const Real x1 = Element::widen(load_bytes<Type>(from.at(second)));
    put(first, x0 * cos - x1 * sin);
    put(second, x1 * cos + x0 * sin);
  }
}

// position < 0: nothing rotates.
void write(const AppendProblem& problem, const Elements& from, const Elements& to, i64 position) {
  if (position >= 0) {
    with_element(problem.dtype, [&]<class Element>(Element) {
      rotate_pairs<Element>(problem, from, position, [&](i64 d, typename Element::Real x) {
        store_bytes(to.at(d), Element::narrow(x));
      });
    });
  }
  Elements before = from;  // of those that rotate
  before.count = position >= 0 ? problem.rotary_begin() : 0;
  copy(before, to, 0, size_bytes(problem.dtype));
  const i64 behind = problem.rotary_begin() + problem.rotary_dim();
  copy(from, to, position >= 0 ? behind : 0, size_bytes(problem.dtype));
}

void store_quantised(char* address, DType dtype, float x) {
  switch (dtype) {
    case DType::kFloat8E4M3:
      return store_bytes(address, to_e4m3(x));
    case DType::kFloat8E5M2:
      return store_bytes(address, to_e5m2(x));
    default:
      return store_bytes(address, to_int8(x));
  }
}

// The same into a quantised cache.
void quantise(const AppendProblem& problem, const Elements& from, const Elements& to, float scale,
              i64 position) {
  const DType stored = problem.k_cache.dtype;
  const auto put = [&](i64 d, float x) { store_quantised(to.at(d), stored, x / scale); };
  with_element(problem.dtype, [&]<class Element>(Element) {
    if constexpr (sizeof(typename Element::Real) == sizeof(float)) {
      if (position >= 0) rotate_pairs<Element>(problem, from, position, put);
      for (i64 d = position >= 0 ? problem.rotary_dim() : 0; d < from.count; ++d) {
        put(d, Element::widen(load_bytes<typename Element::Type>(from.at(d))));
      }
    }
  });
}

// A record: groups of e4m3 with a scale each, then what rotates as bfloat16.
void write_record(const AppendProblem& problem, const Elements& from, const AppendRow& to, i64 head,
                  i64 position) {
  float x[kRecord656.dims];
  with_element(problem.dtype, [&]<class Element>(Element) {
    for (i64 d = 0; d < from.count; ++d) {
      x[d] = static_cast<float>(Element::widen(load_bytes<typename Element::Type>(from.at(d))));
    }
    if (position < 0) return;
    rotate_pairs<Element>(problem, from, position, [&](i64 d, typename Element::Real value) {
      x[d] = static_cast<float>(value);
    });
  });
  const Tensor& cache = problem.k_cache;
  char* const page = cache.address(to.page, head, 0, 0);
  const RecordRow<u8> place(problem.dim_qk, reinterpret_cast<u8*>(page), to.page_row,
                            cache.shape[2], cache.strides[2]);
  const RecordLayout& layout = place.layout;
  for (i64 group = 0; group < layout.stored() / layout.group; ++group) {
    const float* const of_group = x + group * layout.group;
    float largest = 0;
    for (i64 d = 0; d < layout.group; ++d) largest = std::fmax(largest, std::fabs(of_group[d]));
    const u32 exponent = record_exponent(largest);
    const float scale = power_of(static_cast<u8>(exponent));
    for (i64 d = 0; d < layout.group; ++d) {
      place.stored[group * layout.group + d] = to_e4m3(of_group[d] / scale).bits;
    }
    if (layout.has_page_scales()) {
      place.scales[group] = static_cast<u8>(exponent);
    } else {
      store_bytes(place.scales + 4 * group, scale);
    }
  }
  for (i64 d = 0; d < kRecordRotary; ++d) {
    store_bytes(place.rotary + 2 * d, to_bf16(x[layout.stored() + d]));
  }
}

void append_head(const AppendProblem& problem, const Elements& from, const Tensor& cache,
                 const Tensor& scales, const AppendRow& to, i64 head, i64 position) {
  const Elements place = elements_of(cache, to.page, head, to.page_row);
  if (!problem.quantises()) return write(problem, from, place, position);
  const double scale = scales.present() ? scales.real(to.page, head, to.page_row, 0) : 1.0;
  quantise(problem, from, place, static_cast<float>(scale), position);
}

void append_row(const AppendProblem& problem, i64 sequence, i64 row) {
  const AppendRequest request = request_of(problem, sequence);
  if (row < request.begin || row >= request.end) return;  // past the last offset
  const AppendRow to = row_of(problem, request, sequence, row);
  const i64 batch = problem.cu_new.present() ? 0 : sequence;
  for (i64 head = 0; to.page >= 0 && head < problem.kv_heads; ++head) {
    if (problem.has_records()) {
      write_record(problem, elements_of(problem.k, batch, head, row), to, head, to.position);
      continue;
    }
    append_head(problem, elements_of(problem.k, batch, head, row), problem.k_cache, problem.k_scale,
                to, head, to.position);
    append_head(problem, elements_of(problem.v, batch, head, row), problem.v_cache, problem.v_scale,
                to, head, -1);
  }
  for (i64 head = 0; problem.q.present() && head < problem.heads; ++head) {
    write(problem, elements_of(problem.q, batch, head, row),
          elements_of(problem.q_out, batch, head, row), to.position);
  }
}

}  // namespace

void append(const AppendProblem& problem) {
  check_contents(problem);
  const i64 rows = problem.extents.rows;
  const i64 all_rows = problem.batch * rows;
  for_each_task(num_threads(), ceil_div(all_rows, kRowsPerTask), [&](int, i64 task) {
    const i64 end = min((task + 1) * kRowsPerTask, all_rows);
    for (i64 number = task * kRowsPerTask; number < end; ++number) {
      const i64 row = number % rows;
      const bool packed = problem.cu_new.present();
      append_row(problem, packed ? find_sequence(problem, row) : number / rows, row);
    }
  });
}

}  // namespace fulmen::cpu
