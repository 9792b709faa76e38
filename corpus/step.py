"""A stage of corpus/stages.py as a step of datatrove, in a module that its workers can import."""

from datatrove.pipeline.base import PipelineStep

from corpus.folder import publish
from corpus.stages import run_stage


class Stage(PipelineStep):
    type = "Apertus"
    name = "stage"

    def __init__(self, stage, final, tmp):
        """final: the data folder that this stage publishes, or None."""
        super().__init__()
        self.stage, self.final, self.tmp = stage, final, tmp

    def run(self, data=None, rank=0, world_size=1):
        run_stage(self.stage, rank, world_size, self.tmp / "work")
        if self.final:
            publish(self.final, self.tmp)
