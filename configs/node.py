# A model that one node of 8 GPUs of 80 GB trains in two days: 1.51B parameters, 50B tokens, 4.1e20 FLOPs: 37 hours at
# 40 % of the peak, 45 at 33 %. The shape is the report's "1.5B" (1b5.py). No GPU has run it yet; we tested it on a CPU
# with a narrow model.
#
#     pip install datatrove==0.10.1                             # starcoderdata also wants `hf auth login`
#     python -m corpus.cluster "hf://datasets/HuggingFaceFW/fineweb-edu/sample/100BT/*.parquet" \
#         --max_bytes=160e9 --tokenizer=apertus --tasks=64 --parts=64 --out=data/edu
#     for L in cmn_Hani deu_Latn fra_Latn ita_Latn rus_Cyrl spa_Latn; do
#     python -m corpus.cluster "hf://datasets/epfml/FineWeb2-HQ/$L/*.parquet" \
#         --max_bytes=10e9 --tokenizer=apertus --tasks=64 --parts=64 --out=data/web-$L; done
#     python -m corpus.cluster "hf://datasets/bigcode/starcoderdata/python/*.parquet" \
#         --text_field=content --max_bytes=20e9 --tokenizer=apertus --tasks=64 --parts=64 --out=data/code
#     make node
out = "out/node"
# Mixed by their sizes.
data = ("data/edu,data/web-cmn_Hani,data/web-deu_Latn,data/web-fra_Latn,data/web-ita_Latn,data/web-rus_Cyrl,"
        "data/web-spa_Latn,data/code")
device = "cuda"                   # not auto, which takes the CPU if the driver is too old for this torch

block_size = 4096
n_layer = 16
n_head = 32
n_embd = 2048
ffn_dim = 12288

batch_size = 512                  # 2.1M tokens a step
micro_batch = 8
total_samples = 512 * 23_842
warmup_samples = 512 * 1_000
decay_samples = 512 * 4_768       # the last fifth

lr = 3e-4
