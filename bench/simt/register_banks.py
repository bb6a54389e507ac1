# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What the inner products of a compiled kernel cost beside their multiply-adds.

register_banks.py FILE.cubin [LEAST]: for each basic block with at least LEAST multiply-adds, its
instructions, loads of shared memory, and the cycles lost to register banks: a register's bank is
its parity, a bank gives one register a cycle, and what the previous multiply-add marked .reuse
comes from a cache (measured on an H100: docs/design/numerics.md). nvdisasm must be on the path.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

MULTIPLY_ADD = re.compile(r"(?:@!?U?P\d+ )?[FD]FMA\S* R\w+, (.*)")


def basic_blocks(path: str) -> Iterator[tuple[str, list[str]]]:
    """Name and instructions of each basic block."""
    text = subprocess.run(["nvdisasm", "-c", path], capture_output=True, text=True, check=True)
    name, block = "entry", []
    for line in text.stdout.splitlines():
        label = re.match(r"\s*(\.L_\S+):", line)
        instruction = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line)
        if label:
            yield name, block
            name, block = label.group(1), []
        elif instruction:
            block.append(instruction.group(1))
    yield name, block


def cycles_lost(block: list[str]) -> int:
    """Cycles beyond one for each multiply-add."""
    lost = 0
    cached: list[str | None] = [None, None, None]
    for instruction in block:
        found = MULTIPLY_ADD.match(instruction)
        if found is None:
            cached = [None, None, None]
            continue
        operands = [operand.strip() for operand in found.group(1).split(",")]
        registers = [re.sub(r"\.reuse$", "", operand).lstrip("-|") for operand in operands]
        read = {
            register
            for register, kept in zip(registers, cached, strict=False)
            if register != kept and re.fullmatch(r"R\d+", register)
        }
        banks = Counter(int(register[1:]) % 2 for register in read)
        lost += max(banks.values(), default=1) - 1
        cached = [
            register if operand.endswith(".reuse") else None
            for register, operand in zip(registers, operands, strict=True)
        ]
    return lost


def main(path: str, least: str = "64") -> None:
    """Prints a line for each block."""
    for name, block in basic_blocks(path):
        adds = sum(MULTIPLY_ADD.match(instruction) is not None for instruction in block)
        if adds < int(least):
            continue
        loads = sum("LDS" in instruction for instruction in block)
        lost = cycles_lost(block)
        share = 100 * adds / (len(block) + lost)
        print(
            f"{name}: {adds} multiply-adds of {len(block)} instructions, {loads} loads, "
            f"{lost} cycles lost to banks: {share:.0f} % of the peak at best"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
