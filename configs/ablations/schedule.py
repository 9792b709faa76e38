# The learning rate's shape: warm-up, stable, 1-sqrt decay over the last 30 %, or half a cosine. Both end at a
# tenth of the peak.
study = "schedule"
question = "WSD against cosine"
baseline = "wsd"
arms = dict(wsd={}, cosine=dict(schedule="cosine"))
lrs = (5e-4, 1e-3, 2e-3, 4e-3)
published = "report Table 3, 1.5B, 100B tokens, one run: cosine 2.037 -> WSD 2.033 nats of training loss."
reading = (
    "WSD is ahead of half a cosine by 0.042 +- 0.013 bits per byte, in five seeds of five, with each arm at its "
    "own best rate inside the grid (1e-3 and 2e-3). The published difference has the same sign and is small. In "
    "300 steps the stable phase may matter more than in a long run: when WSD begins to decay, the cosine is below "
    "a third of its peak.")
