# Attention inside documents or across them.
study = "doc_mask"
question = "attention inside documents, or across them"
baseline = "inside"
arms = dict(inside={}, across=dict(doc_mask=False))
lrs = (5e-4, 1e-3, 2e-3)
published = (
    "report Table 3, 1.5B, 100B tokens, one run: 2.037 with and without (and the released code most likely did "
    "not mask).")
reading = (
    "Not told apart, as published: +0.003 +- 0.003 bits per byte without the mask. A window of 256 tokens of this "
    "corpus seldom holds a border of documents, so there is little to mask.")
