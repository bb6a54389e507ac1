/* SPDX-FileCopyrightText: fulmen contributors
 * SPDX-License-Identifier: Apache-2.0
 *
 * Plain C.
 */
#include "api/from_c.h"

fulmen_status create_plan_of_operation(const fulmen_problem* problem, const fulmen_tensors* tensors,
                                       int operation, fulmen_plan** plan) {
  return fulmen_plan_create(problem, tensors, (fulmen_operation)operation, plan);
}

const char* name_of_status(int status) { return fulmen_status_name((fulmen_status)status); }
