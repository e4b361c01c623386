"""Configuration: what is read, from where, what is refused, and whether the refusal helps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from configs.check import warnings
from configs.load import describe, from_mapping, from_part, json_schema, load, resolve_secret, to_mapping
from configs.reflect import Dial, Shape, dials_of
from configs.schema import ApiKey, AppConfig
from replicas.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
DIGEST = "ab" * 32
MUST_FIT_OTHERS = {"device", "num_gpus", "max_num_seqs", "max_num_batched_tokens"}


@pytest.fixture(autouse=True)
def _no_foreign_environment(clean_environment):
    """The developer's own TRIESERVE_* variables stay out."""


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "app.yaml"
        path.write_text(text)
        return path

    return write


def refusal(*args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*args, **kwargs)
    return caught.value.message


def mapping_refusal(mapping) -> str:
    with pytest.raises(ConfigError) as caught:
        from_mapping(mapping)
    return caught.value.message


# Layers


def test_nothing_given_is_the_schema_s_defaults():
    assert load(None) == from_mapping({}) == AppConfig()


def test_overrides_beat_the_environment_which_beats_the_file_which_beats_defaults(write, monkeypatch):
    path = write("replicas: {num: 3, num_cpus: 3, num_gpus: 3}")
    monkeypatch.setenv("TRIESERVE_REPLICAS__NUM_CPUS", "4")
    monkeypatch.setenv("TRIESERVE_REPLICAS__NUM_GPUS", "4")
    replicas = load(path, ["replicas.num_gpus=5"]).replicas
    assert (replicas.num, replicas.num_cpus, replicas.num_gpus) == (3, 4.0, 5.0)
    assert replicas.health_check_period_s == AppConfig().replicas.health_check_period_s


def test_the_later_of_two_overrides_counts():
    assert load(None, ["replicas.num=3", "replicas.num=4"]).replicas.num == 4


def test_an_override_reaches_below_a_section_of_a_section():
    assert load(None, ["ingress.limits.max_n=2"]).ingress.limits.max_n == 2


def test_a_list_is_overridden_in_flow_notation():
    config = load(None, [f"ingress.api_keys=[{{name: alice, sha256: {DIGEST}}}]"])
    assert config.ingress.api_keys == (ApiKey("alice", DIGEST),)


def test_text_is_taken_to_the_last_character(monkeypatch):
    monkeypatch.setenv("TRIESERVE_INGRESS__SECRET", "0x1F: a #b ")
    assert load(None).ingress.secret == "0x1F: a #b "
    assert load(None, ["model.served_name=123"]).model.served_name == "123"


@pytest.mark.parametrize("variable", ["TRIESERVE_DATA", "TRIESERVE_PORT", "TRIESERVE_SERVICE_HOST"])
def test_variables_that_others_set_with_our_prefix_are_left_alone(monkeypatch, variable):
    monkeypatch.setenv(variable, "tcp://10.0.0.1:80")
    assert load(None) == AppConfig()


def test_a_misspelt_variable_is_refused(monkeypatch):
    monkeypatch.setenv("TRIESERVE_REPLICA__NUM", "3")
    assert "replica: unknown key; did you mean replicas? (in the environment)" in refusal(None)


def test_a_section_with_all_its_keys_commented_out_is_empty(write):
    assert load(write("replicas:\n  # num: 3\n")) == AppConfig()


def test_a_fault_in_the_file_shows_although_a_later_layer_overrides_it(write):
    assert "replicas.num: 'x'" in refusal(write("replicas: {num: x}"), ["replicas.num=3"])


# YAML


def test_a_repeated_key_is_refused_with_its_line(write):
    assert "line 3: the key 'num' appears twice" in refusal(write("replicas:\n  num: 3\n  num: 4\n"))


def test_scientific_notation_without_a_dot_is_a_number(write):
    assert load(write("engine: {fake_base_s: 2e-3}")).engine.fake_base_s == 0.002


@pytest.mark.parametrize("text", ["just text", "- a\n- b", "replicas: [", "a: !!python/object:os.system {}", "a: \t1\n\t- b"])
def test_what_is_not_a_plain_mapping_is_refused(write, text):
    refusal(write(text))


def test_a_missing_file_is_a_config_error(tmp_path):
    assert "nowhere.yaml" in refusal(tmp_path / "nowhere.yaml")


# What a field takes


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("replicas.nmu=3", "replicas.nmu: unknown key; did you mean replicas.num?"),
        ("replicas.zzz=3", "replicas.zzz: unknown key; known here: num, "),
        ("replicas.num.x=3", "replicas.num: {'x': 3} is not an integer"),
        ("replicas=3", "replicas: 3 is not a section with num, "),
        ("replicas.num=three", "replicas.num: 'three' is not an integer from 1 to 4096"),
        ("replicas.num=0", "replicas.num: 0 is not an integer from 1 to 4096"),
        ("replicas.num=2.0", "replicas.num: 2.0 is not an integer"),
        ("replicas.num=true", "replicas.num: True is not an integer"),
        ("replicas.num_cpus=true", "replicas.num_cpus: True is not a number"),
        ("replicas.num_cpus=.nan", "replicas.num_cpus: nan is not a number"),
        ("replicas.num_cpus=.inf", "replicas.num_cpus: inf is not a number"),
        ("engine.prefix_caching=1", "engine.prefix_caching: 1 is not true or false"),
        ("engine.kind=natve", "'natve' is not one of native, vllm, fake; did you mean native?"),
        ("engine.max_num_batched_tokens=8", "engine.max_num_batched_tokens: 8 is not an integer from 16 to 65536"),
        ("ingress.api_keys=alice", "ingress.api_keys: this is not a list of {name, sha256}"),
        ("ingress.api_keys=[{nme: a}]", "ingress.api_keys[0].nme: unknown key; did you mean ingress.api_keys[0].name?"),
        ("replicas.num", "write it as key=value"),
        ("=3", "write it as key=value"),
    ],
)
def test_a_refusal_names_the_key_the_value_and_what_is_allowed(override, expected):
    assert expected in refusal(None, [override])


def test_yaml_s_surprises_in_text_are_explained(write):
    assert "model.served_name: False is not text; put it in quotes" in refusal(write("model: {served_name: no}"))


def test_an_integer_serves_as_a_float_and_becomes_one():
    num_cpus = load(None, ["replicas.num_cpus=2"]).replicas.num_cpus
    assert isinstance(num_cpus, float)


def test_all_faults_are_listed_at_once():
    message = refusal(None, ["replicas.num=x", "router.polcy=y", "engine.device=tpu"])
    assert all(key in message for key in ("replicas.num", "router.polcy", "engine.device"))


@pytest.mark.parametrize(
    "mapping",
    [
        {"ingress": {"secret": ["canary"]}},
        {"ingress": {"api_keys": "canary"}},
        {"ingress": {"api_keys": ["canary"]}},
        {"ingress": {"api_keys": [{"name": "a", "sha256": "canary"}]}},
        {"ingress": {"secret": "env:canary is this"}},
        {"ingress": {"secret": "canary"}, "replicas": {"host": "0.0.0.0"}},
    ],
)
def test_a_refusal_never_shows_a_secret_or_a_key(mapping):
    assert "canary" not in mapping_refusal(mapping)


# Between fields


@pytest.mark.parametrize(
    ("mapping", "key"),
    [
        ({"ingress": {"host": "0.0.0.0"}}, "ingress.host"),
        ({"ingress": {"host": ""}}, "ingress.host"),
        ({"ingress": {"host": "example.org"}}, "ingress.host"),
        ({"replicas": {"host": "10.0.0.1"}}, "replicas.host"),
        ({"ingress": {"api_keys": [{"name": "a", "sha256": "12ab"}]}}, "ingress.api_keys[0].sha256"),
        ({"ingress": {"api_keys": [{"sha256": DIGEST}]}}, "ingress.api_keys[0].name"),
        (
            {"ingress": {"api_keys": [{"name": "a", "sha256": DIGEST}, {"name": "b", "sha256": DIGEST.upper()}]}},
            "ingress.api_keys[1].sha256",
        ),
        ({"engine": {"device": "cuda"}}, "replicas.num_gpus"),
        ({"engine": {"device": "cpu"}, "replicas": {"num_gpus": 1}}, "replicas.num_gpus"),
        ({"engine": {"max_num_batched_tokens": 63}}, "engine.max_num_batched_tokens"),
        ({"model": {"source": "builtin:other"}}, "model.source"),
        ({"model": {"served_name": " "}}, "model.served_name"),
        ({"engine": {"kind": "vllm", "device": "cuda"}}, "replicas.num_gpus"),
        ({"model": {"adapters": [{"source": "a"}]}}, "model.adapters[0].name"),
        ({"model": {"adapters": [{"name": "a"}]}}, "model.adapters[0].source"),
        ({"more_fleets": [{"engine": {"max_num_seqs": 1024}}]}, "more_fleets[0].engine.max_num_batched_tokens"),
        ({"more_fleets": [{"model": {"served_name": ""}}]}, "more_fleets[0].model.served_name"),
        ({"more_fleets": [{}]}, "more_fleets[0].model.served_name"),
        ({"more_fleets": [{"replicas": {"host": "10.0.0.1"}}]}, "more_fleets[0].replicas.host"),
        (
            {"model": {"adapters": [{"name": "a", "source": "x"}, {"name": "a", "source": "y"}]}},
            "model.adapters[1].name",
        ),
        (
            {"model": {"served_name": "a"}, "more_fleets": [{"model": {"adapters": [{"name": "a", "source": "x"}]}}]},
            "more_fleets[0].model.adapters[0].name",
        ),
        ({"name": ""}, "name"),
    ],
)
def test_fields_that_do_not_fit_together_are_refused(mapping, key):
    assert f"  {key}: " in mapping_refusal(mapping)


@pytest.mark.parametrize(
    "mapping",
    [
        {"ingress": {"host": "::1"}},
        {"ingress": {"host": "localhost"}},
        {"ingress": {"host": "127.0.0.5"}},
        {"ingress": {"host": "0.0.0.0", "allow_anonymous": True}},
        {"ingress": {"host": "0.0.0.0", "api_keys": [{"name": "a", "sha256": DIGEST}]}},
        {"replicas": {"host": "10.0.0.1"}, "ingress": {"secret": "sixteen or more characters"}},
        {"replicas": {"host": "10.0.0.1"}, "ingress": {"secret": "env:TRIESERVE_SECRET"}},
        {"engine": {"device": "cuda"}, "replicas": {"num_gpus": 0.5}},
        {"model": {"served_name": "a"}, "more_fleets": [{"model": {"served_name": "b"}, "engine": {"kind": "vllm"}}]},
    ],
)
def test_fields_that_fit_together_are_accepted(mapping):
    from_mapping(mapping)


def test_what_an_engine_does_not_read_is_remarked_upon_and_not_refused():
    """`engine.kind=native` on the command line, to compare, must not need another file."""
    fleet = {
        "model": {"served_name": "b", "adapters": [{"name": "c", "source": "x"}]},
        "engine": {"vllm": {"enforce_eager": True}},
    }
    found = warnings(from_mapping({"more_fleets": [fleet]}))
    assert [line.split(":")[0] for line in found] == ["more_fleets[0].model.adapters", "more_fleets[0].engine.vllm"]
    assert warnings(from_mapping({"more_fleets": [{**fleet, "engine": {**fleet["engine"], "kind": "vllm"}}]})) == []


def test_a_part_of_a_checked_configuration_is_not_judged_for_what_it_lacks():
    """A replica that listens beyond loopback is told neither the API keys nor where the secret comes from."""
    assert from_part({"replicas": {"host": "10.0.0.1"}}).replicas.host == "10.0.0.1"
    with pytest.raises(ConfigError, match=r"replicas\.num"):
        from_part({"replicas": {"num": 0}})


# The secret


def test_without_a_secret_each_deployment_gets_32_random_bytes():
    first, second = resolve_secret(AppConfig()), resolve_secret(AppConfig())
    assert len(first) == 32
    assert first != second


def test_a_secret_comes_from_the_file_or_from_the_variable_it_names(monkeypatch):
    monkeypatch.setenv("TRIESERVE_SECRET", "from outside")
    assert resolve_secret(from_mapping({"ingress": {"secret": "written down"}})) == b"written down"
    assert resolve_secret(from_mapping({"ingress": {"secret": "env:TRIESERVE_SECRET"}})) == b"from outside"


@pytest.mark.parametrize("value", [None, "", "short"])
def test_a_variable_too_weak_for_an_open_socket_is_refused(monkeypatch, value):
    if value is not None:
        monkeypatch.setenv("TRIESERVE_SECRET", value)
    fleets = [{"model": {"served_name": "b"}, "replicas": {"host": "10.0.0.1"}}]
    config = from_mapping({"more_fleets": fleets, "ingress": {"secret": "env:TRIESERVE_SECRET"}})
    with pytest.raises(ConfigError, match="TRIESERVE_SECRET"):
        resolve_secret(config)


# Round trip and documentation


def _values(dial: Dial) -> st.SearchStrategy[object]:
    if dial.choices is not None:
        return st.sampled_from(dial.choices)
    low, high = dial.minimum, dial.maximum
    if dial.type is int:
        return st.integers(int(low or 0), int(high) if high is not None else None)
    if dial.type is float:
        return st.floats(low, high, allow_nan=False, allow_infinity=False)
    return st.booleans() if dial.type is bool else st.just(dial.default)


def _mappings(section: type) -> st.SearchStrategy[dict[str, object]]:
    optional = {
        name: _mappings(dial.type) if dial.shape is Shape.SECTION else _values(dial)
        for name, dial in dials_of(section).items()
        if dial.shape is not Shape.LIST and name not in MUST_FIT_OTHERS
    }
    return st.fixed_dictionaries({}, optional=optional)


@given(_mappings(AppConfig))
def test_any_configuration_survives_json_and_yaml(mapping):
    config = from_mapping(mapping)
    plain = to_mapping(config)
    assert from_mapping(json.loads(json.dumps(plain))) == config
    assert from_mapping(yaml.safe_load(yaml.safe_dump(plain))) == config


def test_api_keys_survive_the_round_trip():
    config = from_mapping({"ingress": {"api_keys": [{"name": "a", "sha256": DIGEST}]}})
    assert from_mapping(to_mapping(config)) == config


def test_every_setting_is_described_and_documented():
    settings = {setting.key: setting for setting in describe()}
    assert settings["replicas.num"].limits == "an integer from 1 to 4096"
    assert settings["ingress.limits.max_n"].type == "int"
    assert settings["ingress.api_keys[].sha256"].help
    assert all(setting.help and setting.limits for setting in settings.values())


def test_the_json_schema_has_the_same_keys_and_limits_as_the_loader():
    schema = json_schema()
    replicas = schema["properties"]["replicas"]
    assert replicas["additionalProperties"] is False
    assert replicas["properties"]["num"]["maximum"] == 4096
    assert schema["properties"]["engine"]["properties"]["device"]["enum"] == ["auto", "cpu", "cuda"]
    assert json.loads(json.dumps(schema)) == schema


def test_several_fleets_with_adapters_and_arguments_survive_the_round_trip():
    fleet = {
        "model": {"served_name": "b", "adapters": [{"name": "c", "source": "x"}]},
        "engine": {"kind": "vllm", "vllm": {"speculative": {"method": "ngram"}, "args": {"swap_space": [1, {"a": None}]}}},
    }
    config = from_mapping({"more_fleets": [fleet]})
    assert [fleet.model.served_name for fleet in config.fleets] == ["smollm2-135m-instruct", "b"]
    assert from_mapping(json.loads(json.dumps(to_mapping(config)))) == config


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_configuration_loads(path):
    load(path)


def test_the_three_shipped_configurations_say_what_the_readme_promises():
    tiny, gpu, fake = (load(CONFIGS / name) for name in ("tiny-cpu.yaml", "native-1gpu.yaml", "fake.yaml"))
    assert (tiny.engine.device, tiny.replicas.num, tiny.ingress.port) == ("cpu", 2, 8000)
    assert (gpu.engine.device, gpu.replicas.num_gpus, gpu.model.dtype) == ("cuda", 1.0, "bf16")
    assert fake.engine.kind == "fake"


def test_an_unquoted_key_hash_that_begins_like_a_number_is_text() -> None:
    digest = "20e8" + 60 * "c"
    config = load(None, [f"ingress.api_keys=[{{name: alice, sha256: {digest}}}]"])
    assert config.ingress.api_keys[0].sha256 == digest
