/* SPDX-FileCopyrightText: fulmen contributors
 * SPDX-License-Identifier: Apache-2.0
 *
 * A program of a user, in C: attention of one head with equal scores, so that o is the mean of v,
 * whose structs lie between canaries. Included after a fulmen.h of some version; what the test is
 * about is in the files that do so.
 */
#ifndef FULMEN_TESTS_ABI_PROGRAM_H_
#define FULMEN_TESTS_ABI_PROGRAM_H_

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) {                                                       \
      fprintf(stderr, "%s:%d: not %s (%s)\n", __FILE__, __LINE__, #condition, \
              fulmen_last_error());                                           \
      exit(1);                                                                \
    }                                                                         \
  } while (0)

enum { kRows = 3, kKeys = 4, kDim = 2, kCanary = 0x5a, kCanaryBytes = 4096 };

/* Structs as a program may have them beside other data of its own. */
typedef struct call {
  unsigned char before[kCanaryBytes];
  fulmen_problem problem;
  unsigned char between[kCanaryBytes];
  fulmen_tensors tensors;
  unsigned char after[kCanaryBytes];
  float q[kRows * kDim], k[kKeys * kDim], v[kKeys * kDim], o[kRows * kDim], lse[kRows];
  float dout[kRows * kDim], dv[kKeys * kDim];
} call;

static void check_canary(const unsigned char* bytes) {
  for (int i = 0; i < kCanaryBytes; ++i) CHECK(bytes[i] == kCanary);
}

static void check_canaries(const call* c) {
  check_canary(c->before);
  check_canary(c->between);
  check_canary(c->after);
}

static void set_array(fulmen_tensor* tensor, float* data, int64_t rows) {
  const int64_t shape[2] = {rows, kDim};
  CHECK(fulmen_tensor_init(tensor, data, FULMEN_FLOAT32, 2, shape) == FULMEN_OK);
}

/* On the heap, so that ASan sees what is written beyond it. */
static call* new_call(void) {
  const int64_t rows = kRows;
  call* c = malloc(sizeof *c);
  CHECK(c != NULL);
  memset(c, kCanary, sizeof *c);
  fulmen_problem_init(&c->problem);
  check_canaries(c);
  fulmen_tensors_init(&c->tensors);
  check_canaries(c);
  CHECK(c->problem.struct_size == sizeof(fulmen_problem));
  CHECK(c->tensors.struct_size == sizeof(fulmen_tensors));
  for (int i = 0; i < kRows * kDim; ++i) c->q[i] = 0, c->o[i] = -1, c->dout[i] = 1;
  for (int i = 0; i < kKeys * kDim; ++i) c->k[i] = 1, c->v[i] = (float)(i + 1), c->dv[i] = -1;
  set_array(&c->tensors.q, c->q, kRows);
  set_array(&c->tensors.k, c->k, kKeys);
  set_array(&c->tensors.v, c->v, kKeys);
  set_array(&c->tensors.o, c->o, kRows);
  CHECK(fulmen_tensor_init(&c->tensors.lse, c->lse, FULMEN_FLOAT32, 1, &rows) == FULMEN_OK);
  return c;
}

static void check_forward(const call* c) {
  for (int row = 0; row < kRows; ++row) {
    CHECK(c->o[row * kDim] > 3.999f && c->o[row * kDim] < 4.001f);
    CHECK(c->o[row * kDim + 1] > 4.999f && c->o[row * kDim + 1] < 5.001f);
  }
  check_canaries(c);
}

/* Forward and backward, called and planned, and the calls beside them. */
static void check_every_call(void) {
  call* c = new_call();
  fulmen_plan* plan = NULL;
  unsigned char matrix[kRows * kKeys];
  const int64_t extents[4] = {1, 1, kRows, kKeys};
  fulmen_tensor visible;
  fulmen_merge_part parts[2];
  char text[256];
  CHECK(fulmen_attention(&c->problem, &c->tensors, NULL) == FULMEN_OK);
  check_forward(c);

  memset(c->o, 0, sizeof c->o);
  c->problem.backend = FULMEN_BACKEND_CPU;
  CHECK(fulmen_plan_create(&c->problem, &c->tensors, FULMEN_OPERATION_FORWARD, &plan) == FULMEN_OK);
  const size_t bytes = fulmen_plan_workspace_bytes(plan);
  void* workspace = malloc(bytes + 1);
  CHECK(fulmen_forward(plan, &c->tensors, workspace, bytes, NULL) == FULMEN_OK);
  free(workspace);
  fulmen_plan_destroy(plan);
  check_forward(c);

  set_array(&c->tensors.dout, c->dout, kRows);
  set_array(&c->tensors.dv, c->dv, kKeys);
  CHECK(fulmen_attention_backward(&c->problem, &c->tensors, NULL) == FULMEN_OK);
  for (int i = 0; i < kKeys * kDim; ++i) CHECK(c->dv[i] > 0.749f && c->dv[i] < 0.751f);
  check_canaries(c);

  CHECK(fulmen_explain(&c->problem, &c->tensors, FULMEN_OPERATION_FORWARD, text, sizeof text,
                       NULL) == FULMEN_OK);
  CHECK(fulmen_tensor_init(&visible, matrix, FULMEN_BOOL, 4, extents) == FULMEN_OK);
  CHECK(fulmen_dense_mask(&c->problem, &c->tensors, &visible) == FULMEN_OK);
  for (int i = 0; i < kRows * kKeys; ++i) CHECK(matrix[i] == 1);

  for (int i = 0; i < 2; ++i) {
    fulmen_merge_part_init(&parts[i]);
    parts[i].o = c->tensors.o;
    parts[i].lse = c->tensors.lse;
  }
  CHECK(fulmen_merge(parts, 2, NULL, &c->tensors.o, NULL, NULL) == FULMEN_OK);
  check_forward(c);
  free(c);
}

#endif /* FULMEN_TESTS_ABI_PROGRAM_H_ */
