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
lrs = (1e-3, 2e-3)                         # the best of the dense model in the other studies, and twice that
published = ("arXiv 2406.16450, 1.3B, 25.5B tokens, one run: perplexity 12.46 dense; 12.86, 12.97, 12.98 at 63 %; "
             "13.55, 13.74, 13.81 at 32 %. "
             "Its smallest gain from self-guided training: width 768, 4 layers, rank 128, 3,000 steps.")
