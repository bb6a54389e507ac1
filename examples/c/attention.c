/* SPDX-FileCopyrightText: fulmen contributors
 * SPDX-License-Identifier: Apache-2.0
 *
 * Causal attention with grouped heads through the C ABI, checked against the formula written out in
 * double. Prints the largest error; the exit code is 0 when it is what float32 allows.
 */
#include <fulmen/fulmen.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { kHeads = 8, kKvHeads = 2, kRows = 100, kKeys = 130, kDim = 64 };

static float q[kHeads][kRows][kDim];
static float k[kKvHeads][kKeys][kDim];
static float v[kKvHeads][kKeys][kDim];
static float o[kHeads][kRows][kDim];

static void fill(float* values, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    values[i] = 2.0f * (float)rand() / (float)RAND_MAX - 1.0f;
  }
}

/* o[head][row], by the definition: row i sees keys up to i + kKeys - kRows. */
static void reference_row(int head, int row, double out[kDim]) {
  const int group = head / (kHeads / kKvHeads);
  const int visible = row + kKeys - kRows + 1;
  double total = 0;
  for (int d = 0; d < kDim; ++d) out[d] = 0;
  for (int j = 0; j < visible; ++j) {
    double dot = 0;
    for (int d = 0; d < kDim; ++d) dot += (double)q[head][row][d] * (double)k[group][j][d];
    const double weight = exp(dot / sqrt(kDim));
    total += weight;
    for (int d = 0; d < kDim; ++d) out[d] += weight * (double)v[group][j][d];
  }
  for (int d = 0; d < kDim; ++d) out[d] /= total;
}

static double largest_error(void) {
  double error = 0;
  double expected[kDim];
  for (int head = 0; head < kHeads; ++head) {
    for (int row = 0; row < kRows; ++row) {
      reference_row(head, row, expected);
      for (int d = 0; d < kDim; ++d) {
        error = fmax(error, fabs((double)o[head][row][d] - expected[d]));
      }
    }
  }
  return error;
}

int main(void) {
  fill(&q[0][0][0], sizeof q / sizeof(float));
  fill(&k[0][0][0], sizeof k / sizeof(float));
  fill(&v[0][0][0], sizeof v / sizeof(float));

  const int64_t q_shape[] = {kHeads, kRows, kDim};
  const int64_t kv_shape[] = {kKvHeads, kKeys, kDim};
  fulmen_tensors tensors;
  fulmen_tensors_init(&tensors);
  fulmen_tensor_init(&tensors.q, q, FULMEN_FLOAT32, 3, q_shape);
  fulmen_tensor_init(&tensors.k, k, FULMEN_FLOAT32, 3, kv_shape);
  fulmen_tensor_init(&tensors.v, v, FULMEN_FLOAT32, 3, kv_shape);
  fulmen_tensor_init(&tensors.o, o, FULMEN_FLOAT32, 3, q_shape);
  fulmen_problem problem;
  fulmen_problem_init(&problem);
  problem.causal = 1;

  if (fulmen_attention(&problem, &tensors, NULL) != FULMEN_OK) {
    fprintf(stderr, "%s\n", fulmen_last_error());
    return 2;
  }
  const double error = largest_error();
  printf("fulmen %s: causal attention, %d rows, %d keys, largest error %.2e\n", fulmen_version(),
         kRows, kKeys, error);
  return error < 1e-6 ? 0 : 1;
}
