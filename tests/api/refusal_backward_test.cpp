// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The preconditions that backward adds.
#include "api/refusal.h"

namespace fulmen::test {
namespace {

using T = fulmen_tensors;

const Refusal kBackward[] = {
    {"no o",
     [](TestCall& c) { c.remove(&T::o); },
     FULMEN_ERROR_ARGUMENT,
     {"o is missing", "forward"}},
    {"no dout",
     [](TestCall& c) { c.remove(&T::dout); },
     FULMEN_ERROR_ARGUMENT,
     {"dout is missing"}},
    {"neither stats nor lse",
     [](TestCall& c) {
       c.remove(&T::stats);
       c.remove(&T::lse);
     },
     FULMEN_ERROR_ARGUMENT,
     {"lse is missing", "stats"}},
    {"no gradient",
     [](TestCall& c) {
       for (const Member gradient : {&T::dq, &T::dk, &T::dv}) c.remove(gradient);
     },
     FULMEN_ERROR_ARGUMENT,
     {"no gradient", "dq, dk, dv, dbias, dsinks"}},
    {"dbias without bias",
     [](TestCall& c) { c.output(&T::dbias, FULMEN_FLOAT32, {5}); },
     FULMEN_ERROR_ARGUMENT,
     {"dbias is given without bias"}},
    {"dsinks without sinks",
     [](TestCall& c) { c.output(&T::dsinks, FULMEN_FLOAT32, {4}); },
     FULMEN_ERROR_ARGUMENT,
     {"dsinks is given without sinks"}},
    {"dq of another dtype",
     [](TestCall& c) { c.tensors.dq.dtype = FULMEN_FLOAT16; },
     FULMEN_ERROR_DTYPE,
     {"dq is float16 where q is float32"}},
    {"dk of another shape",
     [](TestCall& c) { set_shape(c.tensors.dk, {2, 2, 4, 4}); },
     FULMEN_ERROR_SHAPE,
     {"dk has shape (2, 2, 4, 4)", "kv_row = 5"}},
    {"dv of one head",
     [](TestCall& c) { set_shape(c.tensors.dv, {2, 1, 5, 6}); },
     FULMEN_ERROR_SHAPE,
     {"dv has shape (2, 1, 5, 6)", "kv_head = 2"}},
    {"dbias of other extents",
     [](TestCall& c) {
       c.input(&T::bias, FULMEN_FLOAT32, {4, 1, 5});
       c.output(&T::dbias, FULMEN_FLOAT32, {1, 1, 5});
     },
     FULMEN_ERROR_SHAPE,
     {"dbias has shape (1, 1, 5)", "bias, (4, 1, 5)"}},
    {"dbias of another dtype",
     [](TestCall& c) {
       c.input(&T::bias, FULMEN_FLOAT32, {5});
       c.output(&T::dbias, FULMEN_FLOAT64, {5});
     },
     FULMEN_ERROR_DTYPE,
     {"dbias is float64 where bias is float32"}},
    {"dout of another width",
     [](TestCall& c) { c.tensors.dout.dtype = FULMEN_BFLOAT16; },
     FULMEN_ERROR_DTYPE,
     {"dout is bfloat16"}},
    {"dout of other rows",
     [](TestCall& c) { set_shape(c.tensors.dout, {2, 4, 2, 6}); },
     FULMEN_ERROR_SHAPE,
     {"dout has shape (2, 4, 2, 6)", "q_row = 3"}},
    {"dlse of other heads",
     [](TestCall& c) { set_shape(c.tensors.dlse, {2, 1, 3}); },
     FULMEN_ERROR_SHAPE,
     {"dlse has shape (2, 1, 3)", "head = 4"}},
    {"dq on dk",
     [](TestCall& c) { c.tensors.dk.data = c.tensors.dq.data; },
     FULMEN_ERROR_ARGUMENT,
     {"dq overlaps dk"}},
    {"dv on dout",
     [](TestCall& c) { c.tensors.dv.data = c.tensors.dout.data; },
     FULMEN_ERROR_ARGUMENT,
     {"dv overlaps dout"}},
    {"dq broadcast over heads",
     [](TestCall& c) { c.tensors.dq.strides[1] = 0; },
     FULMEN_ERROR_ARGUMENT,
     {"dq has strides"}},
    {"length beyond the rows",
     [](TestCall& c) { c.indices(&T::q_lengths, {4, 1}); },
     FULMEN_ERROR_ARGUMENT,
     {"q_lengths[0] is 4"}},
};

TEST(Refusal, OfBackwardCalls) {
  for (const Refusal& row : kBackward) {
    SCOPED_TRACE(row.label);
    TestCall call;
    call.add_backward();
    row.spoil(call);
    expect_refused(call, row, call.backward());
  }
}

}  // namespace
}  // namespace fulmen::test
