"""Nodes that are pods of a Deployment or groups of a LeaderWorkerSet, one workload for each pool.

Which pods are a workload's, its `scale` says. A Deployment that gets fewer replicas chooses itself which pod it stops:
one that is not ready before all others, then the one with the lowest deletion cost. So `remove` marks the node's pod by
that cost, and lowers the number only while the pool is at rest: as many pods as it is to have, of one version, and all
others ready. A LeaderWorkerSet stops the group with the highest number.

https://kubernetes.io/docs/concepts/workloads/controllers/replicaset/#pod-deletion-cost
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from router.scalers.kubernetes_api import DELETION_COST, KubernetesApi, Pod, Scale
from router.scalers.scaler import (
    PoolSize,
    Scaler,
    ScalerFailed,
    ScalerFault,
    check_pool,
    node_of,
    nodes_to_add,
    pool_of,
    unknown_node,
)

Kind = Literal["deployments", "leaderworkersets"]
GOES_FIRST = "-2147483648"
"""The lowest deletion cost."""
_GROUPS = {"deployments": "apps/v1", "leaderworkersets": "leaderworkerset.x-k8s.io/v1"}
_VERSION = "pod-template-hash"
_GROUP_INDEX = "leaderworkerset.sigs.k8s.io/group-index"


@dataclass(frozen=True, slots=True)
class Workload:
    """The object that has a pool's pods."""

    kind: Kind
    name: str


class KubernetesScaler(Scaler):
    """Scales the workloads of one namespace by their subresource `scale`."""

    def __init__(self, api: KubernetesApi, namespace: str, workloads: Mapping[str, Workload]) -> None:
        self._api = api
        self._namespace = namespace
        self._workloads = workloads

    async def observe(self) -> Mapping[str, PoolSize]:
        return {pool: self._size(pool, *await self._look(pool)) for pool in self._workloads}

    async def scale(self, pool: str, nodes: int) -> None:
        check_pool(pool, self._workloads)
        seen = await self._api.scale(self._path(pool), pool_of(pool))
        if nodes_to_add(pool, nodes, seen.want):
            await self._api.set_replicas(self._path(pool), seen, nodes, pool_of(pool))

    async def remove(self, name: str) -> None:
        for pool in self._workloads:
            seen, pods = await self._look(pool)
            found = next((pod for pod in pods if pod.name == name), None)
            if found is None:
                continue
            if found.is_ending:
                return
            if self._workloads[pool].kind == "leaderworkersets":
                await self._remove_group(pool, seen, pods, found)
            else:
                await self._remove_pod(pool, seen, [pod for pod in pods if not pod.is_ending], found)
            return
        raise unknown_node(name, self._workloads)

    async def _remove_pod(self, pool: str, seen: Scale, active: Sequence[Pod], gone: Pod) -> None:
        subject = f"{node_of(gone.name)} of {pool_of(pool)}"
        marked = [pod for pod in active if pod.metadata.annotations.get(DELETION_COST) == GOES_FIRST]
        if len(active) > seen.want and marked == [gone]:
            return  # it is about to be stopped
        in_motion = (
            len(active) != seen.want
            or len({pod.metadata.labels.get(_VERSION) for pod in active}) != 1
            or not all(pod.is_ready for pod in active if pod is not gone)
        )
        if in_motion:
            detail = f"{len(active)} pods for {seen.want} wanted, some may not be ready: another pod might be stopped"
            raise ScalerFailed(ScalerFault.CONFLICT, subject, detail)
        for pod in marked:
            if pod is not gone:
                await self._api.set_deletion_cost(self._namespace, pod.name, None, subject)
        await self._api.set_deletion_cost(self._namespace, gone.name, GOES_FIRST, subject)
        await self._api.set_replicas(self._path(pool), seen, seen.want - 1, subject)

    async def _remove_group(self, pool: str, seen: Scale, pods: Sequence[Pod], gone: Pod) -> None:
        subject = f"{node_of(gone.name)} of {pool_of(pool)}"
        number = _group_number(gone, subject)
        if number >= seen.want:
            return  # it is about to be stopped
        if number != seen.want - 1:
            last = self._size(pool, seen, pods).next_out or f"number {seen.want - 1}"
            raise ScalerFailed(ScalerFault.REFUSED, subject, f"a LeaderWorkerSet stops its last group alone: {last}")
        await self._api.set_replicas(self._path(pool), seen, seen.want - 1, subject)

    async def _look(self, pool: str) -> tuple[Scale, list[Pod]]:
        seen = await self._api.scale(self._path(pool), pool_of(pool))
        return seen, await self._api.pods(self._namespace, seen.status.selector, pool_of(pool))

    def _size(self, pool: str, seen: Scale, pods: Sequence[Pod]) -> PoolSize:
        last = ""
        if self._workloads[pool].kind == "leaderworkersets":
            active = [pod for pod in pods if not pod.is_ending]
            last = next((pod.name for pod in active if _group_number(pod, pool_of(pool)) == seen.want - 1), "")
        return PoolSize(seen.want, sum(pod.is_ready for pod in pods), last)

    def _path(self, pool: str) -> str:
        workload = self._workloads[pool]
        return f"/apis/{_GROUPS[workload.kind]}/namespaces/{self._namespace}/{workload.kind}/{workload.name}"


def _group_number(leader: Pod, subject: str) -> int:
    """The number of the group that a pod leads."""
    number = leader.metadata.labels.get(_GROUP_INDEX, "")
    if not (number.isascii() and number.isdigit() and len(number) < 10):
        raise ScalerFailed(ScalerFault.INVALID_ANSWER, subject, f"{leader.name} has no label {_GROUP_INDEX}")
    return int(number)
