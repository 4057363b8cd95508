"""What one rank of a mesh does in one micro step, as completion finds it and the cost model reads it.

Shapes here are global shapes of the traced program with the placement beside them. The traced program has a certain batch
size; a micro step has another one, so ``batch_dim`` says which dimension grows with the batch, and ``local_shape`` puts
both together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.graph import DTYPE_BYTES
from paddle_rbt_plugin.layers.layers import Layers

Phase = Literal["forward", "backward", "optimizer"]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]


class Value(NamedTuple):
    """A tensor as it lies on the mesh. ``name`` is the graph tensor's, with ``@GRAD`` appended for its gradient."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    placement: Placement
    batch_dim: int | None = None
    kind: Literal["param", "data", "var"] = "var"

    @property
    def is_activation(self) -> bool:
        """True for what each micro batch has of its own: no parameters, no tables shared by all layers, no input data."""
        return self.kind == "var" and self.batch_dim is not None

    def local_shape(self, mesh: ProcessMesh, batch_scale: float) -> tuple[int, ...]:
        """Shape on one rank. ``batch_scale`` is the batch that all data-parallel ranks of the mesh hold together in one
        micro step, over the batch of the traced program."""
        shape = tuple(round(n * batch_scale) if d == self.batch_dim else n for d, n in enumerate(self.shape))
        return self.placement.local_shape(shape, mesh)

    def local_numel(self, mesh: ProcessMesh, batch_scale: float) -> int:
        """Elements on one rank; ``batch_scale`` as in ``local_shape``."""
        n = 1
        for d in self.local_shape(mesh, batch_scale):
            n *= d
        return n

    def local_bytes(self, mesh: ProcessMesh, batch_scale: float) -> int:
        """Bytes on one rank in the dtype of the program; ``batch_scale`` as in ``local_shape``."""
        return self.local_numel(mesh, batch_scale) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Collective:
    """A communication along one mesh axis. ``value`` is the tensor whose local bytes are the message: the local input of an
    all-reduce, reduce-scatter or all-to-all, the gathered result of an all-gather, the tensor sent point to point."""

    kind: CollectiveKind
    axis: str
    value: Value
    phase: Phase


@dataclass(frozen=True)
class Kernel:
    """One op as a rank runs it. ``inputs`` lie as the op needs them and ``outputs`` as it makes them; ``collectives`` bring
    the inputs there, and the outputs to where their readers expect them."""

    type: str
    phase: Phase
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    collectives: tuple[Collective, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, eq=False)
class SegmentWork:
    """The work of one segment of the graph. Structurally equal segments whose inputs lie alike share one object, and it is by
    identity that they are known as equal."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    """In the order of execution: last forward op first."""
    params: tuple[Value, ...]
    """Parameters first used in this segment."""
    trained: tuple[Value, ...]
    """Those of them that get a gradient; the others are frozen, or nothing that the loss depends on."""
    gradients: tuple[Value, ...]
    """Their gradients as backward leaves them, a micro batch's or accumulated."""
    gradient_syncs: tuple[Collective, ...]
    """Brings each of these parameters' gradients to the parameter's placement, once per step (phase ``optimizer``)."""
    saved: tuple[Value, ...]
    """Forward values (parameters left out) that backward reads: what a micro batch in flight keeps alive."""
    inputs: tuple[Value, ...]
    """Non-parameter values that enter from other segments or as data."""
    outputs: tuple[Value, ...]
    """Values that later segments read."""
    unread: tuple[Value, ...] = ()
    """Of the first segment, parameters that nothing reads; they are held all the same."""

    def values(self) -> Iterator[Value]:
        """Every value that is read, made, sent or kept; some come several times."""
        for kernel in (*self.forward, *self.backward):
            yield from kernel.inputs
            yield from kernel.outputs
            yield from (c.value for c in kernel.collectives)
        yield from (c.value for c in self.gradient_syncs)
        yield from (*self.params, *self.unread, *self.saved, *self.inputs, *self.outputs)


@dataclass(frozen=True, eq=False)
class Crossing:
    """A value that other layers than its own read, and so other stages where these run one of them and not its own layer.

    ``value`` is what they read: a sum over ranks is finished before. ``how`` says how it comes there: it is ``sent`` from stage
    to stage in a micro step, and its gradient comes back; an input is ``fed`` to every stage that reads it; a constant is
    ``computed`` there; a parameter is ``copied``, and the gradients of the copies are summed once a step."""

    value: Value
    layer: int
    """The layer that makes it, or reads it first where it is a parameter or an input."""
    readers: tuple[int, ...]
    """The other layers that read it, in order."""
    returning: tuple[int, ...]
    """Those of them that give it a gradient."""
    how: Literal["sent", "fed", "computed", "copied"] = "sent"

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient comes back from any reader."""
        return bool(self.returning)


@dataclass(frozen=True)
class Completion:
    """A graph completed on one process mesh: the work of each segment, in program order."""

    mesh: ProcessMesh
    batch: int
    """Batch size of the traced program."""
    layers: Layers
    work: tuple[SegmentWork, ...]
    """One per segment of ``layers.segments``."""
    placements: Mapping[int, Placement]
    """Where every tensor of the graph lies in the forward pass, by its position."""
    crossings: tuple[Crossing, ...]
    """In program order."""
