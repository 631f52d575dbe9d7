"""docs/benchmarks.md and docs/benchmarks.svg from the results in docs/bench: python -m bench.page

A result is one JSON file that bench/all.py wrote: name, command, values, exit, date, seconds, load, machine, versions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]
DOCS = Path(__file__).resolve().parents[1] / "docs"
WHAT = {
    "write": "publication of samples of 126 MB, against `dd` with O_DIRECT and `torch.load` + `torch.save`",
    "manifest": "a manifest of so many samples: `status`, restart to first request, peak memory, commits",
    "capture": "the CPU engine with the capture on against off, on one server, paired; tiny Kimi-K2.5, SmolLM2-135M",
    "verify": "`verify --deep` without its bound, against the faster of two `dd`",
    "compress": "byte split + zstd of stored states (SmolLM2-135M, English), one core",
    "simulate": "simulated hosts, one core",
    "idle": "the supervisor at rest, a real systemd with eight scripted GPUs",
    "gpu": "one CUDA GPU: prefill with the capture on against off and against a server without it, states against "
    "transformers, GB/s into the spool; Qwen3-8B's shape and a slice of Kimi-K2.5's, random weights",
}
GOALS = {
    "write": "vs_dd >= 1, vs_torch >= 3",
    "manifest": "status_s < 1, resume_s < 3, peak_mb < 300, commits_s >= 300",
    "capture": "ratio >= 0.97",
    "idle": "rss_mb < 60, cpu_pct < 0.5",
    "gpu": "on_off, on_bare >= 0.98, ids exact, rel_err <= 0.03",
}
HEAD = """\
# Benchmarks

`make bench` measures all of this again and rewrites this page. Each row is a file in [bench/](bench) that also names
the machine, the versions, the date and the load average at the start. A machine that does other work at the same time
(a load above its cores) makes every rate smaller: read the ratios, which come from runs that alternate.

| measured | figures | goal | when, load |
| --- | --- | --- | --- |
"""
W, H, LEFT, TOP, BOTTOM = 360, 240, 52, 34, 40  # pixels of one panel


def read(folder: Path) -> list[Result]:
    """All results, by kind and then by size."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(found, key=lambda r: (list(WHAT).index(kind(r)), r["values"].get("samples", 0), r["name"]))


def kind(result: Result) -> str:
    return str(result["name"]).partition("-")[0]


def page(results: Sequence[Result]) -> str:
    return HEAD + "".join(map(_row, results)) + "".join(_curve(results)) + "".join(_where(results))


def _row(result: Result) -> str:
    figures = ", ".join(f"{name} {_shown(value)}" for name, value in result["values"].items())
    goal = GOALS.get(kind(result), "")
    met = "" if not goal else f"{goal}: {'met' if result['exit'] == 0 else '**missed**'}"
    what = f"{WHAT[kind(result)]}<br>`{result['command']}`"
    return f"| {what} | {figures} | {met} | {result['date'][:16].replace('T', ' ')}, {result['load']} |\n"


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)


def _curve(results: Sequence[Result]) -> Iterator[str]:
    if len(points(results)) > 1:
        yield "\nThe manifest as it grows: seconds of `status` and of a restart until its first request, and\n"
        yield "commits a second with synchronous=FULL.\n\n![The manifest as it grows](benchmarks.svg)\n"


def _where(results: Sequence[Result]) -> Iterator[str]:
    yield "\n## Where\n\n"
    seen = {json.dumps([r["machine"], r["versions"]], sort_keys=True): r for r in results}
    for result in seen.values():
        names = ", ".join(r["name"] for r in results if [r["machine"], r["versions"]] == _place(result))
        machine = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
        versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
        yield f"- {names}: {machine}; {versions}\n"


def _place(result: Result) -> list[Any]:
    return [result["machine"], result["versions"]]


def points(results: Sequence[Result]) -> list[Result]:
    return [r["values"] for r in results if kind(r) == "manifest"]


def plot(results: Sequence[Result]) -> str:
    """Two panels over the number of samples: seconds, and commits a second."""
    values = points(results)
    panels = (("seconds", ("status_s", "resume_s"), 0), ("commits a second", ("commits_s",), W))
    body = "".join(line for title, names, x in panels for line in _panel(title, names, values, x))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * W}" height="{H}" font-family="sans-serif" font-size="12">'
        f'\n<rect width="100%" height="100%" fill="white"/>\n{body}</svg>\n'
    )


def _panel(title: str, names: Sequence[str], values: Sequence[Result], x0: int) -> Iterator[str]:
    top = max(float(v[name]) for v in values for name in names) * 1.15
    low, high = math.log10(values[0]["samples"]), math.log10(values[-1]["samples"])

    def at(samples: float, value: float) -> tuple[float, float]:
        x = x0 + LEFT + (math.log10(samples) - low) / ((high - low) or 1) * (W - LEFT - 40)
        return round(x, 1), round(H - BOTTOM - value / top * (H - TOP - BOTTOM), 1)

    yield f'<text x="{x0 + LEFT}" y="18" font-weight="bold">{title}</text>\n'
    for part in range(5):
        _, y = at(10**low, top * part / 4)
        yield f'<path d="M{x0 + LEFT} {y}H{x0 + W - 20}" stroke="#ddd"/>'
        yield f'<text x="{x0 + LEFT - 6}" y="{y + 4}" text-anchor="end">{top * part / 4:.3g}</text>\n'
    for v in values:
        yield f'<text x="{at(v["samples"], 0)[0]}" y="{H - 22}" text-anchor="middle">{v["samples"]:,}</text>\n'
    yield f'<text x="{x0 + W / 2}" y="{H - 5}" text-anchor="middle">samples</text>\n'
    for name, colour in zip(names, ("#0b6bcb", "#c2410c"), strict=False):
        dots = [at(v["samples"], float(v[name])) for v in values]
        yield f'<polyline points="{" ".join(f"{x},{y}" for x, y in dots)}" fill="none" stroke="{colour}" '
        yield 'stroke-width="2"/>\n'
        yield from (f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>\n' for x, y in dots)
        yield f'<text x="{dots[0][0] + 4}" y="{dots[0][1] - 8}" fill="{colour}">{name}</text>\n'


def write() -> None:
    results = read(DOCS / "bench")
    (DOCS / "benchmarks.md").write_text(page(results))
    (DOCS / "benchmarks.svg").write_text(plot(results))


if __name__ == "__main__":
    write()
