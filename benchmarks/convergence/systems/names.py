"""The systems of the comparison, and how their processes are started."""

from dataclasses import dataclass

OURS = "pliant_auto"
ORACLE = "oracle"


@dataclass(frozen=True, slots=True)
class System:
    """A system's name and the module here that trains it."""

    name: str
    module: str
    launched: bool = False  # by ``pliant run``, which starts the workers itself
    service: bool = False  # a process beside the workers


SYSTEMS = {
    system.name: system
    for system in (
        System(OURS, "ours", launched=True),
        System("pliant_delay_1", "ours", launched=True),
        System("pliant_delay_0", "ours", launched=True),
        System("lb_bsp", "ddp"),
        System(ORACLE, "ddp"),
        System("ddp", "ddp"),
        System("local_sgd", "local_sgd"),
        System("torchft", "torchft", service=True),
    )
}
