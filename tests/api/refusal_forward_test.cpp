// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Every precondition of a dense forward call, for calls and for plans.
#include <cmath>

#include "api/refusal.h"

namespace fulmen::test {
namespace {

using T = fulmen_tensors;

const Refusal kForward[] = {
    // presence
    {"no q",
     [](TestCall& c) { c.remove(&T::q); },
     FULMEN_ERROR_ARGUMENT,
     {"q is missing", "(batch"}},
    {"no k", [](TestCall& c) { c.remove(&T::k); }, FULMEN_ERROR_ARGUMENT, {"k is missing"}},
    {"no v", [](TestCall& c) { c.remove(&T::v); }, FULMEN_ERROR_ARGUMENT, {"v is missing"}},
    {"no o", [](TestCall& c) { c.remove(&T::o); }, FULMEN_ERROR_ARGUMENT, {"o is missing"}},
    {"cu_q alone",
     [](TestCall& c) { c.indices(&T::cu_q, {0, 3}); },
     FULMEN_ERROR_ARGUMENT,
     {"cu_q is given without cu_kv"}},
    {"cu_kv alone",
     [](TestCall& c) { c.indices(&T::cu_kv, {0, 3}); },
     FULMEN_ERROR_ARGUMENT,
     {"cu_kv is given without cu_q"}},
    {"q_ids alone",
     [](TestCall& c) { c.indices(&T::q_ids, {0, 0, 1}); },
     FULMEN_ERROR_ARGUMENT,
     {"q_ids is given without kv_ids"}},
    {"kv_ids alone",
     [](TestCall& c) { c.indices(&T::kv_ids, {0, 0, 1, 1, 1}); },
     FULMEN_ERROR_ARGUMENT,
     {"kv_ids is given without q_ids"}},

    // ranks, extents, strides, pointers
    {"rank 1 q",
     [](TestCall& c) { c.tensors.q.rank = 1; },
     FULMEN_ERROR_SHAPE,
     {"q has rank 1", "2 to 4"}},
    {"rank 5 q",
     [](TestCall& c) { c.tensors.q.rank = 5; },
     FULMEN_ERROR_SHAPE,
     {"q has rank 5", "2 to 4"}},
    {"rank -1 q",
     [](TestCall& c) { c.tensors.q.rank = -1; },
     FULMEN_ERROR_SHAPE,
     {"q has rank -1"}},
    {"scalar mask",
     [](TestCall& c) { c.output(&T::mask, FULMEN_BOOL, {}); },
     FULMEN_ERROR_SHAPE,
     {"mask has rank 0", "1 to 4"}},
    {"rank 2 sinks",
     [](TestCall& c) { c.input(&T::sinks, FULMEN_FLOAT32, {1, 4}); },
     FULMEN_ERROR_SHAPE,
     {"sinks has rank 2", "allowed is 1"}},
    {"negative extent",
     [](TestCall& c) { c.tensors.k.shape[2] = -5; },
     FULMEN_ERROR_SHAPE,
     {"k has extent -5 on axis 2", "0 to 2147483647"}},
    {"extent beyond 2^31 - 1",
     [](TestCall& c) { c.tensors.k.shape[2] = int64_t{1} << 31; },
     FULMEN_ERROR_SHAPE,
     {"k has extent 2147483648", "0 to 2147483647"}},
    {"negative stride",
     [](TestCall& c) { c.tensors.v.strides[2] = -6; },
     FULMEN_ERROR_ARGUMENT,
     {"v has stride -6 on axis 2", "not negative"}},
    {"strides beyond memory",
     [](TestCall& c) { c.tensors.k.strides[0] = int64_t{1} << 61; },
     FULMEN_ERROR_SHAPE,
     {"k reaches 2^62 bytes"}},
    {"strides beyond 64 bits",
     [](TestCall& c) { c.tensors.k.strides[2] = int64_t{1} << 62; },
     FULMEN_ERROR_SHAPE,
     {"k reaches 2^62 bytes"}},
    {"null k",
     [](TestCall& c) { c.tensors.k.data = nullptr; },
     FULMEN_ERROR_ARGUMENT,
     {"k has elements, shape (2, 2, 5, 4)", "null"}},
    {"null o",
     [](TestCall& c) { c.tensors.o.data = nullptr; },
     FULMEN_ERROR_ARGUMENT,
     {"o has elements", "null"}},

    // dtypes
    {"integer q",
     [](TestCall& c) { c.tensors.q.dtype = FULMEN_INT32; },
     FULMEN_ERROR_DTYPE,
     {"q is int32", "float64, float32, float16 or bfloat16"}},
    {"dtype number 42",
     [](TestCall& c) { set_number(c.tensors.q.dtype, 42); },
     FULMEN_ERROR_DTYPE,
     {"q has dtype number 42", "1 to 7"}},
    {"dtype number 0",
     [](TestCall& c) { set_number(c.tensors.v.dtype, 0); },
     FULMEN_ERROR_DTYPE,
     {"v has dtype number 0"}},
    {"mixed k",
     [](TestCall& c) { c.tensors.k.dtype = FULMEN_FLOAT16; },
     FULMEN_ERROR_DTYPE,
     {"k is float16 where q is float32", "the dtype of q"}},
    {"mixed v",
     [](TestCall& c) { c.tensors.v.dtype = FULMEN_BFLOAT16; },
     FULMEN_ERROR_DTYPE,
     {"v is bfloat16 where q is float32"}},
    {"o of another width",
     [](TestCall& c) { c.tensors.o.dtype = FULMEN_FLOAT16; },
     FULMEN_ERROR_DTYPE,
     {"o is float16 where q is float32", "or float32"}},
    {"half lse",
     [](TestCall& c) { c.tensors.lse.dtype = FULMEN_FLOAT16; },
     FULMEN_ERROR_DTYPE,
     {"lse is float16", "float32"}},
    {"wide stats",
     [](TestCall& c) { c.tensors.stats.dtype = FULMEN_FLOAT64; },
     FULMEN_ERROR_DTYPE,
     {"stats is float64 where q is float32"}},
    {"float mask",
     [](TestCall& c) { c.input(&T::mask, FULMEN_FLOAT32, {5}); },
     FULMEN_ERROR_DTYPE,
     {"mask is float32", "bool"}},
    {"half bias",
     [](TestCall& c) { c.input(&T::bias, FULMEN_FLOAT16, {5}); },
     FULMEN_ERROR_DTYPE,
     {"bias is float16 where q is float32"}},
    {"wide slopes",
     [](TestCall& c) { c.input(&T::alibi_slopes, FULMEN_FLOAT64, {4}); },
     FULMEN_ERROR_DTYPE,
     {"alibi_slopes is float64"}},
    {"half sinks",
     [](TestCall& c) { c.input(&T::sinks, FULMEN_BFLOAT16, {4}); },
     FULMEN_ERROR_DTYPE,
     {"sinks is bfloat16"}},
    {"float lengths",
     [](TestCall& c) { c.input(&T::q_lengths, FULMEN_FLOAT32, {2}); },
     FULMEN_ERROR_DTYPE,
     {"q_lengths is float32", "int32 or int64"}},
    {"bool ids",
     [](TestCall& c) {
       c.indices(&T::kv_ids, {0, 0, 0, 0, 0});
       c.indices(&T::q_ids, {0, 0, 0}).dtype = FULMEN_BOOL;
     },
     FULMEN_ERROR_DTYPE,
     {"q_ids is bool", "int32 or int64"}},

    // shapes
    {"batch of k",
     [](TestCall& c) { set_shape(c.tensors.k, {1, 2, 5, 4}); },
     FULMEN_ERROR_SHAPE,
     {"k has shape (1, 2, 5, 4)", "batch = 2", "batch differs"}},
    {"missing batch of v",
     [](TestCall& c) { set_shape(c.tensors.v, {2, 5, 6}); },
     FULMEN_ERROR_SHAPE,
     {"v has shape (2, 5, 6)", "batch = 2"}},
    {"heads of v",
     [](TestCall& c) { set_shape(c.tensors.v, {2, 1, 5, 6}); },
     FULMEN_ERROR_SHAPE,
     {"v has shape (2, 1, 5, 6)", "kv_head = 2", "kv_head differs"}},
    {"rows of v",
     [](TestCall& c) { set_shape(c.tensors.v, {2, 2, 4, 6}); },
     FULMEN_ERROR_SHAPE,
     {"v has shape (2, 2, 4, 6)", "kv_row = 5", "kv_row differs"}},
    {"dim of k",
     [](TestCall& c) { set_shape(c.tensors.k, {2, 2, 5, 3}); },
     FULMEN_ERROR_SHAPE,
     {"k has shape (2, 2, 5, 3)", "dim_qk = 4"}},
    {"dim of o",
     [](TestCall& c) { set_shape(c.tensors.o, {2, 4, 3, 4}); },
     FULMEN_ERROR_SHAPE,
     {"o has shape (2, 4, 3, 4)", "dim_v = 6", "dim_v differs"}},
    {"heads of lse",
     [](TestCall& c) { set_shape(c.tensors.lse, {2, 2, 3}); },
     FULMEN_ERROR_SHAPE,
     {"lse has shape (2, 2, 3)", "head = 4"}},
    {"single stats",
     [](TestCall& c) { set_shape(c.tensors.stats, {2, 4, 3, 1}); },
     FULMEN_ERROR_SHAPE,
     {"stats has shape (2, 4, 3, 1)", "pair = 2"}},
    {"3 heads on 2",
     [](TestCall& c) { set_shape(c.tensors.q, {2, 3, 3, 4}); },
     FULMEN_ERROR_SHAPE,
     {"q has 3 heads and k 2", "multiple", "2 and 4"}},
    {"1 head on 2",
     [](TestCall& c) { set_shape(c.tensors.q, {2, 1, 3, 4}); },
     FULMEN_ERROR_SHAPE,
     {"q has 1 heads and k 2", "nearest is 2"}},
    {"4 heads on none",
     [](TestCall& c) { set_shape(c.tensors.k, {2, 0, 5, 4}); },
     FULMEN_ERROR_SHAPE,
     {"q has 4 heads and k 0"}},
    {"head dim 577",
     [](TestCall& c) {
       c.tensors.q.shape[3] = c.tensors.k.shape[3] = 577;
       c.tensors.q.strides[3] = c.tensors.k.strides[3] = 0;
     },
     FULMEN_ERROR_SHAPE,
     {"q has head dim 577", "0 to 576"}},
    {"head dim of v 0",
     [](TestCall& c) { set_shape(c.tensors.v, {2, 2, 5, 0}); },
     FULMEN_ERROR_SHAPE,
     {"v has head dim 0", "1 to 512"}},
    {"head dim of v 513",
     [](TestCall& c) {
       c.tensors.v.shape[3] = 513;
       c.tensors.v.strides[3] = 0;
     },
     FULMEN_ERROR_SHAPE,
     {"v has head dim 513", "1 to 512"}},
    {"mask not broadcastable",
     [](TestCall& c) { c.output(&T::mask, FULMEN_BOOL, {2, 5}); },
     FULMEN_ERROR_SHAPE,
     {"mask has shape (2, 5)", "q_row = 3 or 1"}},
    {"bias of another batch",
     [](TestCall& c) { c.input(&T::bias, FULMEN_FLOAT32, {3, 1, 1, 5}); },
     FULMEN_ERROR_SHAPE,
     {"bias has shape (3, 1, 1, 5)", "batch = 2 or 1"}},
    {"slopes of one head",
     [](TestCall& c) { c.input(&T::alibi_slopes, FULMEN_FLOAT32, {1}); },
     FULMEN_ERROR_SHAPE,
     {"alibi_slopes has shape (1)", "head = 4"}},
    {"5 sinks",
     [](TestCall& c) { c.input(&T::sinks, FULMEN_FLOAT32, {5}); },
     FULMEN_ERROR_SHAPE,
     {"sinks has shape (5)", "head = 4"}},
    {"3 lengths",
     [](TestCall& c) { c.indices(&T::kv_lengths, {1, 1, 1}); },
     FULMEN_ERROR_SHAPE,
     {"kv_lengths has shape (3)", "batch = 2"}},
    {"ids of half the rows",
     [](TestCall& c) {
       c.indices(&T::q_ids, {0, 0});
       c.indices(&T::kv_ids, {0, 0, 0, 0, 0});
     },
     FULMEN_ERROR_SHAPE,
     {"q_ids has shape (2)", "q_row = 3"}},

    // options
    {"infinite scale",
     [](TestCall& c) { c.problem.scale = HUGE_VAL; },
     FULMEN_ERROR_ARGUMENT,
     {"scale is inf", "finite"}},
    {"negative softcap",
     [](TestCall& c) { c.problem.softcap = -1; },
     FULMEN_ERROR_ARGUMENT,
     {"softcap is -1", "> 0, or 0"}},
    {"NaN softcap",
     [](TestCall& c) { c.problem.softcap = std::nan(""); },
     FULMEN_ERROR_ARGUMENT,
     {"softcap is nan"}},
    {"infinite softcap",
     [](TestCall& c) { c.problem.softcap = HUGE_VAL; },
     FULMEN_ERROR_ARGUMENT,
     {"softcap is inf"}},
    {"causal 2",
     [](TestCall& c) { c.problem.causal = 2; },
     FULMEN_ERROR_ARGUMENT,
     {"causal is 2", "0 or 1"}},
    {"alignment 7",
     [](TestCall& c) { set_number(c.problem.alignment, 7); },
     FULMEN_ERROR_ARGUMENT,
     {"alignment is 7", "0 to 1"}},
    {"causal with a right window",
     [](TestCall& c) {
       c.problem.causal = 1;
       c.problem.window_right = 3;
     },
     FULMEN_ERROR_ARGUMENT,
     {"window_right is 3", "causal", "window_right = 0"}},
    {"window_left -2",
     [](TestCall& c) { c.problem.window_left = -2; },
     FULMEN_ERROR_ARGUMENT,
     {"window_left is -2", "-1: no limit"}},
    {"window_right -2",
     [](TestCall& c) { c.problem.window_right = -2; },
     FULMEN_ERROR_ARGUMENT,
     {"window_right is -2"}},
    {"prefix without causal",
     [](TestCall& c) { c.problem.prefix = 2; },
     FULMEN_ERROR_ARGUMENT,
     {"prefix is 2 without causal", "set causal"}},
    {"negative prefix",
     [](TestCall& c) {
       c.problem.causal = 1;
       c.problem.prefix = -1;
     },
     FULMEN_ERROR_ARGUMENT,
     {"prefix is -1"}},
    {"negative chunk",
     [](TestCall& c) { c.problem.chunk = -4; },
     FULMEN_ERROR_ARGUMENT,
     {"chunk is -4"}},
    {"dropout_p 1.5",
     [](TestCall& c) { c.problem.dropout_p = 1.5; },
     FULMEN_ERROR_ARGUMENT,
     {"dropout_p is 1.5", "0 to 1"}},
    {"dropout_p -0.1",
     [](TestCall& c) { c.problem.dropout_p = -0.1; },
     FULMEN_ERROR_ARGUMENT,
     {"dropout_p is -0.1"}},
    {"dropout_p NaN",
     [](TestCall& c) { c.problem.dropout_p = std::nan(""); },
     FULMEN_ERROR_ARGUMENT,
     {"dropout_p is nan"}},
    {"rng_offset 2^32",
     [](TestCall& c) { c.problem.rng_offset = uint64_t{1} << 32; },
     FULMEN_ERROR_ARGUMENT,
     {"rng_offset is 4294967296", "4294967295"}},
    {"max_q of a dense problem",
     [](TestCall& c) { c.problem.max_q = 3; },
     FULMEN_ERROR_ARGUMENT,
     {"max_q is 3 without cu_q"}},
    {"max_kv of a dense problem",
     [](TestCall& c) { c.problem.max_kv = 3; },
     FULMEN_ERROR_ARGUMENT,
     {"max_kv is 3 without"}},
    {"deterministic 3",
     [](TestCall& c) { c.problem.deterministic = 3; },
     FULMEN_ERROR_ARGUMENT,
     {"deterministic is 3"}},
    {"batch_invariant -1",
     [](TestCall& c) { c.problem.batch_invariant = -1; },
     FULMEN_ERROR_ARGUMENT,
     {"batch_invariant is -1"}},
    {"backend cuda",
     [](TestCall& c) { c.problem.backend = FULMEN_BACKEND_CUDA; },
     FULMEN_ERROR_UNSUPPORTED,
     {"backend is cuda", "CPU", "auto or cpu"}},
    {"backend 9",
     [](TestCall& c) { set_number(c.problem.backend, 9); },
     FULMEN_ERROR_ARGUMENT,
     {"backend is 9", "0 to 2"}},
    {"implementation 9",
     [](TestCall& c) { set_number(c.problem.implementation, 9); },
     FULMEN_ERROR_ARGUMENT,
     {"implementation is 9", "0 to 2"}},

    // overlaps
    {"o on q",
     [](TestCall& c) { c.tensors.o.data = c.tensors.q.data; },
     FULMEN_ERROR_ARGUMENT,
     {"o overlaps q", "share no byte"}},
    {"lse on o",
     [](TestCall& c) { c.tensors.lse.data = c.tensors.o.data; },
     FULMEN_ERROR_ARGUMENT,
     {"o overlaps lse"}},
    {"lse on the last byte of o",
     [](TestCall& c) {
       c.tensors.lse.data = static_cast<char*>(c.tensors.o.data) + size_of(c.tensors.o) - 1;
       c.tensors.lse.strides[0] = c.tensors.lse.strides[1] = c.tensors.lse.strides[2] = 0;
       set_shape(c.tensors.lse, {2, 4, 3});
     },
     FULMEN_ERROR_ARGUMENT,
     {"o overlaps lse"}},
    {"o broadcast over the batch",
     [](TestCall& c) { c.tensors.o.strides[0] = 0; },
     FULMEN_ERROR_ARGUMENT,
     {"o has strides", "place of its own"}},
    {"rows of o that run into each other",
     [](TestCall& c) { c.tensors.o.strides[2] = 5; },
     FULMEN_ERROR_ARGUMENT,
     {"o has strides"}},

    // lengths
    {"negative length",
     [](TestCall& c) { c.indices(&T::q_lengths, {1, -1}); },
     FULMEN_ERROR_ARGUMENT,
     {"q_lengths[1] is -1", "3 rows of q", "0 to 3"}},
    {"length beyond the rows",
     [](TestCall& c) { c.indices(&T::kv_lengths, {6, 1}); },
     FULMEN_ERROR_ARGUMENT,
     {"kv_lengths[0] is 6", "5 rows of k", "0 to 5"}},
};

TEST(Refusal, OfForwardCalls) {
  for (const Refusal& row : kForward) {
    SCOPED_TRACE(row.label);
    TestCall call;
    row.spoil(call);
    expect_refused(call, row, call.forward());
  }
}

// What a plan can see, a plan refuses: all rows above but those about pointers and contents.
TEST(Refusal, OfPlansToo) {
  for (const Refusal& row : kForward) {
    SCOPED_TRACE(row.label);
    TestCall call;
    row.spoil(call);
    const std::string first_word = row.words.front();
    const bool needs_memory = first_word.find("overlaps") != std::string::npos ||
                              first_word.find("elements") != std::string::npos ||
                              first_word.find("lengths[") != std::string::npos;
    int never_set = 0;
    fulmen_plan* plan = reinterpret_cast<fulmen_plan*>(&never_set);
    const fulmen_status status =
        fulmen_plan_create(&call.problem, &call.tensors, FULMEN_OPERATION_FORWARD, &plan);
    EXPECT_EQ(status, needs_memory ? FULMEN_OK : row.status) << fulmen_last_error();
    EXPECT_EQ(plan == nullptr, !needs_memory);
    fulmen_plan_destroy(plan);
  }
}

}  // namespace
}  // namespace fulmen::test
