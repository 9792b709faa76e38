"""
Hugging Face's config.json: the ApertusConfig that it describes, and its content for an ApertusConfig.

A key that model.py does not know is ignored if it changes no logit (UNREAD), or if its value asks for what model.py
computes anyway (EXPORTED, NEUTRAL). Any other one is an error, since the logits would be wrong without a word.
"""

from configurator import checked
from model import ApertusConfig

# {our name of a setting: Hugging Face's}
HF_NAMES = {
    "block_size": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "ffn_dim": "intermediate_size",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
}
# The same for each type of RoPE.
ROPE_NAMES = {
    "default": {"rope_theta": "rope_theta"},
    "linear": {"rope_theta": "rope_theta", "rope_scaling": "factor"},
    "llama3": {
        "rope_theta": "rope_theta",
        "rope_scaling": "factor",
        "rope_original": "original_max_position_embeddings",
        "rope_low": "low_freq_factor",
        "rope_high": "high_freq_factor",
    },
}
# The RoPE of a config.json that does not mention it, in transformers 4 and 5.
PUBLISHED_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
# Keys of every export, with the only value that model.py computes.
EXPORTED = {
    "architectures": ["ApertusForCausalLM"],
    "model_type": "apertus",
    "hidden_act": "xielu",
    "qk_norm": True,
    "post_norm": False,
    "mlp_bias": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "float32",
    "torch_dtype": "float32",
    "use_cache": True,
}

# -----------------------------------------------------------------------------
# read


def config_from_hf(hf):
    """
    The ApertusConfig of a config.json, a dict; for Apertus 1.5, that of its text model. ValueError, one line, if it
    lacks a size or asks for anything that model.py does not compute.
    """
    given = with_flat_rope(text_model_of(hf))
    rope_type = given.pop("type", "default")
    rope_type = given.pop("rope_type", rope_type)
    if rope_type not in ROPE_NAMES:
        given["rope_type"] = rope_type                     # check_unread() names it
    unread = {
        "tie_word_embeddings": False,
        "num_key_value_heads": given.get("num_attention_heads"),
        "rms_norm_eps": ApertusConfig.norm_eps,
        "initializer_range": ApertusConfig.init_std,
        "rope_theta": PUBLISHED_ROPE["rope_theta"],
    } | given
    settings = {}
    for name, key in (HF_NAMES | ROPE_NAMES.get(rope_type, {})).items():
        settings[name] = checked(key, unread.pop(key, None), getattr(ApertusConfig, name), "config.json")
    # Linear RoPE divides every frequency, as llama3 does if the original window is 0.
    if rope_type == "default":
        settings["rope_scaling"] = 0.0
    elif rope_type == "linear":
        settings["rope_original"] = 0
    config = ApertusConfig(**settings)
    check_unread(unread, config)
    return config


def text_model_of(hf):
    """A config.json with the keys of an Apertus; for 1.5, those of its text model. ValueError for another model."""
    model_type = hf.get("model_type")
    if model_type == "apertus":
        return hf
    if model_type != "apertus1p5":
        raise ValueError(f"config.json is of a {model_type!r} model: want model_type 'apertus'")
    text = hf.get("text_config") or {}
    tied = hf.get("tie_word_embeddings") or text.get("tie_word_embeddings")
    # A head that is not tied has rows for ids of text only, and we read only these rows of the embedding.
    ids = not tied and text.get("output_vocab_size") or text.get("vocab_size")
    return hf | text | dict(vocab_size=ids, tie_word_embeddings=tied)


def with_flat_rope(hf):
    """
    The keys of a config.json that have a value, with those of RoPE next to the others. ValueError if two differ.

    transformers 5 writes rope_parameters, 4 rope_theta and rope_scaling, which is null for plain RoPE.
    """
    given = {key: value for key, value in hf.items() if value is not None}
    ropes = [given.pop(key, None) or {} for key in ("rope_parameters", "rope_scaling")]
    if not any(ropes) and "rope_scaling" not in hf:
        ropes = [PUBLISHED_ROPE]
    for rope in ropes:
        for key, value in rope.items():
            if given.setdefault(key, value) != value:
                raise ValueError(f"config.json says two things about RoPE: {key}={given[key]} and {value}")
    return given


def check_unread(unread, config):
    """ValueError if one of the other keys of a config.json asks for a computation that model.py lacks."""
    allowed = EXPORTED | NEUTRAL | dict(
        head_dim=config.head_dim,
        layer_types=["full_attention"] * config.n_layer,
        output_vocab_size=config.vocab_size)
    unsupported = [f"{key}={value!r}" for key, value in unread.items()
                   if key not in UNREAD and allowed.get(key) != value]
    if unsupported:
        raise ValueError(f"config.json asks for settings that model.py lacks: {', '.join(unsupported):.200}")


# Keys of other programs that may have this value only.
NEUTRAL = {
    # the shape of a model
    "hidden_activation": "xielu", "is_causal": True, "logit_scale": 1.0, "partial_rotary_factor": 1.0,
    "pretraining_tp": 1, "pruned_heads": {}, "rope_traditional": False, "use_bidirectional_attention": False,
    "use_sliding_window": False,
    # encoders and decoders
    "add_cross_attention": False, "is_decoder": False, "is_encoder_decoder": False, "tie_encoder_decoder": False,
    # dropout
    "embd_pdrop": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0,
}
# Keys that change no logit, whatever their value.
UNREAD = {
    # names and versions
    "_commit_hash", "_name_or_path", "architectures", "auto_map", "custom_pipelines", "model_type", "name_or_path",
    "nanoapertus", "transformers_version", "unsloth_fixed", "unsloth_version",
    # the tokenizer
    "bos_token_id", "eos_token_id", "model_max_length", "pad_token_id", "tokenizer_class",
    # how transformers computes, and its outputs
    "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "chunk_size_feed_forward", "dtype",
    "gradient_checkpointing", "keys_to_ignore_at_inference", "output_attentions", "output_hidden_states",
    "return_dict", "torch_dtype", "torchscript", "use_cache", "use_return_dict",
    # classifiers
    "finetuning_task", "id2label", "label2id", "num_labels", "problem_type",
    # pictures and sound in Apertus 1.5
    "audio_config", "audio_token_id", "audio_token_offset", "audio_tokenizer_config", "image_token_id",
    "image_token_offset", "text_config", "vision_config", "vision_tokenizer_config",
}

# -----------------------------------------------------------------------------
# write


def config_to_hf(config, dtype="float32"):
    """The content of a config.json for transformers 4 and 5. ValueError if their Apertus cannot compute the model."""
    if config.activation != "xielu" or not config.qk_norm:
        raise ValueError("transformers' Apertus has xIELU and QK-norm only, this model has "
                         f"activation={config.activation!r}, qk_norm={config.qk_norm}")
    rope_type = "llama3" if config.rope_original else "linear"
    if not config.rope_scaling:
        rope_type = "default"
    rope = dict(rope_type=rope_type) | renamed(config, ROPE_NAMES[rope_type])
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return renamed(config, HF_NAMES) | EXPORTED | dict(
        dtype=dtype,
        torch_dtype=dtype,
        rope_theta=config.rope_theta,
        rope_scaling=scaling if config.rope_scaling else None,
        rope_parameters=rope)


def renamed(config, names):
    """{Hugging Face's name: value} of the settings in `names`, as HF_NAMES has them."""
    return {key: getattr(config, name) for name, key in names.items()}
