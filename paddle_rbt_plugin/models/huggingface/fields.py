"""The fields of a ``config.json``, each read once, so that what nobody has read can be refused.

Defaults are those of the configuration classes of transformers 4.57, since published files leave out what equals them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paddle_rbt_plugin.errors import ModelError
from paddle_rbt_plugin.models.sizes import BASE, COUNT, LAYERS, RATE, SIZE, SMALL, STD, SWITCH
from paddle_rbt_plugin.validation import Kind, check, nearest, number, shown

REQUIRED: Any = object()
"""The default of a field that has none."""

NO_SIZE = frozenset(
    {"_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures", "attn_implementation",
     "auto_map", "aux_loss_alpha", "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "cache_implementation",
     "chunk_size_feed_forward", "classifier_dropout", "decoder_start_token_id", "directionality", "diversity_penalty",
     "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id", "ep_size",
     "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "fuse_linear",
     "fuse_rms_norm", "fuse_rope", "fuse_swiglu", "gradient_checkpointing", "id2label", "initial_context_length",
     "initializer_factor", "label2id", "length_penalty", "max_length", "min_length", "model_type",
     "multi_token_pred_lambda", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
     "output_attentions", "output_hidden_states", "output_past", "output_router_logits", "output_scores", "pad_token_id",
     "paddleformers_version", "paddlenlp_version", "prefix", "pretraining_tp", "problem_type", "quantization_config",
     "remove_invalid_values", "reorder_and_upcast_attn", "repetition_penalty", "return_dict", "return_dict_in_generate",
     "rope_scaling", "router_aux_loss_coef", "router_jitter_noise", "sep_token_id", "seq_aux", "sequence_parallel",
     "suppress_tokens", "task_specific_params", "temperature", "tensor_parallel_degree", "tf_legacy_loss",
     "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version",
     "typical_p", "unk_token_id", "use_bfloat16", "use_cache", "use_flash_attention", "use_recompute", "vocab_file"}
)  # fmt: skip
"""Fields of no influence on sizes or work, whatever the family: how text is generated, what files are called, which precision a
checkpoint has, how positions are stretched, what balances experts."""

USUAL: dict[str, Any] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
}
"""Fields that old files hold whatever the family, and the values that change nothing."""

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_SCALE = number("above 0, and finite", gt=0)


class ModelWarning(UserWarning):
    """What a config asks for and the model that is built lacks, or what is assumed where a config does not say it."""


class Fields:
    """The fields of a config of one family. Reading a field twice is allowed; ``rest`` says which were never read."""

    def __init__(self, family: str, values: Mapping[str, Any]):
        self.family = family
        self.values = values
        self.known: set[str] = set()

    def read(self, name: str, kind: Kind, default: Any = REQUIRED) -> Any:
        """A field, checked. What a config leaves out, or sets to null, is the default. Raises ModelError."""
        self.known.add(name)
        value = self.values.get(name)
        if value is None:
            if default is REQUIRED:
                raise ModelError(f"{self.family} also needs {name}")
            return default
        return check(kind, f"{self.family}: {name}", value, ModelError)

    def size(self, name: str, default: Any = REQUIRED) -> Any:
        return self.read(name, SIZE, default)

    def count(self, name: str, default: Any = REQUIRED) -> Any:
        """A size that may be zero."""
        return self.read(name, COUNT, default)

    def layers(self, name: str, default: Any = REQUIRED) -> Any:
        return self.read(name, LAYERS, default)

    def switch(self, name: str, default: Any) -> Any:
        return self.read(name, SWITCH, default)

    def rate(self, name: str, default: Any) -> Any:
        return self.read(name, RATE, default)

    def scale(self, name: str, default: Any) -> Any:
        return self.read(name, _SCALE, default)

    def eps(self, name: str, default: Any) -> Any:
        return self.read(name, SMALL, default)

    def init_std(self) -> Any:
        return self.read("initializer_range", STD, 0.02)

    def choice(self, name: str, options: Mapping[str, str], default: str) -> str:
        """One of a few words, as this package calls it."""
        self.known.add(name)
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, str) or value not in options:
            raise ModelError(f"{self.family}: {name} {shown(value)} is not supported; supported: {', '.join(options)}")
        return options[value]

    def activation(self, name: str, default: str) -> str:
        return self.choice(name, ACTIVATIONS, default)

    def only(self, name: str, *values: Any) -> None:
        """A field of which a model is built only for these values, or where it is missing."""
        self.known.add(name)
        value = self.values.get(name)
        if value is not None and not any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values):
            supported = " or ".join("null" if v is None else str(v).lower() if isinstance(v, bool) else repr(v) for v in values)
            raise ModelError(f"{self.family}: {name} {shown(value)} is not supported; supported: {supported}")

    def ignore(self, *names: str) -> None:
        """Fields that change neither sizes nor work of this family."""
        self.known.update(names)

    def theta(self, default: float, layer_type: str = "full_attention") -> Any:
        """The base of rotary frequencies, by itself or among ``rope_parameters``, where it may depend on the type of layer."""
        self.known.update(("rope_theta", "rope_parameters"))
        found = self.values.get("rope_parameters") or {}
        if isinstance(found, Mapping):
            found = found.get(layer_type, found)
            value = found.get("rope_theta") if isinstance(found, Mapping) else None
            if value is not None:
                return check(BASE, f"{self.family}: rope_theta of rope_parameters", value, ModelError)
        return self.read("rope_theta", BASE, default)

    def windows(self, layers: int, default: Sequence[bool] | None, window: int) -> tuple[int, ...]:
        """The window of every layer, 0 where it has none: as ``layer_types`` says, else where ``default`` is true in turn."""
        self.known.add("layer_types")
        types = self.values.get("layer_types")
        if types is None:
            return tuple(window if sliding else 0 for sliding in default or (False,))
        words = {"sliding_attention": window, "full_attention": 0}
        if not isinstance(types, list) or len(types) != layers:
            raise ModelError(f"{self.family}: layer_types must be a list of {layers} types of layers, not {shown(types)}")
        for kind in types:
            if kind not in words:
                raise ModelError(
                    f"{self.family}: a layer of type {shown(kind)} is not supported; supported: {', '.join(words)}"
                )
        return tuple(words[kind] for kind in types)

    def check_rest(self) -> None:
        """Raises ModelError for a field that was not read and may change the size or the work of the model."""
        for name, value in self.values.items():
            if name not in self.known and name in USUAL and value is not None:
                self.only(name, USUAL[name])
            elif name not in self.known and name not in NO_SIZE and name not in USUAL:
                raise ModelError(
                    f"{self.family} has no field {shown(name)} that is supported, and what it changes in the model is unknown; "
                    + nearest(str(name), sorted(self.known))
                )
