"""Metrics over REST: strict JSON whatever the values, thinned series that keep every spike."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session, sessionmaker
from starlette.testclient import TestClient

from store.metrics_read import bucket_size
from store.metrics_write import IterationMetrics, write_metrics

BEGUN = datetime(2030, 1, 1, tzinfo=UTC)
NAN, INF = math.nan, math.inf


def strict(text: str) -> Any:
    """JSON without Python's leniency about NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def write(sessions: sessionmaker[Session]) -> Callable[..., None]:
    def write_all(run_id: str, rows: Mapping[int, Mapping[str, float | None]], segment: int = 1) -> None:
        numbers = sorted(rows)
        for begin in range(0, len(numbers), 1000):
            chunk = [
                IterationMetrics(number, BEGUN + timedelta(seconds=10 * number), rows[number])
                for number in numbers[begin : begin + 1000]
            ]
            with sessions.begin() as session:
                write_metrics(session, run_id, segment, chunk, active=True)

    return write_all


def query(client: TestClient, run: str, names: str, **params: Any) -> Any:
    answer = client.get("/v1/metrics/query", params={"runs": run, "names": names, **params})
    assert answer.status_code == 200, answer.text
    return strict(answer.text)


ODD = {1: 0.5, 2: NAN, 3: INF, 4: -INF, 5: None, 6: -0.0, 7: 1e308, 8: 5e-324}


def test_odd_values_travel_as_strict_json_and_are_told_apart(
    viewer: TestClient, make_run: Callable[..., str], write: Callable[..., None]
) -> None:
    run_id = make_run()
    write(run_id, {iteration: {"policy/loss": value} for iteration, value in ODD.items()})
    (series,) = query(viewer, run_id, "policy/loss")["series"]
    assert series["x"] == list(range(1, 9))
    assert series["y"] == [0.5, None, None, None, None, 0.0, 1e308, 5e-324]
    assert series["nonfinite"] == [1, 2, 3]
    assert series["bucket"] == 1


@pytest.mark.parametrize(("value", "name"), [(NAN, "NaN"), (INF, "Infinity"), (-INF, "-Infinity"), (None, None)])
def test_the_latest_value_says_which_odd_value_it_is(
    value: float | None, name: str | None, viewer: TestClient, make_run: Callable[..., str], write: Callable[..., None]
) -> None:
    run_id = make_run()
    write(run_id, {7: {"policy/loss": value, "kl/coef": 0.05}})
    latest = strict(viewer.get(f"/v1/runs/{run_id}/metrics").text)
    assert latest["latest"] == [
        {"name": "kl/coef", "value": 0.05, "nonfinite": None, "iteration": 7, "segment": 1},
        {"name": "policy/loss", "value": None, "nonfinite": name, "iteration": 7, "segment": 1},
    ]
    assert strict(viewer.get(f"/v1/runs/{run_id}").text)["latest"] == {"kl/coef": 0.05, "policy/loss": None}
    strict(viewer.get("/v1/runs").text)


@pytest.mark.parametrize("max_points", [1, 7, 100, 300])
def test_thinned_series_keep_ends_mean_and_every_spike(
    max_points: int, viewer: TestClient, make_run: Callable[..., str], write: Callable[..., None]
) -> None:
    """20,000 iterations go through the points, the buckets of 64 and those of 4096."""
    run_id = make_run()
    values: dict[int, float | None] = {iteration: math.sin(iteration / 900) for iteration in range(1, 20_001)}
    values[9_999], values[12_345], values[15_000], values[4_242] = 50.0, -50.0, NAN, None
    write(run_id, {iteration: {"kl/coef": value} for iteration, value in values.items()})
    for window in ({}, {"from": 3_000, "to": 17_001}, {"from": 9_900, "to": 10_100}):
        low, high = window.get("from", 1), window.get("to", 20_000)
        (series,) = query(viewer, run_id, "kl/coef", max_points=max_points, **window)["series"]
        inside = {i: v for i, v in values.items() if low <= i <= high}
        size = series["bucket"]
        assert len(series["x"]) <= max_points
        assert series["x"][0] == low
        assert series["x"][-1] > high - size
        assert series["x"] == sorted(series["x"])
        finite = {i: v for i, v in inside.items() if v is not None and math.isfinite(v)}
        assert max(series["max"]) == max(finite.values())
        assert min(series["min"]) == min(finite.values())
        expected: dict[int, list[float]] = {}
        for iteration, value in finite.items():
            expected.setdefault(iteration // size, []).append(value)
        means = [math.fsum(part) / len(part) for _, part in sorted(expected.items())]
        assert series["y"] == pytest.approx(means, abs=1e-9)
        bad = [index for index, x in enumerate(series["x"]) if x // size == 15_000 // size and low <= 15_000 <= high]
        assert series["nonfinite"] == bad


def test_buckets_do_not_move_while_a_run_grows() -> None:
    assert [bucket_size(1, last, 100) for last in (99, 100, 199, 200, 12_799)] == [1, 1, 2, 4, 128]
    assert bucket_size(63, 64, 1) == 128


def test_means_of_numbers_near_the_largest_double_do_not_overflow(
    viewer: TestClient, make_run: Callable[..., str], write: Callable[..., None]
) -> None:
    run_id = make_run()
    write(run_id, {iteration: {"value/loss": 1.7e308} for iteration in range(1, 33)})
    (series,) = query(viewer, run_id, "value/loss", max_points=2)["series"]
    assert series["y"] == pytest.approx([1.7e308] * len(series["y"]))


def test_a_sparse_metric_is_sent_whole_beside_a_dense_one(
    viewer: TestClient, make_run: Callable[..., str], write: Callable[..., None]
) -> None:
    run_id = make_run()
    rows = {i: {"kl/coef": 0.1, **({"heldout/score_mean": i / 1000} if i % 50 == 0 else {})} for i in range(1, 1001)}
    write(run_id, rows)
    dense, sparse = query(viewer, run_id, "kl/coef,heldout/score_mean", max_points=100)["series"]
    assert (dense["bucket"], dense["name"]) == (16, "kl/coef")
    assert sparse["bucket"] == 1
    assert sparse["x"] == list(range(50, 1001, 50))


@pytest.mark.parametrize("max_points", [500, 10])
def test_x_may_be_time_or_tokens(
    max_points: int, viewer: TestClient, make_run: Callable[..., str], write: Callable[..., None]
) -> None:
    run_id = make_run()
    write(run_id, {i: {"kl/coef": i / 100, "data/response_tokens": 100.0} for i in range(1, 101)})
    (by_time,) = query(viewer, run_id, "kl/coef", x="time", max_points=max_points)["series"]
    assert by_time["x"][0] == (BEGUN + timedelta(seconds=10)).timestamp()
    assert by_time["x"] == sorted(by_time["x"])
    (by_tokens,) = query(viewer, run_id, "kl/coef", x="tokens", max_points=max_points)["series"]
    assert by_tokens["x"][0] == 100
    assert len(by_tokens["x"]) <= max_points
    (window,) = query(viewer, run_id, "kl/coef", x="tokens", **{"from": 2_000, "to": 3_000})["series"]
    assert (window["x"][0], window["x"][-1]) == (2_000, 3_000)


def test_after_a_roll_back_the_active_line_has_one_value_an_iteration(
    viewer: TestClient, make_run: Callable[..., str], write: Callable[..., None], back_to: Callable[[str, int], None]
) -> None:
    run_id = make_run()
    write(run_id, {i: {"kl/coef": 1.0} for i in range(261)})
    back_to(run_id, 200)
    write(run_id, {i: {"kl/coef": 2.0} for i in range(201, 300)}, segment=2)
    for max_points in (500, 100, 3):
        first, second = query(viewer, run_id, "kl/coef", max_points=max_points)["series"]
        assert (first["segment"], first["active"], second["segment"]) == (1, True, 2)
        assert set(first["y"]) == {1.0}
        assert set(second["y"]) == {2.0}
        assert first["x"][-1] <= 200 < second["x"][0] == 201
        everything = query(viewer, run_id, "kl/coef", max_points=max_points, segments="all")["series"]
        ghost = everything[-1]
        assert [(s["segment"], s["active"]) for s in everything] == [(1, True), (2, True), (1, False)]
        assert ghost["x"][0] == 201
        assert set(ghost["y"]) == {1.0}


def test_the_cursor_is_the_runs_event_position(
    viewer: TestClient, make_run: Callable[..., str], write: Callable[..., None]
) -> None:
    run_id = make_run()
    seq = viewer.get(f"/v1/runs/{run_id}").json()["event_seq"]
    assert viewer.get(f"/v1/runs/{run_id}/metrics").json() == {"cursor": seq, "latest": []}
    assert query(viewer, run_id, "kl/coef") == {"series": [], "cursors": {run_id: seq}}


@pytest.mark.parametrize(
    ("params", "status"),
    [
        ({"runs": ""}, 422),
        ({"names": ","}, 422),
        ({"names": ",".join(f"n{i}" for i in range(101))}, 422),
        ({"max_points": 0}, 422),
        ({"max_points": 10**6}, 422),
        ({"from": "nan"}, 422),
        ({"to": "inf"}, 422),
        ({"x": "moon"}, 422),
        ({"runs": "r-none"}, 404),
        ({"from": 1e300, "to": -1e300}, 200),
        ({"names": "no/such,\u0000"}, 422),
        ({"names": "no/such"}, 200),
    ],
)
def test_odd_queries_get_a_clear_answer(
    params: dict[str, Any], status: int, viewer: TestClient, make_run: Callable[..., str]
) -> None:
    answer = viewer.get("/v1/metrics/query", params={"runs": make_run(), "names": "kl/coef", **params})
    assert answer.status_code == status, answer.text


def test_the_registry_says_what_every_metric_means(viewer: TestClient) -> None:
    registry = strict(viewer.get("/v1/metrics/registry").text)
    by_name = {item["name"]: item for item in registry["items"]}
    assert {"reward/score_mean", "kl/ref_sequence", "policy/first_minibatch_ratio_max_dev"} <= by_name.keys()
    assert all(item["formula"] and item["meaning"] and item["remedy"] for item in by_name.values())
    assert set(registry["panels"]) >= {item["panel"] for item in by_name.values()}
