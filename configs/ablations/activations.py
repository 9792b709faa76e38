# Feed-forward activations at equal parameters: SwiGLU has three matrices, so its width is two thirds of the others'.
study = "activations"
question = "xIELU, SwiGLU, GELU and ReLU^2 at equal parameters"
baseline = "xielu"
arms = dict(xielu={}, swiglu=dict(activation="swiglu"), gelu=dict(activation="gelu"), relu2=dict(activation="relu2"))
lrs = (5e-4, 1e-3, 2e-3)
published = "report Table 3, 1.5B, 100B tokens, one run: SwiGLU 2.037 -> xIELU 1.997 nats of training loss."
reading = (
    "Not the published order. ReLU^2 is ahead of xIELU by 0.036 +- 0.003 bits per byte, in three seeds of three, and of the "
    "rest as well; xIELU, SwiGLU and GELU cannot be told apart (p = 0.27 and 0.36). xIELU wants twice the learning rate of "
    "the others (2e-3 against 1e-3, the lowest that was tried) and has the smallest gradients there. With 0.69M parameters "
    "it was the same order and nearly the same numbers. 300 steps of a 128-wide model say nothing about 1.5B parameters and "
    "100B tokens, where the report's gain was found; they do say that xIELU's gain is not there from the first steps, and "
    "that whoever trains minutes, not weeks, may take ReLU^2.")
