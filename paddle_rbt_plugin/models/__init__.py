"""Transformers in Paddle's public API: the published ones by name, others by their config."""

from paddle_rbt_plugin.models.build import build, input_spec, sample_batch
from paddle_rbt_plugin.models.config import Config, GPTConfig, LlamaConfig
from paddle_rbt_plugin.models.files import config_names, load_config, named_config
from paddle_rbt_plugin.models.huggingface import ModelWarning, load_huggingface, read_huggingface
from paddle_rbt_plugin.models.parameters import Parameters, count_parameters
from paddle_rbt_plugin.models.transformer import DecoderConfig, EncoderConfig, EncoderDecoderConfig

__all__ = [
    "Config",
    "DecoderConfig",
    "EncoderConfig",
    "EncoderDecoderConfig",
    "GPTConfig",
    "LlamaConfig",
    "ModelWarning",
    "Parameters",
    "build",
    "config_names",
    "count_parameters",
    "input_spec",
    "load_config",
    "load_huggingface",
    "named_config",
    "read_huggingface",
    "sample_batch",
]
