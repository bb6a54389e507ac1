// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Plan once, run often: equal to the simple call, from several threads, with any workspace
// contents, without allocation, and never with arrays that differ from the plan's.
#include <gmock/gmock.h>

#include <memory>
#include <thread>

#include "api/count_allocations.h"
#include "api/refusal.h"
#include "core/arrays.h"

namespace fulmen::test {
namespace {

using testing::HasSubstr;
using T = fulmen_tensors;

struct Destroy {
  void operator()(fulmen_plan* plan) const { fulmen_plan_destroy(plan); }
};
using Plan = std::unique_ptr<fulmen_plan, Destroy>;

Plan plan_of(const TestCall& call, fulmen_operation operation) {
  fulmen_plan* plan = nullptr;
  EXPECT_EQ(fulmen_plan_create(&call.problem, &call.tensors, operation, &plan), FULMEN_OK)
      << fulmen_last_error();
  return Plan(plan);
}

Plan forward_plan(const TestCall& call) { return plan_of(call, FULMEN_OPERATION_FORWARD); }
Plan backward_plan(const TestCall& call) { return plan_of(call, FULMEN_OPERATION_BACKWARD); }

// Exactly as large as asked for, guarded, full of NaN, at an odd address.
class Workspace {
 public:
  explicit Workspace(const Plan& plan)
      : bytes(fulmen_plan_workspace_bytes(plan.get())), memory_(bytes + kOdd) {
    std::memset(data(), 0xff, bytes);
  }
  char* data() const { return memory_.data() + kOdd; }

  size_t bytes;

 private:
  static constexpr size_t kOdd = 3;
  GuardedMemory memory_;
};

fulmen_status run_forward(const Plan& plan, const TestCall& call, const Workspace& workspace) {
  return fulmen_forward(plan.get(), &call.tensors, workspace.data(), workspace.bytes, nullptr);
}

fulmen_status run_backward(const Plan& plan, const TestCall& call, const Workspace& workspace) {
  return fulmen_backward(plan.get(), &call.tensors, workspace.data(), workspace.bytes, nullptr);
}

// The members of fulmen_tensors, in the order of Array.
constexpr Member kMembers[] = {
#define FULMEN_ARRAY(array, member, ...) &fulmen_tensors::member,
#include "fulmen/arrays.def"
};

constexpr Sizes kMedium{.batch = 2, .heads = 4, .q_rows = 37, .kv_rows = 53, .dim_qk = 20};

TEST(Plan, RunsAsTheSimpleCallDoes) {
  TestCall simple(kMedium);
  TestCall planned(kMedium);
  simple.problem.causal = planned.problem.causal = 1;
  ASSERT_EQ(simple.forward(), FULMEN_OK);
  const Plan forward = forward_plan(planned);
  ASSERT_EQ(run_forward(forward, planned, Workspace(forward)), FULMEN_OK) << fulmen_last_error();
  for (const Member member : {&T::o, &T::lse, &T::stats}) {
    EXPECT_EQ(planned.bytes(member), simple.bytes(member));
  }
  simple.add_backward();
  planned.add_backward();
  ASSERT_EQ(simple.backward(), FULMEN_OK);
  const Plan backward = backward_plan(planned);
  ASSERT_EQ(run_backward(backward, planned, Workspace(backward)), FULMEN_OK) << fulmen_last_error();
  for (const Member member : {&T::dq, &T::dk, &T::dv}) {
    EXPECT_EQ(planned.bytes(member), simple.bytes(member));
  }
}

TEST(Plan, NeedsNoPointers) {
  TestCall call;
  fulmen_tensors shapes = call.tensors;
  for (const Member member : {&T::q, &T::k, &T::v, &T::o, &T::lse, &T::stats}) {
    (shapes.*member).data = nullptr;
  }
  fulmen_plan* plan = nullptr;
  ASSERT_EQ(fulmen_plan_create(&call.problem, &shapes, FULMEN_OPERATION_FORWARD, &plan), FULMEN_OK);
  const Plan owner(plan);
  EXPECT_EQ(run_forward(owner, call, Workspace(owner)), FULMEN_OK) << fulmen_last_error();
  EXPECT_EQ(fulmen_forward(plan, &shapes, Workspace(owner).data(), Workspace(owner).bytes, nullptr),
            FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("q has elements"));
}

TEST(Plan, RunsFromManyThreadsAtOnce) {
  TestCall first(kMedium);
  first.problem.causal = 1;
  const Plan plan = forward_plan(first);
  ASSERT_EQ(run_forward(plan, first, Workspace(plan)), FULMEN_OK);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&plan, &first] {
      for (int run = 0; run < 5; ++run) {
        TestCall call(kMedium);
        const Workspace workspace(plan);
        ASSERT_EQ(run_forward(plan, call, workspace), FULMEN_OK) << fulmen_last_error();
        ASSERT_EQ(call.bytes(&T::o), first.bytes(&T::o));
        ASSERT_EQ(call.bytes(&T::lse), first.bytes(&T::lse));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Plan, RunAllocatesNothing) {
  TestCall call(kMedium);
  call.input(&T::bias, FULMEN_FLOAT32, {1, 37, 53});
  call.input(&T::sinks, FULMEN_FLOAT32, {4});
  call.indices(&T::kv_lengths, {53, 20});
  call.add_backward();
  call.output(&T::dbias, FULMEN_FLOAT32, {1, 37, 53});
  call.output(&T::dsinks, FULMEN_FLOAT32, {4});
  const Plan forward = forward_plan(call);
  const Plan backward = backward_plan(call);
  const Workspace forward_space(forward);
  const Workspace backward_space(backward);
  ASSERT_EQ(run_forward(forward, call, forward_space), FULMEN_OK);  // the pool starts its threads
  ASSERT_EQ(run_backward(backward, call, backward_space), FULMEN_OK);
  const long before = num_allocations();
  const fulmen_status first = run_forward(forward, call, forward_space);
  const fulmen_status second = run_backward(backward, call, backward_space);
  const long after = num_allocations();
  EXPECT_EQ(first, FULMEN_OK);
  EXPECT_EQ(second, FULMEN_OK);
  EXPECT_EQ(after, before);
}

TEST(Plan, CountingAllocationsCounts) {
  const long before = num_allocations();
  TestCall call;
  EXPECT_GT(num_allocations(), before);
}

TEST(Plan, WorkspaceDoesNotGrowWithTheSquare) {
  TestCall small({.q_rows = 64, .kv_rows = 1024});
  TestCall tall({.q_rows = 64, .kv_rows = 4096});
  const size_t small_bytes = fulmen_plan_workspace_bytes(forward_plan(small).get());
  const size_t tall_bytes = fulmen_plan_workspace_bytes(forward_plan(tall).get());
  EXPECT_LE(tall_bytes, 4 * small_bytes);
}

TEST(Plan, ContentsOfLengthsMayChange) {
  TestCall call;
  int64_t* const lengths = static_cast<int64_t*>(call.indices(&T::kv_lengths, {5, 5}).data);
  const Plan plan = forward_plan(call);
  const Workspace workspace(plan);
  ASSERT_EQ(run_forward(plan, call, workspace), FULMEN_OK);
  const std::string full = call.bytes(&T::o);
  lengths[1] = 0;
  ASSERT_EQ(run_forward(plan, call, workspace), FULMEN_OK);
  EXPECT_NE(call.bytes(&T::o), full);
  const std::vector<float> o = call.floats(&T::o);
  EXPECT_TRUE(std::all_of(o.begin() + static_cast<long>(o.size() / 2), o.end(),
                          [](float x) { return x == 0; }));
  lengths[1] = 6;
  const std::string before = call.bytes(&T::o);
  EXPECT_EQ(run_forward(plan, call, workspace), FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("kv_lengths[1] is 6"));
  EXPECT_EQ(call.bytes(&T::o), before);
}

const Refusal kDifferent[] = {
    {"dtype",
     [](TestCall& c) { c.tensors.lse.dtype = FULMEN_FLOAT64; },
     FULMEN_ERROR_DTYPE,
     {"lse is float64 but was float32"}},
    {"shape",
     [](TestCall& c) { set_shape(c.tensors.k, {2, 2, 4, 4}); },
     FULMEN_ERROR_SHAPE,
     {"k has shape (2, 2, 4, 4)", "make a plan"}},
    {"rank", [](TestCall& c) { c.tensors.q.rank = 5; }, FULMEN_ERROR_SHAPE, {"q has rank 5"}},
    {"stride",
     [](TestCall& c) { c.tensors.q.strides[1] = 0; },
     FULMEN_ERROR_ARGUMENT,
     {"q has stride 0 on axis 1", "had 12"}},
    {"more arrays",
     [](TestCall& c) { c.input(&T::sinks, FULMEN_FLOAT32, {4}); },
     FULMEN_ERROR_ARGUMENT,
     {"sinks is given, but was absent"}},
    {"fewer arrays",
     [](TestCall& c) { c.remove(&T::stats); },
     FULMEN_ERROR_ARGUMENT,
     {"stats is missing, but was given"}},
    {"null",
     [](TestCall& c) { c.tensors.v.data = nullptr; },
     FULMEN_ERROR_ARGUMENT,
     {"v has elements", "null"}},
    {"overlap",
     [](TestCall& c) { c.tensors.o.data = c.tensors.v.data; },
     FULMEN_ERROR_ARGUMENT,
     {"o overlaps v"}},
    {"an array that it does not use, of another rank",
     [](TestCall& c) { c.tensors.dq.rank = -1; },
     FULMEN_ERROR_SHAPE,
     {"dq has rank -1", "2 to 4"}},
    {"struct",
     [](TestCall& c) { c.tensors.struct_size = 1; },
     FULMEN_ERROR_ARGUMENT,
     {"tensors.struct_size is 1"}},
};

TEST(Plan, RefusesArraysThatDiffer) {
  TestCall planned;
  const Plan plan = forward_plan(planned);
  const Workspace workspace(plan);
  for (const Refusal& row : kDifferent) {
    SCOPED_TRACE(row.label);
    TestCall call;
    row.spoil(call);
    expect_refused(call, row, run_forward(plan, call, workspace));
  }
}

TEST(Plan, RefusesTheOtherOperation) {
  TestCall call;
  const Plan plan = forward_plan(call);
  EXPECT_EQ(run_backward(plan, call, Workspace(plan)), FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("plan is for forward; fulmen_backward"));
  EXPECT_TRUE(call.outputs_untouched());
}

TEST(Plan, RefusesTooLittleWorkspace) {
  TestCall call(kMedium);
  const Plan plan = forward_plan(call);
  const Workspace workspace(plan);
  ASSERT_GT(workspace.bytes, 0u);
  EXPECT_EQ(
      fulmen_forward(plan.get(), &call.tensors, workspace.data(), workspace.bytes - 1, nullptr),
      FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("the plan needs"));
  EXPECT_EQ(fulmen_forward(plan.get(), &call.tensors, nullptr, workspace.bytes, nullptr),
            FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("workspace is null"));
  EXPECT_EQ(fulmen_forward(plan.get(), &call.tensors, workspace.data(), workspace.bytes,
                           workspace.data()),
            FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("stream is not null"));
  EXPECT_TRUE(call.outputs_untouched());
}

// Every array that a run uses, moved into the workspace: over its first bytes and its last.
void expect_no_room_for_arrays(const TestCall& call, const Plan& plan, fulmen_operation operation) {
  constexpr size_t kRoom = 1 << 20;  // for an array that begins at the last byte
  const size_t bytes = fulmen_plan_workspace_bytes(plan.get());
  const GuardedMemory memory(bytes + kRoom);
  const auto run = [&](const fulmen_tensors& tensors) {
    return operation == FULMEN_OPERATION_FORWARD
               ? fulmen_forward(plan.get(), &tensors, memory.data(), bytes, nullptr)
               : fulmen_backward(plan.get(), &tensors, memory.data(), bytes, nullptr);
  };
  ASSERT_EQ(run(call.tensors), FULMEN_OK) << fulmen_last_error();
  for (const ArrayRule& rule : rules::kTable) {
    const Member member = kMembers[static_cast<int>(rule.array)];
    const Call kind = call_of(static_cast<Operation>(operation));
    if (use_of(rule, kind) == Use::kIgnored || (call.tensors.*member).data == nullptr) continue;
    ASSERT_LT(size_of(call.tensors.*member), kRoom);
    for (const size_t at : {size_t{0}, bytes - 1}) {
      SCOPED_TRACE(name(rule.array));
      fulmen_tensors tensors = call.tensors;
      (tensors.*member).data = memory.data() + at;
      EXPECT_EQ(run(tensors), FULMEN_ERROR_ARGUMENT);
      EXPECT_THAT(fulmen_last_error(), HasSubstr(sentence("overlaps ", name(rule.array))));
    }
  }
}

TEST(Plan, RefusesAWorkspaceThatOverlapsAnArray) {
  TestCall dense(kMedium);
  dense.add_backward();
  dense.input(&T::bias, FULMEN_FLOAT32, {1, 37, 53});
  dense.output(&T::dbias, FULMEN_FLOAT32, {1, 37, 53});
  dense.indices(&T::kv_lengths, {53, 20});
  expect_no_room_for_arrays(dense, forward_plan(dense), FULMEN_OPERATION_FORWARD);
  expect_no_room_for_arrays(dense, backward_plan(dense), FULMEN_OPERATION_BACKWARD);
  const TestCall packed = packed_call();
  expect_no_room_for_arrays(packed, forward_plan(packed), FULMEN_OPERATION_FORWARD);
}

TEST(Plan, WorkspaceMayLieInMemoryThatNoArrayCounts) {
  TestCall call(kMedium);
  const Plan plan = forward_plan(call);
  const size_t bytes = fulmen_plan_workspace_bytes(plan.get());
  GuardedMemory memory(bytes + size_of(call.tensors.q));
  std::memcpy(memory.data() + bytes, call.tensors.q.data, size_of(call.tensors.q));
  call.tensors.q.data = memory.data() + bytes;
  EXPECT_EQ(fulmen_forward(plan.get(), &call.tensors, memory.data(), bytes, nullptr), FULMEN_OK)
      << fulmen_last_error();
}

}  // namespace
}  // namespace fulmen::test
