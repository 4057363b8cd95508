"""Asks Paddle what an op does with the placements of its inputs.

The question (``question``) is put the way execution puts it: the op is built on distributed inputs in a scratch program
(``scratch``), and the answer (``built``) is read from what Paddle made of it. Answers depend only on the question, so each is
asked once (a third of a millisecond) and remembered by the oracle, and from one run to the next by a cache (``answers``).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.built import Built
from paddle_rbt_plugin.completion.operands import less_sharded, whole_along, wrongly_summed
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.completion.question import HALF, Question
from paddle_rbt_plugin.completion.sample_wise import SAMPLE_WISE, laid, local_placements
from paddle_rbt_plugin.completion.scratch import ScratchPrograms
from paddle_rbt_plugin.completion.synchronised import BATCH_NORM, batch_norm_placements, shards_samples
from paddle_rbt_plugin.errors import UnsupportedProgram
from paddle_rbt_plugin.graph.random_ops import draws_whole


class Remembered(Protocol):
    """What is known of a mesh from other runs, see ``answers.MeshAnswers``."""

    def find(self, question: Question) -> tuple[Built, ...] | None: ...

    def keep(self, question: Question, answer: Sequence[Built] | UnsupportedProgram) -> None: ...


class Oracle:
    """Answers for one arrangement of a mesh; only its shape matters, not which ranks it holds. ``remembered`` is asked first,
    and is told every new answer."""

    def __init__(self, mesh: ProcessMesh, remembered: Remembered | None = None):
        self.mesh = mesh
        self._remembered = remembered
        self._scratch = ScratchPrograms(mesh)
        self._undistributed = ScratchPrograms(None)
        self._answers: dict[Question, tuple[Built, ...]] = {}
        self._built: dict[Question, tuple[Built, ...]] = {}  # ops as they were built to find what they bring their operands to
        self._brought: dict[Question, tuple[Placement, ...] | None] = {}

    def forward(self, question: Question) -> Built:
        """The op itself. Raises UnsupportedProgram when Paddle cannot build it."""
        return self._ask(question)[0]

    def backward(self, question: Question) -> tuple[Built, ...]:
        """The ops of its backward pass in order, the zeros for missing gradients included."""
        return self._ask(question)

    def _ask(self, question: Question) -> tuple[Built, ...]:
        answer = self._answers.get(question)
        if answer is None:
            answer = self._remembered.find(question) if self._remembered else None
            if answer is None:
                answer = self._answer(question)
            self._answers[question] = answer
        return answer

    def _answer(self, question: Question) -> tuple[Built, ...]:
        if question.op == "einsum":  # what ``graph.rewrite`` leaves; building it on distributed operands ends the process
            equation = dict(question.attrs)["equation"]
            raise UnsupportedProgram(f"Paddle cannot shard einsum({equation!r}); write it with matmul, sum and transpose")
        try:
            answer = self._on_local_tensors(question) if _is_local(question) else self._distributed(question)
        except UnsupportedProgram as error:
            if self._remembered:
                self._remembered.keep(question, error)
            raise
        if self._remembered:
            self._remembered.keep(question, answer)
        return answer

    def _on_local_tensors(self, question: Question) -> tuple[Built, ...]:
        """The answer for an op that each rank runs on its own samples."""
        whole = question.whole
        forward = self._build(whole.forward, self._undistributed)
        dims = [len(product.shape) for product in forward[0].products]
        if question.op == BATCH_NORM:
            where = batch_norm_placements(dict(question.attrs), question.operands, dims)
        else:
            where = local_placements(question, self._undistributed.result_slots(whole.forward), dims)
        dense = forward if question.gradients is None else self._build(whole, self._undistributed)
        return laid(dense, question, where)

    def _distributed(self, question: Question) -> tuple[Built, ...]:
        forward = question.forward
        if forward not in self._brought:
            self._brought[forward] = self._find_brought(forward)
        brought = self._brought[forward]
        if brought is not None:
            return self._of_brought(question, brought)
        return self._build(question) if question.gradients is not None else self._built[forward]

    def _find_brought(self, forward: Question) -> tuple[Placement, ...] | None:
        """The placements to which an op brings its operands before it is built. All whole for an op that must draw its whole
        result on every rank and would draw shards; others for an op that Paddle builds wrongly on operands that lie so
        (``operands``). None for an op that is built as it stands."""
        given = tuple(o.placement for o in forward.operands)
        try:
            self._built[forward] = self._build(forward)
        except UnsupportedProgram:
            others = less_sharded(given)
            for other in others[:-1]:
                with suppress(UnsupportedProgram):
                    self._build(forward.placed(other))
                    return other
            if others:
                return others[-1]
            raise
        built = self._built[forward][0]
        made = [product.made for product in built.products]
        if draws_whole(forward.op, dict(forward.attrs)) and any(placement.is_sharded() for placement in made) and given:
            return less_sharded(given)[-1]
        axes = wrongly_summed(built.type, made)
        return whole_along(given, axes) if axes else None

    def _of_brought(self, question: Question, placements: tuple[Placement, ...]) -> tuple[Built, ...]:
        """The answer for operands that the op itself brings to ``placements``."""
        built = self._build(question.placed(placements))
        if question.gradients is not None:
            return tuple(b.with_gradients_of(question.operands) for b in built)
        return (built[0].from_operands(question.operands),)

    def _build(self, question: Question, scratch: ScratchPrograms | None = None) -> tuple[Built, ...]:
        try:
            return (scratch or self._scratch).build(question)
        except UnsupportedProgram:
            raise
        except Exception as error:  # Paddle's own exceptions have no common base
            half = {o.dtype for o in question.operands} & HALF
            if half:
                dtype = half.pop()
                return tuple(built.with_dtype(dtype) for built in self._build(question.in_float32(), scratch))
            shapes = ", ".join(str(list(o.shape)) for o in question.operands)
            raise UnsupportedProgram(
                f"Paddle cannot build {question.op!r} on inputs of shape {shapes} placed as "
                f"{[o.placement.dims_mapping for o in question.operands]}: {str(error).strip().splitlines()[-1]}"
            ) from error


def _is_local(question: Question) -> bool:
    """Whether each rank runs the op on its own samples."""
    return question.op in SAMPLE_WISE or shards_samples(question.op, [o.placement for o in question.operands])
