"""The pipeline: stages over devices, microbatches in flight."""

from pyxdev.executor.executor import Executor, Stats
from pyxdev.executor.plan import LinkPlan, Plan, Stage, StagePlan
from pyxdev.executor.split import split
from pyxdev.executor.tickets import Ticket

__all__ = ["Executor", "LinkPlan", "Plan", "Stage", "StagePlan", "Stats", "Ticket", "split"]
