"""Several models and adapters in one app: who serves a name, and what the rest of the API says of it."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import httpx
import pytest
from asgi_call import AsgiCall
from local_edge import HELLO, SECRET, tokenizer
from local_fleet import LocalFleet, submitted
from scripted_engine import ScriptedEngine, make_request

from cluster.auth import Authenticator
from cluster.backend import named_for
from cluster.catalog import Catalog, Fleet
from cluster.http_app import Api, make_app
from cluster.metrics import IngressMetrics
from cluster.placement import deployment_names, reservation
from cluster.prepare import Preparer
from configs.schema import AdapterConfig, AppConfig, EngineConfig, FleetConfig, ModelConfig, ReplicasConfig, VllmConfig
from replicas.blocks import hash_blocks
from replicas.contract import EngineInfo, ErrorInfo, FinishReason, GrammarKind
from replicas.errors import NoReplicaError, NotFoundError, UnsupportedError

engine = functools.partial(ScriptedEngine, vocab_size=tokenizer().vocab_size)
ADAPTERS = (AdapterConfig("tuned", "/adapters/tuned"),)


class SilentFleet(LocalFleet):
    """One that nothing was heard of yet."""

    def info(self) -> EngineInfo:
        raise NoReplicaError("no replica of it has started yet", retry_after_s=2.0)

    async def ready(self) -> int:
        return 0


def fleet_config(name: str, **model) -> FleetConfig:
    return FleetConfig(model=ModelConfig(served_name=name, **model), replicas=ReplicasConfig(num=1))


class Several:
    """An app with the model `one`, of blocks of 16, and `two`, of blocks of 32 with an adapter and grammars."""

    def __init__(self, *, two: LocalFleet | None = None) -> None:
        self.one = engine()
        self.two = engine(block_size=32, adapters=("tuned",), grammars=(GrammarKind.REGEX.value,))
        fleets = [
            Fleet(fleet_config("one"), LocalFleet(self.one), tokenizer()),
            Fleet(fleet_config("two", adapters=ADAPTERS), two or LocalFleet(self.two), tokenizer()),
        ]
        self.catalog = Catalog(fleets, adapter_revision=lambda source: "r1")
        config = AppConfig()
        metrics = IngressMetrics("i0", model_names=self.catalog.names)
        preparer = Preparer(config, SECRET, self.catalog, metrics)
        self.app = make_app(Api(config, self.catalog, preparer, metrics, Authenticator(())))

    def chat(self, model: str, **fields) -> AsgiCall:
        return AsgiCall(self.app, "POST", "/v1/chat/completions", {"model": model, "messages": HELLO, **fields})

    async def answer(self, method: str, path: str, body=None) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://edge") as client:
            return await client.request(method, path, json=body)

    async def chat_answer(self, model: str, **fields) -> httpx.Response:
        return await self.answer("POST", "/v1/chat/completions", {"model": model, "messages": HELLO, **fields})


async def test_a_request_goes_to_the_fleet_of_its_model_with_that_fleets_blocks():
    app = Several()
    long = [{"role": "user", "content": "x" * 70}]
    for name, made, size in (("one", app.one, 16), ("two", app.two, 32)):
        async with app.chat(name, messages=long):
            await submitted(made)
        [request] = made.submitted.values()
        assert request.block_hashes == hash_blocks(request.hash_root, request.prompt_token_ids, size)
        assert request.block_hashes


@pytest.mark.parametrize("num_tokens", [0, 15, 16, 31, 32, 40, 64, 100])
def test_a_replica_with_other_blocks_than_the_prompt_was_named_by_names_them_itself(num_tokens):
    """A deployment in place may change them, and a request must not fail for it."""
    named = replace(make_request("a"), prompt_token_ids=tuple(range(num_tokens)))
    named = replace(named, block_hashes=hash_blocks(named.hash_root, named.prompt_token_ids, 16))
    assert named_for(named, 16) is named
    assert named_for(named, 32).block_hashes == ()


async def test_an_adapter_is_a_model_of_its_own_with_a_cache_of_its_own():
    app = Several()
    for number, name in enumerate(("two", "tuned"), start=1):
        async with app.chat(name):
            await submitted(app.two, number)
    base, tuned = app.two.submitted.values()
    assert (base.adapter, tuned.adapter) == ("", "tuned")
    assert base.hash_root != tuned.hash_root


def test_other_weights_of_an_adapter_are_another_adapter_to_the_cache():
    fleets = [Fleet(fleet_config("two", adapters=ADAPTERS), LocalFleet(engine(adapters=("tuned",))), tokenizer())]
    keys = {Catalog(fleets, adapter_revision=lambda _, r=r: r).find("tuned").adapter_key for r in ("r1", "r2")}
    assert len(keys) == 2


def test_an_adapter_that_the_engine_does_not_compute_is_refused_and_not_listed():
    fleets = [Fleet(fleet_config("one", adapters=ADAPTERS), LocalFleet(engine()), tokenizer())]
    catalog = Catalog(fleets)
    with pytest.raises(UnsupportedError, match="vllm") as caught:
        catalog.find("tuned")
    assert (caught.value.status, caught.value.param) == (400, "model")
    assert [entry.name for entry in catalog.listed()] == ["one"]


def test_an_unknown_model_is_not_found_and_not_repeated():
    """cases RQ07"""
    with pytest.raises(NotFoundError) as caught:
        Several().catalog.find("canary")
    assert caught.value.message == "this server does not have that model; it has: one, two, tuned"
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_no_name_means_the_first_model():
    assert Several().catalog.find(None).name == "one"


async def test_models_and_adapters_are_listed_with_their_parents():
    listed = (await Several().answer("GET", "/v1/models")).json()["data"]
    assert [(each["id"], each["parent"]) for each in listed] == [("one", None), ("two", None), ("tuned", "two")]
    assert all(each["root"] == each["id"] and each["max_model_len"] for each in listed)
    assert (await Several().answer("GET", "/v1/models/tuned")).json()["parent"] == "two"


async def test_a_fleet_that_nothing_was_heard_of_hurts_no_other():
    app = Several(two=SilentFleet())
    refused = await app.chat_answer("two")
    assert (refused.status_code, refused.headers["retry-after"], refused.json()["error"]["code"]) == (503, "2", "no_replica")
    async with app.chat("one"):
        await submitted(app.one)
    assert [each["id"] for each in (await app.answer("GET", "/v1/models")).json()["data"]] == ["one", "two"]
    ready = await app.answer("GET", "/ready")
    assert ready.status_code == 503
    assert ready.json()["models"] == {
        "one": {"replicas_ready": 1, "replicas_wanted": 1},
        "two": {"replicas_ready": 0, "replicas_wanted": 1},
    }


async def test_a_grammar_reaches_only_an_engine_that_enforces_it():
    app = Several()
    refused = await app.chat_answer("one", structured_outputs={"regex": "a+"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "structured_outputs.regex")
    async with app.chat("two", structured_outputs={"regex": "a+"}):
        await submitted(app.two)
    [request] = app.two.submitted.values()
    assert request.sampling.grammar is not None
    assert request.sampling.grammar.spec == "a+"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_later_is_still_an_answer_with_a_status(stream):
    """cases SO01, SO02: a grammar that can't be compiled is found out by the engine."""
    app = Several()
    async with app.chat("two", structured_outputs={"regex": "(a"}, stream=stream) as call:
        [request_id] = await submitted(app.two)
        error = ErrorInfo("RequestError", "unclosed group", "response_format", "invalid_request")
        app.two.emit(request_id, finish=FinishReason.ERROR, error=error)
        app.two.step()
        body = json.loads(await call.rest())
    assert (call.status, body["error"]["message"]) == (400, "unclosed group")


# What Serve is asked for


def vllm(tensor: int, pipeline: int, num_gpus: float) -> FleetConfig:
    options = VllmConfig(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    return FleetConfig(engine=EngineConfig(kind="vllm", vllm=options), replicas=ReplicasConfig(num_cpus=2, num_gpus=num_gpus))


def test_a_replica_on_one_device_needs_no_placement_group():
    assert reservation(vllm(1, 1, 1)) == {"ray_actor_options": {"num_cpus": 2, "num_gpus": 1}}
    assert reservation(vllm(2, 1, 0)) == {"ray_actor_options": {"num_cpus": 2, "num_gpus": 0}}


def test_a_replica_on_several_gpus_has_a_bundle_for_each_and_uses_none_itself():
    options = reservation(vllm(4, 1, 4))
    assert options["placement_group_bundles"] == [{"CPU": 2, "GPU": 1}, {"GPU": 1}, {"GPU": 1}, {"GPU": 1}]
    assert options["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 0}
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert reservation(vllm(4, 2, 8))["placement_group_strategy"] == "PACK"


def test_deployments_are_named_by_their_models_and_never_alike():
    fleets = [fleet_config(name) for name in ("first", "Llama 3/8b", "Llama-3-8b")]
    assert deployment_names(fleets) == ["engine", "engine-Llama-3-8b", "engine-Llama-3-8b-2"]
