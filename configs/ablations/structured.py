# Structured feed-forward layers at 63 % and 32 % of the MLP's parameters (5/8 and 5/16 of every layer but the first), each with and
# without self-guided training over the first half. The MLP is 4 C wide, as in the paper, so that the shares are the published ones.
study = "structured"
out = "results"                            # not a part of Apertus: not among the studies in results/ablations
question = "LowRank, BlockDense, BlockShuffle at 63 % and 32 % of the MLP, +sg with self-guided training"
baseline = "dense"
_C = 128                                   # the size's n_embd: ranks go with it
_size = dict(ffn_dim=4 * _C)
_forms = {"lowrank63": dict(ffn="lowrank", ffn_rank=_C // 2), "lowrank32": dict(ffn="lowrank", ffn_rank=_C // 4),
          "blockdense63": dict(ffn="blockdense", ffn_rank=2 * round(_C / 3), ffn_blocks=2),
          "blockdense32": dict(ffn="blockdense", ffn_rank=2 * round(_C / 6), ffn_blocks=2),
          "blockshuffle63": dict(ffn="blockshuffle", ffn_blocks=2), "blockshuffle32": dict(ffn="blockshuffle", ffn_blocks=4)}
arms = {"dense": _size, **{_name: {**_size, **_form} for _name, _form in _forms.items()},
        **{_name + "+sg": {**_size, **_form, "self_guided": 0.5} for _name, _form in _forms.items()}}
lrs = (2e-3,)
published = ("arXiv 2406.16450, 1.3B, 25.5B tokens, one run: perplexity 12.46 dense; 12.86, 12.97, 12.98 at 63 %; "
             "13.55, 13.74, 13.81 at 32 %. "
             "Its smallest gain from self-guided training: width 768, 4 layers, rank 128, 3,000 steps.")
reading = (
    "Not the published order: at this size low rank at 32 % of the MLP's parameters is better than dense, -0.052 +- 0.008 "
    "bits per byte, in three seeds of three, and BlockShuffle at 32 % too, -0.041 +- 0.009; low rank at 63 % is ahead in "
    "three of three (-0.030 +- 0.017), BlockShuffle at 63 % equal, BlockDense behind by 0.022 at both. Self-guided training "
    "is worse in 13 pairs of 18: in six of six for BlockShuffle (+0.017 and +0.030), five of six for low rank (+0.010 and "
    "+0.017); for BlockDense it cannot be told. So the 8 of 8 of a first try is confirmed for low rank and BlockShuffle. "
    "The paper's smallest gain from it is at width 768 and 3,000 steps; with 0.71M parameters the picture was the same but "
    "for BlockShuffle. One learning rate for all, that of the dense model; 300 steps; 128 wide: a smaller matrix that "
    "learns faster per step may be all there is to it.")
