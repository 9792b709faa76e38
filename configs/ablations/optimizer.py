# The optimizer. AdamW has the same first two betas, the same clipping, and searches the same learning rates.
study = "optimizer"
question = "AdEMAMix against AdamW"
baseline = "ademamix"
arms = dict(ademamix={}, adamw=dict(optimizer="adamw"))
lrs = (5e-4, 1e-3, 2e-3)
published = "report Table 3, 1.5B, 100B tokens, one run: AdamW 2.037 -> AdEMAMix 2.002 nats of training loss."
