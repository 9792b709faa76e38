# QK-norm at a learning rate five times too high, which is where it is said to matter: look at the gradient norms too.
study = "qk_norm"
question = "QK-norm on and off at a learning rate five times the best"
baseline = "qk_norm"
arms = dict(qk_norm={}, without=dict(qk_norm=False))
lrs = (1e-2,)
published = "no row of its own in the report; said to keep attention logits from growing (sec. 2.1)."
reading = (
    "At a rate of 3e-2, seven times the best one, QK-norm is ahead by 0.23 +- 0.08 bits per byte in three seeds of three, with smaller "
    "gradients (median 0.33 against 0.46, largest 12.7 against 29.0). Neither side diverges, and both are far behind a model at its "
    "best rate (2.03): it makes a wrong rate cheaper, as said. Whether it helps at the right rate was not asked here.")
