"""Named models are as large as those who published them say.

Counts to the last digit are those of the tensors in the published checkpoints (the safetensors metadata that Hugging Face
shows); others are those of technical reports.
"""

from __future__ import annotations

import json
import warnings

import pytest
from click.testing import CliRunner

from paddle_rbt_cli import cli
from paddle_rbt_plugin.models import ModelWarning, config_names, count_parameters, named_config, read_huggingface
from paddle_rbt_plugin.models.files import ARCHITECTURES

WITHIN = 0.005
PUBLISHED = {
    "qwen2.5-0.5b": (494_032_768, "huggingface.co/Qwen/Qwen2.5-0.5B"),
    "qwen2.5-1.5b": (1_543_714_304, "huggingface.co/Qwen/Qwen2.5-1.5B"),
    "qwen2.5-3b": (3_085_938_688, "huggingface.co/Qwen/Qwen2.5-3B"),
    "qwen2.5-7b": (7_615_616_512, "huggingface.co/Qwen/Qwen2.5-7B"),
    "qwen2.5-14b": (14_770_033_664, "huggingface.co/Qwen/Qwen2.5-14B"),
    "qwen2.5-32b": (32_763_876_352, "huggingface.co/Qwen/Qwen2.5-32B"),
    "qwen2.5-72b": (72_706_203_648, "huggingface.co/Qwen/Qwen2.5-72B"),
    "qwen3-0.6b": (596_049_920, "huggingface.co/Qwen/Qwen3-0.6B-Base"),
    "qwen3-1.7b": (1_720_574_976, "huggingface.co/Qwen/Qwen3-1.7B-Base"),
    "qwen3-4b": (4_022_468_096, "huggingface.co/Qwen/Qwen3-4B"),
    "qwen3-8b": (8_190_735_360, "huggingface.co/Qwen/Qwen3-8B"),
    "qwen3-14b": (14_768_307_200, "huggingface.co/Qwen/Qwen3-14B"),
    "qwen3-32b": (32_762_123_264, "huggingface.co/Qwen/Qwen3-32B"),
    "qwen3-30b-a3b": (30_532_122_624, "huggingface.co/Qwen/Qwen3-30B-A3B"),
    "qwen3-235b-a22b": (235_093_634_560, "huggingface.co/Qwen/Qwen3-235B-A22B"),
    "mixtral-8x7b": (46_702_792_704, "huggingface.co/mistralai/Mixtral-8x7B-v0.1"),
    "mixtral-8x22b": (140_620_634_112, "huggingface.co/mistral-community/Mixtral-8x22B-v0.1"),
    "deepseek-v2-lite": (15_706_484_224, "huggingface.co/deepseek-ai/DeepSeek-V2-Lite"),
    "deepseek-v2": (235_741_434_880, "huggingface.co/deepseek-ai/DeepSeek-V2"),
    "deepseek-v3": (671e9, "arXiv 2412.19437, section 4.2; without multi-token prediction"),
    "ernie-4.5-0.3b": (0.36e9, "huggingface.co/baidu/ERNIE-4.5-0.3B-PT"),
    "ernie-4.5-21b-a3b": (21.9e9, "huggingface.co/baidu/ERNIE-4.5-21B-A3B-PT"),
    "ernie-4.5-300b-a47b": (300e9, "ERNIE 4.5 Technical Report (2025)"),
    "gemma-3-1b": (302e6 + 698e6, "arXiv 2503.19786, table 1: embedding and non-embedding parameters"),
    "gemma-3-4b": (675e6 + 3_209e6, "arXiv 2503.19786, table 1"),
    "gemma-3-12b": (1_012e6 + 10_759e6, "arXiv 2503.19786, table 1"),
    "gemma-3-27b": (1_416e6 + 25_600e6, "arXiv 2503.19786, table 1"),
    "gpt-oss-20b": (20.91e9, "arXiv 2508.10925, table 1"),
    "gpt-oss-120b": (116.83e9, "arXiv 2508.10925, table 1"),
}
# Checkpoints of GLM-4.5 hold one more layer, which predicts a token further ahead, with an embedding and a head of its own.
WITH_PREDICTION = {
    "glm-4.5": (358_337_791_296, "huggingface.co/zai-org/GLM-4.5"),
    "glm-4.5-air": (110_468_824_832, "huggingface.co/zai-org/GLM-4.5-Air"),
}
ACTIVE = {
    "qwen3-30b-a3b": (3.3e9, "arXiv 2505.09388, section 2"),
    "qwen3-235b-a22b": (22e9, "arXiv 2505.09388, section 2"),
    "mixtral-8x7b": (12.9e9, "arXiv 2401.04088, section 2"),
    "mixtral-8x22b": (39e9, "mistral.ai/news/mixtral-8x22b"),
    "deepseek-v2": (21e9, "arXiv 2405.04434, section 3.1.2"),
    "deepseek-v3": (37e9, "arXiv 2412.19437, section 4.2"),
    "ernie-4.5-300b-a47b": (47e9, "ERNIE 4.5 Technical Report (2025)"),
}
BY_CONFIG = [
    (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
        124_439_808,  # huggingface.co/openai-community/gpt2
    ),
    (
        {"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064, "sliding_window": 2047},
        3_821_079_552,  # huggingface.co/microsoft/Phi-3-mini-4k-instruct
    ),
    (
        {"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000},
        9_241_705_984,  # huggingface.co/google/gemma-2-9b
    ),
    (
        {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": 4096},
        7_241_732_096,  # huggingface.co/mistralai/Mistral-7B-v0.1
    ),
    (
        {"model_type": "glm4", "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
         "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151552, "attention_bias": True},
        9_400_279_040,  # huggingface.co/zai-org/GLM-4-9B-0414
    ),
    (
        {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True},
        1_235_814_400,  # huggingface.co/meta-llama/Llama-3.2-1B
    ),
    (
        {"model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
         "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 151936, "num_experts": 60,
         "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
        14_315_784_192,  # huggingface.co/Qwen/Qwen1.5-MoE-A2.7B
    ),
    (
        {"model_type": "bert", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
         "num_attention_heads": 12, "vocab_size": 30522},
        110e6,  # arXiv 1810.04805, section 3
    ),
    (
        {"model_type": "t5", "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "vocab_size": 32128},
        60_506_624,  # huggingface.co/google-t5/t5-small
    ),
    (
        {"model_type": "t5", "d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12, "vocab_size": 32128,
         "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        247_577_856,  # huggingface.co/google/t5-v1_1-base
    ),
]  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore::paddle_rbt_plugin.models.ModelWarning")


def named(name):
    return count_parameters(named_config(name))


def test_every_model_by_its_published_config_has_a_published_count():
    by_config = {name for name in config_names() if named_config(name).arch not in ARCHITECTURES}
    assert by_config == PUBLISHED.keys() | WITH_PREDICTION.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_named_model_is_as_large_as_published(name):
    assert named(name).total == pytest.approx(PUBLISHED[name][0], rel=WITHIN)


@pytest.mark.parametrize("name", WITH_PREDICTION)
def test_a_named_model_and_the_layer_that_it_lacks_are_as_large_as_the_checkpoint(name):
    config = named_config(name)
    fields = {"layers": config.layers + 1}
    layer = count_parameters(type(config)(**{**vars(config), **fields})).total - named(name).total
    extra = 2 * config.hidden**2 + 3 * config.hidden + 2 * config.vocab * config.hidden
    assert named(name).total + layer + extra == pytest.approx(WITH_PREDICTION[name][0], rel=1e-6)


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_uses_as_many_parameters_as_published(name):
    """Reports round to two digits, and do not say whether they count the embedding."""
    config = named_config(name)
    embedding = config.vocab * config.hidden
    published, _ = ACTIVE[name]
    assert published - 0.5e9 - embedding <= named(name).active <= published + 0.5e9 + embedding


@pytest.mark.parametrize(("config", "published"), BY_CONFIG, ids=[f"{c['model_type']} {n / 1e9:.2f} B" for c, n in BY_CONFIG])
def test_a_model_by_its_config_is_as_large_as_published(config, published):
    assert count_parameters(read_huggingface(config, seq=512)).total == pytest.approx(published, rel=WITHIN)


@pytest.mark.parametrize("name", sorted(PUBLISHED | WITH_PREDICTION))
def test_a_named_model_says_where_its_numbers_come_from(name):
    assert "arXiv" in named_config(name).source or "config.json" in named_config(name).source


def test_a_model_that_lacks_layers_says_so_by_name():
    for name in (*WITH_PREDICTION, "deepseek-v3"):
        with pytest.warns(ModelWarning, match="multi-token prediction"):
            named_config(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named_config("qwen3-8b")


def test_the_command_lists_models_with_parameters_layers_and_heads():
    result = CliRunner().invoke(cli, ["models", "--json"])
    assert result.exit_code == 0
    rows = {row["name"]: row for row in json.loads(result.stdout)["models"]}
    assert rows.keys() == set(config_names())
    mixtral = rows["mixtral-8x7b"]
    assert (mixtral["parameters"], mixtral["active_parameters"]) == (46_702_792_704, 12_879_925_248)
    assert (mixtral["layers"], mixtral["hidden"], mixtral["heads"], mixtral["kv_heads"]) == (32, 4096, 32, 8)
    assert rows["gpt3-1.3b"]["arch"] == "gpt"
    assert rows["gpt3-1.3b"]["active_parameters"] == rows["gpt3-1.3b"]["parameters"]


def test_the_table_of_models_fits_a_terminal_and_warns_of_nothing():
    result = CliRunner().invoke(cli, ["models"])
    assert result.exit_code == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    (row,) = (line.split() for line in lines if line.split()[:1] == ["deepseek-v3"])
    assert row == ["deepseek-v3", "671", "B", "37.6", "B", "61", "7168", "128", "128", "4096"]


def test_a_config_of_hugging_face_is_planned_from_the_command_line(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**BY_CONFIG[5][0], "num_hidden_layers": 4, "max_position_embeddings": 131072}))
    arguments = ["plan", str(path), "--cluster", "1x8:A100-80G", "--global-batch", "64", "--set", "mp=2", "--json"]
    result = CliRunner().invoke(cli, [*arguments, "--seq", "1024"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["degrees"]["mp"] == 2
    assert plan["unmatched"] == []
    assert "assumed" not in result.stderr
    assert "4096 tokens are assumed, --seq says others" in CliRunner().invoke(cli, arguments).stderr
    path.write_text(json.dumps({"model_type": "rwkv"}))
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1
    assert "model_type 'rwkv' is no family that is supported; supported: bert" in result.stderr
