"""Types of ops as the cost model tells them apart, and the names of gradients."""

from __future__ import annotations

from collections.abc import Iterable

from paddle_rbt_plugin.completion.work import Kernel

LOSS_OPS = frozenset(
    {
        "cross_entropy_with_softmax",
        "c_softmax_with_cross_entropy",
        "c_softmax_with_multi_label_cross_entropy",
        "softmax_with_cross_entropy",
        "log_softmax",
        "log_loss",
        "bce_loss",
        "sigmoid_cross_entropy_with_logits",
        "nll_loss",
    }
)
"""Ops that mixed precision leaves in float32 although their inputs are large."""

MATMULS = frozenset({"matmul", "bmm", "mm", "mv", "addmm", "mul", "fused_gemm_epilogue", "fc", "linear", "fused_linear"})
"""Ops that are one matrix product of their first two operands."""

ELEMENTWISE = frozenset(
    {"add", "subtract", "multiply", "divide", "scale", "cast", "dropout", "gelu", "silu", "swiglu", "relu", "tanh", "sigmoid"}
    | {"pow", "square", "sqrt", "rsqrt", "exp", "log", "abs", "clip", "where", "assign", "maximum", "minimum", "add_n"}
)
"""Ops that read and write each element once, so that a compiler fuses runs of them."""

VIEWS = frozenset(
    {"reshape", "unsqueeze", "squeeze", "flatten", "view", "view_shape", "share_data", "detach", "reshard", "assign_out_"}
    | {"full", "full_int_array", "full_like", "shape", "shape64", "numel", "arange", "print", "identity"}
)
"""Ops that move no tensor: another shape of the same memory, or a few scalars."""

EMBEDDINGS = frozenset({"embedding", "c_embedding", "gather", "lookup_table", "lookup_table_v2"})
"""Ops that look rows of a table up."""


def forward_type(type: str) -> str:
    """The forward op that a ``*_grad`` op belongs to; any other op is its own."""
    return type.removesuffix("_grad")


def grad_name(name: str) -> str:
    """Name of a tensor's gradient."""
    return f"{name}@GRAD"


def base_name(name: str) -> str:
    """Name of the tensor a gradient belongs to; any other name is its own."""
    return name.removesuffix("@GRAD")


def loss_values(kernels: Iterable[Kernel]) -> frozenset[str]:
    """Names of the values that ops of the loss produce."""
    return frozenset(v.name for k in kernels if k.type in LOSS_OPS for v in k.outputs)
