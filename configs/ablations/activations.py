# Feed-forward activations at equal parameters: SwiGLU has three matrices, so its width is two thirds of the
# others'.
study = "activations"
question = "xIELU, SwiGLU, GELU and ReLU^2 at equal parameters"
baseline = "xielu"
arms = dict(xielu={}, swiglu=dict(activation="swiglu"), gelu=dict(activation="gelu"), relu2=dict(activation="relu2"))
lrs = (5e-4, 1e-3, 2e-3)
published = "report Table 3, 1.5B, 100B tokens, one run: SwiGLU 2.037 -> xIELU 1.997 nats of training loss."
reading = (
    "Not the published order. ReLU^2 is ahead of xIELU by 0.049 +- 0.015 bits per byte, in five seeds of five; "
    "GELU is behind by 0.010 +- 0.006; SwiGLU cannot be told from xIELU. Both differences hold among the three "
    "comparisons of the table. All arms are best at 1e-3, inside the grid; at 2e-3 xIELU loses 0.009 and SwiGLU "
    "0.10, so a rate that is too high costs xIELU least. 300 steps of a 128-wide model say nothing about 1.5B "
    "parameters and 100B tokens, where the report's gain was found. They do say that xIELU's gain is not there "
    "from the first steps, and that whoever trains for minutes may take ReLU^2.")
