import configparser
from pathlib import Path

import pytest

from serving import supervisor
from serving.errors import StackError
from serving.supervisor import Supervisor
from serving.topology import Topology, plan


def topology(run_dir: Path) -> Topology:
    return plan(run_dir=run_dir, port=8080, replicas=2, workers=2)


def rendered(run_dir: Path) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(inline_comment_prefixes=(" ;",))
    parser.read_string(supervisor.config(topology(run_dir), haproxy=Path("/usr/sbin/haproxy")))
    return parser


def test_programs_are_the_replicas_the_balancer_and_the_watchdog(tmp_path: Path) -> None:
    programs = [name.removeprefix("program:") for name in rendered(tmp_path).sections() if name.startswith("program:")]
    assert programs == ["replica-0", "replica-1", "haproxy", "watchdog"]


def test_everything_restarts_and_every_log_is_bounded(tmp_path: Path) -> None:
    parser = rendered(tmp_path)
    for name in parser.sections():
        if name.startswith("program:"):
            assert parser[name]["autorestart"] == "true"
            assert parser[name]["stdout_logfile_maxbytes"].endswith("MB")


def test_balancer_is_stopped_softly_and_given_the_time_to_drain(tmp_path: Path) -> None:
    balancer = rendered(tmp_path)["program:haproxy"]
    assert balancer["stopsignal"] == "USR1"
    assert int(balancer["stopwaitsecs"]) > topology(tmp_path).timeouts.drain_s


def test_supervisord_is_reached_through_a_private_socket_only(tmp_path: Path) -> None:
    parser = rendered(tmp_path)
    assert parser["unix_http_server"]["chmod"] == "0600"
    assert "inet_http_server" not in parser


def test_spaces_and_percent_signs_in_paths_survive(tmp_path: Path) -> None:
    folder = tmp_path / "50% off"
    command = rendered(folder)["program:haproxy"]["command"]
    assert command == f"/usr/sbin/haproxy -db -f '{tmp_path}/50%% off'/haproxy.cfg"


def test_supervisord_that_is_gone_is_not_alive_and_says_where_it_was_sought(tmp_path: Path) -> None:
    gone = Supervisor(topology(tmp_path), timeout_s=1)
    assert not gone.alive()
    with pytest.raises(StackError, match=r"supervisord does not answer at .*supervisor\.sock"):
        gone.processes()
