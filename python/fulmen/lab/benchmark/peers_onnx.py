# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Sides of ONNX Runtime on the CPU: its operators MultiHeadAttention and GroupQueryAttention.

Each cell is a model of one operator, built with the package onnx; inputs are bound where they lie,
and rows have their heads side by side, as the operators want them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import fulmen

from .cells import Cell
from .loading import MissingError, load
from .sides import Answer, Side, Tensors

DTYPES = {"float32": np.float32, "float16": np.float16}
DOMAIN = "com.microsoft"


def as_rows(x: Any) -> np.ndarray:
    """(batch, head, row, dim) as (batch, row, head * dim), contiguous, of NumPy."""
    moved = np.asarray(x).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(moved.reshape(*moved.shape[:2], -1))


class OnnxRuntime(Side):
    """One operator by name."""

    options = ("", "grouped")

    def __init__(self, name: str, operator: str) -> None:
        """Loads both packages.

        Raises:
            MissingError: one is not installed.
        """
        self.name = name
        self.operator = operator
        self.onnx = load("onnx")
        self.runtime = load("onnxruntime")

    def answer(self, cell: Cell, tensors: Tensors) -> Answer:
        if cell.op != "forward":
            raise MissingError("it has no backward pass")
        if cell.dtype not in DTYPES:
            raise MissingError(f"it has no {cell.dtype} on the CPU")
        grouped = self.operator == "GroupQueryAttention"
        if grouped and not cell.causal:
            raise MissingError("it is always causal")
        if not grouped and cell.heads != cell.kv_heads:
            raise MissingError("its heads share no keys")
        inputs = {x: as_rows(getattr(tensors, x)) for x in ("q", "k", "v")}
        attributes: dict[str, Any] = {"num_heads": cell.heads}
        empty: list[str] = []
        if grouped:
            attributes["kv_num_heads"] = cell.kv_heads
            inputs["last_keys"] = np.full(cell.batch, cell.rows - 1, np.int32)
            inputs["keys"] = np.asarray([cell.rows], np.int32)
            empty = ["", ""]  # no past
        else:
            attributes["unidirectional"] = int(cell.causal)
        session = self._session(inputs, attributes, empty, inputs["q"].shape)
        shape = (cell.batch, cell.rows, cell.heads, cell.dim)
        return Answer(
            lambda: session.run(["o"], inputs)[0],
            lambda o: (_like(tensors.q, o.reshape(shape).transpose(0, 2, 1, 3)),),
            f"onnxruntime {self.operator}",
        )

    def _session(
        self,
        inputs: dict[str, np.ndarray],
        attributes: dict[str, Any],
        empty: list[str],
        shape: tuple[int, ...],
    ) -> Any:
        helper = self.onnx.helper

        def told(name: str, dtype: Any, shape: Any) -> Any:
            kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
            return helper.make_tensor_value_info(name, kind, shape)

        names = [*list(inputs)[:3], *empty, *list(inputs)[3:]]
        node = helper.make_node(self.operator, names, ["o"], domain=DOMAIN, **attributes)
        if empty:  # its caches of keys and values come after o, and are wanted
            node.output.extend(["present_key", "present_value"])
        graph = helper.make_graph(
            [node], self.operator, [told(n, x.dtype, x.shape) for n, x in inputs.items()],
            [told("o", inputs["q"].dtype, shape)],
        )  # fmt: skip
        imports = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=8)
        options = self.runtime.SessionOptions()
        options.intra_op_num_threads = int(fulmen.build_info()["threads"])
        options.log_severity_level = 3
        return self.runtime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )


def _like(tensor: Any, result: np.ndarray) -> Any:
    """The result as the kind of array that the tensors are."""
    if isinstance(tensor, np.ndarray):
        return result
    import torch

    return torch.from_numpy(np.ascontiguousarray(result))
