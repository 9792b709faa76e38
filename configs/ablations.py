"""
The studies of studies/ablate.py: `python -m studies.ablate NAME` runs one, `--report` writes its tables again.

    arms         {name: arguments of train.py, after those of the size}; the first is the baseline
    lrs          peak learning rates that every arm tries, if not 5e-4, 1e-3, 2e-3; with one, nothing is searched
    published    the result of the report (arXiv 2509.14233) or of another paper
    reading      our conclusion from the committed runs; without one, the program writes its own
    out          the folder of the results, if it is not results/ablations
"""

# The structured layers' ranks go with the width of configs/ablations/size_laptop.py. The MLP is 4 C wide, as in the
# paper, so that the shares of 63 % and 32 % (5/8 and 5/16 of every layer but the first) are the published ones.
_C = 128
_WIDE = f"--ffn_dim={4 * _C}"
_FORMS = dict(
    lowrank63=f"{_WIDE} --ffn=lowrank --ffn_rank={_C // 2}",
    lowrank32=f"{_WIDE} --ffn=lowrank --ffn_rank={_C // 4}",
    blockdense63=f"{_WIDE} --ffn=blockdense --ffn_rank={2 * round(_C / 3)} --ffn_blocks=2",
    blockdense32=f"{_WIDE} --ffn=blockdense --ffn_rank={2 * round(_C / 6)} --ffn_blocks=2",
    blockshuffle63=f"{_WIDE} --ffn=blockshuffle --ffn_blocks=2",
    blockshuffle32=f"{_WIDE} --ffn=blockshuffle --ffn_blocks=4")
_GUIDED = {f"{name}+sg": f"{form} --self_guided=0.5" for name, form in _FORMS.items()}

# The student of the distillation has the same number of steps as its teacher, which is `python train.py
# configs/ablations/start.py --out=out/laptop`. A run folder is named after the teacher's folder, not after its weights:
# for another teacher in out/laptop use another --runs.
_STUDENT = (
    "--n_layer=2 --n_embd=64 --ffn_dim=336 --total_samples=5760 --warmup_samples=288 --decay_samples=1728 "
    "--eval_every=240 --checkpoint_every=1440")

STUDIES = dict(
    activations=dict(
        # SwiGLU has three matrices, so its width is two thirds of the others'.
        question="xIELU, SwiGLU, GELU and ReLU^2 at equal parameters",
        arms=dict(xielu="", swiglu="--activation=swiglu", gelu="--activation=gelu", relu2="--activation=relu2"),
        published="report Table 3, 1.5B, 100B tokens, one run: SwiGLU 2.037 -> xIELU 1.997 nats of training loss.",
        reading="""
            The order is not the published one. ReLU^2 is ahead of xIELU by 0.049 +- 0.015 bits per byte, in five seeds
            of five; GELU is behind by 0.010 +- 0.006; SwiGLU and xIELU do not differ significantly. Both differences
            are significant among the three comparisons of the table. All arms are best at 1e-3, inside the grid; at
            2e-3 xIELU loses 0.009 and SwiGLU 0.10, so xIELU suffers least from a rate that is too high. 300 steps of a
            128-wide model say nothing about 1.5B parameters and 100B tokens, where the report found its gain. They do
            say that xIELU's gain is not there from the first steps, and that ReLU^2 is the better choice for a run of
            minutes."""),
    apertus=dict(
        question="Apertus' recipe against the Llama-style one",
        arms=dict(llama="configs/ablations/llama.py", apertus=""),
        lrs=(5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
        published="""
            report sec. 2.4, 3B, one run: 1.906 -> 1.843 nats of training loss, the baseline's final loss after 60 to 70
            % of its tokens.""",
        reading="""
            The sign of the headline holds at this size, in five seeds of five: -0.097 +- 0.032 bits per byte, although
            Apertus loses 1.6 % of its labels to Goldfish. It reaches the baseline's loss after 70 % of the tokens;
            published are 60 to 70 %. Each arm's best rate is inside a grid of five, and they are far apart: 1e-3 for
            Apertus, 4e-3 for the baseline, which at 1e-3 is 0.147 behind. The other studies exchange one choice at a
            time: half a cosine instead of WSD costs 0.042, and no other choice costs 0.01 at its own best rate. 0.3M
            tokens of Python are 300 steps."""),
    distill=dict(
        question="a student of 0.64M parameters, with and without a teacher of 1.9M",
        arms=dict(alone=_STUDENT, distilled=f"{_STUDENT} --teacher=out/laptop --distill=0.9"),
        lrs=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
        out="results",
        published="""
            arXiv 2605.29128 makes models of 0.5B to 4B parameters so: 0.9 KL to the 8B + 0.1 cross-entropy, 1.7T
            tokens. The seconds below are of both.""",
        reading="""
            With the teacher's distribution the student ends 0.060 bits/byte lower, in five seeds of five, and needs 69
            % of the tokens for the other's loss; at 1.577 it is close to its teacher of three times its size (1.568
            after the same number of tokens). Its best rate is four times as high. It also costs 1.7 times the seconds,
            because the teacher runs too; we did not train the student alone for the same time."""),
    doc_mask=dict(
        question="attention inside documents, or across them",
        arms=dict(inside="", across="--doc_mask=False"),
        published="""
            report Table 3, 1.5B, 100B tokens, one run: 2.037 with and without (and the released code most likely did
            not mask).""",
        reading="""
            Not significant, as published: +0.003 +- 0.003 bits per byte without the mask. A window of 256 tokens of
            this corpus seldom contains a border between documents, so there is little to mask."""),
    goldfish=dict(
        # What it costs in validation loss, with the published hash and with one that drops as many as it promises.
        question="what Goldfish costs: none, the published product hash, a mixing hash (k = h = 50)",
        arms=dict(none="--goldfish_k=0", product="", mix="--goldfish_hash=mix"),
        published="no row of its own in the report; Table E.5 finds downstream scores unharmed at 1B to 8B.",
        reading="""
            Five seeds see no cost of dropping one label in fifty: +0.001 +- 0.006 bits per byte with the product hash,
            0.000 +- 0.002 with the mixing hash, which drops 2 % and not 1.6 %. Validation counts every label."""),
    optimizer=dict(
        # AdamW has the same first two betas, the same clipping, and searches the same learning rates.
        question="AdEMAMix against AdamW",
        arms=dict(ademamix="", adamw="--optimizer=adamw"),
        lrs=(5e-4, 1e-3, 2e-3, 4e-3),
        published="""
            report Table 3, 1.5B, 100B tokens, one run: AdamW 2.037 -> AdEMAMix 2.002 nats of training loss.""",
        reading="""
            Not significant: AdamW is 0.003 +- 0.005 bits per byte behind, at twice AdEMAMix' rate (2e-3 against 1e-3,
            each inside a grid of four). The slow average spans 100 of 300 steps here; the published gain is of 100B
            tokens."""),
    qk_norm=dict(
        # A rate ten times too high is where QK-norm is said to matter. The gradient norms are in runs.jsonl.
        question="QK-norm on and off at a learning rate ten times the best",
        arms=dict(qk_norm="", without="--qk_norm=False"),
        lrs=(1e-2,),
        published="no row of its own in the report; said to keep attention logits from growing (sec. 2.1).",
        reading="""
            At ten times the best rate, QK-norm saves 0.168 +- 0.050 bits per byte, in five seeds of five; both arms are
            far behind the best rate's 2.04. Gradient norms are lower with it, in the median (0.31 against 0.45) and at
            most (7.4 against 12.4). We did not ask this at the best rate."""),
    schedule=dict(
        # Warm-up, stable, 1-sqrt decay over the last 30 %, or half a cosine. Both end at a tenth of the peak.
        question="WSD against cosine",
        arms=dict(wsd="", cosine="--schedule=cosine"),
        lrs=(5e-4, 1e-3, 2e-3, 4e-3),
        published="report Table 3, 1.5B, 100B tokens, one run: cosine 2.037 -> WSD 2.033 nats of training loss.",
        reading="""
            WSD is ahead of half a cosine by 0.042 +- 0.013 bits per byte, in five seeds of five, with each arm at its
            own best rate inside the grid (1e-3 and 2e-3). The published difference has the same sign and is small. In
            300 steps the stable phase may matter more than in a long run: when WSD begins to decay, the cosine is below
            a third of its peak."""),
    structured=dict(
        question="LowRank, BlockDense, BlockShuffle at 63 % and 32 % of the MLP, +sg with self-guided training",
        arms=dict(dense=_WIDE, **_FORMS, **_GUIDED),
        out="results",
        published="""
            arXiv 2406.16450, 1.3B, 25.5B tokens, one run: perplexity 12.46 dense; 12.86, 12.97, 12.98 at 63 %; 13.55,
            13.74, 13.81 at 32 %. Its smallest gain from self-guided training: width 768, 4 layers, rank 128, 3,000
            steps.""",
        reading="""
            In so short a run (0.31M tokens) fewer parameters cost nothing: low rank is 0.044 +- 0.016 and 0.052 +-
            0.008 bits per byte ahead of dense at 63 % and 32 %, BlockShuffle at 32 % 0.037 +- 0.014, each in five seeds
            of five; BlockShuffle at 63 % and BlockDense at 32 % do not differ significantly from dense after Holm,
            BlockDense at 63 % is 0.012 behind. The published order at 25.5B tokens is the other way round, all behind
            dense: learning faster at first says nothing about the end of a long run. Self-guided training takes part of
            the gain of low rank and BlockShuffle (0.027 and 0.009 to 0.012 worse than the same form without it, five of
            five) and changes nothing for BlockDense: its gain, published for thousands of steps, does not show in
            300."""),
    tying=dict(
        # Fewer parameters at equal tokens.
        question="tied and untied embeddings",
        arms=dict(untied="", tied="--tie_embeddings=True"),
        published="no row in the report; Apertus is untied at both sizes.",
        reading="""
            Not significant: +0.008 +- 0.020 bits per byte for one matrix instead of two, at 73 % of the parameters.
            Over half of this model's parameters are embeddings, unlike at 8B."""))
for _study in STUDIES.values():
    _study["baseline"] = next(iter(_study["arms"]))
