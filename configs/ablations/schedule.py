# The learning rate's shape: warm-up, stable, 1-sqrt decay over the last 30 %, or half a cosine. Both end at a tenth of the peak.
study = "schedule"
question = "WSD against cosine"
baseline = "wsd"
arms = dict(wsd={}, cosine=dict(schedule="cosine"))
lrs = (5e-4, 1e-3, 2e-3)
published = "report Table 3, 1.5B, 100B tokens, one run: cosine 2.037 -> WSD 2.033 nats of training loss."
reading = (
    "WSD is ahead of the cosine by 0.024 +- 0.003 bits per byte, in three seeds of three, both at the best of three rates, "
    "2e-3, inside the grid, and both ending at a tenth of it. The published difference is ten times smaller, and at 0.69M "
    "parameters ours was twice as large (0.042). In 300 steps the likely reason is how much is learned at full rate: WSD "
    "holds the peak for 195 steps, the cosine is below half of it for the second half of the run. A longer run would give "
    "the cosine's late steps less to make up for; not measured here.")
