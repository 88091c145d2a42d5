"""What a runtime allocates for a checkpoint, told by its config.json alone; `espalier_format.plan` is the way in."""

from __future__ import annotations

from espalier_format.planning.bank import PlannedBank, PlannedProjection
from espalier_format.planning.config_plan import Plan, plan
from espalier_format.planning.module import PlannedModule, TensorSpec
from espalier_format.planning.rank import Parallelism, RankModule, RankPlan, usual_parallelism

__all__ = [
    "Parallelism",
    "Plan",
    "PlannedBank",
    "PlannedModule",
    "PlannedProjection",
    "RankModule",
    "RankPlan",
    "TensorSpec",
    "plan",
    "usual_parallelism",
]
