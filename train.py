"""
Pretraining, from a laptop to a cluster: real text in, a run folder out.

    loss = - sum over the step's kept tokens of log p(token | its document so far)  /  their number
    step:  gradients of all micro-batches  ->  clip the global norm  ->  AdEMAMix at the learning rate that WSD gives

$ python train.py configs/laptop.py                          # five minutes on two cores; then python sample.py
$ python train.py configs/laptop.py --activation=swiglu      # any setting below, as a flag
$ python train.py configs/8b.py --data=data/mine --resume    # the real thing; goes on where it was stopped
$ torchrun --nproc_per_node=8 train.py configs/8b.py --parallel=fsdp --resume       # on eight GPUs, and on any number later (engine/parallel.py)

Everything that decides the run is in out/<run>/: config.json, log.jsonl (a line a step), loss.png, ckpt/. There is no random state
in the loop: data, masks and schedules are pure functions of the step, so a run that was killed and resumed ends in the same bits.
SIGTERM, SIGUSR2, or a file named `stop` in the run folder: all processes save after the step that they are in, and leave.
"""

import dataclasses
import json
import math
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch
from tqdm import tqdm

from engine import checkpoint
from engine import plot
from studies import structured
import tokenizer
from ademamix import AdEMAMix, param_groups
from engine.hardware import can_compile
from configurator import lengths, run, settings
from data import StagedDataset, TokenDataset, begun
from model import Apertus, ApertusConfig
from engine.parallel import Ranks, drop_gathered, gradients, orderly_exit, spread, square_norm, stop_signals
from engine.hardware import pick_device, pick_dtype
from generate import generate
from schedule import batch_size as batch_at
from schedule import cosine, samples_at, steps_in, wsd

# -----------------------------------------------------------------------------
# the run
out = "out/run"                 # its folder
data = "data/stdlib"            # what prepare.py wrote
resume = False                  # go on from the newest intact checkpoint of this folder (or start, if there is none)
device = "auto"                 # cuda | mps | cpu; auto takes the first that is there
dtype = "auto"                  # float32 | bfloat16, of activations and GEMMs; weights and states: fp32. auto: bf16 where there is hardware
compile = True                  # torch.compile, block by block; eager where there is no C++ compiler
seed = 28                       # of the initial weights and of the order of windows
# the processes (engine/parallel.py)
parallel = "none"               # none | ddp | fsdp | hsdp; all but none want torchrun or srun
hsdp_shard = 0                  # hsdp: processes that share one copy of the weights; 0 = those of a node
recompute = "none"              # activations that backward computes again instead of storing: none | selective | full
exact = False                   # the same bits on any number of processes: gradients added in fp64, the micro-batch fixed
timeout = 600                   # seconds that a process waits for another before it gives up
stages = ()                     # a table, rows of (name, sources or {source: weight}, until so many samples, seed): configs/8b.py
stage = ""                      # stop at the end of this stage, --resume --stage=NEXT goes on; all = run through; "" = no stages, all of the data
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
ffn = "dense"                   # dense | lowrank | blockdense | blockshuffle: not Apertus, see studies/structured.py
ffn_rank = 0                    # of lowrank and blockdense
ffn_blocks = 0                  # of blockdense and blockshuffle
self_guided = 0.0               # share of the run in which a fading dense guide helps the structured layers
guide_saving = False            # compute each guide only as often as its weight says: half its FLOPs
# the loss
goldfish_k = 50                 # forget one label in k; 0 = plain cross-entropy
goldfish_h = 50                 # labels that the hash sees
goldfish_hash = "product"       # product (Apertus, bit-exact) | mix (really drops 1/k)
goldfish_scope = "window"       # window (Apertus) | stream (for windows much shorter than 4096: goldfish.py)
loss_average = "step"           # step: over the kept tokens of the whole step | micro: mean of micro-batch means, as Apertus did (Megatron)
# the schedule, counted in samples (windows)
total_samples = 3_662_109_375   # 15T tokens of 4096
warmup_samples = 4_096_000
decay_samples = 403_905_806
schedule = "wsd"                # wsd | cosine
batch_size = 1024               # samples a step
batch_ramp_at = 0               # from so many samples on the batch is doubled; 0 = never
micro_batch = 4                 # samples in memory at once; gradients of the rest accumulate
# the optimizer
optimizer = "ademamix"          # ademamix | adamw
lr = 1.1e-4                     # peak
lr_floor = 1.1e-5               # at the end of the decay
betas = (0.9, 0.999, 0.9999)    # fast average, squares, slow average; AdamW uses the first two
alpha = 8.0                     # weight of the slow average
alpha_warmup = 0                # steps over which alpha grows; 0 = the run's length, or Apertus' 100,000 if that is shorter
beta3_warmup = 0                # the same for beta3
eps = 1e-8
weight_decay = 0.1              # on matrices; never on gains and xIELU scalars
grad_clip = 0.1                 # global L2 norm; at 0.1 nearly every step is clipped (sec. 2.6)
# what it says on the way
eval_every = 250                # steps; 0 = at the end only
eval_windows = 64               # windows of the validation split; 0 = all
last_eval_windows = 4096        # the same at the end: all of a laptop's; of the 8B's 17M tokens, where all would be billions
sample_every = 1000             # steps; 0 = never
checkpoint_every = 1000         # steps; 0 = at the end only
keep_checkpoints = 2            # of the newest; 0 = all
save_failures = 3               # saves in a row that may fail (disk full) before the run stops
allow_restart = False           # with --resume, start over if there are checkpoints but none is intact
skip_nonfinite = 0              # steps in a row that may be skipped because loss or gradient is not a number; 0 = stop at the first
wandb_log = False               # also log to Weights & Biases (pip install wandb)
wandb_project = "nanoapertus"
# -----------------------------------------------------------------------------

BF16_PEAK = {"H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}   # dense, vendor


def build_optimizer(model, steps, compiled):
    groups = param_groups(model, weight_decay)
    if optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=betas[:2], eps=eps, fused=True)
    if optimizer != "ademamix":
        raise ValueError(f"optimizer={optimizer!r}: there is ademamix and adamw")
    # Apertus grew alpha and beta3 over 100,000 steps of 2.6 million. A short run never gets there and would stay plain Adam: as in the
    # report's own post-training, the warm-ups then last as long as the run.
    warm = min(steps, 100_000)
    return AdEMAMix(groups, lr=lr, betas=betas, alpha=alpha, eps=eps, beta3_warmup=beta3_warmup or warm,
                    alpha_warmup=alpha_warmup or warm, compile=compiled)


def lr_at(samples):
    if schedule == "wsd":
        return wsd(samples, lr, lr_floor, warmup_samples, total_samples, decay_samples)
    if schedule == "cosine":
        return cosine(samples, lr, lr_floor, warmup_samples, total_samples)
    raise ValueError(f"schedule={schedule!r}: there is wsd and cosine")


def check_settings():
    """What cannot work is told before anything is read or built: ValueError, one line that says what to type."""
    checkpoint.check_keep(keep_checkpoints)
    if loss_average not in ("step", "micro"):
        raise ValueError(f"loss_average={loss_average!r}: there is step and micro")
    if total_samples < batch_size:
        raise ValueError(f"total_samples={total_samples} is less than one step of batch_size={batch_size}")
    if schedule == "wsd" and warmup_samples + decay_samples > total_samples:
        # Lengths are three settings, so that a stage may end where the schedule does not. Who shortens a run means all of them.
        steps = steps_in(total_samples, batch_size, batch_ramp_at or None)
        raise ValueError(f"warmup_samples={warmup_samples} and decay_samples={decay_samples} do not fit into total_samples={total_samples} "
                         f"({steps:,} steps): say {lengths(total_samples)}")
    lr_at(0)


# -----------------------------------------------------------------------------
# the run folder: who may write there, and what it says of the run


def claim_folder():
    """Refuse a run folder that holds a run already, unless it is to be gone on with. Returns its lock; nothing else is written yet."""
    if not resume and (os.path.exists(os.path.join(out, "ckpt")) or plot.has_log(out)):
        raise ValueError(f"{out} already holds a run: --resume goes on with it, --out=ANOTHER starts one beside it")
    return checkpoint.claim(out)


def describe_run(config):
    """config.json, and the vocabulary if it is one of the user's own: what sample.py and convert.py need besides a checkpoint."""
    checkpoint.write_flushed(os.path.join(out, "config.json"), json.dumps(config, indent=1))
    if os.path.exists(os.path.join(data, "tokenizer.json")):
        shutil.copy(os.path.join(data, "tokenizer.json"), out)


def resume_from(model, opt, config, ranks, guides=None):
    """Load the newest intact checkpoint. Returns the step to go on with; 0 if there is none."""
    found = checkpoint.newest_intact(os.path.join(out, "ckpt"), ranks.files, allow_restart)
    if not found:
        return 0
    path, manifest = found
    same = [f.name for f in dataclasses.fields(ApertusConfig)]
    same += ["self_guided", "guide_saving", "data_hash", "tokenizer", "batch_size", "batch_ramp_at", "seed", "optimizer"]
    samples = samples_at(manifest["step"], batch_size, batch_ramp_at or None)   # a stage that has not begun may get other data
    before, now = (dict(c, data_hash=begun(c.get("data_hash", ""), samples)) for c in (manifest["config"], config))
    changed = [f"{k} {before.get(k)!r} -> {now[k]!r}" for k in same if before.get(k) != now[k]]
    if bool(manifest["config"].get("stage")) != bool(stage):
        changed.append(f"stage {manifest['config'].get('stage')!r} -> {stage!r}")
    if changed:
        raise ValueError(f"{path} is of another run: {'; '.join(changed)}")
    if guides:
        guides.end(manifest["step"], opt, manifest["config"])
    checkpoint.load(path, model, opt)
    if ranks.first:
        print(f"resumed from {path}")
    return manifest["step"]


def cut_log(path, start, validate):
    """
    Drop the lines of steps that will be done again, and those that a kill or a full disk has torn: every step has one line. validate: the
    validation of the last step, start - 1, will be done again too.
    """
    if not os.path.exists(path):
        return

    def kept():
        with open(path, encoding="utf-8", errors="replace") as f:
            for line in f:
                entry = plot.entry_of(line)
                again = start - 1 if validate and entry and "val_loss" in entry else start
                if entry and entry["step"] < again:
                    yield line

    checkpoint.write_flushed(path, kept())


def has_summary(tokens):
    """Whether summary.json tells of a run of so many tokens. One that a full disk has torn tells nothing: it is written again."""
    try:
        with open(os.path.join(out, "summary.json"), encoding="utf-8") as f:
            return json.load(f)["tokens"] >= tokens
    except (OSError, ValueError, KeyError, TypeError):
        return False


def open_log(config, start, validate):
    """Write what the run folder says of itself, and return the function that adds an entry to log.jsonl (and to W&B)."""
    describe_run(config)
    path = os.path.join(out, "log.jsonl")
    cut_log(path, start, validate)
    wandb = None
    if wandb_log:
        try:
            import wandb
        except ImportError:
            raise ValueError("wandb_log=True needs a package that is not here: pip install wandb, or leave the flag out") from None
        wandb.init(project=wandb_project, name=os.path.basename(out), config=config)
    file = open(path, "a", encoding="utf-8")

    def log(**entry):
        file.write(json.dumps(entry) + "\n")
        file.flush()
        if wandb:
            wandb.log(entry, step=entry["step"])
    return log


# -----------------------------------------------------------------------------
# the loop, and what it shows on the way


def evaluate(model, val, windows, micro, place, ranks):
    """
    Mean loss in nats over the first `windows` validation windows (0 = all), no Goldfish: every predictable token counts. Not under no_grad,
    though nothing is wanted: the blocks then run what training has compiled: 6 s less of a cold start.
    """
    windows = min(windows or val.n_windows, val.n_windows)
    total = count = 0.0
    for first in range(ranks.rank * micro, ranks.rank * micro + windows, micro * ranks.size):
        begin = max(0, min(first, windows - micro))                         # the last batch is as large as the others: compiled once
        idx, targets, keep, doc = (t.to(place) for t in val.batch(begin, min(micro, windows)))
        keep[:first - begin] = False                                        # counted before; with none left, run along: FSDP gathers with all
        _, nll = model(idx, targets, keep, doc, per_token=True)
        total, count = total + (nll * keep).sum().item(), count + keep.sum().item()
    drop_gathered(model)
    total, count = ranks.add(total, count)
    return total / count


def sample(model, tok, place):
    """A short continuation of nothing, to look at. Eager: the cached decode step has shapes that training has not compiled."""
    generator = torch.Generator(place).manual_seed(seed)
    with torch.compiler.set_stance("force_eager"):
        ids = generate(model, [[tok.bos]], min(120, block_size), temperature=0.8, top_p=0.95, stop=(tok.eos,), generator=generator)
    drop_gathered(model)
    return tok.decode(ids[0][1:])


def main():
    ranks = Ranks(parallel, exact, hsdp_shard)                              # who this process is, of how many; the others are met below
    place = ranks.place(pick_device(device))
    work_dtype = pick_dtype(dtype, place)
    check_settings()
    goldfish = (goldfish_k, goldfish_h, goldfish_hash, goldfish_scope)
    if stage and not stages:
        raise ValueError(f"stage={stage!r}, but there is no table of stages: name a config that has one, like configs/8b.py")
    if stage:
        train = StagedDataset(data, stages, block_size, *goldfish, stage=stage.removeprefix("all"))
    else:
        train = TokenDataset(data, "train", block_size, seed, *goldfish)
    val = TokenDataset(data, "val", block_size, seed)
    if vocab_size and vocab_size != train.meta["vocab_size"]:
        raise ValueError(f"{data} was made by a tokenizer of {train.meta['vocab_size']} ids ({train.meta['tokenizer']}) and the model has "
                         f"vocab_size={vocab_size}: prepare the data with --tokenizer=apertus, or set vocab_size=0")
    rows = ranks.micro_batch(batch_size, micro_batch)
    tok = tokenizer.load_for(data)
    config = dict(settings(globals()), vocab_size=train.meta["vocab_size"], data_hash=train.fingerprint, tokenizer=train.meta["tokenizer"])
    model_config = ApertusConfig(**{f.name: config[f.name] for f in dataclasses.fields(ApertusConfig)})
    steps = steps_in(total_samples, batch_size, batch_ramp_at or None)
    structured.guided_steps(config)                                         # a guide without a structured layer is told before it is built
    with claim_folder() if ranks.first else nullcontext():
        ranks.join(place, timeout)
        with stop_signals() as stop:
            pretrain(ranks, stop, place, work_dtype, train, val, tok, model_config, config, steps, rows)
        ranks.leave()
        if ranks.first:                                                     # last, and alone: no rank waits for a picture
            plot.curves([out], os.path.join(out, "loss.png"))
            print(f"the curve: {out}/loss.png")


def pretrain(ranks, stop, place, work_dtype, train, val, tok, model_config, config, steps, rows):
    """The run. steps: all of them; rows: samples of a micro-batch; stop: fills when a signal asks this process to leave."""
    ramp = batch_ramp_at or None
    with torch.device("meta" if ranks.sharded else place):
        model = Apertus(model_config, seed)
        guides = structured.Guides(model, config) if self_guided else None
    model.dtype = work_dtype
    compiled = compile and can_compile(torch.device(place))
    net = spread(model, ranks, place, seed, recompute, compiled)            # what is called in training: the model, or its wrapper
    opt = build_optimizer(model, steps, compiled)
    start = resume_from(model, opt, config, ranks, guides) if resume else 0
    if ranks.mode == "ddp" and start and guides and not guides.last:
        net = spread(model, ranks, place, seed)                             # the guides are gone, and DDP does not forget
    end = steps if train.stop is None else min(steps, steps_in(train.stop, batch_size, ramp))   # a step across the border is the next stage's
    last = start >= end                                                     # only its summary may be missing: killed between the two
    if last and has_summary(samples_at(start, batch_size, ramp) * block_size):
        raise ValueError(f"{out} is finished: all {end} steps are done; raise total_samples, name a later --stage, or sample it: "
                         f"python sample.py --init_from={out}")
    flops = model.flops_per_token(block_size)
    peak = next((v for k, v in BF16_PEAK.items() if place.startswith("cuda") and k in torch.cuda.get_device_name()), None)
    log = open_log(config, start, validate=last) if ranks.first else lambda **entry: None
    if ranks.first:
        if compile and not compiled:
            print(f"no compiler found for {place} (on CPU: a C++ one, like g++): running eagerly, about half as fast")
        where = f"{ranks.size} x {place.split(':')[0]}" if ranks.size > 1 else place
        print(f"{model.num_params():,} parameters on {where} in {str(work_dtype)[6:]}, {steps:,} steps of {batch_size} x {block_size} tokens; "
              f"data: {train.n_tokens:,} tokens, so {samples_at(end, batch_size, ramp) / train.n_windows:.1f} epochs")
    saver = checkpoint.Saver(os.path.join(out, "ckpt"), keep_checkpoints, ranks.files, save_failures)
    # Windows, masks and document ids, off the critical path. In a thread of one OpenMP thread: a second pool would make libgomp count more
    # threads than cores, and those of the training step would sleep at every barrier instead of spinning: 4,500 tokens/s instead of 7,000.
    loader = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))

    def fetch(step):                                                        # this rank's part of a step's samples
        samples = samples_at(step, batch_size, ramp)
        each = batch_at(samples, batch_size, ramp) // ranks.size
        return loader.submit(train.batch, samples + ranks.rank * each, each)

    following, skipped, stop_file = fetch(start), 0, os.path.join(out, "stop")
    began = time.perf_counter()
    bar = tqdm(range(start, end), initial=start, total=end, unit="step", dynamic_ncols=True, disable=not ranks.first)
    if compiled:
        bar.set_postfix_str("compiling: half a minute, the first time")
    for step in bar:
        step_began = time.perf_counter()
        samples = samples_at(step, batch_size, ramp)
        batch, following = following.result(), fetch(step + 1)
        n_tokens, n_all = ranks.add(batch[2].sum(), batch[2].numel())       # of the whole step: kept, and all

        # forward and backward, micro-batch by micro-batch
        loss = torch.zeros((), device=place, dtype=torch.float64 if exact else torch.float32)
        micro = list(zip(*(t.split(rows) for t in batch)))
        for i, (idx, targets, keep, doc) in enumerate(micro):
            divide_by = n_tokens if loss_average == "step" else keep.sum().item() * len(micro) * ranks.size
            if guides:
                guides.set(step, ranks.rank * len(micro) + i)
            with gradients(net, ranks, last=i + 1 == len(micro)):
                _, part = net(*(t.to(place, non_blocking=True) for t in (idx, targets, keep, doc)), n_tokens=max(divide_by, 1))
                part.backward()
            loss += part.detach()

        # one sum over ranks: loss, gradient norm, and whether any of them is to stop
        stop_here = bool(stop) or ranks.first and os.path.exists(stop_file)
        loss, square, stopping = ranks.add(loss, square_norm(model, ranks), stop_here)
        norm = math.sqrt(square)
        finite = math.isfinite(loss + norm)

        # clip and update, unless the numbers are not numbers
        if not finite and skipped >= skip_nonfinite:
            saver.finish()
            before = f", after {skipped} skipped steps" if skipped else ""
            raise ValueError(f"step {step}: loss {loss}, gradient norm {norm}{before}. Stopped before the update; the last checkpoint in "
                             f"{out}/ckpt is good. Try --resume with a lower --lr, a longer --warmup_samples, or --dtype=float32")
        skipped = 0 if finite else skipped + 1
        for group in opt.param_groups:
            group["lr"] = lr_at(samples)
        clip = min(1.0, grad_clip / (norm + 1e-6)) if grad_clip else 1.0
        if finite and optimizer == "ademamix":
            opt.step(grad_scale=clip)                                       # scaled as the gradient is read: no pass of its own
        elif finite:
            torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], clip)
            opt.step()
        opt.zero_grad(set_to_none=True)
        if guides and guides.end(step + 1, opt):
            flops = model.flops_per_token(block_size)
            if ranks.mode == "ddp":
                net = spread(model, ranks, place, seed)

        # say what happened
        seconds = time.perf_counter() - step_began
        speed = n_all / seconds
        samples += int(n_all) // block_size
        memory = torch.cuda.max_memory_allocated() / 2**30 if place.startswith("cuda") else None
        log(step=step, tokens=samples * block_size, loss=loss if finite else None, grad_norm=norm if finite else None, kept=n_tokens / n_all,
            lr=opt.param_groups[0]["lr"], tok_s=round(speed), mfu=flops * speed / (peak * ranks.size) if peak else None, memory_gib=memory,
            skipped=skipped)
        bar.set_postfix_str(f"loss {loss:.3f}, {speed / 1e3:.1f}k tok/s", refresh=False)
        last = step + 1 == end
        model.eval()                                                        # without guides; nothing else depends on it
        if not last and eval_every and (step + 1) % eval_every == 0:        # the last comes after the last save
            nats = evaluate(model, val, eval_windows, rows, place, ranks)
            bpb = val.bits_per_byte(nats)
            log(step=step, tokens=samples * block_size, val_loss=nats, val_bpb=bpb, seconds=round(time.perf_counter() - began, 1))
            if ranks.first:
                bar.write(f"step {step + 1:6}   val {nats:.3f} nats/token, {bpb:.3f} bits/byte   {time.perf_counter() - began:5.0f} s")
        if last or stopping or checkpoint_every and (step + 1) % checkpoint_every == 0:
            saver.save(step + 1, model, opt, dict(config=config))           # copies the tensors; a thread writes them
        if sample_every and (last or (step + 1) % sample_every == 0):
            text = sample(model, tok, place)                                # on all ranks, since FSDP gathers with all
            if ranks.first:
                bar.write(text + "\n")
        model.train()
        if stopping:
            break
    bar.close()
    loader.shutdown(cancel_futures=True)
    saver.finish()                                                          # the weights are safe: what follows can be done again
    if last:
        done = max(start, end)
        tokens = samples_at(done, batch_size, ramp) * block_size
        model.eval()
        nats = evaluate(model, val, last_eval_windows, rows, place, ranks)
        bpb = val.bits_per_byte(nats)
        seconds = time.perf_counter() - began
        log(step=done - 1, tokens=tokens, val_loss=nats, val_bpb=bpb, seconds=round(seconds, 1))
    if ranks.first and last:
        summary = dict(val_bpb=bpb, val_loss=nats, tokens=tokens, seconds=round(seconds), torch=torch.__version__)
        checkpoint.write_flushed(os.path.join(out, "summary.json"), json.dumps(summary, indent=1))
        print(f"{out}: {bpb:.3f} bits per byte of validation text after {seconds:.0f} s")
    elif ranks.first:
        print(f"{out}: stopped as asked after step {step + 1} of {end}, saved; --resume goes on")
    if ranks.first and os.path.exists(stop_file):
        os.remove(stop_file)                                                # or the next start would stop again


if __name__ == "__main__":
    with orderly_exit():
        run(main, globals())
