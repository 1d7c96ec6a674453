"""Small simulations, for tests."""

from collections.abc import Iterable

from triptych.services.simulator.arrivals import Arrival
from triptych.services.simulator.engine_shape import EngineShape
from triptych.services.simulator.figures import ClassFigures, Figures
from triptych.services.simulator.generated_trace import GeneratedTrace, TraceShape
from triptych.services.simulator.simulation import Simulation
from triptych.services.simulator.step_cost import StepCost

ONE_SECOND = StepCost(1.0, 0.0, 0.0)
"""Every step takes it."""

ONE_AT_A_TIME = EngineShape(
    num_blocks=4,
    block_size=4,
    max_model_len=16,
    max_num_seqs=1,
    max_num_batched_tokens=16,
    max_num_waiting=8,
    watermark=0.0,
)
"""Four blocks of four tokens."""


def simulate(
    engine: EngineShape,
    arrivals: Iterable[Arrival],
    cost: StepCost = ONE_SECOND,
    *,
    seed: int = 0,
    fairness_window: float = 60.0,
) -> Figures:
    simulation = Simulation(engine, cost, seed=seed, fairness_window=fairness_window)
    return simulation.run(arrivals)


def generated(shape: TraceShape) -> list[Arrival]:
    return list(GeneratedTrace(shape))


def of_class(figures: Figures, tenant: str, priority: int) -> ClassFigures:
    found = [x for x in figures.classes if (x.tenant, x.priority) == (tenant, priority)]
    assert len(found) == 1
    return found[0]
