"""
Pretraining, from a laptop to a cluster: real text in, a run folder out.

    loss = - sum over the step's kept tokens of log p(token | its document so far)  /  their number
    step:  gradients of all micro-batches  ->  clip the global norm  ->  AdEMAMix at the learning rate that WSD gives

$ python train.py configs/laptop.py                          # five minutes on any machine; then python sample.py
$ python train.py configs/laptop.py --activation=swiglu      # any setting of this file and of ApertusConfig, as a flag
$ python train.py configs/gpu.py --resume                    # one GPU; resumes where it was stopped
$ torchrun --nproc_per_node=8 train.py configs/8b.py --data=data/mine-apertus --resume     # eight GPUs

A run is its folder (engine/runs.py). The loop has no random state: data, masks and schedules are pure functions of the
step, so a killed and resumed run ends bit-exact, on one process or, with --exact, on several. It does not if the clock
chooses where the decay begins, or if the number of threads changes. SIGTERM, SIGUSR2, or a file named `stop` in the run
folder makes all ranks leave after the micro-batch, save and exit. An unfinished step is dropped, a finished one counts.

The decay of the learning rate begins as planned, on request (a file named `cooldown` in the run folder, or SIGUSR1 on a
CPU), or early enough to end in time: --minutes=5 trains for five minutes on any machine. --resume with larger
--total_samples or --minutes continues from before the decay.

Other scripts train other models on other data with this loop (posttrain/attach.py, sft.py, qrpo.py). They call main()
with a function that builds the model, and replace functions of this file by their own.
"""

import itertools
import math
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

# Before torch: engine.hardware sets environment variables that torch reads when it loads.
from engine.hardware import can_compile, keep_freed_memory, pick_device, pick_dtype
import torch
from tqdm import tqdm

from ademamix import build_optimizer
from configurator import run as run_script, settings
from data import TokenDataset, started_stages
from engine import checkpoint, runs
from engine.files import write_json
from engine.parallel import (
    Ranks, add_gradients, distribute, drop_gathered, gradients, orderly_exit, reduce_after, square_norm, stop_signals
)
from model import Apertus, ApertusConfig
from schedule import NEVER, batch_size as batch_at, cosine, plan_with_decay_at, samples_at, steps_in, wsd

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
parallel = "auto"               # none | ddp | fsdp | hsdp; auto = fsdp under torchrun or srun, hsdp on several nodes
hsdp_shard = 0                  # hsdp: ranks that share a copy of the weights; 0 = one node's, more if it does not fit
recompute = "none"              # how much backward recomputes instead of storing: none | cheap | selective | full
exact = False                   # bit-exact on any number of ranks: gradients added in fp64, fixed micro-batch
timeout = 600                   # seconds that a rank waits for another before it gives up
# the model
shape = ApertusConfig(vocab_size=0)    # its fields are settings too (model.py); vocab_size=0: that of the data
# the loss
goldfish_k = 50                 # drop one label in k; 0 = plain cross-entropy
goldfish_h = 50                 # labels that the hash sees
goldfish_hash = "product"       # product (Apertus, bit-exact) | mix (really drops 1/k) | coef (Apertus 2, bit-exact)
goldfish_scope = "window"       # window (Apertus) | stream (for windows much shorter than 4096: goldfish.py)
loss_average = "step"           # step: over all kept tokens | micro: mean of micro-batch means, as Apertus (Megatron)
# the schedule, counted in samples (windows)
total_samples = 3_662_109_375   # 15T tokens in windows of 4096
warmup_samples = 4_096_000      # samples of linear warm-up, from 0 to lr
decay_samples = 403_905_806     # samples of decay, from lr to lr_floor by 1 - sqrt
minutes = 0.0                   # train for this many minutes, decay included; overrides an earlier total_samples
schedule = "wsd"                # wsd | cosine
batch_size = 1024               # samples per step
batch_ramp_at = 0               # samples after which the batch is doubled; 0 = never
micro_batch = 4                 # samples in memory at once, fewer if they do not fit; gradients accumulate
# the optimizer
optimizer = "ademamix"          # ademamix | adamw
state_dtype = "float32"         # of AdEMAMix's two averages; bfloat16 saves 4 bytes a parameter (stochastic rounding)
lr = 1.1e-4                     # peak learning rate
lr_floor = 1.1e-5               # learning rate at the end of the decay
betas = (0.9, 0.999, 0.9999)    # fast average, squares, slow average; AdamW uses the first two
alpha = 8.0                     # weight of the slow average
alpha_warmup = 0                # steps over which alpha grows; 0 = the whole run, at most 100,000; 1 = no warm-up
beta3_warmup = 0                # the same for beta3
eps = 1e-8                      # added to the root of the average of squares
weight_decay = 0.1              # on matrices; never on gains and xIELU scalars
grad_clip = 0.1                 # largest global L2 norm; at 0.1 nearly every step is clipped (sec. 2.6); 0 = off
# logging and saving
eval_every = 250                # steps between validations; 0 = at the end only
eval_minutes = 60.0             # validate at least this often, whatever the steps; 0 = by steps alone
eval_windows = 64               # windows of the validation split; 0 = all
last_eval_windows = 4096        # the same at the end of the run; 17M tokens in the 8B's windows
sample_every = 1000             # steps between samples of text; 0 = never
checkpoint_every = 1000         # steps between checkpoints; 0 = at the end only
checkpoint_minutes = 30.0       # save at least this often, whatever the steps; 0 = by steps alone
keep_checkpoints = 2            # the newest ones to keep, plus the last one before the decay; 0 = all
save_failures = 3               # saves in a row that may fail (disk full) before the run stops
allow_restart = False           # with --resume, start over if there are checkpoints but none is intact
skip_nonfinite = 0              # steps in a row to skip if loss or gradient is not finite; 0 = stop at the first
# -----------------------------------------------------------------------------


_exempt = ()                                               # ids that Goldfish never drops, set by posttrain/attach.py
KINDS = dict(
    parallel="auto, none, ddp, fsdp, hsdp",
    recompute="none, cheap, selective, full",
    goldfish_scope="window, stream",
    loss_average="step, micro",
    schedule="wsd, cosine",
    optimizer="ademamix, adamw",
    state_dtype="float32, bfloat16")
COUNTS = """eval_every eval_minutes eval_windows last_eval_windows sample_every checkpoint_every checkpoint_minutes
            keep_checkpoints save_failures skip_nonfinite grad_clip batch_ramp_at alpha_warmup beta3_warmup lr
            lr_floor eps weight_decay hsdp_shard timeout"""


def lr_at(samples, decay_at=None):
    """The learning rate of a step that begins after these samples. decay_at: as in schedule.wsd."""
    if schedule == "cosine":
        return cosine(samples, lr, lr_floor, warmup_samples, total_samples)
    return wsd(samples, lr, lr_floor, warmup_samples, total_samples, decay_samples, decay_at)


def tokens_seen(step):
    """How many tokens the run has seen when this step begins, for the log."""
    return dict(tokens=samples_before(step) * shape.block_size)


def steps_until(samples):
    """The number of whole steps in this number of samples."""
    return steps_in(samples, batch_size, batch_ramp_at)


def samples_before(step):
    """The number of samples that the run has seen when this step begins."""
    return samples_at(step, batch_size, batch_ramp_at)


# -----------------------------------------------------------------------------
# set-up: validates settings before anything is built; an error names the flag to change


def check_settings():
    global minutes
    said = [name for name in globals().get("_asked", ()) if name in ("minutes", "total_samples")]
    if said[-1:] == ["total_samples"]:
        minutes = 0.0
    for name, kinds in KINDS.items():
        if globals()[name] not in kinds.split(", "):
            raise ValueError(f"{name}={globals()[name]!r}: there is {kinds}")
    if minutes and (not 0 < minutes < math.inf or schedule != "wsd" or decay_samples >= total_samples or stage):
        raise ValueError(f"minutes={minutes:g} finds the end of a run while it trains: it wants a positive number, "
                         "schedule=wsd, a decay shorter than total_samples, and no stage; --minutes=0 counts samples")
    if total_samples < batch_size:
        raise ValueError(f"total_samples={total_samples} is less than one step of batch_size={batch_size}")
    for name in COUNTS.split():
        if globals()[name] < 0:
            raise ValueError(f"{name}={globals()[name]}: want 0 or more; --help says what 0 means")
    if optimizer == "adamw" and state_dtype == "bfloat16":
        raise ValueError("state_dtype=bfloat16 needs stochastic rounding, which AdamW does not have here: "
                         "use --optimizer=ademamix, or leave state_dtype out")
    # The lengths are three settings, so that a stage may end where the schedule does not. They have to fit.
    lr_at(0)


def open_data(ranks):
    """
    The training data, with Goldfish; the validation data, in which every predictable token counts; and the number of
    windows in a micro-batch on each rank.
    """
    goldfish = goldfish_k, goldfish_h, goldfish_hash, goldfish_scope, _exempt
    if stage:
        from stages import StagedDataset                   # here, since runs without stages do not need it
        train = StagedDataset(data, stages, shape.block_size, *goldfish, stage=stage.removeprefix("all"))
    else:
        train = TokenDataset(data, "train", shape.block_size, seed, *goldfish)
    return train, TokenDataset(data, "val", shape.block_size, seed), ranks.micro_batch(batch_size, micro_batch)


def set_up(build, more, decides):
    """
    Everything that a run needs before it joins other ranks or writes files: a namespace that the functions below share.

    rows: windows of a micro-batch on this rank. config: all settings, for config.json; decides: names of those that a
    resumed run may not change. spent: seconds before this process. decay_at: samples before the decay. usage(tokens/s):
    entries of the log about the GPU. Added later: model, opt, saver, log, clock, latest (times); stop and cooldown,
    lists that a signal fills to ask this process to exit or to begin the decay.
    """
    check_settings()
    ranks = Ranks(parallel, exact, hsdp_shard)
    where = ranks.place(pick_device(device))
    train, val, rows = open_data(ranks)
    meta = train.meta
    if shape.vocab_size not in (0, meta["vocab_size"]) and "vocab_size" not in more:
        raise ValueError(f"{data} was made by a tokenizer of {meta['vocab_size']} ids ({meta['tokenizer']}) and the "
                         f"model has vocab_size={shape.vocab_size}: prepare the data with --tokenizer=apertus, or set "
                         "vocab_size=0")
    of_data = dict(vocab_size=meta["vocab_size"], data_hash=train.fingerprint, tokenizer=meta["tokenizer"])
    config = settings(globals(), shape) | of_data | more
    run = SimpleNamespace(ranks=ranks, device=where, dtype=pick_dtype(dtype, where), train=train, val=val, rows=rows,
                          config=config, shape=ApertusConfig.of(config), decides=decides,
                          compiled=compile and can_compile(where), spent=0.0, validate_first=False,
                          summary=None, usage=lambda speed: {}, trace=None, bar=tqdm(disable=True),
                          decay_at=NEVER if minutes else total_samples - decay_samples)
    from engine.memory import check_run                    # here, since only the start of a run needs it
    check_run(run, build)
    return run


def build_plain(run):
    """The model of a run on the current device, without weights. Other scripts give main() another such function."""
    return Apertus(run.shape, seed=None)


def build_all(run, build, found):
    """The model and the optimizer: with initial weights, or with those of the checkpoint `found` (path, manifest)."""
    # A model to be sharded is built on meta, and each rank allocates its shard. Others are not, because to_empty()
    # would untie the head.
    with torch.device("meta" if run.ranks.sharded else run.device):
        run.model = model = build(run)
    model.dtype = run.dtype
    # Imported here, since only a run needs it. A GPU computes as before, but its layers get an attribute of this name:
    # if the first sample set it, torch.compile would compile all blocks again.
    from engine.attention import attend_on
    attend_on(model, run.device)
    if run.device == "cpu":
        keep_freed_memory()
    distribute(model, run.ranks, run.device, recompute, run.compiled)
    flops = model.flops_per_token(run.val.T) / run.ranks.size
    if run.device.startswith("cuda"):
        from engine.gpus import usage
        run.usage = lambda speed: usage(flops * speed)
        # Record where held memory was allocated, for the snapshot that main() writes if it runs out. Frees are not
        # recorded: torch 2.11 then loses the exception by which its checkpoint() ends a recomputation.
        torch.cuda.memory._record_memory_history("state", "state", "python")
    # Checkpoints do not hold frozen weights, so these are initialised in a resumed run too.
    if not found or not all(p.requires_grad for p in model.parameters()):
        # A pretrained model (init_from) has an init_weights() of its own, which reads a file.
        if run.ranks.sharded and "init_weights" not in vars(model):
            from engine.sharding import draw
            draw(model, seed)
        else:
            model.init_weights(seed)
    # Apertus grew alpha and beta3 over 100,000 steps of 2.6 million. A short run would stay close to plain
    # Adam, so its warm-ups last as long as the run, as in the report's own post-training. With --minutes they last as
    # long as total_samples would, since they must not depend on a clock.
    warm = min(steps_until(total_samples), 100_000)
    run.opt = build_optimizer(model, optimizer, lr, betas, alpha, eps, weight_decay, alpha_warmup=alpha_warmup or warm,
                              beta3_warmup=beta3_warmup or warm, compile=run.compiled, state_dtype=state_dtype)
    if found:
        load(run, found)
    if compile and not run.compiled and run.ranks.first:
        print(f"no compiler found for {run.device} (on a CPU: a C++ one, like g++): running eagerly, half as fast")


def load(run, found):
    """Fill model and optimizer from the checkpoint `found` (path, manifest)."""
    from engine import restore

    restore.load(found[0], run.model, run.opt)


# -----------------------------------------------------------------------------
# where a run ends


def end_of(run):
    """
    Steps of the whole run: as planned, unless the decay began earlier or later, or the stage ends before. A step across
    the border of two stages belongs to the second.
    """
    end = steps_until(plan_with_decay_at(run.decay_at, total_samples, decay_samples)[0])
    return end if run.train.stop is None else min(end, steps_until(run.train.stop))


# -----------------------------------------------------------------------------
# one step


def batches(run, step):
    """
    This rank's part of the samples of this step and all later ones: yields idx, targets, keep, doc, each (samples, T).
    Ranks that share a window form one of `groups` groups, number `group`. A thread prepares the next step while the
    caller computes this one.

    The thread has one OpenMP thread: a second pool would make libgomp count more threads than cores, and those of the
    training step would then sleep at every barrier instead of spinning.
    """
    def fetch(step):
        first = samples_before(step)
        each = batch_at(first, batch_size, batch_ramp_at) // run.ranks.groups
        return run.train.batch(first + run.ranks.group * each, each)

    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as thread:
        ahead = thread.submit(fetch, step)
        for step in itertools.count(step + 1):
            batch = ahead.result()
            ahead = thread.submit(fetch, step)
            yield batch


def forward_backward(run, batch, step):
    """
    The gradients of a step, micro-batch by micro-batch. batch: idx, targets, keep, doc, each (samples, T), on the CPU.

    Returns None if any rank is asked to stop meanwhile. Else {"loss": this rank's part of it, 0-d}, and other terms
    that a model has; the positions of the step, over all ranks; and a dict of further facts for the log.
    """
    model, ranks = run.model, run.ranks
    # Divided by the kept tokens of all ranks, losses and gradients of micro-batches and ranks add up to the step's.
    n_tokens, n_all = ranks.add(batch[2].sum(), batch[2].numel())
    terms = {}
    # Copied once a step, since a GPU finishes all queued kernels before each copy from pageable memory.
    micro = list(zip(*(t.to(run.device).split(run.rows) for t in batch)))
    for i, tensors in enumerate(micro):
        # A step of the 8B takes a minute on one node, and Slurm kills 30 seconds after SIGTERM.
        if i and ranks.agree(runs.asked(out, run, "stop")):
            return None
        if i == 4:
            end_trace(run)                                 # a long step would make a file of gigabytes
        if time.perf_counter() - run.step_began > 10:
            run.bar.set_postfix_str(f"micro-batch {i + 1} of {len(micro)}")
        divide_by = n_tokens if loss_average == "step" else int(tensors[2].sum()) * len(micro) * ranks.size
        # FSDP adds gradients over ranks after each micro-batch, DDP and exact FSDP once, after the last.
        reduce_after(model, ranks, last=i + 1 == len(micro))
        model.now = step, ranks.group * len(micro) + i     # for models that change in a run (self-guided training)
        extra, loss = model(*tensors, n_tokens=max(divide_by, 1))
        loss.backward()
        for name, term in (dict(loss=loss.detach()) | (extra or {})).items():
            terms[name] = terms.get(name, 0) + (term.double() if exact else term)
    add_gradients(model, ranks)
    # Ranks that share a window have counted it once each.
    return terms, n_all * ranks.groups / ranks.size, dict(kept=n_tokens / n_all)


def update(run, rate, norm):
    """Clip the gradients, whose global norm is `norm`, and take a step of the optimizer at this learning rate."""
    for group in run.opt.param_groups:
        group["lr"] = rate
    clip = min(1.0, grad_clip / (norm + 1e-6)) if grad_clip else 1.0
    if optimizer == "ademamix":
        # AdEMAMix scales a gradient as it reads it, which saves a pass over all gradients.
        run.opt.step(grad_scale=clip)
    else:
        torch._foreach_mul_(gradients(run.model), clip)
        run.opt.step()


# -----------------------------------------------------------------------------
# evaluation


def evaluate(run, windows):
    """
    Mean loss in nats over the first `windows` validation windows (0 = all), a micro-batch at a time on each rank.

    We need no gradients here, but no_grad would make torch.compile trace every block a second time.
    """
    rows, ranks = run.rows, run.ranks
    windows = min(windows or run.val.n_windows, run.val.n_windows)
    total = count = 0.0
    mine = ranks.group * rows
    for first in range(mine, mine + windows, rows * ranks.groups):
        # The last batch is moved back to be as large as the others, which are compiled; repeated windows do not count.
        # A rank without windows runs all the same, because FSDP gathers weights from all ranks.
        begin = max(0, min(first, windows - rows))
        idx, targets, keep, doc = (t.to(run.device) for t in run.val.batch(begin, min(rows, windows)))
        keep[:first - begin] = False
        _, nll = run.model(idx, targets, keep, doc, per_token=True)
        total += (nll * keep).sum().item()
        count += keep.sum().item()
    drop_gathered(run.model)
    total, count = ranks.add(total, count)
    return total / count


def validate(run, windows):
    """The loss over the first `windows` validation windows for the log: nats per token, bits per byte."""
    run.model.eval()
    nats = evaluate(run, windows)
    run.model.train()
    return dict(val_loss=nats, val_bpb=run.val.bits_per_byte(nats), seconds=round(run.clock.seconds(), 1))


def sample(run):
    """A short text by the model."""
    from sample import sample_of                           # here, since training itself needs no tokenizer

    text = sample_of(run, data, seed)
    drop_gathered(run.model)
    return text


# -----------------------------------------------------------------------------
# messages and config.json


def introduce(run, end):
    """Print how large the run is, and write config.json and the vocabulary."""
    kind = run.device if run.ranks.size == 1 else f"{run.ranks.size} x {run.device.split(':')[0]}"
    length = f"{minutes:g} minute{'s' * (minutes != 1)}" if run.decay_at == NEVER else f"{end:,} steps"
    print(f"{run.model.num_params():,} parameters on {kind} in {str(run.dtype)[6:]}, {length} of {batch_size} x "
          f"{shape.block_size} tokens per step; data: {run.train.n_tokens:,} tokens")
    import convert
    import tokenizer
    convert.describe(out, run.config, run.shape, tokenizer.load_for(data))


def finish(run, last):
    """After the last save of a finished run: the last validation, and the content of summary.json."""
    entry = validate(run, last_eval_windows)
    run.log(step=last - 1, **tokens_seen(last), **entry)
    # Without the first steps, which compile.
    speed = statistics.median(run.speeds[3:] or run.speeds or [0])
    run.summary = entry | tokens_seen(last) | dict(steps=last, seconds=round(entry["seconds"]), tok_s=round(speed),
                                            torch=torch.__version__) | run.usage(speed)
    if run.ranks.first:
        print(f"{out}: {entry['val_bpb']:.3f} bits per byte of validation text after {entry['seconds']:.0f} s")


def conclude(run):
    """After all ranks have left: the weights for Hugging Face, summary.json (the run is finished), and a plot."""
    if run.summary:
        import convert
        convert.complete(out)
        write_json(f"{out}/summary.json", run.summary)
    if run.speeds or run.summary:
        from engine import plot                            # here, since matplotlib takes a second
        plot.curves([out], f"{out}/loss.png")
        print(f"the curve: {out}/loss.png")


# -----------------------------------------------------------------------------
# the run


def decay_wanted(run, step):
    """Whether this rank wants the decay to begin after this step: a signal, the file `cooldown`, or the clock."""
    if run.ranks.first and run.decay_at == NEVER:
        total = run.clock.foresee(samples_before(step))
        if total < math.inf:
            run.bar.total = steps_until(int(total))
        # A decay that begins after this step would end when the time is up, or later.
        if plan_with_decay_at(samples_before(step + 1), total_samples, decay_samples)[0] >= total:
            return True
    return runs.asked(out, run, "cooldown")


def end_trace(run):
    """Write trace.json, if the file `profile` has asked for a trace."""
    if run.trace:
        run.trace.stop()
        run.trace.export_chrome_trace(f"{out}/trace.json")
        runs.forget(out, "profile")
        run.trace = None


def overdue(run, what, minutes):
    """Whether the last validation or checkpoint (`what`) is older than `minutes`."""
    return 0 < 60 * minutes < time.perf_counter() - run.latest[what]


def begin_decay(run, done):
    """Begin the decay after `done` steps, unless the rate is falling already."""
    says = "asked for its decay, but the rate falls already"
    if schedule == "wsd" and samples_before(done) < run.decay_at:
        run.decay_at = samples_before(done)
        says = f"the decay begins, {end_of(run) - done:,} steps"
    run.bar.total = end_of(run)
    if run.ranks.first:
        run.bar.write(f"step {done:6}   {says}")


def save(run, done, decay_begins):
    """Save a checkpoint after `done` steps. decay_begins: whether the next step begins the decay."""
    about = dict(config=run.config, decay_at=run.decay_at, seconds=run.clock.seconds())
    run.saver.save(done, run.model, run.opt, about, spare=steps_until(run.decay_at))
    run.latest["checkpoint"] = time.perf_counter()
    if decay_begins:
        # The start of the decay is on disk before its first step, so a killed run begins it at the same step.
        run.saver.wait()
        if run.ranks.first:
            runs.forget(out, "cooldown")


def open_run(run, build):
    """Resume or begin: checkpoint, model, log, clock and bar. Returns how many steps are done."""
    first, found = run.ranks.first, None
    if resume:
        # Imported here, since a new run does not need it.
        from engine.restore import find_checkpoint, refuse_finished, set_aside
        # It also sets run.spent, run.decay_at, and run.decayed, the steps of the checkpoints to set aside.
        found = find_checkpoint(run, started_stages, samples_before, steps_until)
    start = found[1]["step"] if found else 0
    end = end_of(run)
    if start >= end:
        refuse_finished(out, end)
    run.saver = checkpoint.Saver(f"{out}/ckpt", keep_checkpoints, run.ranks.files, save_failures)
    build_all(run, build, found)
    if first:
        introduce(run, end)
        if found:
            if run.decayed:
                set_aside(out, run.decayed)                # not before, since build_all() may reject the checkpoint
            print(f"resumed from {found[0]}")
    run.log = runs.open_log(out, start, run.ranks, validate=start >= end)
    run.clock = runs.Clock(minutes, run.spent)
    run.latest = dict.fromkeys(("validation", "checkpoint"), time.perf_counter())
    # With --minutes the bar's end is an estimate, which each step makes anew.
    run.bar = tqdm(initial=start, total=None if run.decay_at == NEVER else end, unit="step", dynamic_ncols=True,
                   disable=not first)
    return start


def pretrain(run, build):
    """The loop: step, log, validate and save, until the end or a stop."""
    ranks, first = run.ranks, run.ranks.first
    done = saved = open_run(run, build)
    end, bar, loader = end_of(run), run.bar, batches(run, done)
    skipped, stopping, run.speeds = 0, False, []
    if run.validate_first and not done:
        run.log(step=0, **tokens_seen(0), **validate(run, eval_windows))
    if run.compiled:
        bar.set_postfix_str("compiling: half a minute, the first time")
    while done < end and not stopping:
        step, run.step_began = done, time.perf_counter()
        if first and os.path.exists(f"{out}/profile"):
            run.trace = torch.profiler.profile()
            run.trace.start()

        # Gradients; then one sum over ranks of the squared norm, the loss, and the requests to stop, decay or save.
        made = forward_backward(run, next(loader), step)
        if not made:
            run.opt.zero_grad()
            if saved < done:
                save(run, done, decay_begins=False)
            break
        terms, positions, facts = made
        asked = (runs.asked(out, run, "stop"), decay_wanted(run, step),
                 overdue(run, "checkpoint", checkpoint_minutes), overdue(run, "validation", eval_minutes))
        square, stopping, decay, save_now, validate_now, *sums = ranks.add(
            square_norm(run.model, ranks), *asked, *terms.values())
        norm = math.sqrt(square)
        said = dict(zip(terms, sums))
        finite = math.isfinite(sum(sums) + norm)
        if not finite and skipped >= skip_nonfinite:
            run.saver.finish()
            raise ValueError(f"step {step}: loss {said['loss']}, gradient norm {norm}; skipped before: {skipped}. "
                             "Stopped before the update, so no checkpoint holds it. Try a lower --lr, a longer "
                             "warm-up, or --dtype=float32")
        skipped = 0 if finite else skipped + 1
        rate = lr_at(samples_before(step), run.decay_at)
        if finite:
            update(run, rate, norm)
        run.opt.zero_grad()
        end_trace(run)

        # Count the step, and log it.
        done = step + 1
        if decay:
            if minutes and done < 3:
                # They compile, so they say nothing of the pace.
                raise ValueError(
                    f"minutes={minutes:g}: a decay is due within two steps: take more, or remove the file cooldown")
            run.cooldown.clear()
            begin_decay(run, done)
            end = end_of(run)
        speed = positions / (time.perf_counter() - run.step_began)
        run.speeds.append(speed)
        bar.set_postfix_str(f"loss {said['loss']:.3f}, {speed / 1e3:.1f}k tok/s", refresh=False)
        bar.update()
        if not finite:
            norm, said = None, dict.fromkeys(said)         # JSON has no nan
        run.log(step=step, **tokens_seen(done), **said, grad_norm=norm, lr=rate, tok_s=round(speed), skipped=skipped,
                **facts, **run.usage(speed))
        # The last validation comes after the last save.
        if done < end and (validate_now or eval_every and done % eval_every == 0):
            entry = validate(run, eval_windows)
            run.latest["validation"] = time.perf_counter()
            run.log(step=step, **tokens_seen(done), **entry)
            if first:
                bar.write(f"step {done:6}   " + "   ".join(f"{name} {value:.3f}" for name, value in entry.items()))
        if done >= end or stopping or decay or save_now or checkpoint_every and done % checkpoint_every == 0:
            save(run, done, decay_begins=decay)
            saved = done
        # On all ranks, since FSDP gathers weights from all.
        if sample_every and (done >= end or done % sample_every == 0):
            text = sample(run)
            if first:
                bar.write(text + "\n")
    bar.close()
    loader.close()
    # Once the weights are on disk, the rest can be repeated.
    run.saver.finish()
    if done >= end:
        finish(run, done)
    elif first:
        print(f"{out}: stopped as asked after step {done}{', saved' if done else ''}; --resume continues")
    if first:
        runs.forget(out, "stop", *["cooldown"] * (done >= end))


def main(build=build_plain, more={}, decides=(), prepare=None):
    """
    Train, from the settings above to the run folder.

    build(run): the model without weights, on the current device, which may be meta; it has the interface of Apertus,
    with init_weights(). more: further settings for config.json; decides: names of those that a resumed run may not
    change. prepare(run): called once the ranks have met, before the run begins.
    """
    run = set_up(build, more, decides)
    with runs.claim(out, resume, run.ranks):
        run.ranks.join(run.device, timeout)
        if prepare:
            prepare(run)
        # On GPUs NCCL uses SIGUSR1 itself.
        run.stop, run.cooldown = stop_signals(), stop_signals(["SIGUSR1"] * (run.device == "cpu"))
        try:
            pretrain(run, build)
        except torch.OutOfMemoryError as e:                # on GPUs only
            torch.cuda.memory._dump_snapshot(f"{out}/memory-{run.ranks.rank}.pickle")
            raise ValueError(f"{e}: a smaller --micro_batch and --recompute=cheap take less; {out}/memory-*.pickle "
                             "(pytorch.org/memory_viz) shows what held it") from None
        finally:
            run.bar.close()                                # so that an error starts on a new line
            end_trace(run)
        run.ranks.leave()
        if run.ranks.first:
            conclude(run)


if __name__ == "__main__":
    with orderly_exit():
        run_script(main, globals(), shape, beyond="posttrain.attach")
