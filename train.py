"""
Pretraining, from a laptop to a cluster: real text in, a run folder out.

    loss = - sum over the step's kept tokens of log p(token | its document so far)  /  their number
    step:  gradients of all micro-batches  ->  clip the global norm  ->  AdEMAMix at the learning rate that WSD gives

$ python train.py configs/laptop.py                          # five minutes on any machine; then python sample.py
$ python train.py configs/laptop.py --activation=swiglu      # any setting below, as a flag
$ python train.py configs/8b.py --data=data/mine --resume    # the real thing; goes on where it was stopped
$ python train.py configs/continue_8b.py --lora_r=64 --base=bf16    # from published weights, on one GPU
$ torchrun --nproc_per_node=8 train.py configs/8b.py --parallel=fsdp --resume    # eight GPUs, and later any number

A run is its folder (engine/runs.py). There is no random state in the loop: data, masks and
schedules are pure functions of the step, so a run that was killed and resumed ends in the same
bits. SIGTERM, SIGUSR2, or a file named `stop` in the run folder: all ranks save after the step
that they are in, and leave. `touch out/run/cooldown`, or without NCCL SIGUSR1: the decay begins
now. --minutes=5 says so itself, in time. --resume with a larger --total_samples or --minutes goes
on from before the decay.
"""

import dataclasses
import itertools
import json
import math
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from tqdm import tqdm

import tokenizer
from ademamix import build_optimizer, check_states
from configurator import lengths, settings
from configurator import run as configured
from data import StagedDataset, TokenDataset, begun, first_changed, share_of_one, since
from engine import checkpoint, memory, plot, runs
from engine import routes as ways
from engine.fp8 import check_fp8, multiply_in_fp8
from engine.hardware import can_compile, pick_device, pick_dtype, vendor_flops
from engine.parallel import Ranks, drop_gathered, gradients, orderly_exit, spread, square_norm, stop_signals
from generate import generate
from model import Apertus, ApertusConfig
from schedule import NEVER, begun_at, cosine, samples_at, steps_in, wsd
from schedule import batch_size as batch_at

# -----------------------------------------------------------------------------
# the run
out = "out/run"                 # its folder
data = "data/stdlib"            # what prepare.py wrote
init_from = ""                  # begin with the weights of a run folder, a Hugging Face folder or a hub name
resume = False                  # go on from the folder's newest intact checkpoint, or start if there is none
device = "auto"                 # cuda | mps | cpu; auto takes the first that is there
dtype = "auto"                  # of activations: float32 | bfloat16; auto = bfloat16 where the hardware has it
fp8 = False                     # multiply the matrices of the blocks in 8 bits (engine/fp8.py); H100, 4090 and later
routes = ""                     # a CPU's ways to the same numbers (engine/routes.py); "" = timed once and remembered
compile = True                  # torch.compile, block by block; eager where there is no C++ compiler
seed = 28                       # of the initial weights and of the order of windows
# what is trained, if not all: adapters beside the frozen weights of init_from (posttrain/lora.py)
lora_r = 0                      # rank of the adapters; 0 = no adapters, all weights are trained
lora_alpha = 32.0               # their update counts alpha / r
lora_on = "all"                 # or some of q_proj,k_proj,v_proj,o_proj,up_proj,down_proj
lora_rs = False                 # rank-stabilised: alpha / sqrt(r)
base = "fp32"                   # what frozen weights are held in: fp32 | bf16 | int8 | nf4
# the ranks (engine/parallel.py)
parallel = "none"               # none | ddp | fsdp | hsdp; all but none want torchrun or srun
hsdp_shard = 0                  # hsdp: ranks that share one copy of the weights; 0 = those of a node
sequence_parallel = 1           # neighbouring ranks that share one window, for long ones; divides n_kv_head
recompute = "none"              # activations that backward computes again: none | selective | full
exact = False                   # the same bits on any number of ranks: gradients added in fp64, fixed micro-batch
timeout = 600                   # seconds that a rank waits for another before it gives up
stages = ()                     # rows of (name, sources or {source: weight}, samples at its end, seed): configs/8b.py
stage = ""                      # stop at the end of this stage; all = run through; "" = no stages, all of the data
# the model (ApertusConfig says what each is; the defaults are the 8B)
block_size = 4096
vocab_size = 0                  # 0 = the data's
n_layer = 32
n_head = 32
n_kv_head = 8
n_embd = 4096
ffn_dim = 21504
activation = "xielu"            # xielu | swiglu | gelu | relu2
qk_norm = True
doc_mask = True
tie_embeddings = False
rope_theta = 500_000.0
rope_scaling = 8.0              # 0 = plain RoPE
rope_original = 8192
rope_low = 1.0
rope_high = 4.0
norm_eps = 1e-5
init_std = 0.008944
ffn = "dense"                   # dense | lowrank | blockdense | blockshuffle: not Apertus (studies/structured.py)
ffn_rank = 0                    # of lowrank and blockdense
ffn_blocks = 0                  # of blockdense and blockshuffle
self_guided = 0.0               # share of the run in which a fading dense guide helps the structured layers
guide_saving = False            # compute each guide only as often as its weight says: half its FLOPs
# the loss
goldfish_k = 50                 # forget one label in k; 0 = plain cross-entropy
goldfish_h = 50                 # labels that the hash sees
goldfish_hash = "product"       # product (Apertus, bit-exact) | mix (really drops 1/k)
goldfish_scope = "window"       # window (Apertus) | stream (for windows much shorter than 4096: goldfish.py)
teacher = ""                    # a run folder, Hugging Face folder or hub name to learn from (engine/distill.py)
distill = 0.9                   # share of KL(teacher || model) in the loss, the rest is cross-entropy; the Minis': 0.9
loss_average = "step"           # step: over all kept tokens | micro: mean of micro-batch means, as Apertus (Megatron)
# the schedule, counted in samples (windows)
total_samples = 3_662_109_375   # 15T tokens of 4096
warmup_samples = 4_096_000
decay_samples = 403_905_806
minutes = 0.0                   # train as long, on any machine, instead of total_samples, if it was said after that
schedule = "wsd"                # wsd | cosine
batch_size = 1024               # samples a step
batch_ramp_at = 0               # from so many samples on the batch is doubled; 0 = never
micro_batch = 4                 # samples in memory at once; gradients of the rest accumulate
# the optimizer
optimizer = "ademamix"          # ademamix | adamw
state_dtype = "float32"         # of AdEMAMix's two averages; bfloat16: 4 bytes a parameter less, rounded at random
lr = 1.1e-4                     # peak
lr_floor = 1.1e-5               # at the end of the decay
betas = (0.9, 0.999, 0.9999)    # fast average, squares, slow average; AdamW uses the first two
alpha = 8.0                     # weight of the slow average
alpha_warmup = 0                # steps over which alpha grows; 0 = the run's, at most Apertus' 100,000
beta3_warmup = 0                # the same for beta3
eps = 1e-8
weight_decay = 0.1              # on matrices; never on gains and xIELU scalars
grad_clip = 0.1                 # global L2 norm; at 0.1 nearly every step is clipped (sec. 2.6)
# what it says on the way
eval_every = 250                # steps; 0 = at the end only
eval_windows = 64               # windows of the validation split; 0 = all
last_eval_windows = 4096        # the same at the end; 17M tokens of the 8B's windows
old = ""                        # with init_from: text like the start's, validated on beside (posttrain/forgetting.py)
task = ""                       # questions asked beside that, .jsonl as for evaluate.py
sample_every = 1000             # steps; 0 = never
checkpoint_every = 1000         # steps; 0 = at the end only
keep_checkpoints = 2            # of the newest, and the last from before the decay; 0 = all
save_failures = 3               # saves in a row that may fail (disk full) before the run stops
allow_restart = False           # with --resume, start over if there are checkpoints but none is intact
skip_nonfinite = 0              # steps in a row whose loss or gradient may be not a number; 0 = stop at the first
wandb_log = False               # also log to Weights & Biases (pip install wandb)
wandb_project = "nanoapertus"
# -----------------------------------------------------------------------------


def lr_at(samples, decay_at=None):
    """The learning rate of a step that begins after so many samples. decay_at: as in schedule.wsd."""
    if schedule == "wsd":
        return wsd(samples, lr, lr_floor, warmup_samples, total_samples, decay_samples, decay_at)
    if schedule == "cosine":
        return cosine(samples, lr, lr_floor, warmup_samples, total_samples)
    raise ValueError(f"schedule={schedule!r}: there is wsd and cosine")


def steps_until(samples):
    """The number of whole steps in so many samples."""
    return steps_in(samples, batch_size, batch_ramp_at or None)


def decay_planned(config):
    """After how many samples the decay of a run with these settings begins; NEVER: when the clock says so."""
    return NEVER if config.get("minutes") else config["total_samples"] - config["decay_samples"]


def samples_before(step):
    """The number of samples that the run has seen when this step begins."""
    return samples_at(step, batch_size, batch_ramp_at or None)


@dataclass
class Run:
    """What a run is made of."""
    ranks: Ranks                    # which process this is, of how many
    device: str                     # of this rank
    dtype: torch.dtype              # of the activations
    train: TokenDataset             # or a StagedDataset
    val: TokenDataset
    tok: tokenizer.Tokenizer
    rows: int                       # samples of a micro-batch
    config: dict                    # all settings, the vocabulary's size, what the data are
    shape: ApertusConfig
    guides: object = None           # of structured layers, which are not Apertus (studies/structured.py)
    begin: object = None            # of --init_from: the model that it begins with (posttrain/start.py)
    old: object = None              # of --old: what that model knows, and may forget (posttrain/forgetting.py)
    teacher: object = None          # of --teacher (engine/distill.py)
    decay_at: int = NEVER           # samples before the decay, planned or, once it was begun, as it was
    spent: float = 0.0              # seconds that the run has taken until its checkpoint


# -----------------------------------------------------------------------------
# set-up: what cannot work is told before anything is built, in one line that says what to type


def check_settings():
    global minutes
    said = [name for name in globals().get("_asked", ()) if name in ("minutes", "total_samples")]
    if said[-1:] == ["total_samples"]:
        minutes = 0.0
    if not 0 <= minutes < math.inf:
        raise ValueError(f"minutes={minutes}: want how long to train, --minutes=5, or 0 to count samples")
    if minutes and (schedule != "wsd" or decay_samples >= total_samples or stage):
        raise ValueError(f"minutes={minutes:g} finds the end of a run on the way: it wants schedule=wsd, a decay "
                         "shorter than total_samples, and no stage, since stages are counted in samples")
    checkpoint.check_keep(keep_checkpoints)
    if loss_average not in ("step", "micro"):
        raise ValueError(f"loss_average={loss_average!r}: there is step and micro")
    if total_samples < batch_size:
        raise ValueError(f"total_samples={total_samples} is less than one step of batch_size={batch_size}")
    if schedule == "wsd" and warmup_samples + decay_samples > total_samples:
        # The lengths are three settings, so that a stage may end where the schedule does not.
        # Whoever shortens a run means all three.
        steps = steps_until(total_samples)
        raise ValueError(f"warmup_samples={warmup_samples} and decay_samples={decay_samples} do not fit into "
                         f"total_samples={total_samples} ({steps:,} steps): say {lengths(total_samples)}")
    if not 0 <= distill <= 1:
        raise ValueError(f"distill={distill}: want the teacher's share of the loss, between 0 and 1")
    if distill and not teacher and "distill" in globals().get("_asked", ()):
        raise ValueError(f"distill={distill} wants a model to learn from: --teacher=RUN or a Hugging Face model")
    if stage and not stages:
        raise ValueError(f"stage={stage!r}, but there is no table of stages: "
                         "name a config that has one, like configs/8b.py")
    if (lora_r or base != "fp32") and not (lora_r and init_from):
        raise ValueError(f"lora_r={lora_r}, base={base}: adapters are trained beside the frozen weights of a model: "
                         "name it with --init_from, and their rank, --lora_r=16")
    if lora_r and self_guided:
        raise ValueError(f"lora_r={lora_r} freezes what self_guided={self_guided} guides: leave one of them out")
    check_states(optimizer, state_dtype)
    ways.parse(routes)
    lr_at(0)


def open_data():
    """
    The training windows, with Goldfish, and the validation windows, where every predictable
    token counts.
    """
    goldfish = goldfish_k, goldfish_h, goldfish_hash, goldfish_scope
    if stage:
        train = StagedDataset(data, stages, block_size, *goldfish, stage=stage.removeprefix("all"))
    else:
        train = TokenDataset(data, "train", block_size, seed, *goldfish)
    val = TokenDataset(data, "val", block_size, seed)
    found = train.meta["vocab_size"]
    if vocab_size and vocab_size != found and not init_from:
        raise ValueError(f"{data} was made by a tokenizer of {found} ids ({train.meta['tokenizer']}) and the model has "
                         f"vocab_size={vocab_size}: prepare the data with --tokenizer=apertus, or set vocab_size=0")
    return train, val


def set_up():
    """
    All that a run needs but its folder and the other ranks; nothing is written yet. ValueError:
    what cannot work.
    """
    begin = None
    if init_from:
        from posttrain.start import Start       # here, since other runs need not wait for it
        begin = Start(init_from)
        globals().update(begin.settings(settings(globals()), globals().get("_asked", ())))
    ranks = Ranks(parallel, exact, hsdp_shard, sequence_parallel)
    where = ranks.place(pick_device(device))
    work_dtype = pick_dtype(dtype, where)
    check_settings()
    train, val = open_data()
    rows = ranks.micro_batch(batch_size, micro_batch)
    tok = tokenizer.load_for(data)
    meta = train.meta
    if begin:
        begin.check_vocabulary(tok, data, may_grow=not lora_r)
    config = settings(globals())
    ids = max(vocab_size, meta["vocab_size"]) if begin else meta["vocab_size"]
    config.update(vocab_size=ids, data_hash=train.fingerprint, tokenizer=meta["tokenizer"])
    # Which version of the data this is; older folders do not say.
    config["data_version"] = meta.get("version")
    shape = ApertusConfig.of(config)
    ranks.check_split(block_size=block_size, n_kv_head=shape.n_kv_head)
    if fp8:
        if lora_r or ffn != "dense":
            raise ValueError(f"fp8=True trains whole dense matrices: leave it out, or lora_r={lora_r} and ffn={ffn}")
        check_fp8(shape, rows * block_size // ranks.sequence, where)
    guides = None
    if ffn != "dense" or self_guided:
        from studies.structured import Guides
        guides = Guides(config, shape)
    kept = None
    if old or task:
        from posttrain.forgetting import old_of
        if not begin:
            raise ValueError(f"old={old} is what a start model may forget: name one with --init_from")
        kept = old_of(old, begin.tok, block_size, eval_windows, out, task)
    teaching = None
    if teacher and distill:
        from posttrain.start import teacher_of
        compiled = compile and can_compile(torch.device(where))
        teaching = teacher_of(config, tok, shape, where, work_dtype, compiled)
        ranks.check_split(n_kv_head_of_the_teacher=teaching.model.config.n_kv_head)
    decay_at = decay_planned(config)
    run = Run(ranks, where, work_dtype, train, val, tok, rows, config, shape, guides, begin, kept, teaching, decay_at)
    check_memory(run)
    return run


def check_memory(run):
    """ValueError, with the sum, for a step that the device cannot hold; on a GPU the sum is said in any case."""
    if lora_r:
        model = run.begin.shapes(run.config, run.shape)
    else:
        with torch.device("meta"):
            model = Apertus(run.shape, seed)
    line = memory.check(model, run.config, run.rows, block_size // run.ranks.sequence, run.ranks, run.device, run.dtype)
    if run.ranks.first and run.device.startswith("cuda"):
        print(line)


def build(run, drawn=True):
    """
    The model, what is called in training (the model, or a wrapper that talks to other ranks),
    and the optimizer. drawn: with initial weights, which a file will not fill.
    """
    ranks = run.ranks
    of_weights = seed if drawn else None
    if lora_r:
        model = run.begin.adapted(run.config, run.shape, ranks, run.device, run.dtype)
    else:
        with torch.device("meta" if ranks.sharded else run.device):
            model = Apertus(run.shape, of_weights)
            if run.guides:
                run.guides.join(model)
        model.dtype = run.dtype
        if fp8:
            multiply_in_fp8(model)
    compiled = compile and can_compile(torch.device(run.device))
    net = spread(model, ranks, run.device, of_weights, recompute, compiled)
    # Apertus grew alpha and beta3 over 100,000 steps of 2.6 million. A short run would never
    # get there and stay plain Adam, so its warm-ups last as long as the run, as in the report's
    # own post-training. They must not depend on a clock, so with --minutes they last as long as
    # total_samples would: on a faster machine they end sooner in the run, as Apertus' did.
    warm = min(steps_until(total_samples), 100_000)
    opt = build_optimizer(model, optimizer, lr, betas, alpha, eps, weight_decay,
                          alpha_warmup=alpha_warmup or warm, beta3_warmup=beta3_warmup or warm, compile=compiled,
                          state_dtype=state_dtype)
    if compile and not compiled and ranks.first:
        print(f"no compiler found for {run.device} (on CPU: a C++ one, like g++): running eagerly, about half as fast")
    return model, net, opt


def routes_of(run, found, flops):
    """
    The ways of this run's CPU, as text for its config.json: said, those that it had before, or timed.

    found: the checkpoint that it goes on from (path, manifest), or None; flops: of a token.
    """
    def shapes():
        _, _, _, doc = run.train.batch(0, run.rows)
        compiled = compile and can_compile(torch.device(run.device))
        return run.shape, run.rows, run.dtype, doc if doc_mask else None, compiled

    before = found[1]["config"].get("routes", "") if found else ""
    flops = flops * total_samples * block_size
    return ways.choose(routes, before, flops, run.ranks, run.device, shapes)


def resume_from(path, manifest, model, optimizer, run):
    """
    Load the newest intact checkpoint, or the one before its decay. Returns the step to go on with.

    ValueError: the checkpoint belongs to a run with other settings, which are named.
    """
    samples = samples_before(manifest["step"])
    before = manifest["config"]
    changed = first_changed(before.get("data_hash", ""), run.config["data_hash"], samples)
    removed = since(data, before.get("data_version"))
    if changed is not None and removed:
        first = steps_until(changed)
        raise ValueError(f"{path}: {removed}. Windows are numbered anew, so all steps from {first} on would read other "
                         f"ones, the {manifest['step'] - first} of them that are done too: begin anew with another "
                         f"--out, or go on from these weights there with --init_from={out}")
    runs.refuse_another(path, what_decides(before, samples), what_decides(run.config, samples))
    path, manifest = before_decay(path, manifest, run)
    run.spent = manifest.get("seconds", 0.0)
    if run.guides:
        run.guides.end(manifest["step"], optimizer, manifest["config"])
    checkpoint.load(path, model, optimizer)
    if run.ranks.first:
        print(f"resumed from {path}")
    return manifest["step"]


def before_decay(path, manifest, run):
    """
    The checkpoint to go on with: this one, or if its rate has begun to fall towards an end that is
    no longer the run's, the newest from before that. Returns (path, manifest), and sets
    run.decay_at.

    ValueError: none is left from before the decay.
    """
    before = manifest["config"]
    decay_at = manifest.get("decay_at", decay_planned(before))
    samples, seconds = samples_before(manifest["step"]), manifest.get("seconds", 0.0)
    planned_by = "total_samples", "decay_samples", "minutes", "schedule"
    if all((before.get(name) or 0) == run.config[name] for name in planned_by):
        run.decay_at = decay_at
    elif before["schedule"] == "wsd" and samples > decay_at:
        longer = 60 * minutes > seconds if minutes else total_samples > samples
        if not longer:
            raise ValueError(f"{path} has {samples} samples and {seconds / 60:.1f} minutes behind it, and its rate has "
                             "begun to fall: go on with its own total_samples and minutes, or with more")
        last = steps_until(decay_at)
        found = checkpoint.newest_intact(f"{out}/ckpt", run.ranks.files, until=last)
        if not found:
            raise ValueError(f"{path}: its rate falls since step {last}, and no checkpoint from before that is left to "
                             f"train longer from: begin with these weights, --init_from={out} --out=ANOTHER")
        path, manifest = found
        if run.ranks.first:
            runs.set_aside(out, manifest["step"])
            runs.forget(out, "cooldown")        # it was for the decay that is now given up
            print(f"{out} goes on from before its decay; what was decayed is now {out}/ckpt/decayed-*")
    return path, manifest


def what_decides(config, samples):
    """
    The settings that a resumed run may not change, as {name: value}.

    Of the data, only stages that have begun after `samples` count: those of later stages may
    still come.
    """
    names = [field.name for field in dataclasses.fields(ApertusConfig)]
    names += ["self_guided", "guide_saving", "tokenizer", "batch_size", "batch_ramp_at", "seed", "optimizer"]
    names += ["teacher_hash", "distill"] if config.get("teacher_hash") else ["teacher_hash"]
    if config.get("lora_r"):
        names += ["lora_alpha", "lora_on", "lora_rs", "base", "start_hash"]
    same = {name: config.get(name) for name in names}
    same["lora_r"] = config.get("lora_r", 0)
    same["state_dtype"] = config.get("state_dtype", "float32")
    same["data_hash"] = begun(config.get("data_hash", ""), samples)
    same["staged"] = bool(config.get("stage"))
    return same


# -----------------------------------------------------------------------------
# what a run says of itself


def describe_run(config):
    """
    config.json, and the vocabulary if it is one of the user's own: what sample.py and
    convert.py need.
    """
    checkpoint.write_flushed(f"{out}/config.json", json.dumps(config, indent=1))
    vocabulary = f"{data}/tokenizer.json"
    if os.path.exists(vocabulary):
        shutil.copy(vocabulary, out)


def to_wandb(log, config):
    """The same log function, which sends each entry to Weights & Biases as well."""
    try:
        import wandb
    except ImportError:
        raise ValueError("wandb_log=True needs a package that is not here: pip install wandb, "
                         "or leave the flag out") from None
    wandb.init(project=wandb_project, name=os.path.basename(out), config=config)

    def both(**entry):
        log(**entry)
        wandb.log(entry, step=entry["step"])
    return both


def has_summary(tokens):
    """
    Whether summary.json tells of a run of so many tokens. If a full disk has torn it, it is
    written again.
    """
    try:
        return plot.read_json(f"{out}/summary.json")["tokens"] >= tokens
    except (OSError, ValueError, KeyError):
        return False


def evaluate(run, model, windows):
    """
    Mean loss in nats over the first `windows` validation windows (0 = all), a micro-batch at a
    time on each rank, or each group of ranks that share a window.

    We need no gradients here, but no_grad would make torch.compile trace every block a second
    time.
    """
    rows, ranks = run.rows, run.ranks
    windows = min(windows or run.val.n_windows, run.val.n_windows)
    total = count = 0.0
    mine = ranks.group * rows
    for first in range(mine, mine + windows, rows * ranks.groups):
        # The last batch is moved back to be as large as the others, which are compiled; what it
        # repeats does not count. A rank with no windows left runs along all the same, because
        # FSDP gathers weights from all ranks.
        begin = max(0, min(first, windows - rows))
        batch = run.val.batch(begin, min(rows, windows))
        idx, targets, keep, doc = (t.to(run.device) for t in ranks.cut(*batch))
        keep[:first - begin] = False
        _, nll = model(idx, targets, keep, doc, per_token=True, split=ranks.split)
        total += (nll * keep).sum().item()
        count += keep.sum().item()
    drop_gathered(model)
    total, count = ranks.add(total, count)
    return total / count


def sample(model, tok, device):
    """
    A short text, to look at. Eager, because the cached decoding step has shapes that training
    has not compiled.
    """
    generator = torch.Generator(device).manual_seed(seed)
    how = dict(temperature=0.8, top_p=0.95, stop=(tok.eos,), generator=generator)
    with torch.compiler.set_stance("force_eager"):
        ids = generate(model, [[tok.bos]], min(120, block_size), **how)
    drop_gathered(model)
    return tok.decode(ids[0][1:])


def introduce(run, model, end):
    """Print how large the run is, and on what."""
    ranks = run.ranks
    device = run.device
    if ranks.size > 1:
        kind = device.split(":")[0]
        device = f"{ranks.size} x {kind}"
        if ranks.split:
            device += f", {ranks.sequence} to a window,"
    length = f"{steps_until(total_of(run)):,} steps"
    epochs = f", so {samples_before(end) / run.train.n_windows:.1f} epochs"
    if run.decay_at == NEVER:
        length, epochs, end = f"{minutes:g} minutes of steps", "", steps_until(total_samples)
    print(f"{model.num_params():,} parameters on {device} in {str(run.dtype)[6:]}, "
          f"{length} of {batch_size} x {block_size} tokens; "
          f"data: {run.train.n_tokens:,} tokens{epochs}")
    single = share_of_one(run.train, samples_before(end))
    print(f"{single:.0%} of its windows hold one document, the others parts of several")
    if run.teacher:
        print(f"{distill:.0%} of the loss is what {teacher} thinks of the next token: "
              f"{run.teacher.model.num_params():,} parameters, whole on each rank")


def on_gpu(run, flops, speed):
    """
    What the log says of GPUs, None on other devices, at `speed` tokens per second over all
    ranks.

    mfu: the share of their peak that the model's own FLOPs, `flops` per token, take;
    memory_gib: the most that this one has held.
    """
    if not run.device.startswith("cuda"):
        return dict(mfu=None, memory_gib=None)
    peak = vendor_flops(run.device)
    mfu = None
    if peak:
        mfu = flops * speed / (peak * run.ranks.size)
    return dict(mfu=mfu, memory_gib=torch.cuda.max_memory_allocated() / 2**30)


def nothing_left(end):
    """The error that answers who goes on with a run that is finished."""
    return ValueError(f"{out} is finished: all {end} steps are done; raise total_samples or minutes, name a later "
                      f"--stage, or sample it: python sample.py --init_from={out}")


def not_a_number(step, loss, norm, skipped):
    """The error that ends a run whose loss or gradient norm is none."""
    before = f", after {skipped} skipped steps" if skipped else ""
    return ValueError(f"step {step}: loss {loss}, gradient norm {norm}{before}. Stopped before the update; "
                      f"the last checkpoint in {out}/ckpt is good. Try --resume with a lower --lr, "
                      "a longer --warmup_samples, or --dtype=float32")


def validate(run, model, windows, step, tokens, began, log):
    """
    Log the loss over the first `windows` of the validation split, and return it: nats per
    token, bits per byte. With --old also that of the old text, always over the same windows.
    """
    nats = evaluate(run, model, windows)
    bpb = run.val.bits_per_byte(nats)
    seconds = round(time.perf_counter() - began, 1)
    seen = run.old.measure(model, run.ranks) if run.old else {}
    log(step=step, tokens=tokens, val_loss=nats, val_bpb=bpb, seconds=seconds, **seen)
    return nats, bpb


def validate_start(run, model, start, began, log):
    """The curve of a run that goes on from another model begins with what that one knows."""
    if not start and (eval_every or run.old):
        model.eval()
        validate(run, model, eval_windows, 0, 0, began, log)
        model.train()
    if run.old:
        run.old.remember(start, run.ranks.first)


def finish(run, model, steps, began, log):
    """
    After the last save: the last validation, and summary.json, by which a run is known to be
    finished.
    """
    tokens = samples_before(steps) * block_size
    model.eval()
    nats, bpb = validate(run, model, last_eval_windows, steps - 1, tokens, began, log)
    seconds = time.perf_counter() - began
    if lora_r:
        run.begin.save_adapters(model, run.config, run.ranks)
    if run.ranks.first:
        summary = dict(val_bpb=bpb, val_loss=nats, tokens=tokens, seconds=round(seconds), torch=torch.__version__)
        if run.old:
            summary |= run.old.summary()
            print(run.old.line(out))
        checkpoint.write_flushed(f"{out}/summary.json", json.dumps(summary, indent=1))
        print(f"{out}: {bpb:.3f} bits per byte of validation text after {seconds:.0f} s")


# -----------------------------------------------------------------------------
# one step


def batches(run, step):
    """
    This rank's part of the samples of this step and all that follow: yields idx, targets, keep,
    doc, each (samples, T), whole where ranks share a window. A thread prepares the next step while
    the caller computes this one.

    The thread has one OpenMP thread: a second pool would make libgomp count more threads than
    cores, and those of the training step would then sleep at every barrier instead of spinning.
    """
    ranks = run.ranks

    def fetch(step):
        first = samples_before(step)
        each = batch_at(first, batch_size, batch_ramp_at or None) // ranks.groups
        return run.train.batch(first + ranks.group * each, each)

    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as thread:
        ahead = thread.submit(fetch, step)
        for step in itertools.count(step + 1):
            batch = ahead.result()
            ahead = thread.submit(fetch, step)
            yield batch


def forward_backward(net, run, batch, n_tokens, step):
    """
    The gradients of this rank's part of a step, micro-batch by micro-batch. Returns its part of
    the loss, 0-d, and of the terms of distillation, (2,), none without a teacher.

    batch: idx, targets, keep, doc, each (samples, T), on the CPU. net: the model, or the
    wrapper that is called in training. n_tokens: the kept tokens of the whole step, over all
    ranks: divided by it, losses and gradients of micro-batches and ranks add up to those of the
    step.
    """
    sum_dtype = torch.float64 if exact else torch.float32
    loss = torch.zeros((), device=run.device, dtype=sum_dtype)
    terms = loss.new_zeros(2 if run.teacher else 0)
    micro = list(zip(*(t.split(run.rows) for t in batch)))
    for i, tensors in enumerate(micro):
        if run.guides:
            run.guides.set(step, run.ranks.group * len(micro) + i)
        divide_by = n_tokens
        if loss_average == "micro":
            kept = tensors[2].sum().item()
            divide_by = kept * len(micro) * run.ranks.groups
        tensors = run.ranks.cut(*tensors)
        idx, targets, keep, doc = (t.to(run.device, non_blocking=True) for t in tensors)
        # Ranks exchange gradients once, behind the last micro-batch.
        with gradients(net, run.ranks, last=i + 1 == len(micro)):
            parts, part = net(idx, targets, keep, doc, n_tokens=max(divide_by, 1), teacher=run.teacher,
                              split=run.ranks.split)
            part.backward()
        loss += part.detach()
        if run.teacher:
            terms += parts
    return loss, terms


def update(model, opt, rate, norm):
    """
    Clip the gradients, whose global norm is `norm`, and take a step of the optimizer at this
    learning rate.
    """
    for group in opt.param_groups:
        group["lr"] = rate
    clip = 1.0
    if grad_clip:
        clip = min(1.0, grad_clip / (norm + 1e-6))
    if optimizer == "ademamix":
        # It scales a gradient as it reads it, which saves a pass over them.
        opt.step(grad_scale=clip)
    else:
        torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], clip)
        opt.step()


# -----------------------------------------------------------------------------
# the run


def main():
    run = set_up()
    with runs.claim(out, resume, run.ranks):
        run.ranks.join(run.device, timeout)
        more = () if run.device.startswith("cuda") else ("SIGUSR1",)
        with stop_signals() as stop, stop_signals(more) as cooldown:
            pretrain(run, stop, cooldown)
        run.ranks.leave()
        # The picture comes last, when no rank waits for this one any more.
        if run.ranks.first:
            plot.curves([out], f"{out}/loss.png")
            print(f"the curve: {out}/loss.png")


def total_of(run):
    """The samples of the whole run: a decay that began earlier or later than planned makes it another number."""
    return begun_at(run.decay_at, total_samples, decay_samples)[0]


def end_of(run):
    """The number of steps after which the run ends, or its stage."""
    end = steps_until(total_of(run))
    # A step across the border belongs to the next stage.
    if run.train.stop is not None:
        end = min(end, steps_until(run.train.stop))
    return end


def wishes(run, stop, cooldown, clock, bar, step):
    """
    What this rank wants of all after this step: 1 to stop, and one more than there are ranks to
    begin the decay, so that a single sum over ranks says both.
    """
    ranks = run.ranks
    decay = bool(cooldown)
    if ranks.first:
        decay = decay or os.path.exists(f"{out}/cooldown")
    if ranks.first and run.decay_at == NEVER:
        total = clock.foresee(samples_before(step))
        if total < math.inf:
            bar.total = steps_until(int(total))
        # Begun after this step, the decay would end when the time does, or later.
        decay = decay or begun_at(samples_before(step + 1), total_samples, decay_samples)[0] >= total
    return runs.asked_to_stop(out, stop, ranks) + decay * (ranks.size + 1)


def begin_decay(run, cooldown, bar, done):
    """
    Begin the decay after so many steps, if the rate does not fall already. Returns the number of
    steps after which the run now ends.
    """
    cooldown.clear()
    says = "asked for its decay, but the rate falls already"
    if schedule == "wsd" and samples_before(done) < run.decay_at:
        run.decay_at = samples_before(done)
        says = f"the decay begins, {end_of(run) - done:,} steps"
    bar.total = end_of(run)
    if run.ranks.first:
        bar.write(f"step {done:6}   {says}")
    return bar.total


def save(run, saver, model, opt, done, clock, begun):
    """A checkpoint after so many steps; begun: the decay has just begun, or was asked for."""
    about = dict(config=run.config, decay_at=run.decay_at, seconds=clock.seconds())
    saver.save(done, model, opt, about, spare=steps_until(run.decay_at))
    if begun:
        # No step of the decay is done before its begin is on disk, so a killed run begins it there again.
        saver.wait()
        if run.ranks.first:
            runs.forget(out, "cooldown")


def pretrain(run, stop, cooldown):
    """
    stop, cooldown: lists that are no longer empty once a signal has asked this process to leave, or to
    begin the decay.
    """
    ranks, first, guides = run.ranks, run.ranks.first, run.guides
    found = checkpoint.newest_intact(f"{out}/ckpt", ranks.files, allow_restart) if resume else None
    model, net, opt = build(run, drawn=not found and not run.begin)
    start = resume_from(*found, model, opt, run) if found else 0
    # --init_from, and no checkpoint of this run yet. Beside adapters the weights are there already.
    if run.begin and not start and not lora_r:
        run.begin.fill(model, first)
    if ranks.mode == "ddp" and start and guides and not guides.last:
        # Without the guides, which DDP cannot forget.
        net = spread(model, ranks, run.device, seed)
    end = end_of(run)
    # If no step is left, the run was killed before it had written its summary, or is finished.
    last = start >= end
    if last and has_summary(samples_before(start) * block_size):
        raise nothing_left(end)
    if first:
        introduce(run, model, end)
    # Counted once, since it looks at every parameter.
    flops = model.flops_per_token(block_size)
    run.config["routes"] = routes_of(run, found, flops)
    if first:
        describe_run(run.config)
    log = runs.open_log(out, start, ranks, validate=last)
    if first and wandb_log:
        log = to_wandb(log, run.config)
    saver = checkpoint.Saver(f"{out}/ckpt", keep_checkpoints, ranks.files, save_failures)
    loader = batches(run, start)
    clock = runs.Clock(minutes, run.spent)
    skipped, began = 0, clock.began
    # With --minutes the bar's end is an estimate, which each step makes anew.
    known = None if run.decay_at == NEVER else end
    bar = tqdm(iter(range(start, end)), initial=start, total=known, unit="step", dynamic_ncols=True, disable=not first)
    if run.begin:
        validate_start(run, model, start, began, log)
    if compile and can_compile(torch.device(run.device)):
        bar.set_postfix_str("compiling: half a minute, the first time")
    for step in bar:
        step_began = time.perf_counter()
        batch = next(loader)
        _, _, keep, _ = ranks.cut(*batch)
        n_tokens, n_all = ranks.add(keep.sum(), keep.numel())  # of the whole step

        # Gradients; then one sum over ranks of the loss, the squared norm, and what any rank was asked to do.
        loss, terms = forward_backward(net, run, batch, n_tokens, step)
        asked = wishes(run, stop, cooldown, clock, bar, step)
        loss, square, asked, *terms = ranks.add(loss, square_norm(model, ranks), asked, *terms)
        decay, stopping = divmod(asked, ranks.size + 1)
        norm = math.sqrt(square)
        finite = math.isfinite(loss + norm)
        if not finite and skipped >= skip_nonfinite:
            saver.finish()
            raise not_a_number(step, loss, norm, skipped)
        skipped = 0 if finite else skipped + 1
        rate = lr_at(samples_before(step), run.decay_at)
        if finite:
            update(model, opt, rate, norm)
        opt.zero_grad(set_to_none=True)
        if guides and guides.end(step + 1, opt):
            flops = model.flops_per_token(block_size)
            if ranks.mode == "ddp":
                net = spread(model, ranks, run.device, seed)

        # What happened.
        done = step + 1
        if decay:
            end = begin_decay(run, cooldown, bar, done)
        last = done >= end
        tokens = samples_before(done) * block_size
        speed = n_all / (time.perf_counter() - step_began)
        # With a teacher "loss" is its term of cross-entropy: a number that can be compared with other runs'.
        said = dict(zip(("loss", "kl"), terms or [loss]))
        bar.set_postfix_str(f"loss {said['loss']:.3f}, {speed / 1e3:.1f}k tok/s", refresh=False)
        if not finite:
            norm, said = None, dict.fromkeys(said)             # JSON has no nan
        log(step=step, tokens=tokens, **said, grad_norm=norm, kept=n_tokens / n_all, lr=rate, tok_s=round(speed),
            **on_gpu(run, flops, speed), skipped=skipped)
        # Validation and samples are without guides; nothing else depends on the mode.
        model.eval()
        # The last validation comes after the last save.
        if not last and eval_every and done % eval_every == 0:
            nats, bpb = validate(run, model, eval_windows, step, tokens, began, log)
            if first:
                seconds = time.perf_counter() - began
                bar.write(f"step {done:6}   val {nats:.3f} nats/token, {bpb:.3f} bits/byte   {seconds:5.0f} s")
        if last or stopping or decay or checkpoint_every and done % checkpoint_every == 0:
            save(run, saver, model, opt, done, clock, begun=decay)
        # On all ranks, since FSDP gathers weights from all.
        if sample_every and (last or done % sample_every == 0):
            text = sample(model, run.tok, run.device)
            if first:
                bar.write(text + "\n")
        model.train()
        if last or stopping:
            break
    bar.close()
    loader.close()
    # From here on the weights are safe: what follows can be done again.
    saver.finish()
    if last:
        finish(run, model, max(start, end), began, log)
    elif first:
        length = "" if run.decay_at == NEVER else f" of {end}"
        print(f"{out}: stopped as asked after step {done}{length}, saved; --resume goes on")
    if first:
        runs.forget(out, "stop", "cooldown")


if __name__ == "__main__":
    with orderly_exit():
        configured(main, globals())
