"""A complete third-party pattern package: installing it is all that a user does."""

from setuptools import setup

setup(
    name="rbt-rwkv-pattern",
    version="0.1.0",
    description="RWKV's channel mixing for paddle-rbt-plugin",
    py_modules=["rbt_rwkv_pattern"],
    install_requires=["paddle-rbt-plugin"],
    entry_points={"paddle_rbt": ["rwkv_channel_mix = rbt_rwkv_pattern"]},
)
