"""The settings of train.py, checked before anything is built: an error names the flag to change."""

import math

CHOICES = dict(
    parallel="auto, none, ddp, fsdp, hsdp",
    recompute="none, cheap, selective, full",
    goldfish_scope="window, stream",
    loss_average="step, micro",
    schedule="wsd, cosine",
    optimizer="ademamix, adamw",
    state_dtype="float32, bfloat16")
COUNTS = """eval_every eval_minutes eval_windows last_eval_windows sample_every checkpoint_every checkpoint_minutes
            keep_checkpoints save_failures skip_nonfinite grad_clip batch_ramp_at alpha_warmup beta3_warmup lr
            min_lr eps weight_decay hsdp_shard timeout"""


def check_settings(s, by_clock):
    """s: all settings, a dict; by_clock: whether the minutes end the run. ValueError, one line."""
    for name, kinds in CHOICES.items():
        if s[name] not in kinds.split(", "):
            raise ValueError(f"{name}={s[name]!r}: there is {kinds}")
    for name in COUNTS.split():
        if s[name] < 0:
            raise ValueError(f"{name}={s[name]}: want 0 or more; --help says what 0 means")
    whole = s["schedule"] == "wsd" and s["decay_samples"] < s["total_samples"] and not s["stage"]
    if by_clock and not (whole and 0 < s["minutes"] < math.inf):
        raise ValueError(f"minutes={s['minutes']:g} finds the end of a run while it trains: it wants a positive "
                         "number, schedule=wsd, a decay shorter than total_samples, and no stage; --minutes=0 counts "
                         "samples")
    if s["total_samples"] < s["batch_size"]:
        raise ValueError(f"total_samples={s['total_samples']} is less than one step of batch_size={s['batch_size']}")
    if s["optimizer"] == "adamw" and s["state_dtype"] == "bfloat16":
        raise ValueError("state_dtype=bfloat16 needs stochastic rounding, which AdamW does not have here: "
                         "use --optimizer=ademamix, or leave state_dtype out")
    if (s["lora_r"] or s["base"] != "fp32") and not s["init_from"]:
        raise ValueError(f"lora_r={s['lora_r']}, base={s['base']}: adapters are trained next to the frozen weights of "
                         "a model: name it with --init_from")
    if s["lora_r"] and s["fp8"]:
        raise ValueError(f"lora_r={s['lora_r']} freezes the matrices that fp8={s['fp8']} trains: leave one of them out")
    if s["goldfish_exempt"] not in ("", "special"):
        raise ValueError(f"goldfish_exempt={s['goldfish_exempt']!r}: want special, or leave it out")
    if not 0 <= s["distill"] <= 1:
        raise ValueError(f"distill={s['distill']}: want the teacher's share of the loss, between 0 and 1")
    if s["old"] and (not s["init_from"] or s["sequence_parallel"] > 1):
        raise ValueError(f"old={s['old']} measures what the start model forgets: name one with --init_from, and leave "
                         "sequence_parallel out")


def check_vocabulary(config, meta, data, init_from):
    """ValueError if a new model (ApertusConfig) has another number of ids than the data, and not 0."""
    if not init_from and config.vocab_size not in (0, meta["vocab_size"]):
        raise ValueError(f"{data} was made by a tokenizer of {meta['vocab_size']} ids ({meta['tokenizer']}) and the "
                         f"model has vocab_size={config.vocab_size}: prepare the data with --tokenizer=apertus, or set "
                         "vocab_size=0")
