# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Which files of the product name an option, an array or whatever else has a name.

    count_option.py prefix            the number, and the files
    count_option.py softcap --where   each line as well

A file counts when an identifier or a string of its code, comments and docstrings apart, has the
words of the name beside each other: softcap, kSoftcap and softcap_out are all softcap.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from product_code import Source, names, parts, product
from source_tree import ROOT

# Where a name has another sense: of a prefix of file names, of tensors in a file.
OTHER_SENSE = {"prefix": ("src/gpu/jit/", "python/fulmen/cli/")}


def files_naming(root: Path, name: str) -> list[Source]:
    apart = OTHER_SENSE.get(name, ())
    return [source for source in product(root)
            if names(source.code, parts(name)) and not source.name.startswith(apart)]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Files of the product that name an option.")
    parser.add_argument("name", help="as the C header spells it: batch_invariant")
    parser.add_argument("--where", action="store_true", help="show the lines")
    parser.add_argument("--root", type=Path, default=ROOT)
    arguments = parser.parse_args()
    found = files_naming(arguments.root.resolve(), arguments.name)
    print(f"{arguments.name}: {len(found)} files of include, src and python")
    for source in found:
        print(f"  {source.name}")
        for number, line in enumerate(source.code.splitlines(), start=1):
            if arguments.where and names(line, parts(arguments.name)):
                print(f"    {number}: {line.strip()}")


if __name__ == "__main__":
    main()
