// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Nothing: what carries the precompiled headers that all test programs use.
