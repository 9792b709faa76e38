"""The settings of training scripts, checked before anything is built: an error names the flag to change."""

import math

CHOICES = dict(
    dtype=["auto", "float32", "bfloat16"],
    parallel=["auto", "none", "ddp", "fsdp", "hsdp"],
    recompute=["none", "cheap", "selective", "full"],
    goldfish_scope=["window", "stream"],
    loss_average=["step", "micro"],
    schedule=["wsd", "cosine"],
    optimizer=["ademamix", "adamw", "muon"],
    state_dtype=["float32", "bfloat16"],
    too_long=["drop", "cut"])
LORA_ALPHA = 32.0           # the default of train.py, SFT and QRPO
NOT_NEGATIVE = [
    "eval_every", "eval_windows", "last_eval_windows", "eval_conversations", "sample_every", "checkpoint_every",
    "checkpoint_minutes", "keep_checkpoints", "grad_clip", "batch_ramp_at", "alpha_warmup", "lr", "min_lr",
    "weight_decay", "hsdp_shard", "timeout", "minutes"]


def check_settings(settings):
    """ValueError, one line, for a setting of train.py that cannot work. settings: all, a dict."""
    check_values(settings)
    check_length(settings)
    check_start(settings)
    if not 0 <= settings["distill"] <= 1:
        raise ValueError(f"distill={settings['distill']}: want the teacher's share of the loss, between 0 and 1")
    if settings["wandb_log"]:
        import wandb  # noqa: F401  here, so that a missing package is an error before the run folder is there


def check_values(settings):
    """ValueError for a value that a setting cannot have. settings: of train.py, SFT or QRPO, a dict."""
    for name, choices in CHOICES.items():
        if name in settings and settings[name] not in choices:
            raise ValueError(f"{name}={settings[name]!r}: there is {', '.join(choices)}")
    for name in NOT_NEGATIVE:
        if settings.get(name, 0) < 0:
            raise ValueError(f"{name}={settings[name]}: want 0 or more; --help says what 0 means")
    if settings["optimizer"] != "ademamix" and settings["state_dtype"] == "bfloat16":
        raise ValueError(f"state_dtype=bfloat16 needs stochastic rounding, which {settings['optimizer']} does not have "
                         "here: use --optimizer=ademamix, or leave state_dtype out")
    check_optimizer(settings)
    if settings["lora_alpha"] != LORA_ALPHA and not settings["lora_r"]:
        raise ValueError(f"lora_alpha={settings['lora_alpha']} scales adapters, and this run has none: "
                         "give them a rank, --lora_r=16, or leave lora_alpha out")


def check_optimizer(settings):
    """ValueError for an optimizer that its states, its shards or --exact do not fit. settings: a dict."""
    if settings.get("exact") and settings["state_dtype"] == "bfloat16":
        raise ValueError("exact=True is bit-exact on any number of ranks, and moments in bfloat16 are rounded by their "
                         "place in a shard: take --state_dtype=float32")
    if settings["optimizer"] == "muon" and (settings.get("parallel") in ("fsdp", "hsdp") or settings.get("exact")):
        raise ValueError("optimizer=muon needs whole matrices, and shards hold parts of them: use --parallel=ddp, "
                         "without --exact")


def check_length(settings):
    """ValueError if the run has no first step, or minutes cannot find its end."""
    total, minutes = settings["total_samples"], settings["minutes"]
    if minutes:
        obstacles = {
            "a positive number": not 0 < minutes < math.inf,
            f"schedule=wsd, not {settings['schedule']}": settings["schedule"] != "wsd",
            f"a decay shorter than total_samples={total}, not decay_samples={settings['decay_samples']}":
                settings["decay_samples"] >= total,
            f"no stage, not stage={settings['stage']}": bool(settings["stage"])}
        for wanted, is_there in obstacles.items():
            if is_there:
                raise ValueError(f"minutes={minutes:g} finds the end of a run while it trains: it wants {wanted}; "
                                 "--minutes=0 counts samples")
    if total < settings["batch_size"]:
        raise ValueError(f"total_samples={total} is less than one step of batch_size={settings['batch_size']}")


def check_start(settings):
    """
    ValueError for adapters without a start model, or on matrices that are trained themselves. The values of `base`:
    build.check_base().
    """
    lora_r, base = settings["lora_r"], settings["base"]
    if (lora_r or base != "fp32") and not settings["init_from"]:
        raise ValueError(f"lora_r={lora_r}, base={base}: adapters are trained next to the frozen weights of a model: "
                         "name it with --init_from")
    if lora_r and settings["fp8"]:
        raise ValueError(f"lora_r={lora_r} freezes the matrices that fp8=True trains: leave one of them out")


def check_vocabulary(config, meta, data, init_from):
    """ValueError if a new model (ApertusConfig) has another number of ids than the data, and not 0."""
    if not init_from and config.vocab_size not in (0, meta["vocab_size"]):
        raise ValueError(f"{data} was made by a tokenizer of {meta['vocab_size']} ids ({meta['tokenizer']}) and the "
                         f"model has vocab_size={config.vocab_size}: prepare the data with --tokenizer=apertus, or set "
                         "vocab_size=0")
