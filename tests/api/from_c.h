/* SPDX-FileCopyrightText: fulmen contributors
 * SPDX-License-Identifier: Apache-2.0
 *
 * Calls that only C can make: with numbers that are none of an enumeration's. Also what compiles
 * fulmen.h as C.
 */
#ifndef FULMEN_TESTS_API_FROM_C_H_
#define FULMEN_TESTS_API_FROM_C_H_

#include "fulmen/fulmen.h"

#ifdef __cplusplus
extern "C" {
#endif

fulmen_status create_plan_of_operation(const fulmen_problem* problem, const fulmen_tensors* tensors,
                                       int operation, fulmen_plan** plan);
const char* name_of_status(int status);

#ifdef __cplusplus
}
#endif

#endif
