"""Models by the ``config.json`` that they are published with on Hugging Face."""

from paddle_rbt_plugin.models.huggingface.fields import ModelWarning
from paddle_rbt_plugin.models.huggingface.read import FAMILIES, load_huggingface, read_huggingface

__all__ = ["FAMILIES", "ModelWarning", "load_huggingface", "read_huggingface"]
