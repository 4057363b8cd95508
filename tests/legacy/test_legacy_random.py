"""Random numbers and initial weights of legacy programs: alike on replicas, different on shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from launching import launch_all

from paddle_rbt_plugin.handover.legacy.random import controlled

WORKER = Path(__file__).parent / "random_worker.py"

two_processes = pytest.mark.skipif(
    not paddle.__version__.startswith("3.1"), reason="legacy programs communicate between CPU processes on Paddle 3.1 only"
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks trained to; the worker compares their replicas, too."""
    return launch_all(str(WORKER), 2, tmp_path_factory.mktemp("random") / "result", fresh=True)


@pytest.mark.slow
@two_processes
def test_the_halves_of_a_divided_tensor_drop_different_values(ranks: list) -> None:
    assert all(loss > 0 for rank in ranks for loss in rank["halves"]["losses"])


@pytest.mark.slow
@two_processes
@pytest.mark.parametrize("run", ["halves", "mp", "mp other", "mp seeded apart", "mp noise"])
def test_replicas_draw_alike(ranks: list, run: str) -> None:
    assert ranks[0][run]["losses"] == ranks[1][run]["losses"]


@pytest.mark.slow
@two_processes
@pytest.mark.parametrize("run", ["dp", "dp noise", "dp seeded apart"])
def test_parts_of_a_batch_of_equal_samples_draw_different_numbers(ranks: list, run: str) -> None:
    assert all(a != b for a, b in zip(ranks[0][run]["losses"], ranks[1][run]["losses"], strict=True))


@pytest.mark.slow
@two_processes
def test_one_seed_gives_one_training_and_another_seed_another(ranks: list) -> None:
    for rank in ranks:
        assert rank["mp"]["losses"] == rank["mp again"]["losses"]
        assert rank["dp noise"]["losses"] == rank["dp noise again"]["losses"]
        assert rank["mp"]["losses"] != rank["mp other"]["losses"]
        assert len(set(rank["mp"]["losses"])) == 3


@pytest.mark.slow
@two_processes
def test_weights_of_a_startup_program_are_alike_where_they_are_whole_and_different_where_not(ranks: list) -> None:
    first, second = ([np.array(w) for w in rank["static"]["weights"]] for rank in ranks)
    equal = {a.shape: np.array_equal(a, b) for a, b in zip(first, second, strict=True)}
    assert equal == {(16, 32): False, (32,): False, (32, 16): False, (16,): True}


def test_the_coordinates_of_a_rank_name_its_streams_and_paddle_gets_its_own_control_back() -> None:
    from paddle.distributed.auto_parallel import random
    from paddle.distributed.auto_parallel.static.operators import dist_dropout

    mesh = paddle.distributed.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])
    before = dist_dropout.determinate_rng
    with controlled(3) as names:
        assert random.is_enable_auto_rand_ctrl()
        dist_dropout.determinate_rng(3, [0, -1], mesh)
        dist_dropout.determinate_rng(3, [0, 1], mesh)
        dist_dropout.determinate_rng(3, [-1, -1], mesh)
    assert [name.rsplit("/", 1)[1] for name in names] == ["dp=1", "dp=1,mp=1", ""]
    assert len(set(names)) == 3
    assert dist_dropout.determinate_rng is before
    assert not random.is_enable_auto_rand_ctrl()
