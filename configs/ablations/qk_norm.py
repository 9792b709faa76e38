# QK-norm at a learning rate five times too high, which is where it is said to matter: look at the gradient norms too.
study = "qk_norm"
question = "QK-norm on and off at a learning rate five times the best"
baseline = "qk_norm"
arms = dict(qk_norm={}, without=dict(qk_norm=False))
lrs = (1e-2,)
published = "no row of its own in the report; said to keep attention logits from growing (sec. 2.1)."
reading = (
    "At a rate of 1e-2, five times the best one, QK-norm is ahead by 0.21 +- 0.03 bits per byte in three seeds of three, "
    "with smaller gradients in the middle (median 0.31 against 0.39) and as large ones at the worst (194 and 193). Neither "
    "side diverges, and both are far behind a model at its best rate (2.04): it makes a wrong rate cheaper, as said. "
    "Whether it helps at the right rate was not asked here.")
