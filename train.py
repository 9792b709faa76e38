"""
Pretraining, from a laptop to a cluster: real text in, a run folder out.

    loss = - sum over the step's kept tokens of log p(token | its document so far)  /  their number
    step:  gradients of all micro-batches  ->  clip the global norm  ->  AdEMAMix at the learning rate that WSD gives

$ python train.py configs/laptop.py                          # five minutes on any machine; then python sample.py
$ python train.py configs/laptop.py --activation=swiglu      # any setting of this file and of ApertusConfig, as a flag
$ python train.py configs/gpu.py --resume                    # one GPU; resumes where it was stopped
$ torchrun --nproc_per_node=8 train.py configs/8b.py --data=data/mine-apertus --resume     # eight GPUs

The loop is train(). It has no random state: data, masks and schedules are pure functions of the step, so a killed and
resumed run ends bit-exact, on one process or, with --exact, on several, unless the clock chooses where the decay begins
or the number of threads changes. Folder, signals, clock, log and checkpoints: engine/run.py.

The decay of the learning rate begins as planned, on request (a file named `cooldown` in the run folder, or SIGUSR1 on a
CPU), or early enough to end in time: --minutes=5 trains for five minutes on any machine.
"""

# Before torch: engine.hardware sets environment variables that torch reads when it loads.
import torch

from ademamix import build_optimizer
from configurator import run as run_script, settings
from data import TokenDataset, ahead, special_ids, started_stages
from engine.checks import check_settings, check_vocabulary
from engine.hardware import can_compile, pick_device, pick_dtype
from engine.parallel import Ranks, distribute, drop_gathered, orderly_exit
from engine.run import Run
from model import Apertus, ApertusConfig
from schedule import NEVER, Plan

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
# the start
init_from = ""                  # start with the weights of a run folder, a Hugging Face folder or a hub name
lora_r = 0                      # rank of adapters next to the frozen weights of init_from; 0 = train all weights
lora_alpha = 32.0               # scale of their update: alpha / r
lora_on = "all"                 # matrices with adapters: all, or some of q_proj,k_proj,v_proj,o_proj,up_proj,down_proj
lora_rs = False                 # rank-stabilised: scale by alpha / sqrt(r)
base = "fp32"                   # how frozen weights are stored: fp32 | bf16 | int8 | nf4
old = ""                        # with init_from: a second validation text, like the start model's data
teacher = ""                    # learn from this model too: run folder, Hugging Face folder or hub name
distill = 0.9                   # share of KL(teacher || model) in the loss; the rest is cross-entropy (the Minis: 0.9)
# speed and size
fp8 = False                     # multiply the matrices of the blocks in 8 bits; H100, 4090 and later
sequence_parallel = 1           # neighbouring ranks that share one window, for long windows; must divide n_kv_head
# the loss
goldfish_k = 50                 # drop one label in k; 0 = plain cross-entropy
goldfish_h = 50                 # labels that the hash sees
goldfish_hash = "product"       # product (Apertus, bit-exact) | mix (really drops 1/k) | coef (Apertus 2, bit-exact)
goldfish_scope = "window"       # window (Apertus) | stream (for windows much shorter than 4096: goldfish.py)
goldfish_exempt = ""            # special: Goldfish never drops control tokens; "": it may drop any token
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
state_dtype = "float32"         # of AdEMAMix's two averages; bfloat16 saves 4 bytes a parameter (stochastic rounding)
lr = 1.1e-4                     # peak learning rate
min_lr = 1.1e-5               # learning rate at the end of the decay
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
wandb_log = False               # also send each entry of the log to Weights & Biases (pip install wandb)
wandb_project = "nanoapertus"


# -----------------------------------------------------------------------------
# the model, and all that may be in it


def build_model(config, ranks, where, compiled, path, fresh):
    """
    The model on this rank's device: modules, then shards and compiled blocks, then weights. On meta: the modules alone.

    path: the weights of init_from, or None; fresh: not resumed, so that it needs initial weights.
    """
    with torch.device("meta" if ranks.sharded else where):      # shards get their memory in distribute()
        if lora_r:
            from posttrain.start import adapted
            model = adapted(config, settings(globals()), ranks, where)
        else:
            model = Apertus(config, seed=None)
    if fp8:
        from engine.fp8 import multiply_in_fp8
        multiply_in_fp8(model, micro_batch * config.block_size // ranks.P, where)
    if sequence_parallel > 1:
        from engine.sequence import split_attention
        split_attention(model, ranks)
    if where == "meta":
        return model
    model.dtype = pick_dtype(dtype, where)
    distribute(model, ranks, where, recompute, compiled)
    if lora_r:
        from posttrain.start import fill_adapted
        fill_adapted(model, path, seed, ranks)             # a resumed run reads its frozen weights again
    elif path and fresh:
        from convert import fill
        fill(model, path)
    elif fresh and ranks.sharded:
        from engine.sharding import draw
        draw(model, seed)                                  # the same values: each rank draws some, and scatters them
    elif fresh:
        model.init_weights(seed)
    return model


# -----------------------------------------------------------------------------
# the loop


def train(run, plan, model, optimizer, windows, val, rows, professor, text):
    """
    Train to the end of the plan, or until somebody asks to stop. rows: windows in memory at once.

    All losses of a step are divided by the kept tokens of all ranks, so that losses and gradients of micro-batches and
    ranks add up to the step's.
    """
    ranks = run.ranks
    batches = ahead(lambda step: windows.batch(*plan.samples_of(step, ranks.group, ranks.groups)), run.done)
    for step in run.steps():
        batch = next(batches)                              # this rank's samples
        # Ranks that share a window have counted it once each.
        n_kept, n_all = (n * ranks.groups / ranks.size for n in ranks.all_reduce(batch.keep.sum(), batch.keep.numel()))
        parts, terms = batch.split(rows, run.device), 0
        for part in run.micro_batches(model, parts):
            n = n_kept if loss_average == "step" else int(part.keep.sum()) * len(parts) * ranks.groups
            if sequence_parallel > 1:
                part = ranks.part_of(*part)                # this rank's positions of each window
            if professor:
                loss, each = professor.loss(model, *part, n_tokens=max(n, 1))       # each: cross-entropy and KL
            else:
                loss = each = model.loss(*part, n_tokens=max(n, 1))
            loss.backward()
            terms = terms + (each.detach().double() if exact else each.detach())
        if run.interrupted:                                # asked to stop between two micro-batches: drop this step
            break

        *terms, norm = run.reduce(model, *terms.view(-1))
        rate = plan.lr(step)
        if run.is_finite(step, sum(terms), norm):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step(grad_scale=min(1.0, grad_clip / (norm + 1e-6)) if grad_clip else 1.0)
        optimizer.zero_grad()

        losses = dict(zip(("loss", "kl"), terms))
        run.log_step(step, plan.tokens(step), n_all, losses, norm, lr=rate, kept=n_kept / n_all)
        if run.decay_wanted(plan, step):                   # a file `cooldown`, or the clock
            run.begin_decay(plan, step + 1, model, optimizer)
        if run.validation_due(step + 1, eval_every):
            run.log_validation(step, plan.tokens(step), validate(run, model, val, eval_windows, rows, text))
        if sample_every and (step + 1 == run.end or (step + 1) % sample_every == 0):
            from sample import sample_of
            run.say(sample_of(model, run.device, data, seed))
        run.save_if_due(step + 1, model, optimizer, **plan.saved())


def validate(run, model, val, windows, rows, text):
    """
    For the log: the loss over the first `windows` validation windows (0 = all), and that of `text` (forgetting.Old).

    We need no gradients here, but no_grad would make torch.compile trace every block a second time.
    """
    model.eval()
    ranks = run.ranks
    windows = min(windows or val.n_windows, val.n_windows)
    total = count = 0.0
    mine = ranks.group * rows
    for first in range(mine, mine + windows, rows * ranks.groups):
        # The last batch is moved back to be as large as the others, which are compiled; repeated windows do not count.
        # A rank without windows runs all the same, because FSDP gathers weights from all ranks.
        begin = max(0, min(first, windows - rows))
        [part] = val.batch(begin, min(rows, windows)).split(rows, run.device)
        part.keep[:first - begin] = False
        if sequence_parallel > 1:
            part = ranks.part_of(*part)
        idx, targets, keep, *doc_and_positions = part
        total += (model.nll(idx, targets, *doc_and_positions) * keep).sum().item()
        count += keep.sum().item()
    drop_gathered(model)
    total, count = ranks.all_reduce(total, count)
    model.train()
    entry = dict(val_loss=total / count, val_bpb=val.bits_per_byte(total / count), seconds=run.seconds())
    return entry | text.measure(model, ranks) if text else entry


# -----------------------------------------------------------------------------
# from the settings to the run folder


def open_data(config):
    """The training data, with Goldfish, and the validation data, in which every predictable token counts."""
    goldfish = goldfish_k, goldfish_h, goldfish_hash, goldfish_scope, special_ids(data) if goldfish_exempt else ()
    if stage:
        from stages import StagedDataset  # here, since runs without stages do not need it
        windows = StagedDataset(data, stages, config.block_size, *goldfish, stage=stage.removeprefix("all"))
    else:
        windows = TokenDataset(data, "train", config.block_size, seed, *goldfish)
    check_vocabulary(config, windows.meta, data, init_from)
    config.vocab_size = max(config.vocab_size, windows.meta["vocab_size"])
    return windows, TokenDataset(data, "val", config.block_size, seed)


def main(asked):
    """asked: names of the settings that the user has set, the latest last (of minutes and total_samples it counts)."""
    by_clock = minutes and [name for name in asked if name in ("minutes", "total_samples")][-1:] != ["total_samples"]
    check_settings(settings(globals()), by_clock)
    ranks = Ranks(parallel, exact, hsdp_shard)
    if sequence_parallel > 1:
        from engine.sequence import SplitRanks
        ranks = SplitRanks(sequence_parallel, parallel, exact, hsdp_shard)
    where, path, professor, text = ranks.place(pick_device(device)), None, None, None
    compiled = compile and can_compile(where)
    config = ApertusConfig(**vars(shape))
    if init_from:
        from posttrain.start import start_with
        config, path = start_with(init_from, config, asked, data)
    windows, val = open_data(config)
    about = settings(globals(), config) | dict(
        data_hash=windows.fingerprint, tokenizer=windows.meta["tokenizer"], minutes=minutes if by_clock else 0.0)
    if teacher and distill:
        from posttrain.distill import Teacher
        professor = Teacher(teacher, distill, config, data, ranks, where, pick_dtype(dtype, where), compiled)
        about["teacher_hash"] = professor.hash
    if old:
        from posttrain.forgetting import Old
        text = Old(old, data, config.block_size, eval_windows, out)
    plan = Plan(schedule, lr, min_lr, warmup_samples, total_samples, decay_samples, batch_size, batch_ramp_at,
                config.block_size, windows.stop, NEVER if by_clock else total_samples - decay_samples)
    from engine import memory, restore  # here, since only the start of a run needs them
    rows = memory.check_run(build_model(config, ranks, "meta", False, path, True), about, ranks, where,
                     pick_dtype(dtype, where), val.T, ranks.micro_batch(batch_size, micro_batch))

    with Run(about, ranks, where) as run:
        found = restore.find_checkpoint(run, plan, started_stages) if resume else None
        model = build_model(config, ranks, where, compiled, path, fresh=not found)
        # AdEMAMix' warm-ups last as long as the run, at most Apertus' 100,000 steps of 2.6 million: a short run would
        # stay close to plain Adam. With --minutes they last as long as total_samples would, whatever the clock says.
        warm = min(plan.steps(total_samples), 100_000)
        opt = build_optimizer(model, optimizer, lr, betas, alpha, eps, weight_decay, alpha_warmup or warm,
                              beta3_warmup or warm, compiled, state_dtype)
        if found:
            restore.load(found[0], model, opt)
        if text and found:
            text.recall()
        if lora_r:
            from posttrain.start import hash_of
            about |= hash_of(model, about, found)
        if ranks.is_main:
            introduce(run, plan, model, windows)
        run.open(plan.end, found, model.flops_per_token(val.T) / ranks.size)
        if wandb_log:
            run.also_log_to_wandb(wandb_project)
        if init_from and eval_every and not found:         # how good is the start?
            run.log_validation(0, 0, validate(run, model, val, eval_windows, rows, text))
        train(run, plan, model, opt, windows, val, rows, professor, text)
        if run.close(model, opt, **plan.saved()):
            finish(run, plan, model, val, rows, text)
        from convert import complete
        run.leave(complete)


def introduce(run, plan, model, windows):
    """Print how large the run is, and write config.json and the vocabulary."""
    from convert import describe_run  # here, since training itself needs no tokenizer
    kind = run.device if run.ranks.size == 1 else f"{run.ranks.size} x {run.device.split(':')[0]}"
    length = f"{minutes:g} minute{'s' * (minutes != 1)}" if plan.decay_at == NEVER else f"{plan.end:,} steps"
    print(f"{model.num_params():,} parameters on {kind} in {str(model.dtype)[6:]}, {length} of {batch_size} x {plan.T} "
          f"tokens per step; data: {windows.n_tokens:,} tokens")
    if compile and not can_compile(run.device):
        print(f"no compiler found for {run.device} (on a CPU: a C++ one, like g++): running eagerly, half as fast")
    describe_run(out, run.config, model.config, data)


def finish(run, plan, model, val, rows, text):
    """After the last save of a finished run: the last validation, and the content of summary.json."""
    entry = validate(run, model, val, last_eval_windows, rows, text)
    run.log_validation(run.done - 1, plan.tokens(run.done - 1), entry)
    run.summarise(plan.tokens(run.done - 1), entry | (text.summary(run.ranks.is_main) if text else {}))
    if lora_r:
        from posttrain.start import save_adapter
        save_adapter(run, model, run.config)
    if run.ranks.is_main:
        print(f"{out}: {entry['val_bpb']:.3f} bits per byte of validation text after {entry['seconds']:.0f} s")


if __name__ == "__main__":
    with orderly_exit():
        run_script(main, globals(), shape)
