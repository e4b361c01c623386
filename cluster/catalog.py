"""Which models there are: a name in the API, the fleet that serves it, and the adapter on top where there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from cluster.backend import Backend
from configs.schema import AdapterConfig, FleetConfig
from replicas.errors import NoReplicaError, NotFoundError, UnsupportedError
from replicas.tokenizer import Tokenizer

Metrics = dict[str, bytes | None]


@dataclass(frozen=True, slots=True)
class Fleet:
    """One model: what it is, who serves it, and how text becomes its tokens."""

    config: FleetConfig
    backend: Backend
    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        return self.config.model.served_name


@dataclass(frozen=True, slots=True)
class Entry:
    """A name that requests may use. `revision` names the adapter's weights, and is empty without an adapter."""

    name: str
    fleet: Fleet
    adapter: AdapterConfig | None = None
    revision: str = ""

    @property
    def adapter_name(self) -> str:
        return "" if self.adapter is None else self.adapter.name

    @property
    def adapter_key(self) -> str:
        """What the names of this adapter's KV blocks are made with: other weights are another adapter."""
        return "" if self.adapter is None else f"{self.adapter.name}:{self.revision}"


class Catalog:
    """All names of an app; the first fleet is meant where a request that needn't name a model names none."""

    def __init__(
        self,
        fleets: Sequence[Fleet],
        *,
        adapter_revision: Callable[[str], str] = lambda source: "",
        own_metrics: Callable[[], Awaitable[Metrics]] | None = None,
    ) -> None:
        """`adapter_revision` takes an adapter's source; `own_metrics` are the ingresses'."""
        self._fleets = tuple(fleets)
        self._own_metrics = own_metrics
        entries = [Entry(fleet.name, fleet) for fleet in fleets]
        entries += [
            Entry(adapter.name, fleet, adapter, adapter_revision(adapter.source))
            for fleet in fleets
            for adapter in fleet.config.model.adapters
        ]
        self._entries = {entry.name: entry for entry in entries}

    @property
    def names(self) -> tuple[str, ...]:
        """All that a configuration mentions, whether its engine computes it or not."""
        return tuple(self._entries)

    @property
    def fleets(self) -> tuple[Fleet, ...]:
        return self._fleets

    def find(self, name: str | None) -> Entry:
        """Raises NotFoundError, and UnsupportedError for an adapter that its model's engine doesn't compute."""
        entry = self._entries.get(self._fleets[0].name if name is None else name)
        if entry is None:
            known = ", ".join(each.name for each in self.listed())
            raise NotFoundError(f"this server does not have that model; it has: {known}", param="model", code="model_not_found")
        if entry.adapter is not None and entry.adapter_name not in entry.fleet.backend.info().adapters:
            raise UnsupportedError("adapters are computed by engine.kind vllm, and this one's model has another", param="model")
        return entry

    def listed(self) -> list[Entry]:
        """What requests can use: all models, and those adapters that an engine is known to have."""
        return [entry for entry in self._entries.values() if entry.adapter is None or _has_adapter(entry)]

    async def ready(self) -> dict[str, int]:
        """Replicas of each model that can take a request now."""
        numbers = await asyncio.gather(*(fleet.backend.ready() for fleet in self._fleets))
        return {fleet.name: number for fleet, number in zip(self._fleets, numbers, strict=True)}

    async def metrics(self) -> Metrics:
        """Source -> exposition of every replica and ingress; None where one didn't answer."""
        sources = [fleet.backend.metrics() for fleet in self._fleets]
        found: Metrics = {}
        for part in await asyncio.gather(*sources, *([self._own_metrics()] if self._own_metrics else [])):
            found |= part
        return found


def _has_adapter(entry: Entry) -> bool:
    try:
        return entry.adapter_name in entry.fleet.backend.info().adapters
    except NoReplicaError:
        return False
