# What forgetting one label in fifty costs in validation loss, with the published hash and with one that drops
# what it promises.
study = "goldfish"
question = "what Goldfish costs: none, the published product hash, a mixing hash (k = h = 50)"
baseline = "none"
arms = dict(none=dict(goldfish_k=0), product={}, mix=dict(goldfish_hash="mix"))
lrs = (5e-4, 1e-3, 2e-3)
published = "no row of its own in the report; Table E.5 finds downstream scores unharmed at 1B to 8B."
reading = (
    "Forgetting one label in fifty costs nothing that five seeds can see: +0.001 +- 0.006 bits per byte with the "
    "product hash, 0.000 +- 0.002 with the mixing hash, which drops 2 % and not 1.6 %. Validation counts every "
    "label.")
