/* SPDX-FileCopyrightText: fulmen contributors
 * SPDX-License-Identifier: Apache-2.0
 *
 * A program that was compiled with an older header runs with this library: its structs are shorter.
 */
#include "fulmen_short.h"
#include "program.h"

int main(void) {
  check_every_call();
  return 0;
}
