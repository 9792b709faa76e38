"""
What a run of train.py takes from another model: its weights, a frozen base for adapters, or lessons.

    --init_from=MODEL               its weights and a fresh optimizer: continued pretraining
    --init_from=MODEL --lora_r=64   its weights, frozen, with adapters beside them that are trained (lora.py)
    --teacher=MODEL                 a student that learns from it (engine/distill.py)

MODEL is a run folder, a Hugging Face folder or a hub name. Two vocabularies of one size need not be the same, so they
are compared id by id before anything is built.

$ python train.py configs/continue_8b.py --data=data/mine-apertus
$ python train.py configs/continue_8b.py --data=data/mine-apertus --lora_r=64 --base=bf16 --out=out/mine-lora
$ python train.py configs/laptop.py --n_layer=1 --teacher=out/laptop --out=out/student
"""

import convert
import tokenizer
from engine import checkpoint
from engine.distill import Teacher
from posttrain import lora
from posttrain.common import adapters_of, load_start, shapes_of


class Start:
    """
    The model of --init_from, whose weights are not read yet.

    shape: its ApertusConfig; tok: its Tokenizer; new: {id: the old ids that spelled it} of tokens that it lacks.
    """

    def __init__(self, name):
        self.name = name
        self.shape, self.tok, self.path = convert.start_of(name)
        self.new = {}

    def settings(self, ours, asked):
        """
        The settings of the model that a run takes over, as {name: value}: all but those that the user is free to
        change, its window, RoPE and document mask.

        ours: the run's settings; asked: the names among them that the user has set. ValueError: another shape is asked
        for.
        """
        found = {}
        for name, value in vars(self.shape).items():
            own = ours[name]
            free = name in ("block_size", "doc_mask") or name.startswith("rope_")
            if name not in asked or own == value or name == "vocab_size" and not own:
                found[name] = value
            elif not free:
                raise ValueError(f"{name}={own!r}, but {self.name} has {value!r}: leave it out, the start decides it")
        window = found.get("block_size", ours["block_size"])
        theta = found.get("rope_theta", ours["rope_theta"])
        if window > self.shape.block_size and theta == self.shape.rope_theta:
            print(f"warning: windows of {window} tokens, and {self.name} has seen {self.shape.block_size} at once: "
                  "its RoPE may need another rope_theta")
        return found

    def check_vocabulary(self, tok, data, may_grow):
        """
        ValueError, naming the first id, if the data were made with other ids.

        may_grow: they may have pieces behind all ids of the model, which tokenizer.py --extend made.
        """
        found = tokenizer.first_difference(tok, self.tok)
        behind = self.tok.vocab_size
        grown = may_grow and found and found[0] >= behind > max(tok.special.values())
        if found and not grown:
            raise another_vocabulary(data, self.name, found)
        if grown:
            self.new = tokenizer.new_tokens(tok, self.tok)

    def fill(self, model, first):
        """Give a model, whole or sharded, the weights. The first rank says what new tokens begin with."""
        convert.fill(model, self.path, self.shape.vocab_size, self.new)
        if self.new and first:
            mean = sum(map(len, self.new.values())) / len(self.new)
            print(f"{len(self.new):,} tokens are new, from id {min(self.new):,} on: each begins as the mean of the old "
                  f"ones that spelled it, {mean:.1f} on average")

    def adapted(self, config, shape, ranks, device, dtype):
        """
        The model with its weights frozen, and adapters beside its matrices: all that is trained and saved.

        config: the run's settings, which get a hash of the weights; shape: its ApertusConfig.
        """
        model, _ = load_start(self.name, device, dtype, ranks, config["base"], adapters_of(config), config["seed"])
        model.config = shape            # the same, but for its window and RoPE
        config["start_hash"] = model.start[:16]
        return model

    def shapes(self, config, shape):
        """The same on the meta device, by which its memory is added up."""
        return shapes_of(shape, adapters_of(config), config["base"])

    def save_adapters(self, model, config, ranks):
        """Files that PEFT reads. Each rank gives its shards, and the first one writes."""
        folder = f"{config['out']}/adapter"
        lora.save(model, adapters_of(config), folder, self.name, model.start, ranks.first)


def another_vocabulary(data, name, difference):
    """The error of data and a model of different vocabularies. difference: (id, in the data, in the model)."""
    i, ours, theirs = difference
    return ValueError(f"{data} was made with another vocabulary than that of {name}: id {i} is {ours!r} there and "
                      f"{theirs!r} in the model (None: no such id); prepare the data with the model's tokenizer")


def teacher_of(config, tok, shape, device, dtype, compiled):
    """
    The Teacher that --teacher names; each rank holds it whole. config: the run's settings, which get a hash of it.

    tok, shape: of the data and the student. ValueError: no model, another vocabulary, a shorter window.
    """
    name = config["teacher"]
    model, theirs = convert.load_any(name, device)
    difference = tokenizer.first_difference(tok, theirs)
    if difference:
        raise another_vocabulary(config["data"], name, difference)
    its = model.config
    if its.block_size < shape.block_size or its.vocab_size < shape.vocab_size:
        raise ValueError(f"{name} has windows of {its.block_size} tokens and {its.vocab_size} ids, and the run "
                         f"{shape.block_size} and {shape.vocab_size}: a teacher wants at least as many")
    its.doc_mask = shape.doc_mask       # the teacher sees what the student sees
    config["teacher_hash"] = checkpoint.fingerprint(model)[:16]
    return Teacher(model.to(dtype), config["distill"], shape.vocab_size, compiled)
