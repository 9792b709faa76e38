# Feed-forward activations at equal parameters: SwiGLU has three matrices, so its width is two thirds of the others'.
study = "activations"
question = "xIELU, SwiGLU, GELU and ReLU^2 at equal parameters"
baseline = "xielu"
arms = dict(xielu={}, swiglu=dict(activation="swiglu"), gelu=dict(activation="gelu"), relu2=dict(activation="relu2"))
lrs = (5e-4, 1e-3, 2e-3)
published = "report Table 3, 1.5B, 100B tokens, one run: SwiGLU 2.037 -> xIELU 1.997 nats of training loss."
reading = (
    "Not the published order. ReLU^2 is ahead of xIELU by 0.045 +- 0.038 bits per byte, in three seeds of three, at each of "
    "the three rates too; GELU is behind by 0.013 +- 0.004; SwiGLU cannot be told from xIELU (p = 0.18). All are best at "
    "1e-3, inside the grid; at 2e-3 xIELU loses 0.007 and SwiGLU 0.11, so a too high rate costs xIELU least. After Holm's "
    "correction only GELU's place stands at 0.05. Three seeds so far; five are to come. 300 steps of a 128-wide model say "
    "nothing about 1.5B parameters and 100B tokens, where the report's gain was found; they do say that xIELU's gain is "
    "not there from the first steps, and that whoever trains minutes, not weeks, may take ReLU^2.")
