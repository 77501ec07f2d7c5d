"""Programmatic dependent launch: the next launch's start beside this one's end.

The rule: before `wait_for_previous_launch` a kernel reads nothing but what no launch writes, its
weights and its parameters. Two things may come earlier. Prefetches into L2: all writes meet there,
so that a line fetched too early is not a stale one. And strong loads whose words are loaded again
behind the wait, and used where they are the same (`KernelOp.guessed`). After `launch_dependents`
the next launch may start, and take the resources that this one has left; it does not promise
anything about memory.
"""

from cutlass import cute
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def wait_for_previous_launch(*, loc=None, ip=None) -> None:
    """Wait until the launch before is over and what it wrote is visible."""
    cute.arch.griddepcontrol_wait(loc=loc, ip=ip)


@dsl_user_op
def launch_dependents(*, loc=None, ip=None) -> None:
    """Let the next launch start, once all CTAs have called this or ended."""
    cute.arch.griddepcontrol_launch_dependents(loc=loc, ip=ip)
