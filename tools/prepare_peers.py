"""
What others do with prepare.py's work, for tools/bench.py: documents of a .jsonl -> ids in one file, one process.

pip install orjson, which datatrove's reader wants.

$ python -m tools.prepare_peers datatrove pages.jsonl tokenizer.json out/peer       # prints the number of ids
$ python -m tools.prepare_peers hf pages.jsonl tokenizer.json out/peer
"""

import sys

if __name__ == "__main__" and not __package__:
    print("prepare_peers.py: start it from the project's root, python -m tools.prepare_peers", file=sys.stderr)
    sys.exit(2)

import json
import os

import numpy as np


def hf(pages, tokenizer, out):
    """Hugging Face's tokenizers, 1,000 documents at a time, as its scripts do it with datasets.map."""
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(tokenizer)
    n, some = 0, []
    with open(pages, encoding="utf-8") as lines, open(f"{out}/ids.bin", "wb") as f:
        for line in [*lines, None]:
            if line:
                some.append(json.loads(line)["text"])
            if some and (not line or len(some) == 1000):
                for encoding in tok.encode_batch_fast(some, add_special_tokens=False):
                    f.write(np.array(encoding.ids, np.uint32))
                    n += len(encoding.ids)
                some = []
    return n


def datatrove(pages, tokenizer, out):
    """datatrove's reader and its DocumentTokenizer, which writes a file of ids."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    folder, name = os.path.split(pages)
    tokenize = DocumentTokenizer(
        f"{out}/ids",
        local_working_dir=f"{out}/ids",
        tokenizer_name_or_path=tokenizer,
        eos_token=None,
        shuffle_documents=False,
    )
    pipeline = [JsonlReader(folder, glob_pattern=name), tokenize]
    LocalPipelineExecutor(pipeline, tasks=1, workers=1, logging_dir=f"{out}/logs").run()
    size = sum(os.path.getsize(f"{out}/ids/{file}") for file in os.listdir(f"{out}/ids") if file.endswith(".ds"))
    return size // (2 if tokenize.token_size == 2 else 4)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    peer, pages, tokenizer, out = sys.argv[1:]
    os.makedirs(out)
    print(dict(hf=hf, datatrove=datatrove)[peer](os.path.abspath(pages), tokenizer, out))
