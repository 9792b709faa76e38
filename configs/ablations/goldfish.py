# What forgetting one label in fifty costs in validation loss, with the published hash and with one that drops what it promises.
study = "goldfish"
question = "what Goldfish costs: none, the published product hash, a mixing hash (k = h = 50)"
baseline = "none"
arms = dict(none=dict(goldfish_k=0), product={}, mix=dict(goldfish_hash="mix"))
lrs = (5e-4, 1e-3, 2e-3)
published = "no row of its own in the report; Table E.5 finds downstream scores unharmed at 1B to 8B."
reading = (
    "Forgetting one label in fifty costs nothing that three seeds could show: -0.006 +- 0.014 for the published hash, +0.002 +- 0.008 "
    "for the mixing one, against no mask. The product arm's best rate is the grid's highest, 4e-3 (8e-3, tried in the activations "
    "study, is worse by 0.15).")
