# The optimizer. AdamW has the same first two betas, the same clipping, and searches the same learning rates.
study = "optimizer"
question = "AdEMAMix against AdamW"
baseline = "ademamix"
arms = dict(ademamix={}, adamw=dict(optimizer="adamw"))
lrs = (1e-3, 2e-3, 4e-3, 8e-3)
published = "report Table 3, 1.5B, 100B tokens, one run: AdamW 2.037 -> AdEMAMix 2.002 nats of training loss."
reading = (
    "No difference once both are tuned: the sign changes between seeds and the interval of the mean holds 0. At the lowest rate, 2e-3, "
    "AdEMAMix is 0.058 ahead (seed 1), and AdamW makes that up by a doubled rate: here the slow average acts like a larger step. 300 steps "
    "are too few for more: it reaches a memory of 100 steps and its weight of 2 only at the end, and the published gain is of 48,000 steps. "
    "AdamW's best rate is inside the grid, AdEMAMix' at its lower edge.")
