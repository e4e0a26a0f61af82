"""generate: machine code for one ATen graph, by inductor or by running the graph as it is."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import fx

log = logging.getLogger(__name__)

Compiler = Literal["inductor", "eager"]


@dataclass(frozen=True, slots=True)
class Generator:
    """The inner compiler: `compiler`, with torch.compile's `mode` for inductor."""

    compiler: Compiler
    mode: str | None = None

    @property
    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        """The decompositions to trace with; inductor's may change strides, so its views must be chosen after them.

        Embeddings' backward stays whole, for `factor`; where that leaves it, inductor decomposes it itself.
        """
        if self.compiler == "eager":
            return {}
        from torch._inductor.decomposition import select_decomp_table

        whole = torch.ops.aten.embedding_dense_backward.default
        return {operation: meaning for operation, meaning in select_decomp_table().items() if operation is not whole}

    def generate(self, graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """A function of the same inputs and outputs as `graph_module`, for tensors like `inputs` (fake ones)."""
        if self.compiler == "eager":
            return graph_module
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        patches = dict(list_mode_options(self.mode)) if self.mode else {}
        patches.pop("triton.cudagraphs", None)  # a graph's outputs end with its next call; checkpoints live longer
        compiled: Any = compile_fx(graph_module, list(inputs), config_patches=patches)
        function: Callable[..., Any] = compiled
        return function


@cache
def best_compiler(device_type: str) -> Compiler:
    """inductor where what it needs is there (a C++ compiler for the CPU, Triton elsewhere), else eager, said once."""
    if device_type == "meta":
        return "eager"
    if device_type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            if shutil.which(get_cpp_compiler()):
                return "inductor"
        except InvalidCxxCompiler:
            pass
        missing = "no C++ compiler was found (install g++)"
    else:
        from torch.utils._triton import has_triton

        if has_triton():
            return "inductor"
        missing = f"Triton does not work for {device_type} here"
    log.warning("%s: layers run uncompiled; set expert={'compiler': 'eager'} to choose this", missing)
    return "eager"
