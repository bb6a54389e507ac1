# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The page made from fulmen.h names everything that the header declares, and keeps its words."""

import re

import pytest

import api_reference

HEADER = """\
/* ------------------------------------------------------------------------------------------------
 * 2  Status and types
 *
 * Threads. All may call.
 *
 *   s[i] = softcap(x)
 * ---------------------------------------------------------------------------------------------- */

/* The sentence of the last_call. */
FULMEN_API const char* fulmen_last_error(int a,
                                         int b);

typedef struct fulmen_tensor {
  int rank; /* of the array */

  int shape;
} fulmen_tensor;

#define FULMEN_MAX_RANK 4

#ifdef __cplusplus
} /* extern "C" */
#endif
"""

PAGE = """\
## 2. Status and types

**Threads.** All may call.

```text
s[i] = softcap(x)
```

### `fulmen_last_error`

The sentence of the `last_call`.

```c
const char* fulmen_last_error(int a,
                              int b);
```

### `fulmen_tensor`

```c
typedef struct fulmen_tensor {
  int rank; /* of the array */

  int shape;
} fulmen_tensor;
```

### `FULMEN_MAX_RANK`

```c
#define FULMEN_MAX_RANK 4
```
"""


def test_a_small_header_word_for_word() -> None:
    assert api_reference.markdown(HEADER) == PAGE


@pytest.fixture(scope="module")
def header() -> str:
    return api_reference.HEADER.read_text(encoding="utf-8")


def test_every_declared_name_has_a_heading(header: str) -> None:
    page = api_reference.markdown(header)
    headings = set(re.findall(r"`(fulmen_\w+)`", "\n".join(re.findall(r"^### .*$", page, re.M))))
    declared = set(re.findall(r"FULMEN_API[^;]*?(fulmen_\w+)\(", header))
    declared |= set(re.findall(r"^} (fulmen_\w+);$", header, re.M))
    assert len(declared) > 30
    assert declared <= headings


def test_every_section_and_every_declaration_is_there(header: str) -> None:
    page = api_reference.markdown(header)
    contents = re.findall(r"^ \*   (\d)  (\w[\w ,]*?)(?:  +|$)", header, re.M)
    assert [f"## {number}. {title}" for number, title in contents] == re.findall(
        r"^## .*$", page, re.M
    )
    code = "\n".join(re.findall(r"```c\n(.*?)```", page, re.S))
    assert code.count(";") == header.split("1  Introduction")[2].count(";") - _in_comments(header)


def _in_comments(header: str) -> int:
    """Semicolons of sections and comments before declarations, which the page shows as text."""
    body = header.split("1  Introduction")[2]
    own_lines = re.findall(r"^/\*.*?\*/$", body, re.M | re.S)
    introduction = body.split("*/")[0]
    return sum(comment.count(";") for comment in own_lines) + introduction.count(";")
