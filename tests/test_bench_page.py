"""docs/benchmarks.md is the results in docs/bench and nothing else."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from bench import all as bench
from bench import page


def result(name: str, code: int = 0, **values: object) -> page.Result:
    return {
        "name": name,
        "command": f"python bench/{name}.py",
        "values": values,
        "exit": code,
        "date": "2026-01-02T03:04:05+00:00",
        "load": 0.5,
        "machine": {"cpu": "a CPU"},
        "versions": {"python": "3.11"},
    }


RESULTS = [
    result("write", 1, vs_dd=0.9),
    result("manifest-10", samples=10, status_s=0.1, resume_s=0.2, commits_s=500),
    result("manifest-1000", samples=1000, status_s=0.4, resume_s=0.3, commits_s=400),
]


def test_the_page_is_made_of_the_results_that_lie_beside_it() -> None:
    results = page.read(page.DOCS / "bench")
    assert results
    assert (page.DOCS / "benchmarks.md").read_text() == page.page(results)
    assert (page.DOCS / "benchmarks.svg").read_text() == page.plot(results)


def test_a_missed_goal_is_told() -> None:
    text = page.page(RESULTS)
    assert "vs_dd 0.9" in text
    assert "vs_dd >= 1, vs_torch >= 3: **missed**" in text
    assert "commits_s >= 300: met" in text
    assert "- write, manifest-10, manifest-1000: cpu a CPU; python 3.11" in text


def test_the_plot_is_well_formed_and_higher_is_more() -> None:
    drawn = ET.fromstring(page.plot(RESULTS))
    lines = [e.attrib["points"] for e in drawn.iter("{http://www.w3.org/2000/svg}polyline")]
    assert len(lines) == 3
    (x0, y0), (x1, y1) = (map(float, point.split(",")) for point in lines[0].split())
    assert x0 < x1
    assert y0 > y1, "0.1 s lies below 0.4 s"


def test_every_measurement_is_known_to_the_page_and_its_last_line_is_read() -> None:
    assert {name.partition("-")[0] for name in bench.BENCHES} | {"gpu"} == set(page.WHAT)
    assert bench.LINE.findall("noise\nbench-write: publish_mb_s=12 vs_dd=1.20\n") == ["publish_mb_s=12 vs_dd=1.20"]
    assert [bench.number(text) for text in ("12", "1.20", "x")] == [12, 1.2, "x"]
