"""The IR-neutral graph and the readers that make one from a Paddle program."""

from paddle_rbt_plugin.graph.batch import Batch
from paddle_rbt_plugin.graph.graph import DTYPE_BYTES, Graph, Op, Tensor
from paddle_rbt_plugin.graph.reader import is_legacy, read_program

__all__ = ["DTYPE_BYTES", "Batch", "Graph", "Op", "Tensor", "is_legacy", "read_program"]
