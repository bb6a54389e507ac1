// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen.hpp, over the shared library as users link it: every call, the classes of failures, and
// that its defaults are those of the C structs.
#include <gmock/gmock.h>

#include <cmath>
#include <cstring>
#include <fulmen/fulmen.hpp>

namespace {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr std::int64_t kRows = 3, kKeys = 4, kDim = 2;

// Uniform attention: q = 0, so o is the mean of v.
struct Arrays {
  std::vector<float> q = std::vector<float>(kRows * kDim);
  std::vector<float> k = std::vector<float>(kKeys * kDim, 1);
  std::vector<float> v = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<float> o = std::vector<float>(kRows * kDim);
  std::vector<float> lse = std::vector<float>(kRows);

  fulmen::Tensors tensors() {
    return {.q = fulmen::tensor(q, {kRows, kDim}),
            .k = fulmen::tensor(k, {kKeys, kDim}),
            .v = fulmen::tensor(v, {kKeys, kDim}),
            .o = fulmen::tensor(o, {kRows, kDim}),
            .lse = fulmen::tensor(lse, {kRows})};
  }
};

TEST(Veneer, DefaultsAreThoseOfC) {
  fulmen_problem c;
  fulmen_problem_init(&c);
  const fulmen_problem ours = fulmen::Problem{}.c();
  EXPECT_TRUE(std::isnan(ours.scale) && std::isnan(c.scale));
  const std::size_t after_scale = offsetof(fulmen_problem, softcap);
  EXPECT_EQ(std::memcmp(reinterpret_cast<const char*>(&ours) + after_scale,
                        reinterpret_cast<const char*>(&c) + after_scale, sizeof c - after_scale),
            0);
}

TEST(Veneer, OptionsArriveUnchanged) {
  const fulmen_problem c = fulmen::Problem{.scale = 2,
                                           .softcap = 3,
                                           .causal = true,
                                           .alignment = fulmen::Alignment::kTopLeft,
                                           .window_left = 4,
                                           .window_right = 5,
                                           .prefix = 6,
                                           .chunk = 7,
                                           .dropout_p = 0.5,
                                           .rng_seed = 8,
                                           .rng_offset = 9,
                                           .max_q = 10,
                                           .max_kv = 11,
                                           .deterministic = true,
                                           .batch_invariant = true,
                                           .backend = fulmen::Backend::kCpu,
                                           .implementation = fulmen::Implementation::kTiled,
                                           .device = 12,
                                           .device_name = "h100"}
                               .c();
  EXPECT_EQ(c.scale, 2);
  EXPECT_EQ(c.softcap, 3);
  EXPECT_EQ(c.causal, 1);
  EXPECT_EQ(c.alignment, FULMEN_TOP_LEFT);
  EXPECT_EQ(c.window_left, 4);
  EXPECT_EQ(c.window_right, 5);
  EXPECT_EQ(c.prefix, 6);
  EXPECT_EQ(c.chunk, 7);
  EXPECT_EQ(c.dropout_p, 0.5);
  EXPECT_EQ(c.rng_seed, 8u);
  EXPECT_EQ(c.rng_offset, 9u);
  EXPECT_EQ(c.max_q, 10);
  EXPECT_EQ(c.max_kv, 11);
  EXPECT_EQ(c.deterministic, 1);
  EXPECT_EQ(c.batch_invariant, 1);
  EXPECT_EQ(c.backend, FULMEN_BACKEND_CPU);
  EXPECT_EQ(c.implementation, FULMEN_TILED);
  EXPECT_EQ(c.device, 12);
  EXPECT_STREQ(c.device_name, "h100");
}

// Each member of Tensors, marked by its rank-1 extent, lands in the member of the same name.
TEST(Veneer, TensorsArriveUnderTheirNames) {
  fulmen::Tensors all;
  fulmen::Tensor* const ours[] = {&all.q,          &all.k,           &all.v,
                                  &all.bias,       &all.mask,        &all.alibi_slopes,
                                  &all.sinks,      &all.q_lengths,   &all.kv_lengths,
                                  &all.cu_q,       &all.cu_kv,       &all.q_ids,
                                  &all.kv_ids,     &all.rng,         &all.o,
                                  &all.lse,        &all.stats,       &all.dout,
                                  &all.dlse,       &all.dq,          &all.dk,
                                  &all.dv,         &all.dbias,       &all.dsinks,
                                  &all.page_table, &all.page_indptr, &all.kv_start,
                                  &all.positions,  &all.tree,        &all.k_scale,
                                  &all.v_scale,    &all.capture0,    &all.capture1,
                                  &all.capture2,   &all.capture3,    &all.capture4,
                                  &all.capture5,   &all.capture6,    &all.capture7,
                                  &all.dcapture0,  &all.dcapture1,   &all.dcapture2,
                                  &all.dcapture3,  &all.dcapture4,   &all.dcapture5,
                                  &all.dcapture6,  &all.dcapture7,   &all.kv_shared,
                                  &all.blocks,     &all.q_scale,     &all.q_segments,
                                  &all.kv_segments};
  using C = fulmen_tensors;
  fulmen_tensor C::* const theirs[] = {&C::q,          &C::k,           &C::v,
                                       &C::bias,       &C::mask,        &C::alibi_slopes,
                                       &C::sinks,      &C::q_lengths,   &C::kv_lengths,
                                       &C::cu_q,       &C::cu_kv,       &C::q_ids,
                                       &C::kv_ids,     &C::rng,         &C::o,
                                       &C::lse,        &C::stats,       &C::dout,
                                       &C::dlse,       &C::dq,          &C::dk,
                                       &C::dv,         &C::dbias,       &C::dsinks,
                                       &C::page_table, &C::page_indptr, &C::kv_start,
                                       &C::positions,  &C::tree,        &C::k_scale,
                                       &C::v_scale,    &C::capture0,    &C::capture1,
                                       &C::capture2,   &C::capture3,    &C::capture4,
                                       &C::capture5,   &C::capture6,    &C::capture7,
                                       &C::dcapture0,  &C::dcapture1,   &C::dcapture2,
                                       &C::dcapture3,  &C::dcapture4,   &C::dcapture5,
                                       &C::dcapture6,  &C::dcapture7,   &C::kv_shared,
                                       &C::blocks,     &C::q_scale,     &C::q_segments,
                                       &C::kv_segments};
  static_assert(std::size(ours) == std::size(theirs));
  static_assert(sizeof(C) == sizeof(std::size_t) + std::size(ours) * sizeof(fulmen_tensor));
  for (std::size_t i = 0; i < std::size(ours); ++i) ours[i]->shape[0] = static_cast<int>(i) + 1;
  const fulmen_tensors c = all.c();
  EXPECT_EQ(c.struct_size, sizeof(fulmen_tensors));
  for (std::size_t i = 0; i < std::size(ours); ++i) {
    EXPECT_EQ((c.*theirs[i]).shape[0], static_cast<int>(i) + 1);
  }
}

TEST(Veneer, ExpressionsAreOfTexts) {
  Arrays arrays;
  std::vector<float> bias = {0, 1, 0, 2};
  fulmen::Tensors tensors = arrays.tensors();
  tensors.capture0 = fulmen::tensor(bias, {kKeys});
  const fulmen::Expression added("s + $factor * bias[j]", "j > 0", {"bias"}, {"factor"});
  fulmen::attention({.expression = added.number(), .scalar0 = 0.5}, tensors);
  const std::vector<float> found = arrays.o;
  for (float& x : bias) x /= 2;
  bias[0] = -std::numeric_limits<float>::infinity();
  tensors.capture0 = {};
  tensors.bias = fulmen::tensor(bias, {kKeys});
  fulmen::attention({}, tensors);
  EXPECT_THAT(arrays.o, testing::Pointwise(testing::FloatNear(1e-6f), found));
  try {
    fulmen::Expression("s +");
    FAIL();
  } catch (const fulmen::Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("at column 4"));
  }
}

TEST(Veneer, CallsComputeAndPlansToo) {
  Arrays arrays;
  fulmen::attention({}, arrays.tensors());
  EXPECT_THAT(arrays.o, testing::ElementsAre(4, 5, 4, 5, 4, 5));
  EXPECT_THAT(arrays.lse, Each(testing::FloatNear(std::log(4.0f), 1e-6f)));

  Arrays planned;
  const fulmen::Plan plan({}, planned.tensors(), fulmen::Operation::kForward);
  std::vector<std::byte> workspace(plan.workspace_bytes());
  plan.forward(planned.tensors(), workspace);
  EXPECT_EQ(planned.o, arrays.o);
  EXPECT_THAT(plan.explain(), HasSubstr("\"operation\": \"forward\""));
  EXPECT_EQ(fulmen::explain({}, planned.tensors()), plan.explain());
}

TEST(Veneer, BackwardComputes) {
  Arrays arrays;
  fulmen::attention({}, arrays.tensors());
  std::vector<float> dout(kRows * kDim, 1), dv(kKeys * kDim);
  fulmen::Tensors tensors = arrays.tensors();
  tensors.dout = fulmen::tensor(dout, {kRows, kDim});
  tensors.dv = fulmen::tensor(dv, {kKeys, kDim});
  fulmen::attention_backward({}, tensors);
  EXPECT_THAT(dv, Each(0.75f));
  std::vector<float> again(dv.size());
  tensors.dv = fulmen::tensor(again, {kKeys, kDim});
  const fulmen::Plan plan({}, tensors, fulmen::Operation::kBackward);
  std::vector<std::byte> workspace(plan.workspace_bytes());
  plan.backward(tensors, workspace);
  EXPECT_EQ(again, dv);
}

TEST(Veneer, MergeAndDenseMask) {
  Arrays a, b;
  fulmen::attention({}, a.tensors());
  fulmen::attention({}, b.tensors());
  std::vector<float> o(a.o.size()), lse(a.lse.size());
  const fulmen::MergePart parts[] = {{a.tensors().o, a.tensors().lse},
                                     {b.tensors().o, b.tensors().lse}};
  fulmen::merge(parts, fulmen::tensor(o, {kRows, kDim}), fulmen::tensor(lse, {kRows}));
  EXPECT_EQ(o, a.o);
  EXPECT_THAT(lse, Each(testing::FloatNear(std::log(8.0f), 1e-6f)));

  float cache[2][1][2][2] = {}, values[2][1][2][2] = {}, turned[2] = {};
  float row[2] = {1, 2}, cosine[1] = {0}, sine[1] = {1};
  std::int32_t slot[1] = {3}, position[1] = {0};
  const fulmen::Tensor cos = fulmen::tensor(cosine, {1, 1}), sin = fulmen::tensor(sine, {1, 1});
  fulmen::append_kv(
      {.k_cache = fulmen::tensor(&cache[0][0][0][0], fulmen::DType::kFloat32, {2, 1, 2, 2}),
       .v_cache = fulmen::tensor(&values[0][0][0][0], fulmen::DType::kFloat32, {2, 1, 2, 2}),
       .k = fulmen::tensor(row, {1, 2}),
       .v = fulmen::tensor(row, {1, 2}),
       .slots = fulmen::tensor(slot, fulmen::DType::kInt32, {1}),
       .positions = fulmen::tensor(position, fulmen::DType::kInt32, {1}),
       .cos = cos,
       .sin = sin});
  EXPECT_THAT(cache[1][0][1], ElementsAre(-2, 1));
  EXPECT_THAT(values[1][0][1], ElementsAre(1, 2));
  fulmen::rotary(fulmen::tensor(row, {1, 2}), {}, cos, sin, true, fulmen::tensor(turned, {1, 2}));
  EXPECT_THAT(turned, ElementsAre(-2, 1));

  std::int8_t rounded[2];
  float scale[1] = {};
  fulmen::quantise({.x = fulmen::tensor(row, {1, 2}),
                    .values = fulmen::tensor(rounded, fulmen::DType::kInt8, {1, 2}),
                    .scale = fulmen::tensor(scale, {1}),
                    .find_scale = true});
  EXPECT_FLOAT_EQ(scale[0], 2 / 127.f);
  EXPECT_THAT(rounded, ElementsAre(64, 127));

  bool visible[kRows][kKeys];
  fulmen::dense_mask({.causal = true}, a.tensors(),
                     fulmen::tensor(visible, fulmen::DType::kBool, {kRows, kKeys}));
  EXPECT_FALSE(visible[0][2]);
  EXPECT_TRUE(visible[2][3]);

  std::int8_t kinds[kRows][kKeys];
  fulmen::block_map({.causal = true}, a.tensors(), 1, 1, false,
                    fulmen::tensor(kinds, fulmen::DType::kInt8, {1, 1, kRows, kKeys}));
  EXPECT_EQ(kinds[0][2], 0);
  EXPECT_EQ(kinds[2][3], 2);
}

TEST(Veneer, ListsOfBlocks) {
  Arrays a;
  fulmen::attention({}, a.tensors());
  const Arrays whole = a;
  std::int32_t lists[1] = {0};
  fulmen::Tensors tensors = a.tensors();
  tensors.blocks = fulmen::tensor(lists, {1, 1});
  fulmen::attention({.block_q = 64, .block_kv = 64}, tensors);
  EXPECT_EQ(a.o, whole.o);
  lists[0] = -1;
  fulmen::attention({.block_q = 64, .block_kv = 64}, tensors);
  for (const float& x : a.o) EXPECT_EQ(x, 0);
}

TEST(Veneer, FailuresAreTheClassOfTheirStatus) {
  Arrays arrays;
  fulmen::Tensors tensors = arrays.tensors();
  EXPECT_THROW(fulmen::attention({.softcap = -1}, tensors), fulmen::ArgumentError);
  EXPECT_THROW(fulmen::attention({.backend = fulmen::Backend::kCpu, .device = 0}, tensors),
               fulmen::ArgumentError);
  tensors.lse.dtype = FULMEN_FLOAT16;
  EXPECT_THROW(fulmen::attention({}, tensors), fulmen::DTypeError);
  tensors.lse = fulmen::tensor(arrays.lse, {1, kRows});
  tensors.v = fulmen::tensor(arrays.v, {kDim, kKeys});
  try {
    fulmen::attention({}, tensors);
    FAIL();
  } catch (const fulmen::ArgumentError& error) {  // a ShapeError is one
    EXPECT_EQ(error.status(), fulmen::Status::kShape);
    EXPECT_THAT(error.what(), HasSubstr("v has shape (2, 4)"));
  }
  EXPECT_THROW(fulmen::Plan({.chunk = -1}, arrays.tensors(), fulmen::Operation::kForward),
               fulmen::Error);
  EXPECT_THROW(fulmen::set_num_threads(-1), fulmen::ArgumentError);
}

TEST(Veneer, TensorsCheckTheirSizes) {
  std::vector<float> six(6);
  EXPECT_THROW(fulmen::tensor(six, {2, 2}), fulmen::ShapeError);
  EXPECT_THROW(fulmen::tensor(six.data(), fulmen::DType::kFloat32, {2, 3}, {3}),
               fulmen::ArgumentError);
  EXPECT_THROW(fulmen::tensor(six.data(), fulmen::DType::kFloat32, {1, 1, 1, 1, 6}),
               fulmen::ShapeError);
  EXPECT_EQ(fulmen::tensor(six.data(), fulmen::DType::kFloat32, {2, 3}, {1, 2}).strides[1], 2);
}

TEST(Veneer, GpusAreReached) {
  Arrays arrays;
  const fulmen::Problem problem{.device_name = "sm_80"};
  const fulmen::Plan plan(problem, arrays.tensors(), fulmen::Operation::kForward);
  EXPECT_THAT(plan.explain(), HasSubstr("\"arch\": \"sm_80\""));
  EXPECT_THROW(plan.forward(arrays.tensors(), {}), fulmen::UnsupportedError);
  EXPECT_THAT(fulmen::gpu_info(), HasSubstr("\"device_names\": [\"t4\""));
  EXPECT_THROW(fulmen::bundle_write(std::span(&plan, 1), ""), fulmen::ArgumentError);
  EXPECT_THROW(fulmen::bundle_load("/no/such/bundle"), fulmen::ArgumentError);
  EXPECT_THROW(fulmen::device_faults(-1), fulmen::Error);
  const std::string empty[] = {""};
  EXPECT_THROW(fulmen::set_nvrtc_candidates(empty), fulmen::ArgumentError);
}

TEST(Veneer, TextsAreWhole) {
  EXPECT_THAT(fulmen::build_info(), HasSubstr(fulmen::version()));
  EXPECT_EQ(fulmen::build_info().back(), '}');
}

}  // namespace
