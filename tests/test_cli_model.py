"""What MODEL may be, and what is said of one that leads nowhere."""

import paddle
import pytest

from paddle_rbt_plugin.errors import ModelError, UnsupportedProgram
from paddle_rbt_plugin.handover.pir.configs import config_graph
from paddle_rbt_plugin.handover.pir.trace import trace_layer
from paddle_rbt_plugin.model_reference import model_graph
from paddle_rbt_plugin.models import GPTConfig, LlamaConfig, build, input_spec, named_config

MODULE = """
import paddle
from paddle import nn
from paddle.static import InputSpec

class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))

class WithLoss(Net):
    def forward(self, x):
        return super().forward(x).mean()

class Namespace:
    def build():
        return pair()

def loss(y, target):
    return ((y - target) ** 2).mean()

def pair():
    return WithLoss(), [InputSpec([-1, 8], "float32", "x")]

def bare_specs():
    return Net(), InputSpec([-1, 8], "float32", "x"), loss, InputSpec([-1, 8], "float32", "target")

def program():
    paddle.enable_static()
    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        WithLoss()(paddle.static.data("x", [4, 8]))
    return main

def huge():  # 10 TiB
    layers = (nn.Linear(2**18, 2**18) for _ in range(40))
    return nn.Sequential(*layers), [InputSpec([-1, 2**18], "float32", "x")], lambda y: y.mean()

def alone():
    return Net()

def number():
    return 3

def swapped():
    return [InputSpec([4, 8], "float32")], Net()

def raises():
    raise KeyError("no such thing")

def asserts():
    assert 1 + 1 == 3, "arithmetic"

def leaves():
    raise SystemExit

class Unspeakable(Exception):
    def __str__(self):
        raise SystemExit

def unspeakable():
    raise Unspeakable

class Leaving(Net):
    def forward(self, x):
        raise SystemExit(0)

def leaving():
    return Leaving(), [InputSpec([-1, 8], "float32", "x")]

constant = 7
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the current directory, as a user has it."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "faulty.py").write_text("import no_such_package_anywhere\n")
    (tmp_path / "exiting.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "noisy.py").write_text("raise ValueError('at import')\n")
    monkeypatch.chdir(tmp_path)
    yield
    import sys

    for name in ("mine", "exiting", "faulty", "noisy"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "config",
    [
        GPTConfig(layers=6, hidden=32, ffn=64, heads=4, vocab=64, seq=16),
        GPTConfig(layers=2, hidden=32, ffn=64, heads=4, vocab=64, seq=16),
        LlamaConfig(layers=5, hidden=32, ffn=48, heads=4, kv_heads=2, vocab=64, seq=16),
    ],
    ids=["deep gpt", "shallow gpt", "llama"],
)
def test_the_graph_of_a_config_is_that_of_the_whole_model(config):
    from paddle.utils import unique_name

    with unique_name.guard(), paddle.LazyGuard():
        layer = build(config)
    whole = trace_layer(layer, input_spec(config, 4)).graph
    graph = config_graph(config, 4)
    assert graph.signature == whole.signature
    assert [t.name for t in graph.params] == [t.name for t in whole.params]
    assert config_graph(config, 4).signature == graph.signature


def test_a_name_and_a_file_of_the_same_content_are_the_same_model(tmp_path):
    config = named_config("gpt3-125m")
    path = tmp_path / "mine.yaml"
    fields = {k: v for k, v in vars(config).items() if k != "source"}
    path.write_text("arch: gpt\n" + "".join(f"{k}: {v}\n" for k, v in fields.items()))
    assert model_graph(str(path), 4).signature == model_graph("gpt3-125m", 4).signature


def test_seq_replaces_the_sequence_length_of_a_config():
    graph = model_graph("gpt3-125m", 4, seq=256)
    assert graph.tensor("tokens").shape == (4, 256)


def test_seq_is_refused_where_the_inputs_fix_it(module):
    with pytest.raises(ModelError, match="--seq changes the sequence length of a config, but 'mine:pair' is none"):
        model_graph("mine:pair", 4, seq=256)


@pytest.mark.parametrize("function", ["pair", "bare_specs", "Namespace.build"])
def test_a_function_may_return_a_layer_with_its_inputs(module, function):
    graph = model_graph(f"mine:{function}", 4)
    assert graph.tensor("x").shape == (4, 8)
    assert graph.loss is not None
    assert [op.type for op in graph][:2] == ["matmul", "add"]


def test_a_function_may_return_a_static_program(module):
    assert paddle.in_dynamic_mode()
    assert model_graph("mine:program", 4).tensor("x").shape == (4, 8)
    assert paddle.in_dynamic_mode()


def test_a_layer_far_larger_than_memory_is_not_allocated(module):
    assert sum(t.nbytes for t in model_graph("mine:huge", 4).params) > 2**43


def test_a_saved_program_is_the_program(tmp_path, module):
    import mine

    layer, specs = mine.pair()
    specs[0].shape = (4, 8)
    trace = trace_layer(layer, specs)
    paddle.base.core.serialize_pir_program(trace.program, str(tmp_path / "saved.json"))
    assert model_graph(str(tmp_path / "saved.json"), 4).signature == trace.graph.signature


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("gpt3-13B", r"no model is named 'gpt3-13B'; did you mean gpt3-13b"),
        ("zzz", r"the published ones are deepseek-v2, .* \(MODEL is the name of a published model, a config file"),
        ("mine:", r"'mine:' is not of the form package\.module:function"),
        (":pair", r"':pair' is not of the form package\.module:function"),
        ("mine:par", r"mine has no function 'par'; did you mean 'pair'"),
        ("mine:constant", r"mine:constant is int, not a function; it would return a static Program"),
        ("mine:alone", r"mine:alone returns a Layer alone, so the shapes of its inputs are unknown; it should return"),
        ("mine:number", r"mine:number returns int; it should return a static Program"),
        ("mine:swapped", r"mine:swapped returns a tuple of 2; it should return"),
        ("mine:raises", r"mine:raises raised KeyError: 'no such thing'"),
        ("mine:asserts", r"mine:asserts raised AssertionError: arithmetic"),
        ("mine:leaves", r"mine:leaves raised SystemExit"),
        ("mine:unspeakable", r"mine:unspeakable raised Unspeakable: its message cannot be read"),
        ("sys:exit", r"sys:exit raised SystemExit"),
        ("exiting:pair", r"importing exiting raised SystemExit: 0"),
        ("theirs:pair", r"there is no module 'theirs' in the current directory or the Python environment"),
        ("faulty:pair", r"importing faulty raised ModuleNotFoundError: No module named 'no_such_package_anywhere'"),
        ("noisy:pair", r"importing noisy raised ValueError: at import"),
        ("none.yaml", r"cannot read the model config none\.yaml"),
        ("none.json", r"the program 'none\.json' cannot be read: No such file or directory"),
        ("mine.py", r"'mine\.py' is a Python file; name the function in it that returns the model, as mine:build"),
    ],
)
def test_a_reference_that_leads_nowhere_says_what_would_be_right(module, reference, message):
    with pytest.raises(ModelError, match=message):
        model_graph(reference, 4)


def test_a_layer_that_exits_while_it_is_traced_is_unsupported(module):
    with pytest.warns(UserWarning, match="SystemExit"), pytest.raises(UnsupportedProgram, match="cannot be traced: SystemExit"):
        model_graph("mine:leaving", 4)


def test_an_empty_program_is_unsupported(tmp_path):
    path = tmp_path / "empty.json"
    paddle.base.core.serialize_pir_program(paddle.static.Program(), str(path))
    with pytest.raises(UnsupportedProgram, match="the program is empty"):
        model_graph(str(path), 4)
