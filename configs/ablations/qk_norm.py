# QK-norm at a learning rate ten times too high, which is where it is said to matter: look at the gradient norms too.
study = "qk_norm"
question = "QK-norm on and off at a learning rate ten times the best"
baseline = "qk_norm"
arms = dict(qk_norm={}, without=dict(qk_norm=False))
lrs = (1e-2,)
published = "no row of its own in the report; said to keep attention logits from growing (sec. 2.1)."
