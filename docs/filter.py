"""
Extract the text of raw pages, and keep the pages that pass FineWeb's filters (docs/data.md). An example to edit.

Reads pages/*.jsonl, rows of text (HTML) and url. Writes filtered/*.jsonl, in which prepare.py finds <meta> and <link>.

$ pip install datatrove==0.10.1 trafilatura==2.3.1 lxml_html_clean==0.4.6 orjson==3.13.0 spacy==3.8.18
$ python docs/filter.py
$ python prepare.py filtered/ --tokenizer=byte --out=data/filtered
"""

import trafilatura
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.extractors import Trafilatura
from datatrove.pipeline.filters import FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter


def keep_metas(pages, rank, world_size):
    for page in pages:  # so that prepare.py sees <meta name="robots" content="noai">
        html = trafilatura.load_html(page.text)
        page.metadata["metas"] = [(meta.get("name", ""), meta.get("content", "")) for meta in html.iter("meta")]
        page.metadata["links"] = [(link.get("rel", ""), link.get("href", "")) for link in html.iter("link")]
        yield page


filters = [GopherRepetitionFilter(), GopherQualityFilter(), FineWebQualityFilter()]
writer = JsonlWriter("filtered", compression=None, expand_metadata=True)
LocalPipelineExecutor([JsonlReader("pages"), keep_metas, Trafilatura(), *filters, writer]).run()
