# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The command `fulmen`: a program on the public functions, one file a command.

main reads the arguments and answers for errors; run, verify, bench, tune, ablation,
explain, compile and doctor are the commands; tensor_file reads and writes safetensors, measure
times and counts bytes, output prints. Cases, oracle and benchmark are in fulmen.lab.
"""
