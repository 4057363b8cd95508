"""The differential benchmark: its cases, its shrinking, and that it finds a wrong gradient."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # at the end: some modules there are named as packages are
from random_models.blocks import BLOCKS, INPUTS
from random_models.compare import Difference, compare
from random_models.draw import draw_case
from random_models.grammar import LAYOUTS, LOSSES, SCRIPT, Case, check, completed
from random_models.model import LAYERS
from random_models.pool import Jobs
from random_models.run import general, run_case
from random_models.shrink import shrink
from random_models.spell import spell_case

numbers = st.integers(0, 10**6)


@given(numbers, numbers)
@settings(deadline=None)
def test_a_seed_and_a_number_give_one_case_which_is_legal_and_survives_json(seed: int, number: int) -> None:
    case = draw_case(seed, number)
    assert case == draw_case(seed, number)
    assert json.loads(json.dumps(case)) == case
    check(case)
    assert spell_case(case).count("\n") >= len(case["model"])


def test_drawn_cases_hold_every_block_every_loss_and_every_choice_of_the_script() -> None:
    cases = [draw_case(1, number) for number in range(1500)]
    assert {s["op"] for c in cases for s in c["model"]} == set(BLOCKS) - {"einsum"}
    assert {(o["loss"], o["form"]) for c in cases for o in c["outputs"]} == {
        (k, f) for k, v in LOSSES.items() for f in v["form"]
    }
    for name, choices in SCRIPT.items():
        assert {c["script"][name] for c in cases} == set(choices) - ({1, 2} if name == "steps" else set())
    assert {(c["layout"]["dp"], c["layout"]["mp"]) for c in cases} == set(LAYOUTS.values())
    assert any(s["op"] == "einsum" for n in range(500) for s in draw_case(1, n, crashing=True)["model"])


def test_every_block_is_a_layer() -> None:
    assert set(LAYERS) == set(BLOCKS) - set(INPUTS)


def test_a_case_of_an_earlier_grammar_gets_the_simplest_script() -> None:
    case = draw_case(1, 1)
    del case["script"]["decay_of"]
    assert completed(case)["script"]["decay_of"] == "all"


@given(numbers, st.data())
@settings(deadline=None, max_examples=30)
def test_shrinking_keeps_what_fails_and_nothing_else(number: int, data: st.DataObject) -> None:
    case = draw_case(2, number)
    op = data.draw(st.sampled_from(sorted({s["op"] for s in case["model"]} - set(INPUTS))))
    clip = case["script"]["clip"]

    def fails(candidate: Case) -> bool:
        return any(s["op"] == op for s in candidate["model"]) and candidate["script"]["clip"] == clip

    small = shrink(case, fails, 10**6)
    assert fails(small)
    check(small)
    assert len(small["outputs"]) == 1 and not small["returned"] and small["script"]["steps"] == 1
    assert all(small["script"][name] == choices[0] for name, choices in SCRIPT.items() if name not in ("clip", "steps"))
    needed = sum(s["op"] == op for s in small["model"])
    others = [s["op"] for s in small["model"] if s["op"] not in (op, *INPUTS)]
    assert needed == 1 and len(others) <= 3, spell_case(small)  # what turns an input into its operands, and weights


def answer(path: Path, losses: list[float], arrays: dict[str, np.ndarray], dims: dict[str, list[int]], rank: int = 0) -> dict:
    """What a rank tells, its arrays saved."""
    file = path / f"{rank}-{len(list(path.iterdir()))}.npz"
    np.savez(file, **{f"a{i}": a for i, a in enumerate(arrays.values())})
    parts = [[name, dims[name]] for name in arrays]
    return {"losses": losses, "path": str(file), "parts": parts, "mesh": {"shape": [1, 2], "ranks": [0, 1]}}


def test_parts_are_put_together_and_copies_compared(tmp_path: Path) -> None:
    whole = {"weight w": np.arange(8.0).reshape(2, 4), "weight b": np.ones(4)}
    dims = {"weight w": [-1, 1], "weight b": [-1]}
    serial = answer(tmp_path, [1.0], whole, {name: [-1] * a.ndim for name, a in whole.items()})
    halves = [{"weight w": h, "weight b": whole["weight b"].copy()} for h in np.split(whole["weight w"], 2, axis=1)]
    ranks = [answer(tmp_path, [1.0], h, dims, rank) for rank, h in enumerate(halves)]
    assert compare(serial, ranks).kind == ""
    halves[1]["weight b"][2] += 1e-3
    assert compare(serial, [ranks[0], answer(tmp_path, [1.0], halves[1], dims, 1)]).kind == "copies"
    halves[0]["weight b"][2] += 1e-3
    ranks = [answer(tmp_path, [1.0], h, dims, rank) for rank, h in enumerate(halves)]
    found = compare(serial, ranks)
    assert found.kind == "weight" and found.beyond(Difference(weight=1.0)) == "" and "weight b" in found.where
    assert compare(serial, [{**r, "losses": [math.nan]} for r in ranks]).kind == "loss"


def test_reasons_are_counted_without_their_numbers_and_names() -> None:
    assert general("mp 4 does not divide the 6 heads of 'a.b'") == general("mp 2 does not divide the 7 heads of 'c'")


@pytest.mark.slow
def test_a_gradient_that_one_rank_gets_wrong_is_found_and_shrunk_to_a_small_model() -> None:
    case = draw_case(3, 1, ("dp2",), ("dygraph",))
    assert len(case["model"]) > 3
    with Jobs() as jobs:
        assert run_case(jobs, case, 120).outcome == "same"
    with Jobs(fault=1) as jobs:
        outcome = run_case(jobs, case, 120)
        assert outcome.outcome == "difference", outcome
        small = shrink(case, lambda candidate: run_case(jobs, candidate, 120).same_failure(outcome))
    assert len(small["model"]) <= 3, spell_case(small)
    assert small["script"]["steps"] == 1


@pytest.mark.slow
def test_a_job_that_hangs_is_replaced() -> None:
    case = draw_case(3, 1, ("dp2",), ("dygraph",))
    with Jobs() as jobs:
        job = jobs.job(2, "dygraph")
        assert job.run(case, 0.0)["outcome"] == "hang"
        assert jobs.job(2, "dygraph") is not job
        assert run_case(jobs, case, 120).outcome == "same"
