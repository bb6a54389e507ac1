# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The command `fulmen`: a program on the public functions, one file a command.

main reads the arguments and answers for errors; run, verify, explain and doctor are the commands;
tensor_file reads and writes safetensors, measure times and counts bytes, naive is the way without
fulmen, accuracy judges, output prints.
"""
