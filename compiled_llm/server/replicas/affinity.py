"""Which replica has a prompt's leading pages, and which one answers it."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

R = TypeVar("R", bound=Hashable)  # the identifier of a replica


@dataclass(frozen=True)
class Chosen(Generic[R]):
    """The replica that answers a prompt, and whether it was chosen for its pages, or for its shorter queue."""

    replica: R
    by_pages: bool


class Affinity(Generic[R]):
    """A memory of which replicas have answered prompts, by their leading pages; chooses one for the next prompt."""

    # Pages are forgotten in the order of their last use; of a prompt the last ones before those that lead to them, so
    # that the known pages of a prompt are always its first ones. A replica needs ``least_share`` of a prompt's pages to
    # be chosen for them: a beginning that nearly all prompts have would bring them all to one replica.

    def __init__(self, max_pages: int, max_longer: int, least_share: float) -> None:
        self._max_pages = max_pages
        self._max_longer = max_longer
        self._least_share = least_share
        self._owners: OrderedDict[bytes, set[R]] = OrderedDict()  # those asked for last at the end

    def __len__(self) -> int:
        return len(self._owners)

    def choose(self, pages: Sequence[bytes], queues: Mapping[R, int]) -> Chosen[R]:
        """Choose a replica by keys of the prompt's leading pages and how many requests each has, and remember it."""
        owner = self._owner(pages, queues)
        chosen = shorter_of_two(queues) if owner is None else owner
        self._remember(pages, chosen)
        return Chosen(chosen, owner is not None)

    def _owner(self, pages: Sequence[bytes], queues: Mapping[R, int]) -> R | None:
        """Return the replica with most of the pages, of those that are not much busier than others."""
        longest = min(queues.values()) + self._max_longer
        known = {replica: 0 for replica, length in queues.items() if length <= longest}
        for number, page in enumerate(pages, start=1):
            owners = self._owners.get(page, set()) & known.keys()
            if not owners:
                break
            known.update(dict.fromkeys(owners, number))
        best = max(known, key=lambda replica: (known[replica], -queues[replica]))
        return best if known[best] and known[best] >= self._least_share * len(pages) else None

    def _remember(self, pages: Sequence[bytes], replica: R) -> None:
        for page in reversed(pages):  # the first page last: it is forgotten after those that it leads to
            self._owners.setdefault(page, set()).add(replica)
            self._owners.move_to_end(page)
        while len(self._owners) > self._max_pages:
            self._owners.popitem(last=False)

    def forget_others(self, replicas: set[R]) -> None:
        for page, owners in tuple(self._owners.items()):
            owners &= replicas
            if not owners:
                del self._owners[page]


def shorter_of_two(queues: Mapping[R, int]) -> R:
    """Return the one with the shorter queue of two that are drawn: the power of two choices."""
    # The lengths of queues are a moment old: to take always the shortest of all would send all prompts of that moment
    # there.
    drawn = random.sample(list(queues), min(2, len(queues)))
    return min(drawn, key=lambda replica: queues[replica])
