// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The two kernels around the passes of a cascade.
//
// prepare_cascade: its blocks pack rows of q, of a group of heads one behind the other, a copy for
// each part of the shared keys, since the copy engine reads no array that was broadcast. The last
// block finds how many keys are shared, from lengths that no host sees, and says which pages each
// part has and where the own keys of every request begin.
//
// combine_cascade: o, lse and stats of every row from its parts over the shared keys and the one
// over the keys of its request, by the one law (softmax_state.cuh). One warp a row of a head: a
// lane has the state of one part, and four dims of the row at a time.
#pragma once

#include "kernels/attention/softmax_state.cuh"
#include "kernels/cascade/params.h"
#include "kernels/common/accurate_math.cuh"
#include "kernels/common/caches.cuh"
#include "kernels/ptx/memory.cuh"

namespace fulmen {

template <CascadeConfig kConfig>
struct CascadePrepare {
  static constexpr i32 kThreads = kConfig.num_threads;

  const CascadeParams& params;
  const AttentionParams& p = params.attention;
  i32 thread = static_cast<i32>(ptx::thread_index());

  // Vectors of 16 bytes, from where the caller has them to every part.
  void pack() const {
    const i64 vectors = p.dim_qk / 8, of_head = params.rows() * vectors;
    const i64 all = of_head * p.heads_q;
    const i64 step = i64{kThreads} * (ptx::num_blocks() - 1);
    for (i64 at = i64{ptx::block_index()} * kThreads + thread; at < all; at += step) {
      const i64 row = at % of_head / vectors;
      const i64 from = p.q.offset(row / p.q_rows, at / of_head, row % p.q_rows, at % vectors * 8);
      const ptx::U32x4 x = ptx::load_global_x4(reinterpret_cast<const u16*>(p.q.data) + from);
      for (i32 part = 0; part < params.num_parts; ++part) {
        ptx::store_global_x4(params.q + (part * all + at) * 8, x);
      }
    }
  }

  struct Shared {
    u32 first = ~0u;  // the request whose pages are read
    u32 keys = ~0u;

    void meet(const Shared& other) {
      first = min(first, other.first);
      keys = min(keys, other.keys);
    }
  };

  Shared shared_of_thread() const {
    Shared found;
#pragma unroll 1
    for (i32 i = thread; i < p.num_sequences; i += kThreads) {
      const CacheSequence sequence = load_cache_sequence(p, i);
      if (!shares_keys(sequence.shape)) continue;
      const i64 said = load_index(params.kv_shared, i * params.kv_shared.strides[3]);
      found.meet({static_cast<u32>(i), static_cast<u32>(shared_keys(sequence.shape, said))});
    }
    return found;
  }

  Shared shared_of_all() const {
    Shared found = shared_of_thread();
#pragma unroll
    for (u32 distance = 16; distance >= 1; distance /= 2) {
      found.meet({ptx::shuffle_xor(found.first, distance), ptx::shuffle_xor(found.keys, distance)});
    }
    const u32 words = ptx::dynamic_shared();
    if (thread % 32 == 0) {
      ptx::store_shared_x2(words + thread / 32 * 8, {{found.first, found.keys}});
    }
    ptx::block_sync();  // warps -> all
#pragma unroll
    for (i32 warp = 0; warp < kThreads / 32; ++warp) {
      found.meet({ptx::load_shared(words + warp * 8), ptx::load_shared(words + warp * 8 + 4)});
    }
    return found.first == ~0u ? Shared{0, 0} : found;
  }

  void divide() const {
    const Shared shared = shared_of_all();
    const CacheSequence first = load_cache_sequence(p, shared.first);
    const i64 keys = min(i64{shared.keys}, i64{first.shape.kv_len});
    const i64 page_rows = p.cache_layout.page_rows;
    const i64 pages = ceil_div(keys, page_rows);
    const i64 of_part = ceil_div(ceil_div(pages, i64{params.num_parts}), i64{params.chunk_pages}) *
                        params.chunk_pages;
    const i64 entries = first.kv_batch * p.page_table.strides[0] + first.first_page;
    for (i32 part = thread; part <= params.num_parts; part += kThreads) {
      const i64 begin = min(part * of_part, pages);
      params.page_begin[part] = static_cast<i32>(entries + begin);
      if (part == params.num_parts) break;
      const i64 end = min((part + 1) * of_part, pages);
      params.kv_lengths[part] =
          static_cast<i32>(min(end * page_rows, keys) - min(begin * page_rows, keys));
    }
    for (i32 i = thread; i < p.num_sequences; i += kThreads) {
      const i64 own = load_cache_sequence(p, i).shape.kv_len;
      params.kv_start[i] = static_cast<i32>(min(keys, own));
    }
  }

  void run() const {
    if (ptx::block_index() + 1 < ptx::num_blocks()) {
      pack();
    } else {
      divide();
    }
  }
};

template <CascadeConfig kConfig>
void prepare_cascade(const CascadeParams& params) {
  CascadePrepare<kConfig>{params}.run();
}

// ---- Combine ------------------------------------------------------------------------------------

struct CascadeCombine {
  using Math = AccurateMath<float>;
  static constexpr i32 kAtOnce = 4;  // parts that are read before the first is added

  const CascadeParams& params;
  const AttentionParams& p = params.attention;
  i64 row;  // of all requests
  i64 head;
  u32 lane = ptx::thread_index() % 32;

  // The request of the row, and its number there; a row behind the last one of its request has no
  // keys.
  struct QueryRow {
    CacheSequence sequence;
    i64 index;
    bool exists;
  };
  QueryRow query_row() const {
    i64 index = row / p.q_rows;
    if (p.packed.q) index = owner() - 1;
    if (index < 0) return {{}, 0, false};
    const CacheSequence sequence = load_cache_sequence(p, index);
    const i64 at = row % p.q_rows - sequence.q_begin;
    return {sequence, at, at >= 0 && at < sequence.shape.q_len && sequence.shape.kv_len > 0};
  }

  // How many packed requests begin at or before the row.
  i64 owner() const {
    i64 before = 0;
#pragma unroll 1
    for (i64 first = 0; first < p.num_sequences; first += 32) {
      const i64 i = first + lane;
      const bool begins = i < p.num_sequences && load_index(p.cu_q, i * p.cu_q.strides[3]) <= row;
      before += ptx::count_ones(ptx::ballot(begins));
    }
    return before;
  }

  i64 of_part(i64 part) const { return (part * p.heads_q + head) * params.rows() + row; }
  i64 own() const { return head * params.rows() + row; }

  // Of the part that the lane has; the own keys come behind the parts of the shared ones.
  SoftmaxState<Math> state_of_lane(bool exists) const {
    SoftmaxState<Math> state;
    const i64 part = lane;
    if (!exists || part > params.num_parts) return state;
    const float* const at = part < params.num_parts ? params.shared_stats + 2 * of_part(part)
                                                    : params.own_stats + 2 * own();
    state.row_max = at[0];
    state.row_sum = at[1];
    return state;
  }

  // A part over keys that none of the row's states has: a page that k and v do not have empties the
  // row, whatever else it sees. Asked only of parts that are empty.
  bool sees_bad_page(const QueryRow& at, i64 begin, i64 end) const {
    bool found = false;
    for (i64 j = begin + lane; j < end; j += 32) {
      found |= sees_key(p, at.sequence, at.index, j) && !has_page(p, key_row(p, at.sequence, j));
    }
    return ptx::any(found);
  }
  bool is_emptied(const QueryRow& at, const SoftmaxState<Math>& state) const {
    const u32 empty = ptx::ballot(lane <= u32(params.num_parts) && state.row_sum == 0);
    if (empty == 0) return false;
    i64 begin = 0;
#pragma unroll 1
    for (i32 part = 0; part <= params.num_parts; ++part) {
      const bool is_own = part == params.num_parts;
      const i64 end = is_own ? i64{at.sequence.shape.kv_len} : begin + params.kv_lengths[part];
      if ((empty >> part & 1) != 0 && sees_bad_page(at, begin, end)) return true;
      begin = end;
    }
    return false;
  }

  static float of_lane(float x, i32 lane) {
    return __builtin_bit_cast(float, ptx::shuffle(__builtin_bit_cast(i32, x), u32(lane)));
  }

  // The state of the row, all lanes alike.
  static SoftmaxState<Math> sum_of(SoftmaxState<Math> state) {
#pragma unroll
    for (u32 distance = 16; distance >= 1; distance /= 2) {
      state.merge(
          {ptx::shuffle_xor(state.row_max, distance), ptx::shuffle_xor(state.row_sum, distance)});
    }
    return {of_lane(state.row_max, 0), of_lane(state.row_sum, 0)};
  }

  void store(const float (&O)[4], i64 dim) const {
    const i64 at = p.o.offset(row / p.q_rows, head, row % p.q_rows, dim);
#pragma unroll
    for (i32 i = 0; i < 4; ++i) store_real(p.o, at + i * p.o.strides[3], O[i]);
  }

  // O = sum of exp(m_part - m) l_part / l O_part, and the sink in l. weight: of the part that the
  // lane has; below 0: it is empty, and its o says nothing.
  void add_parts(float weight) const {
#pragma unroll 1
    for (i64 dim = 4 * lane; dim - 4 * lane < p.dim_v; dim += 128) {
      float O[4] = {};
#pragma unroll 1
      for (i32 first = 0; first <= params.num_parts; first += kAtOnce) {
        ptx::F32x4 x[kAtOnce];
        float factor[kAtOnce];
#pragma unroll
        for (i32 i = 0; i < kAtOnce; ++i) {
          const i32 part = min(first + i, params.num_parts);
          factor[i] = of_lane(weight, part);
          const float* const from = part < params.num_parts
                                        ? params.shared_o + of_part(part) * p.dim_v
                                        : params.own_o + own() * p.dim_v;
          x[i] = dim < p.dim_v ? ptx::load_l2_x4(from + dim) : ptx::F32x4{};
        }
#pragma unroll
        for (i32 i = 0; i < kAtOnce; ++i) {
          if (first + i > params.num_parts || factor[i] < 0) continue;
#pragma unroll
          for (i32 e = 0; e < 4; ++e) O[e] += factor[i] * x[i].word[e];
        }
      }
      if (dim < p.dim_v) store(O, dim);
    }
  }

  void run() const {
    const QueryRow at = query_row();
    SoftmaxState<Math> state = state_of_lane(at.exists);
    if (at.exists && is_emptied(at, state)) state = {};
    const SoftmaxState<Math> all = sum_of(state);
    const float sink = p.sinks.present() ? load_real<float>(p.sinks, p.sinks.offset(0, head, 0, 0))
                                         : -kInfinity<float>;
    const float weight = all.weight(state.row_max) * state.row_sum * all.normalizer(sink);
    add_parts(state.row_sum == 0 ? -1.f : weight);
    if (lane != 0) return;
    const i64 batch = row / p.q_rows, index = row % p.q_rows;
    if (p.lse.present()) store_real(p.lse, p.lse.offset(batch, head, index, 0), all.lse());
    if (!p.stats.present()) return;
    store_real(p.stats, p.stats.offset(batch, head, index, 0), all.row_max);
    store_real(p.stats, p.stats.offset(batch, head, index, 1), all.row_sum);
  }
};

template <CascadeConfig kConfig>
void combine_cascade(const CascadeParams& params) {
  const i64 number =
      static_cast<i64>(ptx::block_index()) * (kConfig.num_threads / 32) + ptx::thread_index() / 32;
  if (number >= params.rows() * params.attention.heads_q) return;
  CascadeCombine{params, params.attention, number / params.attention.heads_q,
                 number % params.attention.heads_q}
      .run();
}

}  // namespace fulmen
