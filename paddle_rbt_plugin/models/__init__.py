"""GPT and LLaMA in Paddle's public API, and the published ones by name."""

from paddle_rbt_plugin.models.build import build, input_spec, sample_batch
from paddle_rbt_plugin.models.config import Config, GPTConfig, LlamaConfig, config_names, load_config, named_config

__all__ = [
    "Config",
    "GPTConfig",
    "LlamaConfig",
    "build",
    "config_names",
    "input_spec",
    "load_config",
    "named_config",
    "sample_batch",
]
