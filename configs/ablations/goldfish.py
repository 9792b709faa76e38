# What forgetting one label in fifty costs in validation loss, with the published hash and with one that drops what it promises.
study = "goldfish"
question = "what Goldfish costs: none, the published product hash, a mixing hash (k = h = 50)"
baseline = "none"
arms = dict(none=dict(goldfish_k=0), product={}, mix=dict(goldfish_hash="mix"))
lrs = (5e-4, 1e-3, 2e-3)
published = "no row of its own in the report; Table E.5 finds downstream scores unharmed at 1B to 8B."
reading = (
    "Forgetting one label in fifty costs nothing that three seeds could show: +0.003 +- 0.011 bits per byte for the "
    "published hash, which drops 1.6 % of them here, and +0.007 +- 0.004 (p = 0.09) for the mixing one, which drops 2 %, "
    "against no mask. The product arm's best rate is the grid's highest, 2e-3, by 0.0005; 4e-3, tried in the activations "
    "study, is worse by 0.19.")
