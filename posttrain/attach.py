"""
What a run of train.py may take from outside. train.py hands its command line over if it names one of these settings.

    --init_from=MODEL               start with its weights and a fresh optimizer: continued pretraining
    --init_from=MODEL --lora_r=64   its weights, frozen, with trained adapters beside them (posttrain/lora.py)
    --teacher=MODEL                 a student that learns from it (posttrain/distill.py)
    --fp8                           the matrices of the blocks multiplied in 8 bits (engine/fp8.py)
    --sequence_parallel=8           windows over 8 ranks (engine/sequence.py)
    --ffn=lowrank --self_guided=.5  structured feed-forward layers: not Apertus (papers/structured_ffn.py)
    --old=FOLDER                    a second validation text: what the start model forgets (posttrain/forgetting.py)

MODEL is a run folder, a Hugging Face folder or a hub name. Two vocabularies of one size need not be equal, so they are
compared id by id before anything is built.

$ python train.py configs/continue_8b.py --data=data/mine-apertus
$ python train.py configs/continue_8b.py --data=data/mine-apertus --lora_r=64 --base=bf16 --out=out/mine-lora
$ python train.py configs/laptop.py --n_layer=1 --teacher=out/laptop --out=out/student
"""

import functools
import json

import torch

import convert
import tokenizer
import train
from configurator import attached, run, settings
from data import read_meta
from engine import fp8 as eight_bits
from engine import sequence
from engine.attention import attend_on
from engine.files import read_json, write_flushed
from engine.parallel import orderly_exit
from engine.resume import refuse_another
from model import Apertus
from posttrain import distill as distillation
from posttrain import forgetting, lora
from posttrain.common import adapters_of, load_start, shapes_of

structured = attached("papers.structured_ffn")

# the start
init_from = ""                  # start with the weights of a run folder, a Hugging Face folder or a hub name
old = ""                        # with init_from: a second text to validate on, like the start's own
lora_r = 0                      # rank of adapters beside the frozen weights of init_from; 0 = train all weights
lora_alpha = 32.0               # their update counts alpha / r
lora_on = "all"                 # or some of q_proj,k_proj,v_proj,o_proj,up_proj,down_proj
lora_rs = False                 # rank-stabilised: alpha / sqrt(r)
base = "fp32"                   # frozen weights are held in: fp32 | bf16 | int8 | nf4
# the teacher
teacher = ""                    # a run folder, Hugging Face folder or hub name to learn from
distill = 0.9                   # share of KL(teacher || model) in the loss, the rest is cross-entropy; the Minis': 0.9
# speed and size
fp8 = False                     # multiply the matrices of the blocks in 8 bits; H100, 4090 and later
sequence_parallel = 1           # neighbouring ranks that share one window, for long ones; divides n_kv_head
# structured layers
ffn = "dense"                   # dense | lowrank | blockdense | blockshuffle
ffn_rank = 0                    # of lowrank and blockdense
ffn_blocks = 0                  # of blockdense and blockshuffle
self_guided = 0.0               # share of the run in which a fading dense guide helps the structured layers
guide_saving = False            # compute each guide only as often as its weight says: half its FLOPs


def check_settings():
    if (lora_r or base != "fp32") and not (lora_r and init_from):
        raise ValueError(f"lora_r={lora_r}, base={base}: adapters are trained beside the frozen weights of a model: "
                         "name it with --init_from, and their rank, --lora_r=16")
    if lora_r and (self_guided or fp8):
        raise ValueError(f"lora_r={lora_r} freezes the matrices that self_guided={self_guided} and fp8={fp8} train: "
                         "leave one of them out")
    if fp8 and ffn != "dense":
        raise ValueError(f"fp8=True trains whole dense matrices: leave it out, or ffn={ffn}")
    if sequence_parallel < 1:
        raise ValueError(f"sequence_parallel={sequence_parallel}: want how many ranks share a window; 1 is one each")
    if not 0 <= distill <= 1:
        raise ValueError(f"distill={distill}: want the teacher's share of the loss, between 0 and 1")
    if "distill" in train._asked and not teacher:
        raise ValueError(f"distill={distill} wants a model to learn from: --teacher=RUN or a Hugging Face model")
    if old and (not init_from or sequence_parallel > 1):
        raise ValueError(f"old={old} is what a start model may forget: name one with --init_from, and leave "
                         "sequence_parallel out")


def same_vocabulary(ours, theirs, name):
    """ValueError, naming the first id, if two tokenizers differ: of the data and of the model `name`."""
    difference = tokenizer.first_difference(ours, theirs)
    if difference:
        i, mine, other = difference
        raise ValueError(f"{train.data} was made with another vocabulary than that of {name}: id {i} is {mine!r} there "
                         f"and {other!r} in the model (None: no such id); prepare the data with the model's tokenizer")


def take_shape(found):
    """
    Take the settings of the start model, found (ApertusConfig), into the run's shape: all but those that the user has
    set and is free to change, its window, RoPE and document mask. ValueError: the user asks for another shape.
    """
    for name, value in vars(found).items():
        own = getattr(train.shape, name)
        free = name in ("block_size", "doc_mask") or name.startswith("rope_")
        if name not in train._asked or name == "vocab_size" and not own:
            setattr(train.shape, name, value)
        elif own != value and not free:
            raise ValueError(f"{name}={own!r}, but {init_from} has {value!r}: leave it out, the start decides it")
    if train.shape.block_size > found.block_size and train.shape.rope_theta == found.rope_theta:
        print(f"warning: windows of {train.shape.block_size} tokens, and {init_from} has seen {found.block_size} at "
              "once: its RoPE may need another rope_theta")


def main():
    check_settings()
    tok = tokenizer.load_for(train.data)
    more, path, professor = {}, None, None
    if init_from:
        found, theirs, path = convert.start_of(init_from)
        take_shape(found)
        same_vocabulary(tok, theirs, init_from)
        more = dict(init_from=init_from, vocab_size=max(found.vocab_size, read_meta(train.data)["vocab_size"]))
    if lora_r:
        more |= dict(lora_r=lora_r, lora_alpha=lora_alpha, lora_on=lora_on, lora_rs=lora_rs, base=base)
    if teacher and distill:
        professor, theirs = convert.load_any(teacher)
        same_vocabulary(tok, theirs, teacher)
        check_teacher(professor.config)
        more |= dict(teacher_hash=convert.fingerprint(professor)[:16], distill=distill)
    if ffn != "dense" or self_guided:
        more |= dict(ffn=ffn, ffn_rank=ffn_rank, ffn_blocks=ffn_blocks, self_guided=self_guided,
                     guide_saving=guide_saving)
    if sequence_parallel != 1:
        train.Ranks = functools.partial(sequence.SplitRanks, sequence_parallel)
        sequence.check_split(sequence_parallel, block_size=train.shape.block_size, n_kv_head=train.shape.n_kv_head)
    wrap_loop()
    decides = more.keys() - {"init_from", "vocab_size"}
    train.main(functools.partial(build, path=path, professor=professor), settings(globals()) | more, decides)


def build(run, path, professor):
    """
    The model of a run on the current device. On meta it has no values yet: init_weights() reads or draws them.

    path: of the weights of init_from, or None; professor: the model of teacher, or None.
    """
    meta = torch.empty(0).is_meta
    if not lora_r:
        model = Apertus(run.shape, seed=None)
        if path:
            model.init_weights = lambda seed, fill: convert.fill(model, path)
    elif meta:
        model = shapes_of(run.shape, adapters_of(globals()), base)
        model.init_weights = lambda seed, fill: fill_adapted(run, model, path)
    else:
        model, _ = load_start(init_from, run.device, run.dtype, None, base, adapters_of(globals()), train.seed)
        model.config = run.shape                           # the same, but for its window and RoPE
        run.start_hash = model.start
        model.init_weights = lambda seed, fill: None
    if ffn != "dense" or self_guided:
        run.guides = structured.Guides(run.config)
        structured.build(model, run.config)
        run.guides.join(model)
        model.__class__ = type("Guided", (structured.Guided, type(model)), {})
        model.guides = (run.guides,)
    if fp8:
        eight_bits.check_fp8(run.shape, run.rows * run.shape.block_size // sequence_parallel, run.device)
        eight_bits.multiply_in_fp8(model)
    if professor:
        model.__class__ = type("Student", (distillation.Student, type(model)), {})
        if run.ranks.sharded or not meta:
            professor.config.doc_mask = run.shape.doc_mask
            distillation.learn_from(model, professor.to(run.device, run.dtype), distill, run.compiled)
            attend_on(professor, run.device)
    if sequence_parallel > 1:
        model.__class__ = type("Split", (sequence.SplitForward, type(model)), {})
        model.ranks = run.ranks
    return model


def fill_adapted(run, model, path):
    """Give shards of a model with adapters its weights."""
    convert.fill(model, path)
    run.start_hash = convert.fingerprint(model)
    lora.draw(model, train.seed)


def check_teacher(its):
    """ValueError: a teacher (its ApertusConfig) whose window is shorter, or vocabulary smaller, than the student's."""
    ids = read_meta(train.data)["vocab_size"]
    if its.block_size < train.shape.block_size or its.vocab_size < ids:
        raise ValueError(f"{teacher} has windows of {its.block_size} tokens and {its.vocab_size} ids, and the run "
                         f"{train.shape.block_size} and {ids}: a teacher wants at least as many")
    if sequence_parallel > 1:
        sequence.check_split(sequence_parallel, n_kv_head_of_the_teacher=its.n_kv_head)


# -----------------------------------------------------------------------------
# what is added to functions of train.py


def wrap_loop():
    build_all, load, update, validate, finish = (
        train.build_all, train.load, train.update, train.validate, train.finish)

    def then_attach(run, build, found):
        build_all(run, build, found)
        if lora_r:
            run.config["start_hash"] = run.start_hash[:16]
        if sequence_parallel > 1:
            for model in (run.model, *getattr(run.model, "teacher", ())):
                sequence.split_attention(model, run.ranks)
        run.validate_first = bool(init_from and (train.eval_every or old))
        if old:
            run.old = forgetting.Old(old, tokenizer.load_for(train.data), run.shape.block_size, train.eval_windows,
                                     train.out)
            if found:
                run.old.remember(found[1]["step"], run.ranks.first)

    def load_same_start(run, found):
        path, manifest = found
        before = manifest["config"]
        if lora_r:
            refuse_another(path, before, dict(start_hash=run.start_hash[:16]))
        if hasattr(run, "guides"):
            run.guides.end(manifest["step"], run.opt, before)
        load(run, found)

    def update_guided(run, rate, norm):
        update(run, rate, norm)
        if hasattr(run, "guides"):
            step, _ = run.model.now
            run.guides.end(step + 1, run.opt)

    def validate_old(run, windows):
        entry = validate(run, windows)
        if old:
            run.model.eval()
            entry |= run.old.measure(run.model, run.ranks)
            run.model.train()
            if not hasattr(run.old, "before"):
                run.old.remember(0, run.ranks.first)
        return entry

    def finish_adapters(run, last):
        finish(run, last)
        if old and run.ranks.first:
            summary = read_json(f"{train.out}/summary.json") | run.old.summary()
            write_flushed(f"{train.out}/summary.json", json.dumps(summary, indent=1))
            print(run.old.line(train.out))
        if lora_r:
            lora.save(run.model, adapters_of(globals()), f"{train.out}/adapter", init_from, run.start_hash,
                      run.ranks.first)

    train.build_all, train.load, train.update = then_attach, load_same_start, update_guided
    train.validate, train.finish = validate_old, finish_adapters


def start():
    with orderly_exit():
        run(main, vars(train), train.shape, globals())
