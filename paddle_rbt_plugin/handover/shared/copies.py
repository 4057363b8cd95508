"""Makes all copies of a model start equal, however its ranks were seeded.

Every rank builds the whole model and keeps its part. The parts must belong to one model, that of rank 0, so rank 0 broadcasts
every parameter and buffer before it is sharded. They are sent one at a time, which needs memory for the largest one only.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import paddle
import paddle.distributed as dist

from paddle_rbt_plugin.errors import TunerWarning


def share_all(tensors: Iterable[tuple[str, Any]]) -> None:
    """Broadcasts the values of these named dygraph tensors from rank 0; warns once if another rank had different values."""
    sharing = Sharing()
    for name, tensor in tensors:
        sharing.share(name, tensor)
    sharing.report()


class Sharing:
    """Broadcasts tensors from rank 0, one at a time, and records those that differed on other ranks."""

    def __init__(self) -> None:
        self.active = dist.is_initialized() and dist.get_world_size() > 1
        self._names: list[str] = []
        self._differ: list[int] = []

    def share(self, name: str, tensor: Any) -> None:
        """Broadcasts one tensor, in place; skips a tensor that is not initialized yet, or already distributed."""
        if not self.active or not tensor._is_initialized() or tensor.is_dist() or 0 in tensor.shape:
            return
        with paddle.base.dygraph.guard(), paddle.no_grad():
            own = as_bytes(tensor)
            received = own.clone()
            dist.broadcast(received, src=0)
            differs = not bool((own == received).all())
            if differs:
                is_bool = tensor.dtype == paddle.bool
                value = received.cast("bool") if is_bool else received.view(tensor.dtype)
                value = value.reshape(tensor.shape)
                tensor.get_tensor()._share_data_with(value.get_tensor())
        self._names.append(name)
        self._differ.append(int(differs))

    def report(self) -> None:
        """Warns on rank 0 if any rank held different values."""
        if not self.active or not self._names:
            return
        with paddle.base.dygraph.guard():
            ranks = paddle.to_tensor(self._differ, dtype="int64")
            dist.all_reduce(ranks)
            names = [name for name, count in zip(self._names, ranks.tolist(), strict=True) if count]
        if names and dist.get_rank() == 0:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            warnings.warn(
                f"the ranks held different weights ({names[0]}{more}), as is normal without a common paddle.seed; all ranks "
                "train with those of rank 0",
                TunerWarning,
                stacklevel=2,
            )


def as_bytes(tensor: Any) -> Any:
    """The values of a dense dygraph tensor as a flat tensor of bytes, so that comparison is exact."""
    flat = tensor.detach().reshape([-1])
    return flat.cast("uint8") if flat.dtype == paddle.bool else flat.view("uint8")


def _is_lazy(parameter: Any) -> bool:
    """Whether a parameter was made under ``LazyGuard`` and has not been initialized."""
    return not parameter._is_initialized() and not parameter.is_dist() and getattr(parameter, "_init_func", None) is not None


class SharedOnTheWay(list[Any]):
    """A list of parameters that initializes each parameter, if needed, and broadcasts it during iteration: code that shards
    them one by one never holds more than one whole parameter."""

    def __iter__(self) -> Iterator[Any]:
        sharing = Sharing()
        for parameter in super().__iter__():
            if _is_lazy(parameter):
                with paddle.base.dygraph.guard():
                    parameter.initialize()
            sharing.share(parameter.name, parameter)
            yield parameter
        sharing.report()
