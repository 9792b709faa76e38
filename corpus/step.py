"""A stage of corpus/stages.py as a step of datatrove, in a module that its workers can import."""

from datatrove.pipeline.base import PipelineStep

from corpus import stages
from corpus.folder import publish


class Stage(PipelineStep):
    type = "Apertus"
    name = "stage"

    def __init__(self, stage, final, tmp):
        """final: the data folder that this stage publishes, or None."""
        super().__init__()
        self.stage, self.final, self.tmp = stage, final, tmp

    def run(self, data=None, rank=0, world_size=1):
        for number in range(rank, stages.pieces(self.stage, self.tmp / "work"), world_size):
            stages.do(self.stage, number, self.tmp / "work")
        if self.final:
            publish(self.final, self.tmp)
