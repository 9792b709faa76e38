"""
config.json of Hugging Face in and out: an ApertusConfig, or an error that names what model.py lacks.
"""

from configurator import checked
from model import ApertusConfig

# Our names of settings, and Hugging Face's.
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
# Keys of every export, because model.py computes nothing else.
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
# Keys of other programs that may have this value only.
NEUTRAL = {
    "hidden_activation": "xielu", "is_causal": True, "pretraining_tp": 1, "partial_rotary_factor": 1.0,
    "logit_scale": 1.0, "pruned_heads": {}, "hidden_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    "is_decoder": False, "is_encoder_decoder": False, "add_cross_attention": False, "tie_encoder_decoder": False,
    "use_sliding_window": False, "use_bidirectional_attention": False, "rope_traditional": False,
}
# Keys that change no logit, whatever their value.
FREE = {
    "architectures", "model_type", "auto_map", "custom_pipelines", "_name_or_path", "name_or_path", "_commit_hash",
    "transformers_version", "unsloth_version", "unsloth_fixed", "tokenizer_class", "model_max_length", "dtype",
    "torch_dtype", "use_cache", "use_return_dict", "return_dict", "output_attentions", "output_hidden_states",
    "bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "num_labels", "problem_type",
    "finetuning_task", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
    "chunk_size_feed_forward", "keys_to_ignore_at_inference", "torchscript", "gradient_checkpointing", "nanoapertus",
    "text_config", "vision_config", "audio_config", "vision_tokenizer_config", "audio_tokenizer_config",
    "image_token_id", "audio_token_id", "image_token_offset", "audio_token_offset",
}

def config_from_hf(hf):
    """
    The ApertusConfig of a config.json, a dict; for Apertus 1.5, that of its text model. ValueError, one line, if it
    lacks a size or asks for anything that model.py does not compute.
    """
    given = with_flat_rope(text_model_of(hf))
    rope_type = given.pop("type", "default")
    rope_type = given.pop("rope_type", rope_type)
    if rope_type not in ROPE_NAMES:
        given["rope_type"] = rope_type                     # check_unused_keys() names it
    values = {
        "tie_word_embeddings": False,
        "num_key_value_heads": given.get("num_attention_heads"),
        "rms_norm_eps": ApertusConfig.norm_eps,
        "initializer_range": ApertusConfig.init_std,
        "rope_theta": PUBLISHED_ROPE["rope_theta"],
    } | given
    config = ApertusConfig(**{
        name: checked(hf_name, values.pop(hf_name, None), getattr(ApertusConfig, name), "config.json")
        for name, hf_name in (HF_NAMES | ROPE_NAMES.get(rope_type, {})).items()})
    # Linear RoPE divides every frequency, as llama3 does if the original window is 0.
    if rope_type == "default":
        config.rope_scaling = 0.0
    elif rope_type == "linear":
        config.rope_original = 0
    check_unused_keys(values, config)
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


def check_unused_keys(values, config):
    """ValueError if one of the other keys of a config.json asks for a computation that model.py lacks."""
    allowed = EXPORTED | NEUTRAL | dict(
        head_dim=config.head_dim,
        layer_types=["full_attention"] * config.n_layer,
        output_vocab_size=config.vocab_size)
    unsupported = [f"{key}={value!r}" for key, value in values.items()
                   if key not in FREE and allowed.get(key) != value]
    if unsupported:
        raise ValueError(f"config.json asks for settings that model.py lacks: {', '.join(unsupported):.200}")


def config_to_hf(config, dtype="float32"):
    """The content of a config.json for transformers 4 and 5. ValueError if their Apertus cannot compute the model."""
    if config.activation != "xielu" or not config.qk_norm:
        raise ValueError("transformers' Apertus has xIELU and QK-norm only, this model has "
                         f"activation={config.activation!r}, qk_norm={config.qk_norm}")

    def renamed(names):
        return {hf_name: getattr(config, name) for name, hf_name in names.items()}

    rope_type = "llama3" if config.rope_original else "linear"
    if not config.rope_scaling:
        rope_type = "default"
    rope = dict(rope_type=rope_type) | renamed(ROPE_NAMES[rope_type])
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return renamed(HF_NAMES) | EXPORTED | dict(
        dtype=dtype,
        torch_dtype=dtype,
        rope_theta=config.rope_theta,
        rope_scaling=scaling if config.rope_scaling else None,
        rope_parameters=rope)
