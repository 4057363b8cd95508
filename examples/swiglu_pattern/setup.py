"""A complete third-party pattern package: installing it is all that a user does."""

from setuptools import setup

setup(
    name="rbt-swiglu-pattern",
    version="0.1.0",
    description="LLaMA's gated feed-forward network for paddle-rbt-plugin",
    py_modules=["rbt_swiglu_pattern"],
    install_requires=["paddle-rbt-plugin"],
    entry_points={"paddle_rbt": ["swiglu_ffn = rbt_swiglu_pattern"]},
)
