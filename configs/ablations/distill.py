# A small student beside the same student without a teacher. The teacher is `python train.py
# configs/ablations/start.py --out=out/laptop`: three times as large, 1,440 steps on the same text in another order; the
# students have as many steps. A run is named after the teacher's folder, not after its weights: for another teacher in
# out/laptop take another --runs.
study = "distill"
out = "results"                            # of the Minis, not of the pretraining that results/ablations is about
question = "a student of 0.64M parameters, with and without a teacher of 1.9M"
baseline = "alone"
_steps = 1440
_student = dict(n_layer=2, n_embd=64, ffn_dim=336, total_samples=4 * _steps, warmup_samples=4 * 72,
                decay_samples=4 * 432, eval_every=240, checkpoint_every=_steps)
arms = dict(alone=_student, distilled={**_student, "teacher": "out/laptop", "distill": 0.9})
lrs = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
published = (
    "arXiv 2605.29128 makes models of 0.5B to 4B parameters so: 0.9 KL to the 8B + 0.1 cross-entropy, 1.7T tokens. "
    "FLOPs below are the student's own, seconds are of both.")
reading = (
    "With the teacher's distribution the student ends 0.060 bits/byte lower, five seeds of five, and needs 69 % of the "
    "tokens for the other's loss; at 1.577 it stands beside its teacher of three times its size (1.568, which saw as "
    "many tokens). It wants a rate four times as high. It also costs 1.7 times the seconds, since the teacher runs "
    "along: what the student alone does with as much time was not tried.")
