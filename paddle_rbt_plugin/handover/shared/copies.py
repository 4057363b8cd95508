"""Copies of a model that start alike, whatever its ranks were seeded with.

Every rank builds a whole model and keeps its part. The parts have to be those of one model, that of rank 0, so every parameter
and buffer is sent from there before it is cut. They are sent one after the other, so this needs the memory of the largest one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import paddle
import paddle.distributed as dist

from paddle_rbt_plugin.errors import TunerWarning


def share_all(tensors: Iterable[tuple[str, Any]]) -> None:
    """Gives every rank the values that rank 0 has of these named tensors of dygraph; warns once where a rank had others."""
    sharing = Sharing()
    for name, tensor in tensors:
        sharing.share(name, tensor)
    sharing.report()


class Sharing:
    """Sends tensors from rank 0, one at a time, and keeps note of those that were others elsewhere."""

    def __init__(self) -> None:
        self.active = dist.is_initialized() and dist.get_world_size() > 1
        self._names: list[str] = []
        self._differ: list[int] = []

    def share(self, name: str, tensor: Any) -> None:
        """One tensor, in place; nothing happens for one that holds nothing yet, or is distributed already."""
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
        """Warns on rank 0 where any rank held other values."""
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
    """The values of a dense tensor of dygraph as a flat tensor of bytes, of which any two are compared exactly."""
    flat = tensor.detach().reshape([-1])
    return flat.cast("uint8") if flat.dtype == paddle.bool else flat.view("uint8")


def _is_lazy(parameter: Any) -> bool:
    """Whether a parameter was made under ``LazyGuard`` and not initialized since."""
    return not parameter._is_initialized() and not parameter.is_dist() and getattr(parameter, "_init_func", None) is not None


class SharedOnTheWay(list[Any]):
    """A list of parameters that are initialized, where they are not yet, and shared when they are iterated over, one at a time:
    whoever cuts them and lets go of the whole never holds more than one."""

    def __iter__(self) -> Iterator[Any]:
        sharing = Sharing()
        for parameter in super().__iter__():
            if _is_lazy(parameter):
                with paddle.base.dygraph.guard():
                    parameter.initialize()
            sharing.share(parameter.name, parameter)
            yield parameter
        sharing.report()
