"""
Pretraining, from a laptop to a cluster: real text in, a run folder out.

    loss = - sum over the step's kept tokens of log p(token | its document so far)  /  their number
    step:  gradients of all micro-batches  ->  clip the global norm  ->  AdEMAMix at the learning rate that WSD gives

$ python train.py configs/laptop.py                          # five minutes on any machine; then python sample.py
$ python train.py configs/laptop.py --activation=swiglu      # any setting of this file and of ApertusConfig, as a flag
$ python train.py configs/gpu.py --resume                    # one GPU; resumes where it was stopped
$ torchrun --nproc_per_node=8 --shutdown-timeout=600 --max-restarts=3 --signals-to-handle=SIGTERM,SIGINT,SIGUSR2 \\
  train.py configs/8b.py --data=data/mine-apertus --resume     # eight GPUs

The settings are the globals below: configurator.py sets them before main() begins, and nothing changes them later.
The loop is train(). It has no random state: data, masks and schedules are pure functions of the step, so a killed and
resumed run ends bit-exact, unless the clock chooses where the decay begins or the number of threads changes; with
--exact also on another number of ranks. The run folder, signals and checkpoints are in engine/run.py.
"""

from contextlib import suppress

# Before torch: engine.hardware sets environment variables that torch reads when it loads.
from engine.hardware import can_compile, pick_device, pick_dtype

# isort: split
import torch

import configurator
from ademamix import build_optimizer, optimizer_step
from data import StagedDataset, TokenDataset, prefetch, started_stages
from engine.checks import check_settings, check_vocabulary
from engine.clock import DecayClock, decay_state
from engine.parallel import Ranks, check_finite, distribute, drop_gathered, orderly_exit, reduce_step, split_batch
from engine.run import Run, StepInterrupted
from engine.runs import note_unfinished
from model import Apertus, ApertusConfig
from schedule import Plan

# -----------------------------------------------------------------------------
# the run
out = "out/run"                 # the run folder
data = "data/stdlib"            # data folder, written by prepare.py
resume = False                  # continue from the newest intact checkpoint in `out`, or start if it has no checkpoint
device = "auto"                 # cuda | mps | cpu; auto takes the first that is available
dtype = "auto"                  # of activations: float32 | bfloat16; auto = bfloat16 where the hardware has it
compile = True                  # torch.compile, block by block; eager where there is no C++ compiler
seed = 28                       # of the initial weights and of the order of windows
stages = ()                     # rows of (name, sources or {source: weight}, samples at its end, seed): configs/8b.py
stage = ""                      # stop at the end of this stage; all = run all stages; "" = no stages, all of the data
# the ranks (engine/parallel.py)
parallel = "auto"               # none | ddp | fsdp | hsdp; auto: fsdp on one node, hsdp on several, none alone
hsdp_shard = 0                  # hsdp: ranks that share a copy of the weights; 0 = one node's, more if it does not fit
sequence_parallel = 1           # neighbouring ranks that share one window, for long windows; must divide n_kv_head
recompute = "none"              # how much backward recomputes instead of storing: none | cheap | selective | full
exact = False                   # bit-exact on any number of ranks: gradients added in fp64, fixed micro-batch
timeout = 600                   # seconds that a rank waits for another before it gives up; ten times as long for files
# the model
fp8 = False                     # multiply the matrices of the blocks in 8 bits; H100, 4090 and later
shape = ApertusConfig(vocab_size=0)    # its fields are settings too (model.py); vocab_size=0: that of the data
# the start
init_from = ""                  # start with the weights of a run folder, a Hugging Face folder or a hub name
lora_r = 0                      # rank of adapters next to the frozen weights of init_from; 0 = train all weights
lora_alpha = 32.0               # scale of their update: alpha / r
base = "fp32"                   # how frozen weights are stored: fp32 | bf16 | int8 | nf4
teacher = ""                    # learn from this model too: run folder, Hugging Face folder or hub name
distill = 0.9                   # share of KL(teacher || model) in the loss; the rest is cross-entropy (the Minis: 0.9)
# the loss
goldfish_k = 50                 # drop one target in k; 0 = plain cross-entropy
goldfish_h = 50                 # targets that the hash sees
goldfish_hash = "product"       # product (Apertus, bit-exact) | mix (really drops 1/k) | coef (Apertus 2, bit-exact)
goldfish_scope = "window"       # window (Apertus) | stream (for windows much shorter than 4096: goldfish.py)
loss_average = "step"           # step: over all kept tokens | micro: mean of micro-batch means, as Apertus (Megatron)
# the schedule, counted in samples (windows)
total_samples = 3_662_109_375   # 15T tokens in windows of 4096
warmup_samples = 4_096_000      # samples of linear warm-up, from 0 to lr
decay_samples = 403_905_806     # samples of decay, from lr to min_lr by 1 - sqrt
minutes = 0.0                   # train for this many minutes, decay included; overrides an earlier total_samples
schedule = "wsd"                # wsd | cosine
batch_size = 1024               # samples per step
batch_ramp_at = 0               # samples after which the batch is doubled; 0 = never
micro_batch = 4                 # samples in memory at once, fewer if they do not fit; gradients accumulate
# the optimizer
optimizer = "ademamix"          # ademamix | adamw
state_dtype = "float32"         # of AdEMAMix's two moments; bfloat16 saves 4 bytes a parameter (stochastic rounding)
lr = 1.1e-4                     # peak learning rate
min_lr = 1.1e-5                 # learning rate at the end of the decay
betas = (0.9, 0.999, 0.9999)    # fast moment, squares, slow moment; AdamW uses the first two
alpha = 8.0                     # weight of the slow moment
alpha_warmup = 0                # steps over which alpha and the slow beta grow; 0 = the whole run, at most 100,000
weight_decay = 0.1              # on matrices; never on norm weights and xIELU scalars
grad_clip = 0.1                 # largest global L2 norm; at 0.1 nearly every step is clipped (sec. 2.6); 0 = off
# logging and saving
eval_every = 250                # steps between validations; 0 = at the end only
eval_windows = 64               # windows of the validation split; 0 = all
last_eval_windows = 4096        # the same at the end of the run; 17M tokens in the 8B's windows
sample_every = 1000             # steps between samples of text; 0 = never
checkpoint_every = 1000         # steps between checkpoints; 0 = at the end only
checkpoint_minutes = 30.0       # save at least this often, whatever the steps; 0 = by steps alone
keep_checkpoints = 2            # the newest ones to keep, plus the last one before the decay; 0 = all
wandb_log = False               # also send each entry of the log to Weights & Biases (pip install wandb)


# -----------------------------------------------------------------------------
# the model, and everything that may be in it


def build_model(shape, settings, ranks, device, compiled=False, weights="", fresh=True):
    """
    The model of a run on this rank's device: modules, then shards and compiled blocks, then weights. On the device
    "meta": the modules alone, without memory.

    shape: ApertusConfig; settings: of a training script, a dict; weights: the file or folder of init_from's weights;
    fresh: False if a checkpoint will fill the trained weights.
    """
    with torch.device("meta" if ranks.sharded else device):     # distribute() gives shards their memory
        if settings["lora_r"] or settings["base"] != "fp32":     # a base without adapters is an error there
            from posttrain.start import build_lora_model
            model = build_lora_model(shape, settings, ranks, device, on_meta=ranks.sharded or device == "meta")
        else:
            model = Apertus(shape, seed=None)
    if settings.get("fp8"):                                # of train.py only
        from engine.fp8 import multiply_in_fp8
        multiply_in_fp8(model, settings["micro_batch"] * shape.block_size // ranks.P, device)
    if ranks.P > 1:
        from engine.sequence import split_attention
        split_attention(model, ranks)
    if device == "meta":
        return model
    model.dtype = pick_dtype(settings["dtype"], device)
    distribute(model, ranks, device, settings["recompute"], compiled)
    if settings["lora_r"]:
        from posttrain.start import init_lora_model
        init_lora_model(model, weights, settings["seed"], ranks)    # checkpoints hold no frozen weights
    elif fresh and weights:
        from convert import fill
        fill(model, weights)
    elif fresh and ranks.sharded:
        from engine.sharding import draw
        draw(model, settings["seed"])                      # the same values; each rank draws some and scatters them
    elif fresh:
        model.init_weights(settings["seed"])
    return model


# -----------------------------------------------------------------------------
# the loop


def train(run, plan, clock, model, optimizer, train_data, val_data, micro_batch_size, teacher_model):
    """
    Train to the end of the plan, or until the user asks to stop.

    Each micro-batch's loss is divided by the number of kept tokens of the whole step on all ranks, so that losses and
    gradients of micro-batches and ranks add up to the step's.
    """
    ranks = run.ranks
    batches = prefetch(lambda step: train_data.batch(*plan.samples_of(step, ranks.group, ranks.groups)), run.done)
    for step in run.steps():
        batch = next(batches)                              # this rank's samples
        n_kept, n_tokens = ranks.all_reduce(batch.keep.sum(), batch.keep.numel())
        n_kept, n_tokens = n_kept / ranks.P, n_tokens / ranks.P      # each of the P ranks that share a window counts it
        parts = batch.split(micro_batch_size, run.device)
        losses = 0.0
        for part in run.micro_batches(model, parts):
            denominator = n_kept if loss_average == "step" else int(part.keep.sum()) * len(parts) * ranks.groups
            denominator = max(denominator, 1)
            if ranks.P > 1:
                part = split_batch(ranks, *part)           # this rank's positions of each window
            if teacher_model:
                loss, terms = teacher_model.loss(model, *part, n_tokens=denominator)    # cross-entropy and KL
            else:
                loss = terms = model.loss(*part, n_tokens=denominator)
            loss.backward()
            losses += terms.detach().double() if exact else terms.detach()
        losses, norm = reduce_step(model, ranks, losses)   # over all ranks
        check_finite(step, losses, norm)
        lr_now = plan.lr_at(step)
        optimizer_step(optimizer, lr_now, norm, grad_clip)

        run.log.step(step, **dict(zip(("loss", "kl"), losses)), seconds=run.step_seconds(), tokens_in_step=n_tokens,
                     tokens=plan.tokens_after(step), grad_norm=norm, lr=lr_now, kept=n_kept / n_tokens)
        if eval_every and (step + 1) % eval_every == 0 and step + 1 < run.end:
            entry = validate(run, model, val_data, eval_windows, micro_batch_size)
            run.log.validation(step, tokens=plan.tokens_after(step), **entry)
        if clock.decay_is_due(step):                       # the file `cooldown`, or the minutes
            clock.begin_decay(step + 1, model, optimizer)  # saves, so the log must have the validation before
        if sample_every and (step + 1 == run.end or (step + 1) % sample_every == 0):
            from sample import sample_of
            run.log.say(sample_of(model, run.device, data, seed))
        run.save_if_due(step + 1, model, optimizer, **decay_state(plan))


def validate(run, model, val_data, windows, micro_batch_size):
    """
    For the log: the mean loss over the first `windows` validation windows (0: all), in nats and in bits per byte.

    It needs no gradients, but no_grad would make torch.compile trace every block a second time.
    """
    model.eval()
    ranks = run.ranks
    windows = min(windows or val_data.n_windows, val_data.n_windows)
    total = count = 0.0
    start = ranks.group * micro_batch_size
    for first in range(start, start + windows, micro_batch_size * ranks.groups):
        # All batches have one size, since each size would be compiled. So the last one begins earlier, and its windows
        # that were scored before do not count. A rank without windows runs all the same: FSDP gathers its weights too.
        begin = max(0, min(first, windows - micro_batch_size))
        [part] = val_data.batch(begin, min(micro_batch_size, windows)).split(micro_batch_size, run.device)
        part.keep[:first - begin] = False
        if ranks.P > 1:
            part = split_batch(ranks, *part)
        idx, targets, keep, *doc_and_positions = part
        total += (model.nll(idx, targets, *doc_and_positions) * keep).sum().item()
        count += keep.sum().item()
    drop_gathered(model)
    model.train()
    total, count = ranks.all_reduce(total, count)
    bpb = val_data.bits_per_byte(total / count)
    return dict(val_loss=total / count, val_bpb=bpb, seconds=round(run.seconds(), 1))


# -----------------------------------------------------------------------------
# from the settings to the run folder


def main(requested):
    """requested: the names of the settings that the user has set, the latest last."""
    by_clock = minutes > 0 and configurator.is_set_later(requested, "minutes", "total_samples")
    check_settings(configurator.settings(globals()), by_clock)
    ranks = Ranks(parallel, exact, hsdp_shard, sequence_parallel)
    local_device = ranks.local_device(pick_device(device))
    compiled = compile and can_compile(local_device)
    model_shape, weights = ApertusConfig(**vars(shape)), ""
    if init_from:
        from posttrain.start import start_config
        model_shape, weights = start_config(init_from, model_shape, requested, data)
    train_data, val_data = open_data(model_shape)
    model_shape.vocab_size = max(model_shape.vocab_size, train_data.meta["vocab_size"])
    teacher_model = load_teacher(model_shape, ranks, local_device, compiled)
    settings = configurator.settings(globals(), model_shape) | dict(
        data_hash=train_data.fingerprint, tokenizer=train_data.meta["tokenizer"], minutes=minutes if by_clock else 0.0,
        teacher_hash=teacher_model.hash if teacher_model else "")
    plan = Plan.from_settings(settings, by_clock, stage_end=train_data.stage_end)
    from engine import memory, preflight, restore  # here, since only the start of a run needs them
    outline = build_model(model_shape, settings, ranks, "meta")
    micro_batch_size, shards = memory.fit_to_memory(
        outline, settings, ranks, local_device, pick_dtype(dtype, local_device), val_data.T,
        ranks.micro_batch(batch_size, micro_batch))
    ranks.shard_over(shards)
    settings |= dict(micro_batch=micro_batch_size)         # checkpoints hold it, since results depend on it

    with Run(settings, ranks, local_device) as run:
        preflight.check(outline, settings, ranks, local_device)
        checkpoint, decayed = None, []
        if resume:
            checkpoint, plan.decay_at, decayed = restore.find_checkpoint(
                out, settings, plan, started_stages, ranks.save_group)
        model = build_model(model_shape, settings, ranks, local_device, compiled, weights, fresh=not checkpoint)
        # AdEMAMix' warm-ups last as long as the run, at most Apertus' 100,000 steps of 2.6 million: a short run would
        # stay close to plain Adam. With --minutes they last as long as total_samples would, whatever the clock says.
        warmup = alpha_warmup or min(plan.steps_in(total_samples), 100_000)
        opt = build_optimizer(model, optimizer, lr, betas, alpha, weight_decay, warmup, compiled, state_dtype)
        if checkpoint:
            restore.load(checkpoint[0], model, opt)
        if lora_r:
            from posttrain.start import frozen_hash
            settings |= dict(start_hash=frozen_hash(model, checkpoint))
        if ranks.is_main:
            introduce(run, settings, plan, model, train_data)
            restore.set_aside(out, decayed)                # not before: the checkpoint may be of another model
        run.begin(settings, plan.end, checkpoint, model.flops_per_token(val_data.T))
        if wandb_log:
            run.log.send_to_wandb(settings)
        if init_from and eval_every and not checkpoint:    # how good is the start?
            run.log.write(0, tokens=0, **validate(run, model, val_data, eval_windows, micro_batch_size))
        with suppress(StepInterrupted):                    # the steps before it are saved below
            train(run, plan, DecayClock(run, plan, minutes * by_clock), model, opt, train_data=train_data,
                  val_data=val_data, micro_batch_size=micro_batch_size, teacher_model=teacher_model)
        finished = run.close(model, opt, **decay_state(plan))
        summary = finish(run, plan, model, val_data, micro_batch_size) if finished else None
        ranks.leave()
        conclude(run, summary)


def open_data(model_shape):
    """The training data, with Goldfish, and the validation data, in which every predictable token counts."""
    goldfish = goldfish_k, goldfish_h, goldfish_hash, goldfish_scope
    if stage:
        train_data = StagedDataset(data, stages, model_shape.block_size, *goldfish, stage=stage.removeprefix("all"))
    else:
        train_data = TokenDataset(data, "train", model_shape.block_size, seed, *goldfish)
    check_vocabulary(model_shape, train_data.meta, data, init_from)
    return train_data, TokenDataset(data, "val", model_shape.block_size, seed)


def load_teacher(model_shape, ranks, local_device, compiled):
    """The model to learn from; None without one."""
    if not (teacher and distill):
        return None
    from distill import Teacher
    activations = pick_dtype(dtype, local_device)
    return Teacher(teacher, distill, model_shape, data, ranks, local_device, activations, compiled)


def introduce(run, settings, plan, model, train_data):
    """Print how large the run is; begin its folder: config.json and the vocabulary, no weights of an earlier end."""
    from convert import remove_old_weights, write_run_config  # here, since training itself needs no tokenizer
    devices = run.device if run.ranks.size == 1 else f"{run.ranks.size} x {run.device.split(':')[0]}"
    length = f"{minutes:g} minute{'s' * (minutes != 1)}" if plan.decay_at is None else f"{plan.end:,} steps"
    print(f"{model.num_params():,} parameters on {devices} in {str(model.dtype)[6:]}, {length} of {batch_size} x "
          f"{plan.block_size} tokens per step; data: {train_data.n_tokens:,} tokens{note_unfinished(init_from)}")
    if compile and not can_compile(run.device):
        print(f"no compiler found for {run.device} (it wants g++, and on CUDA Python.h): running eagerly, half as fast")
    remove_old_weights(out)
    write_run_config(out, settings, model.config, data)


def finish(run, plan, model, val_data, micro_batch_size):
    """After the last save of a finished run: the last validation and the adapters. Returns the summary."""
    entry = validate(run, model, val_data, last_eval_windows, micro_batch_size)
    entry["tokens"] = plan.tokens_after(run.done - 1)
    run.log.write(run.done - 1, **entry)
    if lora_r:
        from posttrain.start import save_adapter
        save_adapter(run, model)
    if run.ranks.is_main:
        print(f"{run.out}: {entry['val_bpb']:.3f} bits per byte of validation text after {entry['seconds']:.0f} s")
    return run.log.summary(run.done, **entry | dict(seconds=round(entry["seconds"])))


def conclude(run, summary):
    """After all ranks have left: the weights for Hugging Face, summary.json and the plot. summary: None if stopped."""
    if summary and run.ranks.is_main:
        from convert import complete
        complete(run.out)
    run.log.conclude(summary)


if __name__ == "__main__":
    with orderly_exit():
        configurator.run(main, globals(), shape)
