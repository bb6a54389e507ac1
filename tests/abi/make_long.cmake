# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
#
# Writes fulmen_long.h: fulmen.h as a later version might have it, with two options and an array
# more. cmake -D SOURCE=fulmen.h -D TARGET=fulmen_long.h -P make_long.cmake
file(READ ${SOURCE} text)
string(REPLACE ";" "<semicolon>" text "${text}")
string(REPLACE "} fulmen_problem<semicolon>"
  "  int64_t later_count<semicolon>\n  double later_real<semicolon>\n} fulmen_problem<semicolon>"
  text "${text}")
string(REPLACE "} fulmen_tensors<semicolon>"
  "  fulmen_tensor later<semicolon>\n} fulmen_tensors<semicolon>" text "${text}")
string(REPLACE "<semicolon>" ";" text "${text}")
file(WRITE ${TARGET} "${text}")
