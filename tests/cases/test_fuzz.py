# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Hypothesis draws whole cases: shapes, strides, options and numbers at once.

The budget is fixed and the examples are the same in every run. A failure prints the Case, which can
be pasted into the catalogue as it is.
"""

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from fulmen.lab.cases import Case, run_case
from fulmen.lab.cases.arrays import DTYPES
from fulmen.lab.cases.views import VIEWS

KINDS = ("normal", "wide", "outlier", "opposed_100", "uneven_do", "tiny", "one_hot", "ones")
ORDINARY = tuple(view for view in VIEWS if not view.startswith("far"))
SHAPES = ("bhqk", "1hqk", "b1qk", "11qk", "bh1k", "1h1k", "b11k", "111k", "11q1", "bhq1", "1111")


@st.composite
def masks(draw, causal, packed):
    """At most one mask of each kind."""
    found = []
    if causal and draw(st.booleans()):
        found.append(("prefix", draw(st.integers(0, 20))))
    if draw(st.integers(0, 3)) == 0:
        found.append(("documents", draw(st.integers(1, 5))))
    if draw(st.integers(0, 3)) == 0:
        found.append(("chunks", draw(st.integers(1, 20))))
    if draw(st.integers(0, 2)) == 0:
        shape = draw(st.sampled_from(SHAPES))
        content = draw(st.sampled_from((0.2, 0.5, 0.9, "lower", "empty_rows", "nothing")))
        if isinstance(content, str):
            shape = "11qk"
        found.append(("bool", shape[1:] if packed else shape, content))
    return tuple(found)


@st.composite
def cases(draw):
    """Any case that means something."""
    kv_heads = draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(DTYPES))
    causal, packed = draw(st.booleans()), draw(st.integers(0, 3)) == 0
    batch = draw(st.integers(1, 3))
    length = st.one_of(st.integers(0, 12), st.integers(0, 80))
    if packed:
        lengths = st.lists(length, min_size=batch, max_size=batch).map(tuple)
        shape = {
            "q_packed": draw(lengths),
            "kv_packed": draw(lengths),
            "q_tail": draw(st.integers(0, 3)),
            "kv_tail": draw(st.integers(0, 3)),
            "offsets": draw(st.sampled_from(("int32", "int64"))),
        }
    else:
        q_rows, kv_rows = draw(length), draw(length)
        shape = {"batch": batch, "q_rows": q_rows, "kv_rows": kv_rows}
        for name, rows in (("q_lengths", q_rows), ("kv_lengths", kv_rows)):
            if draw(st.integers(0, 2)) == 0:
                each = st.integers(0, rows)
                shape[name] = draw(st.lists(each, min_size=batch, max_size=batch).map(tuple))
    limit = st.integers(-1, 40)
    bias = draw(st.sampled_from(("", "", *SHAPES)))
    if bias:
        bias = bias[1:] if packed else bias
        kinds = ("same", "float32") if dtype != "float64" else ("same",)
        bias = f"{bias} {draw(st.sampled_from(kinds))} {draw(st.sampled_from(('normal', 'hides')))}"
    views = st.tuples(st.sampled_from(("q", "k", "v", "do", "k v")), st.sampled_from(ORDINARY))
    if packed:
        views = views.filter(lambda view: view[1] != "same_batch")
    placed = tuple(draw(st.lists(views, max_size=2)))
    poisons = ("", "nan_hidden", "inf_hidden")
    if any(view.startswith("same") for _, view in placed):  # a stride of 0 would repeat the poison
        poisons = ("",)
    return Case(
        f"fuzz_{draw(st.integers(0, 2**16))}",
        dtype=dtype,
        heads=kv_heads * draw(st.sampled_from((1, 2, 3, 5))),
        kv_heads=kv_heads,
        dim=draw(st.integers(0, 40)),
        dim_v=draw(st.integers(1, 40)),
        inputs=draw(st.sampled_from(KINDS)),
        poison=draw(st.sampled_from(poisons)),
        views=placed,
        scale=draw(st.sampled_from((None, None, 0.0, -0.5, 2.0))),
        softcap=draw(st.sampled_from((0.0, 0.0, 1.0, 30.0))),
        causal=causal,
        alignment=draw(st.sampled_from(("bottom_right", "top_left"))),
        window=draw(
            st.one_of(
                st.none(),
                st.tuples(limit, st.sampled_from((-1, 0)) if causal else limit),
                st.integers(0, 40),
            )
        ),
        masks=draw(masks(causal, packed)),
        bias=bias,
        alibi=draw(st.sampled_from(("", "", "h", "bh"))),
        sinks=draw(st.sampled_from(("", "normal", "low", "high"))),
        dropout_p=draw(st.sampled_from((0.0, 0.0, 0.3, 1.0))),
        rng=(draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 2**32 - 1))),
        dlse=draw(st.booleans()),
        need_each=draw(st.booleans()),
        **shape,
    )


@settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(case=cases())
def test_any_case(case):
    for implementation in ("scalar", "tiled"):
        outcome = run_case(case, "cpu", implementation)
        note(f"{implementation}: {outcome}\nCase({case.changed()})")
        assert outcome.status != "failed", outcome.message
