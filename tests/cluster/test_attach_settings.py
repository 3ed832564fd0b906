"""The command `kvmesh attach` starts the right workers with the right settings."""

from pathlib import Path

import msgspec
import pytest

from kvmesh.cluster.attach.attaching import describe
from kvmesh.cluster.attach.command import split_urls
from kvmesh.cluster.attach.servers import AttachConfig, ServerEntry, entries_of, name_of, process_specs
from kvmesh.mesh.config import load
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Role, WorkerCard
from kvmesh.workers.config import WorkerConfig

A, B = "http://a:8000", "https://b"


def config(*flags: str) -> AttachConfig:
    return load(AttachConfig, flags, {}, prefix="KVMESH_ATTACH_", prog="attach")


def workers_of(config: AttachConfig, *urls: str) -> list[WorkerConfig]:
    """The settings that the worker processes will read."""
    commands = [spec.argv for spec in process_specs(config, entries_of(config, urls))]
    flags = [argv[2:] for argv in commands if argv[:2] == ["-m", "kvmesh.workers"]]
    return [load(WorkerConfig, argv, {}, prefix="KVMESH_WORKER_", prog="worker") for argv in flags]


def servers_file(folder: Path, text: str) -> AttachConfig:
    path = folder / "servers.toml"
    path.write_text(text)
    return config("--servers", str(path))


def test_words_before_the_flags_are_servers() -> None:
    assert split_urls([A, B, "--role", "decode"]) == ([A, B], ["--role", "decode"])
    assert split_urls(["--role", "decode"]) == ([], ["--role", "decode"])


def test_every_server_is_a_worker_with_its_name() -> None:
    first, second = workers_of(config("--role", "decode", "--model", "m"), A, B)
    assert (first.engine, first.attach_url, first.name, first.role) == ("attach", A, "a-8000", Role.DECODE)
    assert (second.attach_url, second.name, second.model) == (B, "b-443", "m")


def test_the_sockets_of_one_server_are_named_by_flags() -> None:
    flags = ("--kv-events", "tcp://a:1", "--replay", "tcp://a:2")
    [worker] = workers_of(config(*flags), A)
    assert (worker.attach_kv_events, worker.attach_kv_replay) == ("tcp://a:1", "tcp://a:2")
    with pytest.raises(ConfigError, match="one server's"):
        workers_of(config(*flags), A, B)


def test_a_file_says_more_of_each_server(tmp_path: Path) -> None:
    settings = servers_file(
        tmp_path,
        f'[[server]]\nurl = "{A}"\nrole = "prefill"\n'
        f'[[server]]\nurl = "{B}"\nname = "d"\nrole = "decode"\nkv_events = "tcp://b:1"\nmodel = "m"\n',
    )
    first, second = workers_of(settings)
    assert (first.name, first.role) == ("a-8000", Role.PREFILL)
    assert (second.name, second.role, second.attach_kv_events, second.model) == ("d", Role.DECODE, "tcp://b:1", "m")


def test_a_frontend_comes_first_if_one_is_asked_for() -> None:
    settings = config("--frontend", "--port", "0")
    assert [spec.name for spec in process_specs(settings, entries_of(settings, [A]))] == ["frontend", "a-8000"]


@pytest.mark.parametrize(
    "text",
    ["server = 1", "[[server]]\nname = 'x'", "[[server]]\nurl = 'http://a'\nrolle = 'x'", "[[", "[[server]]\nurl=1"],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"servers\.toml"):
        workers_of(servers_file(tmp_path, text))


@pytest.mark.parametrize("url", ["a:8000", "tcp://a:1", "http://", "http://a:99999", "http://[::1", ""])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="http://host:port"):
        name_of(url)


def test_a_server_twice_is_refused_unless_it_has_two_names() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        workers_of(config(), A, A)
    with pytest.raises(ConfigError, match="no server"):
        workers_of(config())


def test_the_report_says_whether_a_workers_cache_is_known() -> None:
    card = WorkerCard(
        worker_id=WorkerId("w"), name="a-8000", role=Role.AGGREGATED, model="m", model_path="/m", address="h:1",
        block_size=32, total_blocks=9, context_tokens=100, kv_events="tcp://h:2",
    )  # fmt: skip
    assert "followed" in describe(card)
    assert "predicted" in describe(msgspec.structs.replace(card, kv_events=""))


def test_flags_are_the_defaults_of_an_entry() -> None:
    entry = ServerEntry(url=A, name="x")
    [spec] = process_specs(config("--role", "prefill"), [entry])
    assert "--role=prefill" in spec.argv
