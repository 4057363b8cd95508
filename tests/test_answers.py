"""The persistent cache of Paddle's answers: equal plans, nothing asked twice, and no harm from whatever is in the folder."""

import os
import subprocess
import sys

import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion import Answers, Placement, answers, cache, cache_folder
from paddle_rbt_plugin.completion.oracle import Oracle
from paddle_rbt_plugin.completion.question import Operand, Question
from paddle_rbt_plugin.completion.scratch import ScratchPrograms
from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.errors import TunerError, UnsupportedProgram
from paddle_rbt_plugin.handover.pir.configs import config_graph
from paddle_rbt_plugin.models import GPTConfig, LlamaConfig
from paddle_rbt_plugin.request import Request
from paddle_rbt_plugin.tuner import tune_graph

MESH = ProcessMesh(("dp", "mp"), (2, 2), (0, 1, 2, 3))
MODELS = {
    "gpt": GPTConfig(layers=4, hidden=64, ffn=256, heads=4, vocab=128, seq=32),
    "llama": LlamaConfig(layers=4, hidden=64, ffn=128, heads=4, kv_heads=2, vocab=128, seq=32),
}


def plan(model, cache):
    chosen = Settings(cluster="1x8:A100-80G", cache=cache)
    return tune_graph(config_graph(MODELS[model], 16), Request(chosen, precision="bf16")).to_dict()


def relu(shape, placement, op="relu"):
    return Question(op, (), (("x", (Operand(shape, "float32", placement, False),)),))


def ask(folder, question, backward=False):
    known = Answers(folder)
    asked = Oracle(MESH, known.of(MESH))
    try:
        return asked.backward(question) if backward else asked.forward(question)
    finally:
        known.save()


@pytest.fixture
def questions(monkeypatch):
    """The questions that Paddle is asked."""
    asked = []
    build = ScratchPrograms.build

    def counted(scratch, question):
        asked.append(question)
        return build(scratch, question)

    monkeypatch.setattr(ScratchPrograms, "build", counted)
    return asked


@pytest.mark.parametrize("model", MODELS)
def test_the_second_plan_of_a_model_asks_nothing_and_is_equal(model, tmp_path, questions):
    uncached = plan(model, "off")
    assert not list(tmp_path.iterdir())
    questions.clear()
    first = plan(model, tmp_path)
    assert questions
    questions.clear()
    second = plan(model, tmp_path)
    assert not questions
    assert uncached == first == second


axes = st.permutations([-1, -1, 0, 1])


@given(dims=axes, gradient=axes, op=st.sampled_from(["relu", "softmax", "sum", "cumsum"]))
@settings(max_examples=40, deadline=None)
def test_answers_come_back_as_paddle_gave_them(tmp_path_factory, dims, gradient, op):
    attrs = {
        "relu": (),
        "softmax": (("axis", -1),),
        "sum": (("axis", (1,)), ("dtype", "undefined"), ("keepdim", True)),
        "cumsum": (("axis", 1), ("flatten", False), ("exclusive", False), ("reverse", False)),
    }[op]
    operand = Operand((4, 8, 4, 2), "float32", Placement(tuple(dims)), False)
    question = Question(op, attrs, (("x", (operand,)),))
    folder = tmp_path_factory.mktemp("answers")
    for q in (question, question._replace(gradients=(Placement(tuple(gradient)),))):
        asked = Oracle(MESH).backward(q)
        assert ask(folder, q, backward=True) == asked
        known = Answers(folder).of(MESH).find(q)
        assert known == asked
        assert repr(known) == repr(asked)


def test_that_paddle_cannot_build_an_op_is_an_answer_too(tmp_path, questions):
    wrong = Question("matmul", (("transpose_x", False), ("transpose_y", False)), (
        ("x", (Operand((2, 3), "float32", Placement.replicated(2), False),)),
        ("y", (Operand((2, 3), "float32", Placement.replicated(2), False),)),
    ))  # fmt: skip
    said = []
    for _ in range(2):
        questions.clear()
        with pytest.raises(UnsupportedProgram) as error:
            ask(tmp_path, wrong)
        said.append(str(error.value))
    assert not questions
    assert said[0] == said[1]


def test_ops_that_paddle_does_not_declare_are_not_cached(tmp_path):
    with pytest.raises(UnsupportedProgram):
        ask(tmp_path, relu((4, 4), Placement((0, -1)), "an_op_of_a_plugin"))
    assert not list(tmp_path.iterdir())


def test_answers_of_another_build_are_not_read(tmp_path, monkeypatch, questions):
    question = relu((4, 4), Placement((0, 1)))
    ask(tmp_path, question)
    monkeypatch.setattr(paddle.version, "commit", "another")
    questions.clear()
    ask(tmp_path, question)
    assert questions
    theirs = Answers(tmp_path).of(MESH)
    assert theirs.find(question) is not None
    monkeypatch.undo()
    mine = Answers(tmp_path).of(MESH)
    assert mine._path != theirs._path
    mine._path.write_bytes(theirs._path.read_bytes())  # copied by hand: its first line tells
    assert mine.find(question) is None


@pytest.mark.parametrize("broken", [b"", b"\xff\x00", b"[]\nx", b'{"build": 1}\n', "cut", "changed"], ids=str)
def test_a_broken_file_is_ignored_and_written_anew(broken, tmp_path):
    question = relu((4, 4), Placement((0, 1)))
    right = ask(tmp_path, question)
    (path,) = tmp_path.glob("*/*.jsonl")
    whole = path.read_bytes()
    damaged = {"cut": whole[:-20], "changed": whole.replace(b"float32", b"float64")}
    path.write_bytes(damaged.get(broken, broken))
    assert Answers(tmp_path).of(MESH).find(question) is None
    assert ask(tmp_path, question) == right
    assert Answers(tmp_path).of(MESH).find(question) == (right,)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    question = relu((4, 4), Placement((0, 1)))
    assert ask(tmp_path / "file" / "below", question) == Oracle(MESH).forward(question)


def test_old_answers_give_way(tmp_path, monkeypatch):
    first, second = (relu((n, 4), Placement((0, 1))) for n in (4, 8))
    ask(tmp_path, first)
    (path,) = tmp_path.glob("*/*.jsonl")
    monkeypatch.setattr(answers, "MOST_BYTES_OF_A_FILE", int(1.5 * len(path.read_bytes().splitlines()[1])))
    ask(tmp_path, second)
    known = Answers(tmp_path).of(MESH)
    assert known.find(first) is None
    assert known.find(second) is not None
    monkeypatch.setattr(cache, "MOST_BYTES", 0)
    ask(tmp_path, first)
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.slow
def test_processes_share_a_folder(tmp_path):
    script = (
        "import test_answers as t, pathlib, sys\n"
        "for n in map(int, sys.argv[2:]): t.ask(pathlib.Path(sys.argv[1]), t.relu((4 * n, 4), t.Placement((0, 1))))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)]
    running = [subprocess.Popen([*command, *map(str, range(1 + 20 * k, 21 + 20 * k))], env=environment) for k in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    known = Answers(tmp_path).of(MESH)
    found = [n for n in range(1, 41) if known.find(relu((4 * n, 4), Placement((0, 1)))) is not None]
    assert {20, 40} & set(found)  # who wrote last has all of its own
    assert not list(tmp_path.glob("*/*.tmp"))


def test_the_folder_is_the_users_a_settings_or_none(tmp_path, monkeypatch):
    monkeypatch.delenv(cache.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert tmp_path in cache_folder(None).parents
    assert cache_folder(None) == cache_folder("on") == cache_folder(True)
    monkeypatch.setenv(cache.CACHE_VARIABLE, "off")
    assert cache_folder(None) is None
    assert cache_folder(str(tmp_path)) == tmp_path
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path))
    assert cache_folder(None) == tmp_path
    assert cache_folder("off") is cache_folder(False) is None


def test_a_wrong_setting_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TunerError, match="cache must be a folder, 'on' or 'off', not the file"):
        cache_folder(tmp_path / "file")
    with pytest.raises(TunerError, match="cache must be a folder, 'on' or 'off', not 3"):
        Settings(cache=3)
