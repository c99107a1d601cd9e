"""Turns of consumer warpgroups to start products. One warpgroup's softmax then runs during another
warpgroup's products, not during another softmax."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...common.carried import Carried
from .mma import WARPGROUP

FIRST_BARRIER = 8  # the first warpgroup's named barrier; each warpgroup has one


class Turns(Carried):
    """The turns of warpgroup `group` of `groups`. Every warpgroup takes equally many turns; a
    single warpgroup needs no turns."""

    def __init__(self, group: Any, groups: int):
        self.group = group
        self.groups = groups

    @cute.jit
    def begin(self) -> None:
        """Give warpgroup 0 its first turn."""
        if self.group == self.groups - 1:
            self.give()

    def wait(self) -> None:
        if self.groups == 1:
            return
        barrier = FIRST_BARRIER + self.group
        cute.arch.barrier(barrier_id=barrier, number_of_threads=2 * WARPGROUP)

    def give(self) -> None:
        """Pass the turn to the next warpgroup."""
        if self.groups == 1:
            return
        last = self.group == self.groups - 1
        following = cutlass.select_(last, Int32(0), self.group + 1)
        barrier = FIRST_BARRIER + following
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def end(self) -> None:
        """Take the turn that is left over, so that no barrier has an arrival at the end."""
        if self.group == 0:
            self.wait()
