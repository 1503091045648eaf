"""`ds-ldt check`: what two sites are told about each other and the link, and about whatever is wrong."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_ldt.cli import main as cli
from ds_ldt.cli.site_check import first_difference
from ds_ldt.comm.site_report import MeasuredLink, SiteFacts, SiteReport, advice, read_facts, suggested_hints
from ds_ldt.errors import LinkError
from tests.harness import ROOT, GroupSession, free_port

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "ldt": {"pipeline_num_layers": [[1, 4], [1, 0]], "timeout_s": 30},
}
VERSIONS = {"ds_ldt": "0.1.0", "deepspeed": "0.19.8", "torch": "2.13.0+cpu", "python": "3.11.7"}
TARGETS = "tests.site_check_cases:"


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(path)


# --- two processes --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Iterator[GroupSession]:
    with GroupSession(2) as group:
        yield group


def check(pair: GroupSession, config: str, *arguments: str, **changes: list[str]) -> list[Any]:
    """Run the command on both sites; `edge=` and `cloud=` are further arguments of one."""
    by_rank = {("edge", "cloud").index(site): further for site, further in changes.items()}
    given = [*arguments, "--master_port", str(free_port())]
    answers: list[Any] = pair.run(TARGETS + "command", config, given, by_rank, deadline_s=60)
    return answers


@pytest.mark.distributed
def test_sites_that_agree_are_told_the_same_about_each_other_and_the_link(
    pair: GroupSession, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edge, cloud = check(pair, config, "--json")
    assert (edge[0], cloud[0]) == (0, 0), edge[2] + cloud[2]
    assert edge[1] == cloud[1]
    found = json.loads(edge[1])
    assert found["agree"] is True
    assert found["difference"] is None
    capsys.readouterr()
    assert cli.main(["plan", config, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    for site in ("edge", "cloud"):
        told = found["sites"][site]
        assert {"ds_ldt", "torch", "deepspeed", "python", "transformers"} <= set(told["versions"])
        assert told["settings"]["gradient_accumulation_steps"] == "8"
        assert (told["policy"], told["fingerprint"]) == (plan["policy"], plan["fingerprint"])
        assert len(told["settings_sha256"]) == 64
    link = found["link"]
    assert 0 < link["latency_s"] <= link["latency_p90_s"] < 0.1
    assert link["round_trips"] >= 20
    assert all(rate > 1e6 for rate in link["bandwidth_bytes_per_s"].values())
    assert found["suggested"]["ldt.link.latency_ms"] < 20


@pytest.mark.distributed
def test_a_setting_that_differs_is_named_with_both_values_on_both_sites(pair: GroupSession, config: str) -> None:
    edge, cloud = check(pair, config, cloud=["--set", "gradient_accumulation_steps=4"])
    assert (edge[0], cloud[0]) == (1, 1)
    assert edge[2].splitlines()[-1] == cloud[2].splitlines()[-1]
    assert "gradient_accumulation_steps: found edge 8, cloud 4" in edge[2]
    assert "Fix: give both sites the same JSON" in edge[2]
    assert edge[1] == ""


@pytest.mark.distributed
def test_hints_that_lead_to_different_plans_are_named_and_json_says_so_too(pair: GroupSession, config: str) -> None:
    edge, cloud = check(pair, config, "--json", cloud=["--set", "ldt.link.latency_ms=3"])
    assert (edge[0], cloud[0]) == (1, 1)
    assert edge[1:3] == cloud[1:3]
    found = json.loads(edge[1])
    assert (found["agree"], found["link"], found["difference"]["key"]) == (False, None, "plan")
    assert "latency_ms 20" in found["difference"]["found"]
    assert "latency_ms 3" in found["difference"]["found"]


@pytest.mark.distributed
def test_a_version_that_differs_is_named_on_both_sites(pair: GroupSession, config: str) -> None:
    edge, cloud = pair.run(TARGETS + "other_version_in_the_cloud", config, free_port(), deadline_s=60)
    assert edge == cloud
    assert edge[0].startswith("deepspeed: found edge 0.19.8, cloud 0.19.9, expected the same on both sites. Fix:")
    assert edge[1]["agree"] is False


@pytest.mark.distributed
def test_a_site_that_goes_away_while_the_link_is_measured_is_missed_at_once(pair: GroupSession, config: str) -> None:
    answers = pair.run(TARGETS + "cloud_goes_away_while_the_link_is_measured", config, free_port(), deadline_s=60)
    for status, out, message, seconds in answers:
        assert (status, out) == (1, "")
        assert "the other one went away while the link was measured" in message
        assert seconds < 15
    assert "told to" in answers[1][2]


@pytest.mark.distributed
def test_both_sites_started_as_the_edge_are_told_so(pair: GroupSession, config: str) -> None:
    answers = check(pair, config, cloud=["--site", "edge"])
    for status, _, message, seconds in answers:
        assert status == 1
        assert "--site: found edge on both sites" in message
        assert seconds < 15


@pytest.mark.distributed
@pytest.mark.parametrize(
    "absent, fragments",
    [
        ("cloud", ["The cloud did not come to 127.0.0.1:", "--site cloud", "firewall", "the edge, waited"]),
        ("edge", ["Nobody listens at 127.0.0.1:", "--site edge", "as seen from here", "connection refused"]),
    ],
)
def test_S60_a_site_that_is_absent_is_missed_in_time(
    pair: GroupSession, config: str, absent: str, fragments: list[str]
) -> None:
    answers = check(pair, config, "--timeout_s", "1.5", **{absent: ["absent"]})
    status, _, message, seconds = answers[0 if absent == "cloud" else 1]
    assert status == 1
    assert [fragment for fragment in fragments if fragment not in message] == []
    for fragment in ("Nobody answered", "within 1.5 s (--timeout_s)", "own address 127.0.0.1, GLOO_SOCKET_IFNAME=lo"):
        assert fragment in message
    assert "port that" not in message
    assert "Look at" in message
    assert 1.0 < seconds < 12


@pytest.mark.distributed
@pytest.mark.parametrize("site", ["edge", "cloud"])
def test_S60_nobody_there_ends_the_command_in_time_with_status_1_and_without_an_abort(config: str, site: str) -> None:
    """At this port something takes connections and keeps quiet, which torch waits for without a bound."""
    with socket.create_server(("127.0.0.1", 0)) as quiet:
        port = free_port() if site == "edge" else quiet.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "ds_ldt.cli",
            "check",
            config,
            "--site",
            site,
            "--master_port",
            str(port),
        ]
        begin = time.monotonic()
        done = subprocess.run(
            [*command, "--timeout_s", "2"], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
        )
    assert done.returncode == 1, done.stderr
    assert "ds-ldt: Nobody answered. " in done.stderr.splitlines()[-1]
    assert "terminate" not in done.stderr
    assert time.monotonic() - begin < 30


def test_S60_an_address_of_another_machine_is_named_on_the_edge(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--master_addr", "192.0.2.77", "--master_port", str(free_port()), "--timeout_s", "1"]
    assert cli.main(["check", config, "--site", "edge", *arguments]) == 1
    assert "The edge did not reach its own address 192.0.2.77:" in capsys.readouterr().err


def test_S60_a_name_that_does_not_resolve_is_named_in_the_cloud(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", config, "--site", "cloud", "--master_addr", "no.invalid", "--timeout_s", "0.5"]) == 1
    assert "the name does not resolve" in capsys.readouterr().err


# --- one process ----------------------------------------------------------------------------------------------------


def test_a_port_that_something_else_listens_on_is_named(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        threading.Thread(target=_hang_up_on, args=(busy,), daemon=True).start()
        arguments = ["check", config, "--site", "edge", "--master_port", str(port), "--timeout_s", "1"]
        assert cli.main(arguments) == 1
    assert f"--master_port: found {port}, expected a TCP port of this machine" in capsys.readouterr().err


def _hang_up_on(listening: socket.socket) -> None:
    try:
        while True:
            listening.accept()[0].close()
    except OSError:
        return


def test_an_interface_that_does_not_exist_is_named_at_once(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # whatever the command sets is taken back
    assert cli.main(["check", config, "--site", "cloud", "--interface", "nope0"]) == 1
    message = capsys.readouterr().err
    assert 'found "nope0"' in message
    assert ": lo" in message


def test_a_wrong_configuration_ends_it_before_anybody_is_waited_for(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", config, "--site", "edge", "--set", "ldt.schedule.policy=fast"]) == 1
    assert "ldt.schedule.policy" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "x"],
        ["check", "x", "--site", "moon"],
        ["check", "x", "--site", "edge", "--master_port", "70000"],
        ["check", "x", "--site", "edge", "--timeout_s", "0"],
        ["check", "--site", "edge"],
    ],
)
def test_a_wrong_command_line_ends_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2


# --- no process -----------------------------------------------------------------------------------------------------


def facts(site: str = "edge", **changes: Any) -> SiteFacts:
    values: dict[str, Any] = {
        "site": site,
        "versions": VERSIONS,
        "backend": "gloo",
        "settings": {"gradient_clipping": "1.0"},
        "policy": "greedy",
        "fingerprint": "ab" * 32,
        "latency_ms": 20.0,
        "bandwidth_mbps": 1000.0,
        "slow_start_after_idle": False,
        "tcp_buffer_bytes": 2**30,
    }
    return SiteFacts(**values | changes)


def link(latency_ms: float = 20.0, mbps: float = 1000.0, *, p90_ms: float | None = None) -> MeasuredLink:
    return MeasuredLink(
        latency_s=latency_ms * 1e-3,
        latency_p90_s=(p90_ms or latency_ms) * 1e-3,
        round_trips=100,
        to_cloud=mbps * 1e6 / 8,
        to_edge=2 * mbps * 1e6 / 8,
        message_bytes=2**24,
    )


@pytest.mark.parametrize(
    "changes, key, values",
    [
        ({"versions": VERSIONS | {"ds_ldt": "0.2.0"}}, "ds_ldt", "edge 0.1.0, cloud 0.2.0"),
        ({"versions": VERSIONS | {"torch": "2.14.0"}, "backend": "x"}, "torch", "edge 2.13.0+cpu, cloud 2.14.0"),
        ({"backend": "hccl", "settings": {}}, "backend", "edge gloo, cloud hccl"),
        ({"settings": {}, "fingerprint": "cd"}, "gradient_clipping", "edge 1.0, cloud nothing"),
        ({"fingerprint": "cd", "latency_ms": 3.0}, "plan", "cloud greedy cd (ldt.link.latency_ms 3,"),
    ],
)
def test_the_first_difference_is_named(changes: dict[str, Any], key: str, values: str) -> None:
    problem = first_difference(facts(), facts("cloud", **changes))
    assert problem is not None
    assert problem.key == key
    assert values in str(problem)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"versions": VERSIONS | {"torch": "2.13.1", "python": "3.12.1", "transformers": "5.24.0"}},
        {"latency_ms": 3.0, "slow_start_after_idle": None},
    ],
)
def test_what_may_differ_is_no_difference(changes: dict[str, Any]) -> None:
    assert first_difference(facts(), facts("cloud", **changes)) is None


@pytest.mark.parametrize(
    "latency_ms, p90_ms, suggested",
    [
        (20, 20, None),
        (16.1, 16.1, None),
        (15.9, 15.9, 15.9),
        (26, 26, None),
        (27, 27, 27),
        (27, 40.04, 40),
        (10, 17, None),
    ],
)
def test_a_hint_of_latency_may_be_off_by_a_quarter(latency_ms: float, p90_ms: float, suggested: float | None) -> None:
    found = suggested_hints(facts(), link(latency_ms, p90_ms=p90_ms))
    assert found.get("ldt.link.latency_ms") == suggested


def test_latencies_that_are_mostly_software_are_alike() -> None:
    assert suggested_hints(facts(latency_ms=0.0), link(0.3)) == {}
    assert suggested_hints(facts(latency_ms=0.0), link(0.6)) == {"ldt.link.latency_ms": 0.6}


@pytest.mark.parametrize("hint, suggested", [(1000, None), (790, None), (740, 1000), (1260, 1000), (0, 1000)])
def test_a_hint_of_bandwidth_is_held_to_the_slower_direction(hint: float, suggested: float | None) -> None:
    found = suggested_hints(facts(bandwidth_mbps=float(hint)), link())
    assert found.get("ldt.link.bandwidth_mbps") == suggested


def test_advice_names_keys_values_and_the_command_that_shows_their_effect() -> None:
    lines = "\n".join(advice(facts(), facts("cloud", latency_ms=10.0), link(41.23, 200)))
    assert "set ldt.link.latency_ms to 41.2 on both sites, it is 20" in lines
    assert "ds-ldt plan CONFIG --set ldt.link.latency_ms=41.2 --set ldt.link.bandwidth_mbps=200" in lines
    assert "give both sites the same hints: the cloud's ldt.link.latency_ms is 10" in lines
    assert list(advice(facts(), facts("cloud"), link())) == []


def test_settings_of_tcp_are_advised_where_they_cost_something() -> None:
    slow = facts("cloud", slow_start_after_idle=True)
    assert [line.split(":")[0] for line in advice(facts(), slow, link())] == ["on the cloud"]
    assert (
        list(advice(facts(latency_ms=1.0), facts("cloud", latency_ms=1.0, slow_start_after_idle=True), link(1))) == []
    )
    small = facts(tcp_buffer_bytes=4 * 2**20)
    assert any("tcp_rmem" in line for line in advice(small, facts("cloud"), link(20, 1000)))
    assert not any("tcp_rmem" in line for line in advice(small, facts("cloud"), link(20, 100)))


def test_the_text_holds_both_sites_and_the_link() -> None:
    cloud = facts("cloud", versions=VERSIONS | {"python": "3.12.1"})
    text = SiteReport(edge=facts(), cloud=cloud, difference=None, measured=link(20.5, 900)).text()
    for fragment in (
        "python        3.11.7               3.12.1               (may differ)",
        f"plan          edge   greedy {'ab' * 32}",
        "1 shared, sha256 ",
        "20.5 ms one way",
        "half of 100 round trips",
        "edge to cloud 900 Mbit/s, cloud to edge 1800 Mbit/s",
    ):
        assert fragment in text


@pytest.mark.parametrize(
    "text", ["", "HTTP/1.1 400", "[]", "{}", facts().model_dump_json().replace("20.0", '"20"'), '{"site": "moon"}']
)
def test_an_answer_from_something_else_is_refused(text: str) -> None:
    with pytest.raises(LinkError, match="answer is not understood"):
        read_facts(text)


def test_facts_survive_the_way_to_the_other_site() -> None:
    assert read_facts(facts().model_dump_json()) == facts()
