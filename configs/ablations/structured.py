# Structured feed-forward layers at 63 % and 32 % of the MLP's parameters (5/8 and 5/16 of every layer but the
# first), each with and without self-guided training over the first half. The MLP is 4 C wide, as in the paper,
# so that the shares are the published ones.
study = "structured"
out = "results"                            # not a part of Apertus: not among the studies in results/ablations
question = "LowRank, BlockDense, BlockShuffle at 63 % and 32 % of the MLP, +sg with self-guided training"
baseline = "dense"
_C = 128                                   # the size's n_embd: ranks go with it
_size = dict(ffn_dim=4 * _C)
_forms = {"lowrank63": dict(ffn="lowrank", ffn_rank=_C // 2), "lowrank32": dict(ffn="lowrank", ffn_rank=_C // 4),
          "blockdense63": dict(ffn="blockdense", ffn_rank=2 * round(_C / 3), ffn_blocks=2),
          "blockdense32": dict(ffn="blockdense", ffn_rank=2 * round(_C / 6), ffn_blocks=2),
          "blockshuffle63": dict(ffn="blockshuffle", ffn_blocks=2),
          "blockshuffle32": dict(ffn="blockshuffle", ffn_blocks=4)}
arms = {"dense": _size, **{_name: {**_size, **_form} for _name, _form in _forms.items()},
        **{_name + "+sg": {**_size, **_form, "self_guided": 0.5} for _name, _form in _forms.items()}}
lrs = (5e-4, 1e-3, 2e-3)
published = ("arXiv 2406.16450, 1.3B, 25.5B tokens, one run: perplexity 12.46 dense; 12.86, 12.97, 12.98 at 63 %; "
             "13.55, 13.74, 13.81 at 32 %. "
             "Its smallest gain from self-guided training: width 768, 4 layers, rank 128, 3,000 steps.")
reading = (
    "In so short a run (0.31M tokens) fewer parameters cost nothing: low rank is 0.044 +- 0.016 and 0.052 +- "
    "0.008 bits per byte ahead of dense at 63 % and 32 %, BlockShuffle at 32 % 0.037 +- 0.014, each in five seeds "
    "of five; BlockShuffle at 63 % and BlockDense at 32 % are not told apart from dense after Holm, BlockDense at "
    "63 % is 0.012 behind. The published order at 25.5B tokens is the other way round, all behind dense: who "
    "learns faster at first says nothing of who is better later. Self-guided training takes part of what low rank "
    "and BlockShuffle gain (0.027 and 0.009 to 0.012 worse than the same form without it, five of five) and "
    "changes nothing for BlockDense: its gain, published for thousands of steps, is not seen in 300.")
