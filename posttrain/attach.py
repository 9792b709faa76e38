"""
The extras of train.py, which hands its command line over to this file if it names one of these settings.

    --init_from=MODEL               start with its weights and a fresh optimizer: continued pretraining
    --init_from=MODEL --lora_r=64   train adapters next to its frozen weights (posttrain/lora.py)
    --teacher=MODEL                 distillation: learn from its predictions too (posttrain/distill.py)
    --fp8                           multiply the matrices of the blocks in 8 bits (engine/fp8.py)
    --sequence_parallel=8           split each window over 8 ranks (engine/sequence.py)
    --ffn=lowrank --self_guided=.5  structured feed-forward layers: not Apertus (papers/structured_ffn.py)
    --goldfish_exempt=special       control tokens always have a loss, as in the Apertus 2 trainer
    --wandb_log                     also send the log to Weights & Biases
    --old=FOLDER                    a second validation text, to measure forgetting (posttrain/forgetting.py)

MODEL is a run folder, a Hugging Face folder or a hub name. Vocabularies of the same size may differ, so their hashes
are compared before anything is built.

$ python train.py configs/continue_8b.py --data=data/mine-apertus
$ python train.py configs/continue_8b.py --data=data/mine-apertus --lora_r=64 --base=bf16 --out=out/mine-lora
$ python train.py configs/laptop.py --n_layer=1 --teacher=out/laptop --out=out/student
"""

import functools
import os

import convert
import tokenizer
import train
from configurator import attached, run, settings
from data import read_meta
from engine import fp8 as eight_bits
from engine import sequence
from engine.attention import attend_on
from engine.parallel import check_split, orderly_exit
from engine.runs import settings_of
from model import Apertus
from posttrain import distill as distillation
from posttrain import start

structured = attached("papers.structured_ffn")

# the start
init_from = ""                  # start with the weights of a run folder, a Hugging Face folder or a hub name
old = ""                        # with init_from: a second validation text, like the start model's data
lora_r = 0                      # rank of adapters next to the frozen weights of init_from; 0 = train all weights
lora_alpha = 32.0               # scale of their update: alpha / r
lora_on = "all"                 # matrices with adapters: all, or some of q_proj,k_proj,v_proj,o_proj,up_proj,down_proj
lora_rs = False                 # rank-stabilised: scale by alpha / sqrt(r)
base = "fp32"                   # how frozen weights are stored: fp32 | bf16 | int8 | nf4
# the teacher
teacher = ""                    # learn from this model too: run folder, Hugging Face folder or hub name
distill = 0.9                   # share of KL(teacher || model) in the loss; the rest is cross-entropy (the Minis: 0.9)
# speed and size
fp8 = False                     # multiply the matrices of the blocks in 8 bits; H100, 4090 and later
sequence_parallel = 1           # neighbouring ranks that share one window, for long windows; must divide n_kv_head
# the loss
goldfish_exempt = ""            # special: Goldfish never drops control tokens; "": it may drop any token
# the log
wandb_log = False               # also send each entry of the log to Weights & Biases (pip install wandb)
wandb_project = "nanoapertus"
# structured layers
ffn = "dense"                   # dense | lowrank | blockdense | blockshuffle
ffn_rank = 0                    # rank of lowrank and blockdense
ffn_blocks = 0                  # number of blocks of blockdense and blockshuffle
self_guided = 0.0               # share of the run in which a fading dense guide helps the structured layers
guide_saving = False            # compute a guide only with the probability of its weight: saves half of its FLOPs


def check_settings():
    if (lora_r or base != "fp32") and not init_from:
        raise ValueError(f"lora_r={lora_r}, base={base}: adapters are trained next to the frozen weights of a model: "
                         "name it with --init_from")
    if lora_r and (self_guided or fp8):
        raise ValueError(f"lora_r={lora_r} freezes the matrices that self_guided={self_guided} and fp8={fp8} train: "
                         "leave one of them out")
    if fp8 and ffn != "dense":
        raise ValueError(f"fp8=True trains whole dense matrices: leave it out, or ffn={ffn}")
    if goldfish_exempt not in ("", "special"):
        raise ValueError(f"goldfish_exempt={goldfish_exempt!r}: want special, or leave it out")
    if not 0 <= distill <= 1:
        raise ValueError(f"distill={distill}: want the teacher's share of the loss, between 0 and 1")
    if "distill" in train._asked and not teacher:
        raise ValueError(f"distill={distill} wants a model to learn from: --teacher=RUN or a Hugging Face model")
    if old and (not init_from or sequence_parallel > 1):
        raise ValueError(f"old={old} measures what the start model forgets: name one with --init_from, and leave "
                         "sequence_parallel out")


def same_vocabulary(ours, theirs, name):
    """ValueError if the tokenizers of the data (ours) and of the model `name` (theirs) differ."""
    if ours.hash != theirs.hash:
        raise ValueError(f"{train.data} was made with another vocabulary than that of {name}: prepare the data with "
                         f"the model's, python convert.py --load={name} --save=vocabulary.json and "
                         "python prepare.py TEXTS --tokenizer=vocabulary.json")


def take_shape(found):
    """
    Copy the settings of the start model, found (ApertusConfig), to the run's shape. The user may set another window,
    RoPE or document mask; any other setting that differs is a ValueError.
    """
    for name, value in vars(found).items():
        own = getattr(train.shape, name)
        free = name in ("block_size", "doc_mask") or name.startswith("rope_")
        if name not in train._asked or name == "vocab_size" and not own:
            setattr(train.shape, name, value)
        elif own != value and not free:
            raise ValueError(f"{name}={own!r}, but {init_from} has {value!r}: leave it out, the start model decides it")


def main():
    check_settings()
    tok = tokenizer.load_for(train.data)
    more, decides = settings(globals()), []
    path = professor = None
    if init_from:
        found, theirs, path = convert.start_of(init_from)
        take_shape(found)
        same_vocabulary(tok, theirs, init_from)
        more["vocab_size"] = max(found.vocab_size, read_meta(train.data)["vocab_size"])
    if lora_r:
        decides += start.ADAPTERS
    if goldfish_exempt:
        train._exempt = (*tok.special.values(),)
        decides += ["goldfish_exempt"]
    if teacher and distill:
        professor, theirs = convert.load_any(teacher)
        same_vocabulary(tok, theirs, teacher)
        check_teacher(professor.config)
        more["teacher_hash"] = convert.fingerprint(professor)[:16]
        decides += ["teacher_hash", "distill"]
    if ffn != "dense" or self_guided:
        decides += ["ffn", "ffn_rank", "ffn_blocks", "self_guided", "guide_saving"]
    if sequence_parallel != 1:
        check_split("sequence_parallel", sequence_parallel, block_size=train.shape.block_size,
                    n_kv_head=train.shape.n_kv_head)
        train.Ranks = functools.partial(sequence.SplitRanks, sequence_parallel)
    wrap_loop(tok)
    train.main(functools.partial(build, path=path, professor=professor), more, decides)


def build(run, path, professor):
    """
    The model of a run on the current device. On meta it has no values yet: init_weights() reads or draws them.

    path: where the weights of init_from are, or None; professor: the teacher model, or None.
    """
    run.path = path
    model = start.build(run) if path else Apertus(run.shape, seed=None)
    if ffn != "dense" or self_guided:
        run.guides = structured.Guides(run.config)
        structured.build(model, run.config)
        run.guides.join(model)
        extend(model, structured.Guided)
        model.guides = (run.guides,)
    if fp8:
        eight_bits.check_fp8(run.shape, run.rows * run.shape.block_size // sequence_parallel, run.device)
        eight_bits.multiply_in_fp8(model)
    if professor:
        extend(model, distillation.Student)
        professor.config.doc_mask = run.shape.doc_mask
        distillation.learn_from(model, professor.to(run.device, run.dtype), distill, run.compiled)
        attend_on(professor, run.device)
    if sequence_parallel > 1:
        extend(model, sequence.SplitForward)
        model.ranks = run.ranks
    return model


def extend(model, mixin):
    """Let the methods of a class override those of the model."""
    model.__class__ = type(mixin.__name__, (mixin, type(model)), {})


def check_teacher(its):
    """ValueError if the teacher has a shorter window or a smaller vocabulary than the run. its: its ApertusConfig."""
    ids = max(train.shape.vocab_size, read_meta(train.data)["vocab_size"])
    if its.block_size < train.shape.block_size or its.vocab_size < ids:
        raise ValueError(f"{teacher} has windows of {its.block_size} tokens and {its.vocab_size} ids, and the run "
                         f"{train.shape.block_size} and {ids}: a teacher needs at least those")
    if sequence_parallel > 1:
        check_split("sequence_parallel", sequence_parallel, n_kv_head_of_the_teacher=its.n_kv_head)


# -----------------------------------------------------------------------------
# additions to functions of train.py


def wrap_loop(tok):
    start.wrap(old, train.eval_windows, tok)
    build_all, load, update = train.build_all, train.load, train.update

    def then_attach(run, build, found):
        build_all(run, build, found)
        if sequence_parallel > 1:
            for model in (run.model, *getattr(run.model, "teacher", ())):
                sequence.split_attention(model, run.ranks)
        run.validate_first = bool(init_from and (train.eval_every or old))

    def load_guides(run, found):
        run.guides.end(found[1]["step"], run.opt, found[1]["config"])
        load(run, found)

    def update_guided(run, rate, norm):
        update(run, rate, norm)
        step, _ = run.model.now
        run.guides.end(step + 1, run.opt)

    if wandb_log:
        import wandb                                       # here: if it is missing, no run folder is made

        batches = train.batches

        # train.py calls batches() once, after it has opened the log.
        def batches_and_wandb(run, start):
            log = run.log

            def both(**entry):
                log(**entry)
                wandb.log(entry, step=entry["step"])
            if run.ranks.first:
                wandb.init(project=wandb_project, name=os.path.basename(train.out), config=settings_of(train.out))
                run.log = both
            return batches(run, start)
        train.batches = batches_and_wandb

    train.build_all = then_attach
    if ffn != "dense" or self_guided:
        train.load, train.update = load_guides, update_guided


def take_over():
    with orderly_exit():
        run(main, vars(train), train.shape, globals())
