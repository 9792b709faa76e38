# Attention inside documents or across them.
study = "doc_mask"
question = "attention inside documents, or across them"
baseline = "inside"
arms = dict(inside={}, across=dict(doc_mask=False))
lrs = (5e-4, 1e-3, 2e-3)
published = "report Table 3, 1.5B, 100B tokens, one run: 2.037 with and without (and the released code most likely did not mask)."
reading = (
    "No difference that three seeds could show: +0.001 +- 0.014 bits per byte without the mask, as published. Windows of "
    "256 tokens seldom hold two documents (the library's have thousands of tokens), so there is little to mask here. With "
    "the mask the best rate is the grid's highest, 2e-3, by 0.0005; 4e-3, tried in the activations study, is worse by 0.19.")
