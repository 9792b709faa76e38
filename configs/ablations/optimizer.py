# The optimizer. AdamW has the same first two betas, the same clipping, and searches the same learning rates.
study = "optimizer"
question = "AdEMAMix against AdamW"
baseline = "ademamix"
arms = dict(ademamix={}, adamw=dict(optimizer="adamw"))
lrs = (5e-4, 1e-3, 2e-3)
published = "report Table 3, 1.5B, 100B tokens, one run: AdamW 2.037 -> AdEMAMix 2.002 nats of training loss."
reading = (
    "No difference once both are tuned: -0.004 +- 0.005 bits per byte, the interval of the mean holds 0, and both are best "
    "at 2e-3, inside the grid. At half that rate AdEMAMix is ahead (seed 1: by 0.048), at twice it behind (by 0.028): here "
    "the slow average acts like a larger step. 300 steps are too few for more: the slow average reaches a memory of 100 "
    "steps and its weight of 2 only at the end; the published gain is of 48,000 steps. At 0.69M parameters it was the same.")
