# Feed-forward activations at equal parameters: SwiGLU has three matrices, so its width is two thirds of the others'.
study = "activations"
question = "xIELU, SwiGLU, GELU and ReLU^2 at equal parameters"
baseline = "xielu"
arms = dict(xielu={}, swiglu=dict(activation="swiglu"), gelu=dict(activation="gelu"), relu2=dict(activation="relu2"))
lrs = (1e-3, 2e-3, 4e-3, 8e-3)
published = "report Table 3, 1.5B, 100B tokens, one run: SwiGLU 2.037 -> xIELU 1.997 nats of training loss."
