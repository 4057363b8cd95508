"""Local sizes of values: what one rank stores of a tensor in one micro step.

The traced program is in float32. What a float32 value is stored as is decided by the training precision: two bytes under
fp16 and bf16 (Paddle's AMP level O2, Megatron's mixed precision), except what the loss works on, which stays in float32.
Under sequence parallelism (arXiv 2205.05198, section 4.2.2) a hidden state that tensor parallelism replicates is split over
the mp group along the sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import prod

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.completion.work import Kernel, Value
from paddle_rbt_plugin.cost.candidate import Precision
from paddle_rbt_plugin.graph import DTYPE_BYTES

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


class Sizes:
    """Elements and bytes per rank of the values of one segment."""

    def __init__(
        self,
        mesh: ProcessMesh,
        batch_scale: float,
        precision: Precision,
        sequence_parallel: bool = False,
        float32: Collection[str] = (),
    ):
        self.mesh = mesh
        self.batch_scale = batch_scale
        self.half = precision != "fp32"
        self.split = mesh.degree("mp") if sequence_parallel else 1
        """Parts that a hidden state is split into along the sequence."""
        self.float32 = float32
        """Names of values that stay in float32."""
        self._mp_axis = mesh.axes.index("mp") if "mp" in mesh.axes else None
        self._shapes: dict[tuple[tuple[int, ...], Placement, int | None], tuple[float, ...]] = {}
        self._bytes: dict[Value, float] = {}

    def shape(self, value: Value) -> tuple[float, ...]:
        """Local shape, the sequence unsplit. A rank may hold a part of a sample (context parallelism): the dimension that
        grows with the batch need not be whole."""
        key = value.shape, value.placement, value.batch_dim
        found = self._shapes.get(key)
        if found is None:
            shape: list[float] = list(value.placement.local_shape(value.shape, self.mesh))
            d = value.batch_dim
            if d is not None:
                axis = value.placement.dims_mapping[d]
                shape[d] = value.shape[d] * self.batch_scale / (self.mesh.shape[axis] if axis >= 0 else 1)
            found = self._shapes[key] = tuple(shape)
        return found

    def numel(self, value: Value) -> float:
        """Local elements, the sequence unsplit."""
        return prod(self.shape(value), start=1.0)

    def itemsize(self, value: Value) -> int:
        """Bytes of an element."""
        if self.half and value.dtype == "float32" and base_name(value.name) not in self.float32:
            return 2
        return DTYPE_BYTES[value.dtype]

    def nbytes(self, value: Value) -> float:
        """Local bytes, the sequence unsplit."""
        found = self._bytes.get(value)
        if found is None:
            found = self._bytes[value] = self.numel(value) * self.itemsize(value)
        return found

    def is_split(self, value: Value) -> bool:
        """True for a hidden state that sequence parallelism splits: an intermediate value that grows with the batch and
        that the mp group would otherwise replicate."""
        return (
            self.split > 1
            and value.kind == "var"
            and value.batch_dim is not None
            and len(value.shape) > 1
            and base_name(value.name) not in self.float32
            and self._mp_axis not in value.placement.dims_mapping
            and all(axis != self._mp_axis for axis, _ in value.placement.partial)
        )

    def stored(self, value: Value) -> float:
        """Local bytes as kept in memory, a split sequence counted as its part."""
        if self.split > 1 and self.is_split(value):
            return self.nbytes(value) / self.split
        return self.nbytes(value)
