/* SPDX-FileCopyrightText: fulmen contributors
 * SPDX-License-Identifier: Apache-2.0
 *
 * A program that was compiled with a later header runs with this library: its structs are longer.
 * What it does not set is at its default; what it sets and this library does not know is refused.
 * fulmen_long.h is made of fulmen.h by make_long.cmake.
 */
#include "fulmen_long.h"
#include "program.h"

static void check_refused(call* c, const char* words) {
  CHECK(fulmen_attention(&c->problem, &c->tensors, NULL) == FULMEN_ERROR_ARGUMENT);
  CHECK(strstr(fulmen_last_error(), words) != NULL);
  CHECK(strstr(fulmen_last_error(), "this library knows") != NULL);
  CHECK(c->o[0] == -1.0f);
  check_canaries(c);
}

int main(void) {
  const int64_t shape[1] = {1};
  float number = 0;
  call* c = new_call();
  CHECK(c->problem.later_count == 0 && c->problem.later_real == 0);
  CHECK(c->tensors.later.data == NULL && c->tensors.later.struct_size == 0);
  c->problem.later_count = 1;
  check_refused(c, "problem.struct_size is");
  c->problem.later_count = 0;
  c->problem.later_real = 0.5;
  check_refused(c, "problem.struct_size is");
  c->problem.later_real = 0;
  CHECK(fulmen_tensor_init(&c->tensors.later, &number, FULMEN_FLOAT32, 1, shape) == FULMEN_OK);
  check_refused(c, "tensors.struct_size is");
  free(c);
  check_every_call();
  return 0;
}
