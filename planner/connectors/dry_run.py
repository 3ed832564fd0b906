"""Change nothing, and report what would have been ordered. The workers are those that have joined the mesh."""

from kvmesh.planner.config import ServiceConfig
from kvmesh.planner.connectors.connector import Applied, Fleets, Present
from kvmesh.planner.connectors.steps import applied_of
from kvmesh.planner.model import ScalingDecision


class DryRunConnector:
    name = "dry-run"

    def __init__(self, present: Present) -> None:
        """Take the workers from `present`: those that have a card in discovery."""
        self._present = present

    async def fleets(self) -> Fleets:
        return self._present()

    async def apply(self, decision: ScalingDecision) -> Applied:
        fleets = self._present()
        prefill, decode = fleets.prefill.ordered, fleets.decode.ordered
        notes: tuple[str, ...] = ()
        if (prefill, decode) != (decision.prefill, decision.decode):
            asked = f"{decision.prefill} prefill and {decision.decode} decode workers instead of {prefill} and {decode}"
            flip = "" if decision.flip is None else f", {decision.flip.count} of them turned to {decision.flip.to_role}"
            notes = (f"{self.name} changes nothing; it would have asked for {asked}{flip}",)
        return applied_of(decision, prefill, decode, 0, notes)

    async def close(self) -> None:
        pass


async def open_connector(config: ServiceConfig, present: Present) -> DryRunConnector:
    return DryRunConnector(present)
