"""Ray Serve's router of requests to replicas, one in each API server; all use of this alpha interface stands here."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from compiled_llm.protocol.messages import Submit
from compiled_llm.server.replicas.affinity import Affinity, shorter_of_two
from compiled_llm.server.replicas.leading_pages import leading_pages
from compiled_llm.server.replicas.ray_figures import RoutedFigure


class LeadingPagesRouter(RequestRouter):  # type: ignore[misc]  # Ray's types are not seen
    """A router of prompts by leading pages and salt, to the same replica unless its queue is too long."""

    def initialize_state(
        self, max_longer: int, least_share: float, page_size: int, max_leading: int, max_pages: int
    ) -> None:
        """Take the settings of ``ray_app``; Ray calls this once."""
        self._affinity: Affinity[ReplicaID] = Affinity(max_pages, max_longer, least_share)
        self._page_size = page_size
        self._max_leading = max_leading
        self._routed = RoutedFigure()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replica that is to answer, and those that may if it cannot."""
        if pending_request is not None:  # only Ray's own routers set it; without it, Ray tries again at once
            pending_request.routing_context.should_backoff = True
        found = {replica.replica_id: replica for replica in candidate_replicas}
        if not found:
            return []
        chosen = self._chosen(pending_request, self._queues(found))
        others = [replica for name, replica in found.items() if name != chosen]
        return [[found[chosen]], others]

    def _queues(self, replicas: dict[ReplicaID, RunningReplica]) -> dict[ReplicaID, int]:
        """Return how many requests each has; 0 for one of which Ray has heard nothing for seconds."""
        return {name: self.replica_queue_len_cache.get(name) or 0 for name in replicas}

    def _chosen(self, request: PendingRequest | None, queues: dict[ReplicaID, int]) -> ReplicaID:
        submit = request.args[0] if request is not None and request.args else None
        if not isinstance(submit, Submit):
            return shorter_of_two(queues)
        pages = leading_pages(submit.prompt, submit.cache_salt, self._page_size, self._max_leading)
        chosen = self._affinity.choose(pages, queues)
        self._routed.count(chosen.by_pages)
        return chosen.replica

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget the pages of replicas that do not run any more."""
        super().update_replicas(replicas)
        self._affinity.forget_others(set(self.curr_replicas))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> Any:
        super().on_replica_actor_died(replica_id)
        self._affinity.forget_others(set(self.curr_replicas))
