"""Launches that overlap under programmatic dependent launch.

A launch that may start early does so once every CTA of the one before has executed
griddepcontrol.launch_dependents or exited. Its griddepcontrol.wait then waits for that launch to
complete; what it does before the wait happens meanwhile.
"""

from __future__ import annotations

import random

import numpy as np

from dsv4.simulator.errors import Deadlock
from dsv4.simulator.machine.deadlock import describe_deadlock
from dsv4.simulator.machine.scheduler import IDLE_ROUNDS, Launch, LaunchRun

OVERLAPS = ("none", "all", "random")


def check_overlap(overlap: str, races: bool, workers: int = 1) -> None:
    """Refuse what is none, and what cannot be checked meanwhile: ValueError."""
    if overlap not in OVERLAPS:
        raise ValueError(f"overlap must be one of {', '.join(OVERLAPS)}, got {overlap!r}")
    if overlap != "none" and (races or workers > 1):
        raise ValueError(
            "overlap needs races=False and one worker: the checker finds what is missing "
            "between launches by running them one after another"
        )


def early_launches(launches: list[Launch], overlap: str, seed: int) -> list[bool]:
    """Which launches start early: none, all that may, or a seeded choice of those."""
    chance = random.Random(seed)
    return [
        i > 0
        and launch.config.programmatic
        and (overlap == "all" or (overlap == "random" and chance.random() < 0.5))
        for i, launch in enumerate(launches)
    ]


@np.errstate(all="ignore")  # overflow and NaN are results, not mishaps
def run_chain(launches: list[Launch], overlap: str, seed: int) -> int:
    """Run launches in stream order, some of them early; how many started early in fact.

    In a `random` order the launches that run take turns of random length. Raises Deadlock,
    KernelFault.
    """
    early, chance = early_launches(launches, overlap, seed), random.Random(seed)
    runs: list[LaunchRun] = []
    waiting: set[LaunchRun] = set()  # for the launch before, and for nothing else
    started_early = idle = 0
    while len(runs) < len(launches) or not all(run.done for run in runs):
        if len(runs) < len(launches):
            complete = all(run.done for run in runs)
            if complete or (early[len(runs)] and runs[-1].launch.lets_go):
                started_early += not complete
                runs.append(_all_at_once(launches[len(runs)]))
        progressed = skipped = False
        for i, run in reversed(list(enumerate(runs))):  # the youngest gets ahead
            run.launch.launch_before_done = i == 0 or runs[i - 1].done
            if overlap == "random" and chance.random() < 0.5:
                skipped = True
            elif not run.done and (run.launch.launch_before_done or run not in waiting):
                moved = run.step()
                progressed |= moved
                if not moved:
                    waiting.add(run)
        idle = 0 if progressed else idle + (not skipped)
        if idle > IDLE_ROUNDS:
            raise Deadlock(describe_deadlock([warp for run in runs for warp in run.live()]))
    return started_early


def _all_at_once(launch: Launch) -> LaunchRun:
    """The run of a launch whose CTAs start together, in short turns, so that launches meet."""
    launch.quantum = 1
    run = LaunchRun(launch)
    run.width = launch.resident_clusters
    return run
