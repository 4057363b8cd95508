"""Packaging. The built-in patterns are plugins like any other: entry points of group ``paddle_rbt``."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

PATTERNS = (
    "qkv",
    "multi_query",
    "latent_attention",
    "cross_attention",
    "fused_qkv",
    "row_matmul",
    "relative_position_bias",
    "ffn",
    "gated_ffn",
    "fused_gated_ffn",
    "moe_ffn",
    "fused_moe_ffn",
    "moe_router",
    "layer_norm",
    "rms_norm",
    "shared_word_embedding",
    "word_embedding",
    "position_embedding",
    "counted_positions",
    "learned_positions",
    "class_token",
    "patch_embedding",
    "lm_head",
    "classifier",
    "pooler",
    "head_transform",
    "unsqueeze_data",
    "reshape_data",
    "cast_data",
    "label_data",
    "attention_mask",
)

# The CPU and the GPU wheel of Paddle exclude each other, so Paddle comes only through an extra.
CPU = ["paddlepaddle>=2.6.2,<3.4"]
GPU = ["paddlepaddle-gpu>=2.6.2,<3.4"]
TEST = ["pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", "setuptools>=68", "wheel"]
DEV = ["ruff>=0.6", "mypy>=1.11", "types-PyYAML", "types-jsonschema", "types-psutil", "nox>=2024.10.9"]
FORMERS = ["paddleformers==1.2.0"]
DOCS = ["mkdocs-material>=9.5", "mkdocstrings[python]>=0.26", "mkdocs-click>=0.8", "ruff>=0.6"]
PLOT = ["matplotlib>=3.8"]

setup(
    name="paddle-rbt-plugin",
    version="0.1.0",
    description="Rule-based tuner for PaddlePaddle's auto-parallel framework: finds a parallel strategy from plugin patterns",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[*find_packages(include=["paddle_rbt_plugin", "paddle_rbt_plugin.*"]), "paddle_rbt_cli", "paddle_rbt_patterns"],
    package_dir={"paddle_rbt_patterns": "patterns"},
    package_data={
        "paddle_rbt_plugin": [
            "py.typed",
            "cluster/*.yaml",
            "models/configs/*.yaml",
            "plan/*.json",
            "handover/checkpoint/*.json",
            "bench/*.json",
            "bench/cases/*.yaml",
        ]
    },
    install_requires=[
        "numpy>=1.24",
        "pluggy>=1.3",
        "click>=8.1",
        "rich>=13.7",
        "PyYAML>=6.0",
        "jsonschema>=4.20",
        "safetensors>=0.4",
        "platformdirs>=3.0",
        "psutil>=5.9.5",
        "pydantic>=2.7",
        "packaging>=23",
    ],
    extras_require={"cpu": CPU, "gpu": GPU, "test": TEST, "dev": TEST + DEV, "docs": DOCS, "plot": PLOT, "formers": FORMERS},
    entry_points={
        "console_scripts": ["paddle-rbt = paddle_rbt_cli:main"],
        "paddle_rbt": [f"{name} = paddle_rbt_patterns.{name}" for name in PATTERNS],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
