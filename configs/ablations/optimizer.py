# The optimizer. AdamW has the same first two betas, the same clipping, and searches the same learning rates.
study = "optimizer"
question = "AdEMAMix against AdamW"
baseline = "ademamix"
arms = dict(ademamix={}, adamw=dict(optimizer="adamw"))
lrs = (5e-4, 1e-3, 2e-3, 4e-3)
published = "report Table 3, 1.5B, 100B tokens, one run: AdamW 2.037 -> AdEMAMix 2.002 nats of training loss."
reading = (
    "Not told apart: AdamW is 0.003 +- 0.005 bits per byte behind, at twice AdEMAMix' rate (2e-3 against 1e-3, each "
    "inside a grid of four). The slow average holds 100 of 300 steps here; the published gain is of 100B tokens.")
