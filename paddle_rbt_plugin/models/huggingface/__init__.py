"""Models by the ``config.json`` that they are published with on Hugging Face."""

from paddle_rbt_plugin.models.huggingface.fields import ModelWarning
from paddle_rbt_plugin.models.huggingface.read import FAMILIES, is_huggingface, load_huggingface, read_huggingface

__all__ = ["FAMILIES", "ModelWarning", "is_huggingface", "load_huggingface", "read_huggingface"]
