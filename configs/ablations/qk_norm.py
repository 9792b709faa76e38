# QK-norm at a learning rate ten times too high, which is where it is said to matter: look at the gradient norms
# too.
study = "qk_norm"
question = "QK-norm on and off at a learning rate ten times the best"
baseline = "qk_norm"
arms = dict(qk_norm={}, without=dict(qk_norm=False))
lrs = (1e-2,)
published = "no row of its own in the report; said to keep attention logits from growing (sec. 2.1)."
reading = (
    "At ten times the best rate, QK-norm saves 0.168 +- 0.050 bits per byte, in five seeds of five; both arms are far "
    "behind the best rate's 2.04. Gradient norms are lower with it, in the median (0.31 against 0.45) and at most (7.4 "
    "against 12.4). At the best rate this was not asked.")
