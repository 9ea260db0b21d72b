"""What a node process reads and writes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from loadgen.engine.specs import EngineMode, FleetConfig
from loadgen.node.files import (
    NodeConfig,
    arrays_of,
    classes_of,
    load_arrays,
    load_tables,
    read_config,
    save_arrays,
    save_tables,
    write_config,
)
from loadgen.requests import RequestTable, empty_table
from schemas.classes import ServiceClass
from services.errors import UserError


def config(**changes) -> NodeConfig:
    return NodeConfig(**({"node": "n0", "sockets": "s", "tables": "t", "results": "r", "duration_s": 60.0} | changes))


def table(service_class: ServiceClass = ServiceClass.AGENT) -> RequestTable:
    return RequestTable(
        arrival_s=np.array([0.5, np.nan]),
        prompt_tokens=np.array([100, 300]),
        cached_tokens=np.array([0, 150]),
        output_tokens=np.array([60, 10]),
        max_tokens=np.array([4096, 4096]),
        service_class=np.full(2, service_class, np.uint8),
        session=np.array([0, 0]),
        next_turn=np.array([1, -1]),
        think_s=np.array([5.0, 0.0]),
    ).check()


def test_a_configuration_survives_its_file_with_the_fleets_settings(tmp_path):
    made = config(fleet=FleetConfig(card="H200-141G", cards=2, mode=EngineMode(offload=True)), speed=10.0)
    write_config(tmp_path / "c.json", made)
    read = read_config(tmp_path / "c.json")
    assert read == made, "limits that are infinite are so again"
    assert read.workers() == ("n0/0/w0", "n0/0/w1", "n0/1/w0", "n0/1/w1")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "truncated"),
        ('{"node":"n0"}', "sockets"),
        ('{"node":"n0","sockets":"s","tables":"t","results":"r","duration_s":-1}', "> 0"),
        ('{"node":"n/0","sockets":"s","tables":"t","results":"r","duration_s":1}', "without '/'"),
        ('{"node":"n0","sockets":"s","tables":"t","results":"r","duration_s":1,"sped":2}', "sped"),
    ],
)
def test_a_bad_configuration_names_the_file_and_what_is_wrong(tmp_path, text, told):
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(UserError, match=told) as raised:
        read_config(path)
    assert str(path) in str(raised.value)
    with pytest.raises(UserError, match="No such file"):
        read_config(tmp_path / "absent.json")


def test_request_tables_survive_their_file(tmp_path):
    path = tmp_path / "tables.npz"
    save_tables(path, [table(), empty_table()])
    first, second = load_tables(path, 2)
    for field in dataclasses.fields(RequestTable):
        np.testing.assert_array_equal(getattr(first, field.name), getattr(table(), field.name))
    assert len(second) == 0
    with pytest.raises(UserError, match="2 request tables, expected 3"):
        load_tables(path, 3)
    told = dataclasses.replace(table(), expected_think_s=np.full(len(table()), np.inf))
    save_tables(path, [told])
    assert np.isinf(load_tables(path, 1)[0].expected_think_s).all(), "what only some tables have travels too"
    save_arrays(path, {"tables": np.array(1), "0.arrival_s": told.arrival_s})
    with pytest.raises(UserError, match="expected request tables"):
        load_tables(path, 1)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match="expected request tables"):
        load_tables(path, 2)


def test_a_workers_class_is_that_of_most_of_its_requests():
    assert classes_of(config(), [table(), empty_table()]) == (ServiceClass.AGENT, ServiceClass.CHAT)
    assert classes_of(config(classes=(3, 0)), [table(), empty_table()]) == (3, 0)
    with pytest.raises(UserError, match="expected 2 numbers"):
        classes_of(config(classes=(9, 0)), [table(), empty_table()])


@dataclasses.dataclass
class Outcome:
    wait_s: np.ndarray
    duration_s: float
    name: str = "left out"


def test_results_appear_whole_and_only_numbers_of_them(tmp_path):
    path = tmp_path / "results.npz"
    save_arrays(path, arrays_of(Outcome(np.array([1.0, np.nan]), 60.0)))
    read = load_arrays(path)
    assert set(read) == {"wait_s", "duration_s"}
    np.testing.assert_array_equal(read["wait_s"], [1.0, np.nan])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["results.npz"], "no part of a file is left"
